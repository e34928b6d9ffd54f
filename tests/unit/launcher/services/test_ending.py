"""Ending is not kept from its work by what else fails."""

import errno
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from atropos_launcher.commands import train
from atropos_launcher.commands.existing_runs.stop import CannotStop, stop
from atropos_launcher.placement.ports import Ports, PortTaken
from atropos_launcher.services import stop_services
from atropos_launcher.services.events import Ending, Event
from atropos_launcher.services.records import Record, Records
from atropos_launcher.services.shared_memory import SharedMemory
from atropos_launcher.services.stop_services import end

pytestmark = pytest.mark.services


@pytest.fixture
def service() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def records(tmp_path: Path, service: subprocess.Popen[bytes]) -> Records:
    found = Records(tmp_path)
    found.claim()
    found.write(Record.of("api", service.pid))
    return found


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_does_not_keep_services_running(
    records: Records, service: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = SharedMemory(records)
    monkeypatch.setattr(memory, "note", full_disk)
    end(records, records.services(), memory, lambda event: None)
    assert service.wait(timeout=10) == -15
    assert not records.exist()


def test_a_console_that_is_gone_does_not_keep_services_running(
    records: Records, service: subprocess.Popen[bytes]
) -> None:
    end(records, records.services(), SharedMemory(records), full_disk)
    assert service.wait(timeout=10) == -15


def test_the_second_end_finds_nothing_to_do(records: Records) -> None:
    services, told = records.services(), list[Event]()
    end(records, services, SharedMemory(records), told.append)
    started = time.monotonic()
    end(records, services, SharedMemory(records), told.append)
    assert told == [Ending(("api",), 7.0)]
    assert time.monotonic() - started < 5


def test_stop_fails_while_something_outlives_its_kill(records: Records, monkeypatch: pytest.MonkeyPatch) -> None:
    """It said that everything had ended, with status 0, while the kernel took gigabytes back."""
    records.release()
    monkeypatch.setattr(stop_services, "end_groups", lambda groups, *limits, **tellers: list(groups))
    with pytest.raises(CannotStop, match=r"^api of .* is still there 30 s after SIGKILL: .* run this command again"):
        stop(records.run_dir)
    assert records.exist()
    monkeypatch.undo()
    stop(records.run_dir)
    assert not records.exist()


def test_stop_leaves_what_was_in_shared_memory_before_the_run_of_a_killed_launcher(records: Records) -> None:
    own = Path(f"/dev/shm/atropos-test-{os.getpid()}-data")
    own.write_bytes(bytes(4096))
    SharedMemory(records).begin()
    records.release()
    source = (
        f"import mmap, os, signal, time\nheld = mmap.mmap(os.open({str(own)!r}, os.O_RDWR), 0)\n"
        "signal.signal(signal.SIGTERM, lambda *_: exit(time.sleep(1)))\nprint('UP', flush=True)\ntime.sleep(60)"
    )
    command = [sys.executable, "-c", source]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == b"UP\n"
        records.write(Record.of("reader", reader.pid))
        stop(records.run_dir)
    assert own.exists()
    own.unlink()


LISTENS = "import socket, time; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True)"


def test_a_run_is_resumed_on_ports_that_services_of_its_killed_launcher_still_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was refused, as its own port was taken, while a vLLM server took some seconds to end."""
    run, model = tmp_path / "run", tmp_path / "model"
    (run / "checkpoints").mkdir(parents=True)
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "llama"}')
    with subprocess.Popen(
        [sys.executable, "-c", f"{LISTENS}; time.sleep(60)"], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as left:
        assert left.stdout is not None
        port = int(left.stdout.readline())
        (run / "run.yaml").write_text(f"base: arithmetic.yaml\nmodel: {model}\nvllm: {{port: {port}}}\n")
        records = Records(run)
        records.claim()
        records.write(Record.of("vllm", left.pid))
        records.release()
        with pytest.raises(PortTaken, match=f"--vllm-port {port} is taken by "), Ports() as ports:
            ports.require("--vllm-port", port)
        assert train.main(["--resume", str(run), "--dry-run"]) == 0
        assert left.poll() is None
        monkeypatch.setattr(train, "train", lambda asked, plan, *others: plan.site.vllm_ports[0])
        assert train.main(["--resume", str(run), "--no-view"]) == port
        assert left.wait(10) == -15
    assert not records.exist()
