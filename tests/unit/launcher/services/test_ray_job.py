"""A service of a Ray node, without a cluster: what is sent to the node, and the actor that runs it there."""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atropos_launcher.paths import PACKAGES
from atropos_launcher.services import ray_actor, ray_client
from atropos_launcher.services.ray_actor import ServiceActor

SILENCE_S = 1.0
WORDS = ["--host", "10.0.0.2", "--name", "vllm-2", "--ray", "10.0.0.1:6379", "--group", "g-1", "--silence-s", "1"]


def job_of(folder: Path, command: list[str], *flags: str, environ: dict[str, str] | None = None) -> dict[str, Any]:
    asked = ray_client.parser().parse_args([*WORDS, "--folder", str(folder / "run"), *flags, "--", *command])
    job: dict[str, Any] = json.loads(ray_client.job_of(asked, environ or {}))
    return job


def program(text: str) -> list[str]:
    return [sys.executable, "-uc", text]


@pytest.fixture
def actor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ServiceActor]:
    monkeypatch.chdir(tmp_path)  # which a job leaves
    monkeypatch.setattr(sys, "path", [*sys.path])
    made = ServiceActor()
    yield made
    made.stop()


def start(actor: ServiceActor, job: dict[str, Any]) -> str:
    return actor.start(str(PACKAGES), json.dumps(job).encode())


def ended(actor: ServiceActor, within_s: float = 20.0) -> tuple[bytes, int]:
    """All that it wrote, and its status."""
    deadline, text = time.monotonic() + within_s, b""
    while True:
        more, status = actor.read(len(text))
        text += more
        if status is not None:
            return text, status
        assert time.monotonic() < deadline, text
        time.sleep(0.05)


def test_the_node_gets_the_services_own_variables_and_those_of_libraries(tmp_path: Path) -> None:
    environ = {"MINE": "1", "VLLM_API_KEY": "k", "ATROPOS_API_TOKEN": "t", "HOME": "/root", "AWS_SECRET": "no"}
    job = job_of(tmp_path, ["true"], "--variables", "MINE", environ=environ)
    assert job["environment"] == {"MINE": "1", "VLLM_API_KEY": "k", "ATROPOS_API_TOKEN": "t"}


@pytest.mark.services
def test_files_are_sent_and_the_output_arrives_with_the_exit_status(tmp_path: Path, actor: ServiceActor) -> None:
    sent = tmp_path / "run/trainer.yaml"
    sent.parent.mkdir()
    sent.write_text("lr: 1")
    text = f"import os, sys; print(os.environ['VLLM_X'], open({str(sent)!r}).read()); sys.exit(3)"
    job = job_of(tmp_path, program(text), "--file", str(sent), environ={"VLLM_X": "x"})
    sent.unlink()
    assert start(actor, job) == ""
    assert ended(actor) == (b"x lr: 1\n", 3)


@pytest.mark.services
def test_a_long_log_comes_in_parts_and_the_status_behind_the_last(tmp_path: Path, actor: ServiceActor) -> None:
    size = 3 * ray_actor.MOST + 5
    assert start(actor, job_of(tmp_path, program(f"import os; os.write(1, b'x' * {size}); os.abort()"))) == ""
    text, status = ended(actor)
    assert (len(text), status) == (size, -signal.SIGABRT)


@pytest.mark.services
def test_a_service_whose_launcher_is_silent_is_ended(tmp_path: Path, actor: ServiceActor) -> None:
    job = job_of(tmp_path, program("import os, time; print(os.getpid()); time.sleep(60)"))
    assert start(actor, job) == ""
    begun = time.monotonic()
    while not (text := actor.read(0)[0]).strip():
        time.sleep(0.05)
    heard = time.monotonic()
    while Path(f"/proc/{int(text)}").exists() and "Z" not in Path(f"/proc/{int(text)}/stat").read_text().split()[2]:
        assert time.monotonic() - heard < SILENCE_S + 5
        time.sleep(0.05)
    assert time.monotonic() - heard > SILENCE_S / 2
    assert begun < heard


@pytest.mark.services
def test_what_must_be_shared_is_looked_for_before_anything_starts(
    tmp_path: Path, actor: ServiceActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_actor, "SHARED_S", 0.2)
    witness = tmp_path / "run.json"
    witness.write_text("of the launcher")
    job = job_of(tmp_path, program("print('started')"), "--sees", str(witness), "share it")
    witness.write_text("of another machine")
    assert start(actor, job) == f"the launcher's {witness} is not on {os.uname().nodename}: share it"
    witness.write_text("of the launcher")
    assert start(actor, job) == ""
    assert ended(actor) == (b"started\n", 0)
