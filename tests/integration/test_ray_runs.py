"""One run on two Ray nodes, which are network namespaces joined by a cable: a vLLM server and a trainer rank on each,
and environments on both. It continues after the cable was cut. The nodes share their files, or have `runs` of their
own.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from atroposlib.logs import RUN
from tests.integration.conftest import REPOSITORY
from tests.integration.namespaces import Host
from tests.integration.ray_nodes import SILENCE_S, Launched, address_of, far, found, head, node, started

__all__ = ["far", "head"]

pytestmark = [pytest.mark.nightly, pytest.mark.services, pytest.mark.timeout(1800)]

STEPS = 6
START_S = 600.0
# as short as a step of the quickstart's task can be
SHORT = [
    *("--trainer.batch_size", "2", "--trainer.gradient_accumulation_steps", "2", "--env.group_size", "2"),
    *("--env.max_new_tokens", "16", "--env.steps_per_eval", "0", "--env.eval_at_start", "false"),
    *("--trainer.checkpoint_interval", "1", "--trainer.threads", "1"),
]


@dataclass
class Nodes:
    """A cluster of two nodes, and the run that is launched on it."""

    head: Host
    far: Host
    folder: Path
    name: str
    away: tuple[str, ...] = ()  # starts Ray on the second one

    @property
    def run(self) -> Path:
        return self.folder / "runs" / self.name

    def second(self) -> "AbstractContextManager[object]":
        return node(self.far, f"--address={address_of(self.head)}", first=self.away)

    @property
    def flags(self) -> list[str]:
        return [
            *("--ray", address_of(self.head), "--ray-nodes", "2", "--ray-timeout", str(SILENCE_S)),
            *("--runs", str(self.folder / "runs"), "--view", "false"),
        ]

    def launch(self, *words: str) -> "AbstractContextManager[Launched]":
        command = ["-m", "atropos_launcher", "train", *words, *self.flags]
        return started(command, self.folder, self.run, self.processes, self.head)

    def scale(self, count: int) -> list[str]:
        """The lines of `atropos scale vllm COUNT`."""
        words = [sys.executable, "-m", "atropos_launcher", "scale", "vllm", str(count), str(self.run)]
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        done = subprocess.run(words, capture_output=True, text=True, timeout=START_S, env=environment, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.splitlines()

    def processes(self) -> list[psutil.Process]:
        """Of the run, on both nodes."""
        return found(lambda each: each.environ().get(RUN) == self.name)


@pytest.fixture
def nodes(head: Host, far: Host, tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(head, far, tmp_path, f"nodes-{uuid.uuid4().hex[:8]}")
    with made.second():
        yield made


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def steps(run: Path) -> list[int]:
    return [row["step"] for row in rows(run)]


def test_a_run_on_two_nodes_continues_after_the_cable_was_cut(
    head: Host, far: Host, tmp_path: Path, llama_folder: Path
) -> None:
    nodes = Nodes(head, far, tmp_path, f"nodes-{uuid.uuid4().hex[:8]}")
    words = ("arithmetic", str(llama_folder), "--steps", str(STEPS), "--run-name", nodes.name, "--env.count", "2")
    with nodes.second(), nodes.launch(*words, *SHORT) as first:
        first.says("Step 2/6", within_s=START_S)
        assert (
            f"Machine {far.address}: vllm-2 on port 9001, trainer rank 1 of 2, gsm8k_1; Ray reserves 3 CPUs"
            in first.said
        )
        assert f"Trainer ranks meet at {head.address}:29500" in first.said
        said = (nodes.run / "trainer.log").read_text()
        assert "served by 2 of 2 servers" in said
        assert "2 trainer ranks send what they hold (direct)" in said  # each to the servers of both nodes
        first.says("\n", nodes.run / "samples_gsm8k_1.jsonl")  # of the environment on the other node
        far.set_cable("down")
        cut = time.monotonic()
        first.ends(1, within_s=SILENCE_S + 30)
        assert re.search(rf"\S+ on {far.address} \(pid \d+\) died", first.said), first.said[-3000:]
        assert f"no sign of life for {SILENCE_S} s from {far.address}" in first.said
        again = rf"atropos train --resume {nodes.name} --ray {address_of(head)} --ray-nodes 2"
        assert re.search(
            rf"start Ray on the lost node again or continue without it, then run: \S*{again}", first.said
        ), first.said[-3000:]
        first.expect_all_gone(cut + SILENCE_S + 40 - time.monotonic())
    far.set_cable("up")
    with nodes.second(), nodes.launch("--resume", f"runs/{nodes.name}") as second:
        second.ends(0, within_s=START_S)
        assert steps(nodes.run) == list(range(1, STEPS + 1))
        assert list(nodes.run.glob("checkpoints/final_model/*.safetensors"))
        second.expect_all_gone(10)


def test_a_rank_that_is_killed_on_one_node_ends_the_run_with_its_name(nodes: Nodes, llama_folder: Path) -> None:
    words = ("arithmetic", str(llama_folder), "--steps", "100", "--run-name", nodes.name)
    with nodes.launch(*words, *SHORT) as run:
        run.says("Step 1/100", within_s=START_S)
        (rank,) = (each for each in nodes.processes() if each.environ().get("RANK") == "1")
        rank.send_signal(signal.SIGKILL)
        run.ends(1, within_s=60)
        assert f"trainer-2 on {nodes.far.address} (pid" in run.said
        assert f"grpo: error: trainer rank 1 on {nodes.far.address} was ended by SIGKILL" in run.said
        assert "trainer (pid" not in run.said.partition("died")[2].partition("died")[0]
        run.expect_all_gone(20)


def test_a_server_joins_on_a_node_that_ray_finds_and_leaves_again(nodes: Nodes, llama_folder: Path) -> None:
    words = ("arithmetic", str(llama_folder), "--steps", "1000", "--run-name", nodes.name)
    with nodes.launch(*words, *SHORT) as run:
        run.says("Step 2/1000", within_s=START_S)
        said = nodes.scale(3)
        assert "for a Ray node with 1 CPUs and 0 GPUs free" in said[1]
        assert said[-1] == "vllm-3 serves the policy"
        url = re.search(r"Started vllm-3 at http://([\d.]+):\d+", "\n".join(said))
        assert url is not None
        assert url[1] in (nodes.head.address, nodes.far.address)
        run.says("POST /", nodes.run / "vllm-3.log")  # an environment samples from it
        assert rows(nodes.run)[-1]["servers"] == 3
        assert nodes.scale(2)[-1] == "vllm-3 has left"
        before = len(rows(nodes.run))
        run.says(f"Step {before + 3}/1000")
        assert rows(nodes.run)[-1]["servers"] == 2
        assert {row["rejected_groups"] for row in rows(nodes.run)} == {0}
        assert {row["failed_rollouts"] for row in rows(nodes.run)} == {0}


def test_nodes_without_a_shared_file_system_train_and_resume_from_a_copied_checkpoint(
    head: Host, far: Host, tmp_path: Path, llama_folder: Path
) -> None:
    """As docs/devices.md describes; what it says to do is asked for where it was not done."""
    (tmp_path / "runs").mkdir()
    # `runs` of the second node is a file system of its own: `ip netns exec` makes a mount namespace, too
    mounting = ("sh", "-c", 'mount -t tmpfs -o size=256m none "$0" && exec "$@"', str(tmp_path / "runs"))
    nodes = Nodes(head, far, tmp_path, f"nodes-{uuid.uuid4().hex[:8]}", mounting)
    saved, run = nodes.run / "checkpoints", ("arithmetic", str(llama_folder), "--run-name", nodes.name, *SHORT)
    with node(far, f"--address={address_of(head)}", first=mounting) as ray:
        there = Path(f"/proc/{ray.pid}/root{saved}")
        with nodes.launch(*run, "--steps", "2") as refused:
            refused.ends(1, within_s=START_S)
            assert f"the launcher's {nodes.run}/run.json is not on " in refused.said, refused.said[-3000:]
            assert "give --trainer.checkpoint-format hf" in refused.said
            refused.expect_all_gone(20)
        shutil.rmtree(nodes.run)

        with nodes.launch(*run, "--steps", "2", "--trainer.checkpoint-format", "hf") as first:
            first.ends(0, within_s=START_S)
            assert (saved / "latest").is_file()
            assert there.parent.is_dir()
            assert not there.exists()

        resume = ("--resume", f"runs/{nodes.name}", "--steps", "4")
        with nodes.launch(*resume) as refused:
            refused.ends(1, within_s=START_S)
            assert f"every rank reads the checkpoint: copy {saved} " in refused.said, refused.said[-3000:]
            refused.expect_all_gone(20)

        shutil.copytree(saved, there)
        with nodes.launch(*resume) as second:
            second.ends(0, within_s=START_S)
            assert steps(nodes.run) == [1, 2, 3, 4]
            assert list(saved.glob("final_model/*.safetensors"))
            second.expect_all_gone(10)
