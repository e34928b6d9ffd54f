"""What `atropos stop` and `atropos status` believe of a run's directory, which may come from somebody else."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from atropos_launcher.runs import ended_runs, recorded_runs
from atropos_launcher.services.records import ForeignRecord, Record, Records, RunInUse
from atroposlib.processes.identity import boot_id, first_ticks
from tests.unit.launcher.processes import DEAF, atropos, await_record, launch, lives, python
from tests.waiting import wait_until

pytestmark = pytest.mark.services


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """A process of ours that no launcher started."""
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


def plant(run: Path, name: str = "api", **fields: object) -> Path:
    """A record as a launcher writes it, but for `fields`."""
    (run / "pids").mkdir(parents=True, exist_ok=True)
    content = {"name": name, "pid": 99999, "start": 1, "boot": boot_id(), "url": ""}
    path = run / "pids" / name
    path.write_text(json.dumps(content | fields))
    return path


def test_a_record_is_read_as_it_was_written(tmp_path: Path, bystander: subprocess.Popen[bytes]) -> None:
    records = Records(tmp_path)
    records.claim()
    record = Record.of("api", bystander.pid, "http://127.0.0.1:8000/health")
    records.write(record)
    assert records.read() == {"api": record}
    assert record.is_alive
    assert record.group.members() == [bystander.pid]


def test_a_recycled_pid_is_not_hit(tmp_path: Path, bystander: subprocess.Popen[bytes]) -> None:
    plant(tmp_path, pid=bystander.pid)
    done = atropos("stop", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Ending" not in done.stdout
    assert bystander.poll() is None


def test_a_pid_of_another_boot_is_not_hit(tmp_path: Path, bystander: subprocess.Popen[bytes]) -> None:
    plant(tmp_path, pid=bystander.pid, start=first_ticks(bystander.pid), boot="0" * 36)
    assert atropos("stop", tmp_path).returncode == 0
    assert bystander.poll() is None


def test_a_recycled_launcher_is_not_hit(tmp_path: Path, bystander: subprocess.Popen[bytes]) -> None:
    plant(tmp_path, "launcher", pid=bystander.pid)
    assert atropos("stop", tmp_path).returncode == 0
    assert bystander.poll() is None


@pytest.mark.parametrize("pid", [0, 1, -1, "12", "$(touch /tmp/x)", 1.5, None, 99999999999999, [7]])
def test_a_record_without_a_process_s_number_signals_nobody(tmp_path: Path, pid: object) -> None:
    plant(tmp_path, "odd", pid=pid)
    done = atropos("stop", tmp_path)
    assert done.returncode == 1
    assert "pids/odd was not written by a launcher" in done.stderr
    assert "$.pid" in done.stderr
    assert done.stderr.rstrip().endswith("remove it by hand")


@pytest.mark.parametrize(
    "fields", [{"url": "file:///etc/passwd"}, {"name": "../x"}, {"name": "other"}, {"boot": "\x1b["}, {"more": 1}]
)
def test_odd_records_are_refused(tmp_path: Path, fields: dict[str, object]) -> None:
    path = plant(tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with pytest.raises(ForeignRecord):
        Records(tmp_path).read()


@pytest.mark.parametrize("content", [b"", b"pid=7", b"\xff\xfe", b"[]", b"{}"])
def test_what_is_no_record_is_refused(tmp_path: Path, content: bytes) -> None:
    plant(tmp_path).write_bytes(content)
    with pytest.raises(ForeignRecord):
        Records(tmp_path).read()


@pytest.mark.parametrize("name", [".shared.new", ".shared", "api", ".api.new", ".lock"])
def test_a_link_among_the_records_is_not_followed(tmp_path: Path, name: str) -> None:
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "run/pids").mkdir(parents=True)
    (tmp_path / "run/pids" / name).symlink_to(tmp_path / "precious")
    done = atropos("stop", tmp_path / "run")
    assert done.returncode == 1
    assert "was not written by a launcher (it is a link)" in done.stderr
    assert (tmp_path / "precious").read_text() == "mine"


def test_a_pipe_among_the_records_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "pids").mkdir()
    os.mkfifo(tmp_path / "pids/api")
    assert "it is not a regular file" in atropos("status", tmp_path).stdout


def test_a_link_in_place_of_the_records_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/thesis.txt").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/pids").symlink_to(tmp_path / "elsewhere")
    assert atropos("stop", tmp_path / "run").returncode == 1
    assert (tmp_path / "elsewhere/thesis.txt").read_text() == "mine"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize("name", ["api", "launcher", ".shared", "."])
def test_another_users_records_are_refused(tmp_path: Path, name: str, bystander: subprocess.Popen[bytes]) -> None:
    plant(tmp_path, pid=bystander.pid, start=first_ticks(bystander.pid))
    (tmp_path / "pids" / name).touch()
    os.chown(tmp_path / "pids" / name, 65534, 65534)
    done = atropos("stop", tmp_path)
    assert done.returncode == 1
    assert "was not written by a launcher (it belongs to another user)" in done.stderr
    assert bystander.poll() is None


def test_what_a_received_run_holds_does_not_reach_the_terminal_raw(tmp_path: Path) -> None:
    run = tmp_path / "run\x1b[2J"
    plant(run)
    (run / "api.log").write_bytes(b"Groups: \xe2\x9c\x93 \x1b]0;owned\x07\x9b31m\xc2\x9b31m end\n")
    shown = atropos("status", run)
    assert shown.returncode == 0, shown.stderr
    assert "Groups: \u2713 \\x1b]0;owned\\x07" in shown.stdout
    assert shown.stdout.rstrip().endswith("31m end")
    logs = atropos("logs", run)
    (run / "pids/e\x1b[31mvil").write_text("{}")
    refused = atropos("stop", run)
    assert refused.returncode == 1
    everything = shown.stdout + logs.stdout + refused.stdout + refused.stderr
    assert not {"\x1b", "\x07", "\x9b"} & {*everything}


def test_a_run_whose_name_holds_a_newline_is_not_listed(tmp_path: Path) -> None:
    for name in ("good", f"evil\n{str(tmp_path).replace('/', '_')}"):
        (tmp_path / "runs" / name / "pids").mkdir(parents=True)
        (tmp_path / "runs" / f"{name}-ended").mkdir()
        (tmp_path / "runs" / f"{name}-ended" / "api.log").touch()
    assert recorded_runs(tmp_path / "runs") == [tmp_path / "runs/good"]
    assert [run.name for run in ended_runs(tmp_path / "runs")] == ["good-ended"]


@pytest.mark.parametrize(
    "forged", ["no list", "another boot", "another inode", "outside of /dev/shm", "a way out of it", "a link"]
)
def test_a_file_that_no_service_had_open_is_not_removed(tmp_path: Path, forged: str) -> None:
    mine = tmp_path / "thesis.txt" if "out" in forged else Path(f"/dev/shm/atropos-test-{os.getpid()}-forged")
    if forged == "a link":
        mine.symlink_to(tmp_path / "thesis.txt")
    else:
        mine.write_text("mine")
    name = f"../..{mine}" if forged == "a way out of it" else str(mine) if "outside" in forged else mine.name
    inode = mine.lstat().st_ino + (forged == "another inode")
    notes = {"boot": "0" * 36 if forged == "another boot" else boot_id(), "files": {name: inode}}
    (tmp_path / "run/pids").mkdir(parents=True)
    (tmp_path / "run/pids/.shared").write_text(mine.name if forged == "no list" else json.dumps(notes))
    try:
        done = atropos("stop", tmp_path / "run")
        assert done.returncode in (0, 1), done.stderr
        assert "Traceback" not in done.stderr
        assert mine.is_symlink() or mine.read_text() == "mine"
    finally:
        mine.unlink()


def test_a_noted_file_that_a_living_process_has_mapped_stays(tmp_path: Path) -> None:
    mine = Path(f"/dev/shm/atropos-test-{os.getpid()}-mapped")
    mine.write_bytes(bytes(4096))
    source = (
        f"import mmap\nwith open({str(mine)!r}, 'r+b') as file: held = mmap.mmap(file.fileno(), 0)\nprint(flush=True)"
    )
    source += "\ninput()"
    holder = subprocess.Popen(["python3", "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    try:
        holder.stdout.readline()
        (tmp_path / "pids").mkdir()
        (tmp_path / "pids/.shared").write_text(
            json.dumps({"boot": boot_id(), "files": {mine.name: mine.stat().st_ino}})
        )
        assert atropos("stop", tmp_path).returncode == 0
        assert mine.exists()
    finally:
        holder.communicate()
        mine.unlink()


def test_the_run_is_claimed_by_one_at_a_time_and_free_again_after_its_end(tmp_path: Path) -> None:
    first, second = Records(tmp_path), Records(tmp_path)
    first.claim()
    with pytest.raises(RunInUse, match="another command"):
        second.claim()
    first.forget()
    assert not (tmp_path / "pids").exists()
    second.claim()
    second.forget()


def test_a_launcher_without_a_lock_still_has_its_run(tmp_path: Path) -> None:
    """As on a file system that knows no locks."""
    parent = os.getppid()
    plant(tmp_path, "launcher", pid=parent, start=first_ticks(parent))
    with pytest.raises(RunInUse, match=f"its launcher \\(pid {parent}\\)"):
        Records(tmp_path).claim()


@pytest.mark.slow
def test_stop_ends_what_a_killed_launcher_has_left_and_nothing_else(
    tmp_path: Path, bystander: subprocess.Popen[bytes]
) -> None:
    run = tmp_path / "runs/mine"
    family = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {DEAF!r}]); {DEAF}"
    launcher = launch(run, python("api", family), python("vllm", DEAF))
    pids = [await_record(run, "api"), await_record(run, "vllm")]
    wait_until(lambda: (run / "api.log").read_text().count("deaf") == 2 and "deaf" in (run / "vllm.log").read_text())
    launcher.send_signal(signal.SIGKILL)
    launcher.communicate(timeout=10)
    assert all(map(lives, pids))
    shown = atropos("status", "--runs", tmp_path / "runs")
    assert "its launcher is gone: `atropos stop` ends what it left" in shown.stdout
    done = atropos("stop", "--runs", tmp_path / "runs")
    assert done.returncode == 0, done.stderr
    assert "Ending api vllm (at most 35 s)" in done.stdout
    assert "Killed, still running after 5 s: api vllm" in done.stdout
    assert f"Everything of {run} has ended" in done.stdout
    assert not any(map(lives, pids))
    assert bystander.poll() is None
    assert not (run / "pids").exists()
