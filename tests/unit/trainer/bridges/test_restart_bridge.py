"""Mode none against a server program that is not vLLM: who starts, who is asked, who is never touched, and what is
reported.
"""

import contextlib
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from atroposlib.processes.child_group import ChildGroup, StillRunning
from atroposlib.wire.bridge import read_policy_version, write_policy_version
from example_trainer.bridges import BridgeError, restart
from example_trainer.bridges.restart import RestartBridge
from example_trainer.ranks.place import VARIABLE
from example_trainer.settings.config import TrainerConfig
from example_trainer.weights.load import load_trained
from tests.integration.conftest import session_members
from tests.serving import free_port
from tests.unit.trainer.fakes import FakeApi, serve

pytestmark = pytest.mark.services

FAKE = Path(__file__).with_name("fake_vllm_server.py")
DEADLINE_S = 60.0
CPU = torch.device("cpu")


def keep() -> None:
    """An update that leaves the weights."""


@dataclass
class Bench:
    """Configurations for one free port, and bridges that are closed with the test."""

    model: str
    folder: Path
    resources: contextlib.ExitStack
    port: int = field(default_factory=free_port)

    def config(self, flags: str = "", **changes: Any) -> TrainerConfig:
        settings: dict[str, Any] = dict(
            model_name=self.model,
            vllm_port=self.port,
            vllm_flags=flags,
            training_steps=5,
            save_path=self.folder / "checkpoints",
            log_dir=self.folder,
        )
        return TrainerConfig.model_validate(settings | {"vllm_start_timeout": DEADLINE_S} | changes)

    def connect(self, config: TrainerConfig, source: str | None = None) -> RestartBridge:
        source = source or self.model
        prepared = restart.prepare(config, source, CPU, FAKE)
        self.resources.callback(prepared.close)
        bridge = prepared.connect(load_trained(config, source, CPU))
        assert isinstance(bridge, RestartBridge)
        return bridge

    def bridge(self, flags: str = "", **changes: Any) -> RestartBridge:
        return self.connect(self.config(flags, **changes))


@pytest.fixture
def bench(model: str, tmp_path: Path) -> Iterator[Bench]:
    with contextlib.ExitStack() as resources:
        yield Bench(model, tmp_path, resources)


def own_pid(bridge: RestartBridge) -> int:
    assert bridge._server.process is not None
    return bridge._server.process.pid


def stranger(config: TrainerConfig, model: str, *flags: str) -> subprocess.Popen[bytes]:
    """A server that somebody else has started at the bridge's port."""
    port = config.vllm_port
    command = [
        sys.executable,
        str(FAKE),
        "--model",
        model,
        "--port",
        str(port),
        "--served-model-name",
        "theirs",
        *flags,
    ]
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + DEADLINE_S
    while socket.socket().connect_ex(("127.0.0.1", port)) != 0:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process


