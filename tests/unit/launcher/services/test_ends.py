"""How a run ends is said: out of memory by name, the command that continues it, and in the window."""

import errno
import json
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from atropos_launcher.commands import train
from atropos_launcher.plan.services import AGENT_JOURNAL
from atropos_launcher.runs import outcome
from atropos_launcher.service import Service
from atropos_launcher.services.child import Child
from atropos_launcher.services.events import Died, Event, Interrupted
from atropos_launcher.services.oom import OomKills
from atropos_launcher.services.run_log import RunLog
from atropos_launcher.services.supervisor import CannotStart, Limits, Supervisor
from atroposlib.flags import ConfigError
from atroposlib.view.run_data.run_files import RunFiles
from atroposlib.wire.folders import LATEST
from tests.unit.launcher.memory_group import memory_group
from tests.unit.launcher.processes import launched, python


def counters(root: Path, group: str, kills: int) -> Path:
    """A file system whose process is in a control group with as many kills."""
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/self/cgroup").write_text(f"0::{group}\n")
    folder = root / f"sys/fs/cgroup{group}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.events").write_text(f"low 0\noom 3\noom_kill {kills}\noom_group_kill 0\n")
    return root


def test_a_kill_for_want_of_memory_is_seen_once(tmp_path: Path) -> None:
    kills = OomKills(counters(tmp_path, "/job", 2))
    assert kills.since_last() is None
    counters(tmp_path, "/job", 3)
    assert kills.since_last() == "oom_kill of /sys/fs/cgroup/job/memory.events"
    assert kills.since_last() is None


