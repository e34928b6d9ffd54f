"""deploy/kuberay.yaml: keys as KubeRay publishes them, numbers that agree with each other, no secret in it."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from atropos_launcher.plan.services import reservations
from tests.unit.launcher.plans import no_processes, on_gpus, plan

__all__ = ["no_processes"]

ROOT = Path(__file__).parents[3]
# of ray-operator/config/crd/bases/ray.io_rayjobs.yaml of KubeRay 1.7, the levels that are Ray's
JOB = {"entrypoint", "shutdownAfterJobFinishes", "rayClusterSpec", "submissionMode", "backoffLimit", "runtimeEnvYAML"}
CLUSTER = {"authOptions", "headGroupSpec", "rayVersion", "workerGroupSpecs", "enableInTreeAutoscaling"}
HEAD = {"labels", "rayStartParams", "resources", "template", "serviceType", "headService"}
WORKERS = {"groupName", "labels", "maxReplicas", "minReplicas", "rayStartParams", "replicas", "resources", "template"}


def job() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((ROOT / "deploy/kuberay.yaml").read_text())
    return content


def groups() -> list[dict[str, Any]]:
    cluster = job()["spec"]["rayClusterSpec"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def containers() -> list[dict[str, Any]]:
    return [container for group in groups() for container in group["template"]["spec"]["containers"]]


def test_its_keys_are_those_of_a_ray_job() -> None:
    content = job()
    assert (content["apiVersion"], content["kind"]) == ("ray.io/v1", "RayJob")
    spec = content["spec"]
    assert {*spec} <= JOB
    assert {*spec["rayClusterSpec"]} <= CLUSTER
    head, *workers = groups()
    assert {*head} <= HEAD
    assert all({*each} <= WORKERS for each in workers)
    assert spec["rayClusterSpec"]["authOptions"] == {"mode": "token"}


@pytest.mark.usefixtures("no_processes")
def test_its_run_takes_all_nodes_and_their_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    atropos, train, *words = shlex.split(job()["spec"]["entrypoint"])
    assert (atropos, train) == ("atropos", "train")
    _, *workers = groups()
    assert words[words.index("--ray-nodes") + 1] == str(1 + sum(group["replicas"] for group in workers))
    assert all(group["minReplicas"] == group["replicas"] == group["maxReplicas"] for group in workers)
    gpus = {container["resources"]["limits"]["nvidia.com/gpu"] for container in containers()}
    (each,) = gpus
    on_gpus(monkeypatch, [])  # what the plan is for is said by --gpus
    made = plan(*words, "--gpus", f"{each}x80")
    assert [bundle["GPU"] for bundle in reservations(made)] == [int(each)] * 2
    mounts = [mount["mountPath"] for container in containers() for mount in container["volumeMounts"]]
    assert mounts.count(words[words.index("--runs") + 1]) == 2


def test_its_ray_is_that_of_the_lock_and_of_the_image() -> None:
    (locked,) = re.findall(r"^ray==([\d.]+)", (ROOT / "requirements/cpu.lock").read_text(), re.MULTILINE)
    (built,) = re.findall(r"ray\[default\]==([\d.]+)", (ROOT / "Dockerfile").read_text())
    assert locked == built == job()["spec"]["rayClusterSpec"]["rayVersion"]


def test_no_secret_is_in_the_file_or_in_the_metadata_of_the_job() -> None:
    for container in containers():
        assert not [each for each in container["env"] if "value" in each]
        assert all("secretKeyRef" in each["valueFrom"] for each in container["env"])
    assert not re.search(r"token|key|secret|password", job()["spec"]["entrypoint"], re.IGNORECASE)