def end(process: subprocess.Popen[bytes]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(DEADLINE_S)


def test_a_version_is_served_at_every_interval_and_at_the_end(bench: Bench, model: str, tmp_path: Path) -> None:
    (tmp_path / "checkpoints/served_7").mkdir(parents=True)  # by a process of the run that was killed
    bridge = bench.bridge("--start-s 0.5", vllm_restart_interval=2)
    assert bridge.served_dtype == "bfloat16"
    pids, reports, updates = [], [], []
    for version in range(6):
        reports.append(bridge.sync(version, lambda: updates.append(1)))
        pids.append(own_pid(bridge))
    assert [report.policy_version for report in reports] == [0, 0, 2, 2, 4, 5]
    assert len(updates) == 6
    assert [report.stall_s > 0 for report in reports] == [False, False, True, False, True, True]
    assert all(
        report.stall_s >= report.apply_s >= 0.5 and report.bytes_moved > 80_000 for report in reports if report.stall_s
    )
    assert len(set(pids)) == 4
    assert session_members(pids[0]) == []
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["served_5"]
    last_start = (tmp_path / "vllm.log").read_text().splitlines()[-1]
    assert f"--model {tmp_path}/checkpoints/served_5 --served-model-name {model}" in last_start
    assert "--dtype bfloat16" in last_start
    bridge.close()
    assert session_members(pids[-1]) == []


def test_the_version_that_the_run_says_is_the_last_is_served(bench: Bench) -> None:
    bridge = bench.bridge(vllm_restart_interval=3)
    bridge.sync(0, keep)
    bridge.last_version = 2
    assert [bridge.sync(version, keep).policy_version for version in (1, 2)] == [0, 2]


def test_the_server_of_a_trainer_rank_is_no_rank(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "2"}
    for name, value in (told | {"OMP_NUM_THREADS": "1", VARIABLE: "0 2 5 6 7"}).items():
        monkeypatch.setenv(name, value)
    environ = psutil.Process(own_pid(bench.bridge())).environ()
    assert not {*told, "OMP_NUM_THREADS", VARIABLE} & set(environ)
    assert environ["VLLM_ENABLE_SHARED_WEIGHTS"] == "0"


def test_the_checkpoint_holds_the_updated_weights_and_their_version(bench: Bench, model: str, tmp_path: Path) -> None:
    bridge = bench.bridge(vllm_restart_interval=1)
    trained = bridge._trained.model

    def update() -> None:
        with torch.no_grad():
            next(trained.parameters()).fill_(0.25)

    bridge.sync(0, keep)
    bridge.sync(1, update)
    folder = tmp_path / "checkpoints" / "served_1"
    assert read_policy_version(str(folder)) == 1
    assert type(trained).from_pretrained(folder).get_parameter("model.embed_tokens.weight").unique().tolist() == [0.25]


def test_a_resumed_run_starts_with_the_version_of_its_checkpoint(bench: Bench, model: str, tmp_path: Path) -> None:
    source = tmp_path / "step_4"
    shutil.copytree(model, source)
    write_policy_version(source, 4)
    bridge = bench.connect(bench.config(), str(source))
    assert bridge.sync(4, keep).stall_s == 0
    # a new run from the same directory counts from 0, so what is served must be labelled again
    fresh = bench.connect(bench.config(vllm_port=free_port()), str(source))
    report = fresh.sync(0, keep)
    assert report.policy_version == 0
    assert report.stall_s > 0
    assert read_policy_version(str(tmp_path / "checkpoints" / "served_0")) == 0


def test_a_served_version_that_is_the_model_name_stays(bench: Bench, model: str, tmp_path: Path) -> None:
    """The start model of the KL term is read from it again."""
    bench.model = str(shutil.copytree(model, tmp_path / "checkpoints" / "served_20"))
    bench.bridge().sync(1, lambda: None)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["served_1", "served_20"]


def test_an_adapter_is_served_beside_its_base_model(bench: Bench, model: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = dict(weight_bridge_mode="lora_restart", vllm_restart_interval=1, lora_r=9)
    bridge = bench.bridge(**settings)
    assert bridge.sync(0, keep).stall_s == 0
    assert bridge.sync(1, keep).policy_version == 1
    folder = tmp_path / "checkpoints" / "served_1"
    base, adapted = (line for line in (tmp_path / "vllm.log").read_text().splitlines() if line.startswith("FAKE"))
    assert f"--model {model} --enable-lora --max-lora-rank 16 --served-model-name {model}" in base
    assert (
        f"--model {model} --enable-lora --max-lora-rank 16 --lora-modules policy-v1={folder} --served-model-name"
        f" {model}" in adapted
    )
    assert {path.name for path in folder.iterdir()} >= {
        "adapter_config.json",
        "adapter_model.safetensors",
        "policy.json",
    }
    assert not (folder / "model.safetensors").exists()

    resumed = bench.connect(bench.config(vllm_port=free_port(), **settings), str(folder))
    assert resumed.sync(1, keep).stall_s == 0


def test_a_failed_update_leaves_the_server_as_it_is(bench: Bench, tmp_path: Path) -> None:
    bridge = bench.bridge(vllm_restart_interval=1)
    bridge.sync(0, keep)
    pid = own_pid(bridge)

    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        bridge.sync(1, fail)
    assert own_pid(bridge) == pid
    assert session_members(pid)
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize(
    ("flags", "settings", "says"),
    [
        (
            "--no-such-flag",
            {},
            r"ended by itself: exit status 2. Last lines of .*vllm.log:\n[^$]*arguments: --no-such-flag",
        ),
        (
            "--start-s 600",
            {"vllm_start_timeout": 1},
            r"vLLM is not at http://localhost:\d+ after 1 s: no answer \(ConnectionError\); see its log",
        ),
        ("", {"vllm_host": "0.0.0.0"}, "starts vLLM only on its own loopback"),
    ],
    ids=["dies", "never answers", "elsewhere"],
)
def test_a_server_that_does_not_come_up_is_an_error_with_the_reason(
    bench: Bench, flags: str, settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(BridgeError, match=says):
        bench.bridge(flags, **settings)


def noticed(bridge: Any, pid: int) -> None:
    """Kill our own, and check until another one serves or the bridge gives up."""
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + DEADLINE_S
    while own_pid(bridge) == pid and time.monotonic() < deadline:
        bridge.check()


def test_a_server_that_dies_is_started_again_from_what_it_served(bench: Bench, model: str) -> None:
    bridge = bench.bridge(vllm_restart_interval=1)
    bridge.sync(0, lambda: None)
    bridge.sync(1, lambda: None)
    for _ in range(restart.RESTARTS):
        pid = own_pid(bridge)
        noticed(bridge, pid)
        assert own_pid(bridge) != pid
        assert session_members(pid) == []  # its orphaned engine too
        assert bridge._server.client.status().policy_version == 1
    pid = own_pid(bridge)
    with pytest.raises(BridgeError, match=r"ended by itself: killed by signal KILL. Last lines of [^$]*FAKE --model"):
        noticed(bridge, pid)
    bridge.close()
    assert session_members(pid) == []


def test_a_server_that_ignores_term_is_killed_after_the_grace(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("example_trainer.bridges.restart.GRACE_S", 0.2)
    bridge = bench.bridge("--ignore-term")
    pid = own_pid(bridge)
    bridge.close()
    assert session_members(pid) == []
    assert f"Process group {pid} did not end within 0.2 s of TERM: killing it" in caplog.text


def test_a_server_that_outlives_sigkill_is_an_error_of_the_bridge(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bridge = bench.bridge()

    def outlive(group: ChildGroup, grace_s: float) -> None:
        raise StillRunning("processes [7] of group 7 still run")

    with monkeypatch.context() as patched:
        patched.setattr(ChildGroup, "stop", outlive)
        with pytest.raises(BridgeError, match="still run"):
            bridge._server.stop()


def test_a_server_of_somebody_else_is_asked_for_and_never_touched(
    bench: Bench, model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = bench.config(vllm_restart_interval=1)
    theirs = [stranger(config, model)]
    bridge = bench.connect(config)
    assert bridge.sync(0, keep).policy_version == 0
    assert bridge._server.process is None

    def restart_by_hand() -> None:
        while not (tmp_path / "checkpoints" / "served_1").exists():
            time.sleep(0.05)
        time.sleep(1)
        alive.append(theirs[0].poll() is None)
        end(theirs[0])
        theirs.append(stranger(config, str(tmp_path / "checkpoints" / "served_1")))

    alive: list[bool] = []
    owner = threading.Thread(target=restart_by_hand)
    owner.start()
    with caplog.at_level(logging.WARNING):
        report = bridge.sync(1, keep)
    owner.join()
    assert alive == [True]
    assert report.policy_version == 1
    assert report.stall_s > 1
    (request,) = [record.getMessage() for record in caplog.records if "Restart the vLLM server" in record.getMessage()]
    assert f"--model {tmp_path}/checkpoints/served_1 --served-model-name theirs --port {config.vllm_port}" in request
    bridge.close()
    assert theirs[1].poll() is None
    end(theirs[1])


def test_a_restart_by_hand_that_never_comes_is_given_up_with_what_is_served(bench: Bench, model: str) -> None:
    config = bench.config(vllm_restart_interval=1, vllm_start_timeout=1)
    theirs = stranger(config, model)
    bridge = bench.connect(config)
    bridge.sync(0, keep)
    with pytest.raises(
        BridgeError, match=f"vLLM with policy version 1 is not at .* after 1 s: it serves {model} as policy version 0"
    ):
        bridge.sync(1, keep)
    bridge.close()
    assert theirs.poll() is None
    end(theirs)


def test_a_port_that_a_stranger_takes_during_the_restart_is_left_to_it(
    bench: Bench, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = bench.config(vllm_restart_interval=1)
    bridge = bench.connect(config)
    bridge.sync(0, keep)
    stop, theirs = bridge._server.stop, []

    def stop_and_lose_the_port() -> None:
        stop()
        theirs.append(stranger(config, model))

    monkeypatch.setattr(bridge._server, "stop", stop_and_lose_the_port)
    with pytest.raises(BridgeError, match="is now in use by another process"):
        bridge.sync(1, keep)
    monkeypatch.undo()
    bridge.close()
    assert theirs[0].poll() is None
    end(theirs[0])


@pytest.mark.rotating
@pytest.mark.slow
@pytest.mark.parametrize("with_signal", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_trainer_ends_its_server_within_ten_seconds(
    with_signal: signal.Signals, model: str, tmp_path: Path
) -> None:
    """While it waits for a server that does not come up and ignores TERM."""
    code = (
        "import sys; from pathlib import Path\n"
        "from functools import partial; from example_trainer import grpo; from example_trainer.bridges import restart\n"
        f"grpo.make_bridge = lambda config: partial(restart.prepare, config, launcher=Path({str(FAKE)!r}))\n"
        "raise SystemExit(grpo.main(sys.argv[1:]))"
    )
    flags = ["--model-name", model, "--vllm-port", str(free_port()), "--vllm-flags", "--start-s 600 --ignore-term"]
    with serve(FakeApi(lambda delivered: None)) as url:
        command = [
            sys.executable,
            "-c",
            code,
            *flags,
            "--atropos-url",
            url,
            "--save-path",
            str(tmp_path),
            "--log-dir",
            str(tmp_path),
        ]
        trainer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert trainer.stderr is not None
        started = next(match for line in trainer.stderr if (match := re.search(r"Started vLLM \(pid (\d+)", line)))
        while not next(trainer.stderr).endswith("of at most 900 s so far (no answer (ConnectionError))\n"):
            pass
        trainer.send_signal(with_signal)
        start = time.monotonic()
        trainer.communicate(timeout=DEADLINE_S)
    assert trainer.returncode == (130 if with_signal == signal.SIGINT else 143)
    assert session_members(int(started[1])) == []
    assert time.monotonic() - start < 15