def test_the_first_version_of_control_groups_and_the_machine_are_read(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/a\n3:cpu:/b\n")
    (tmp_path / "sys/fs/cgroup/memory/a").mkdir(parents=True)
    control = tmp_path / "sys/fs/cgroup/memory/a/memory.oom_control"
    control.write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 0\n")
    (tmp_path / "proc/vmstat").write_text("nr_free_pages 1\noom_kill 7\n")
    kills = OomKills(tmp_path)
    (tmp_path / "proc/vmstat").write_text("nr_free_pages 1\noom_kill 8\n")
    assert kills.since_last() == "oom_kill of /proc/vmstat"
    control.write_text("oom_kill 1\n")
    assert kills.since_last() == "oom_kill of /sys/fs/cgroup/memory/a/memory.oom_control"
    assert OomKills(tmp_path / "nothing").since_last() is None


def test_a_container_that_sees_its_own_group_alone_is_read(tmp_path: Path) -> None:
    """/proc names the group as the host does; the container's mount begins at the group."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/docker/abc\n")
    (tmp_path / "sys/fs/cgroup/memory").mkdir(parents=True)
    control = tmp_path / "sys/fs/cgroup/memory/memory.oom_control"
    control.write_text("oom_kill 0\n")
    kills = OomKills(tmp_path)
    control.write_text("oom_kill 1\n")
    assert kills.since_last() == "oom_kill of /sys/fs/cgroup/memory/memory.oom_control"


@pytest.mark.services
@pytest.mark.parametrize("out_of_memory", [True, False])
def test_a_service_that_was_killed_is_told_with_the_reason(tmp_path: Path, out_of_memory: bool) -> None:
    told: list[Event] = []
    program = "import os, signal, time; time.sleep(0.3); os.kill(os.getpid(), signal.SIGKILL)"
    service = Service("trainer", (sys.executable, "-c", program), may_end=True)
    with Supervisor(tmp_path / "run", [service], told.append, Limits()) as supervisor:
        supervisor._oom = OomKills(counters(tmp_path, "/job", 0))
        if out_of_memory:
            counters(tmp_path, "/job", 1)
        assert supervisor.run() == 1
    (died,) = [event for event in told if isinstance(event, Died)]
    assert died.how.startswith("killed by signal KILL")
    assert ("out of memory (oom_kill of /sys/fs/cgroup/job/memory.events rose)" in died.how) == out_of_memory
    assert (supervisor.out_of_memory, supervisor.killed) == (out_of_memory, not out_of_memory)
    assert "killed by signal KILL" in outcome(tmp_path / "run")


HUNGRY = "held = []\nwhile True: held.append(bytearray(8 << 20))"


@pytest.mark.services
@pytest.mark.parametrize("child", [False, True], ids=["the service", "a process of the service"])
def test_a_real_kill_for_want_of_memory_is_named(tmp_path: Path, child: bool) -> None:
    """The kernel kills the largest process of the group, in which the launcher is, too."""
    source = HUNGRY
    if child:
        source = f"import subprocess, sys; sys.exit(abs(subprocess.run([sys.executable, '-c', {HUNGRY!r}]).returncode))"
    with ExitStack() as resources:
        try:
            before = resources.enter_context(memory_group(megabytes=400))
        except PermissionError as refused:
            pytest.skip(f"this machine lets nobody make a control group of memory: {refused}")
        status, output = launched(tmp_path / "run", python("trainer", source, may_end=True), before=before)
    assert status == 1, output
    how = "exit status 9" if child else "killed by signal KILL"
    (line,) = [line for line in output.splitlines() if " died: " in line]
    assert f"died: {how}: the machine or its control group was out of memory (oom_kill of /sys/fs/cgroup/" in line
    assert "/atropos-test-" in line  # the group's own counter, not the machine's
    assert "out of memory" in outcome(tmp_path / "run")


def run_with(tmp_path: Path, *events: Event) -> RunFiles:
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "run.json").write_text(json.dumps({"starts": [{"time": "2026-11-26T10:00:00+0000"}]}))
    for event in events:
        RunLog(tmp_path)(event)
    return RunFiles(tmp_path, "r")


def test_the_window_tells_a_failed_run_from_a_finished_one(tmp_path: Path) -> None:
    died = Died("vllm", 5, "killed by signal KILL", tmp_path / "vllm.log", (), None)
    restarted = Died("env", 5, "exit status 1", tmp_path / "env.log", (), 2.0)
    failed = run_with(tmp_path / "failed", died).summary()
    assert (failed["state"], failed["reason"]) == ("failed", "vllm (pid 5) died: killed by signal KILL")
    assert failed["ended"] is not None
    interrupted = run_with(tmp_path / "interrupted", Interrupted(signal.SIGINT)).summary()
    assert (interrupted["state"], interrupted["reason"]) == ("interrupted", "Interrupted by SIGINT")
    finished = run_with(tmp_path / "finished", restarted).summary()
    assert (finished["state"], finished["reason"]) == ("ended", "")


def test_the_window_tells_a_run_whose_launcher_was_killed(tmp_path: Path) -> None:
    files = run_with(tmp_path)
    (tmp_path / "pids").mkdir()
    record = {"pid": 4_000_000, "start": 1, "boot": "0" * 36}
    (tmp_path / "pids/launcher").write_text(json.dumps(record))
    found = files.summary()
    assert found["state"] == "killed"
    assert found["reason"] == "its launcher is gone without a word: it was killed, or the machine stopped"
    assert found["problems"] == []


@pytest.mark.rotating
@pytest.mark.services
def test_every_end_before_its_time_prints_the_command_that_continues_from_where_it_says(tmp_path: Path) -> None:
    """A trainer that cannot load its model ends the run; the same words come after Ctrl-C and after a kill."""
    words = ["train", "arithmetic", "--model", str(tmp_path / "model"), "--steps", "2", "--runs", str(tmp_path)]
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text('{"model_type": "llama"}')
    command = [sys.executable, "-m", "atropos_launcher", *words, "--run-name", "r", "--no-view"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "To continue (there is no checkpoint yet: from step 1), run: " in done.stdout
    assert "atropos train --resume r\n" in done.stdout

    turns = tmp_path / "r" / AGENT_JOURNAL  # of policies that a run from step 1 has yet to train
    forgotten = "Removed the turns of agents: there is no checkpoint, so the run begins anew"
    again = [sys.executable, "-m", "atropos_launcher", "train", "--resume", str(tmp_path / "r"), "--no-view"]
    (tmp_path / "r/checkpoints/.step_1.partial-7").mkdir(parents=True)
    for is_kept in (False, True):
        if is_kept:
            (tmp_path / "r/checkpoints" / LATEST).write_text("step_1\n")
        turns.write_bytes(b"")
        done = subprocess.run(again, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path)
        assert done.returncode == 1
        assert (turns.exists(), forgotten in done.stdout) == (is_kept, not is_kept)


@pytest.mark.services
@pytest.mark.parametrize(
    ("trained", "how"),
    [
        ("final_model", "atropos train .*/r/run.yaml --model .*/final_model; "),
        ("final_adapter", r"merge .*/final_adapter into its model \(docs/bridges.md#lora\), then atropos train "),
    ],
)
def test_a_run_that_is_done_and_kept_no_checkpoint_does_not_begin_anew_over_its_results(
    trained: str, how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "r/checkpoints" / trained
    model.mkdir(parents=True)
    (tmp_path / "r/run.yaml").write_text("base: quickstart.yaml\n")
    if trained == "final_model":
        (model / "config.json").write_text("{}")
    words = ["--resume", str(tmp_path / "r"), "--steps", "30", "--dry-run"]
    with pytest.raises(ConfigError, match=f"it is done, and kept no checkpoint to continue from.* in a new run: {how}"):
        train.main(words)
    assert capsys.readouterr().out == ""
    (model.parent / LATEST).write_text("step_20\n")
    assert train.main(words) == 0


@pytest.mark.services
@pytest.mark.parametrize("freed", [True, False])
def test_a_service_is_started_again_once_a_full_disk_has_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, freed: bool
) -> None:
    tries: list[int] = []
    start = Child.start

    def on_a_full_disk(child: Child, records: object) -> int:
        tries.append(1)
        if len(tries) in (2, 3) or (len(tries) > 1 and not freed):
            raise OSError(errno.ENOSPC, "No space left on device")
        return start(child, records)  # type: ignore[arg-type]

    monkeypatch.setattr(Child, "start", on_a_full_disk)
    told: list[Event] = []
    marker = tmp_path / "again"
    program = (
        f"import pathlib, sys; p = pathlib.Path({str(marker)!r}); e = p.exists(); p.touch(); sys.exit(0 if e else 1)"
    )
    service = Service("env", (sys.executable, "-c", program), may_end=True, restarts=3)
    limits = Limits(pause_s=0.0, no_space_s=60.0 if freed else 0.5, no_space_pause_s=0.1)
    with Supervisor(tmp_path / "run", [service], told.append, limits) as supervisor:
        for child in supervisor._children:
            child.has_served = True
        if freed:
            assert supervisor.run() == 0
        else:
            with pytest.raises(CannotStart, match="No space left on device"):
                supervisor.run()
    waits = [event.how for event in told if isinstance(event, Died) and "No space left" in event.how]
    assert len(waits) == 2 if freed else waits


def test_a_disk_without_room_is_named_with_what_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=3_000_000))
    assert "has 3.0 MB free, and a run needs at least 67: free some first" in train.disk_line(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10**9))
    assert train.disk_line(tmp_path) == ""
