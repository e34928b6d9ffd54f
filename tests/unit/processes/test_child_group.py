"""A process group of our own: ended as a whole, never outliving a killed trainer, and nobody else's touched."""

import errno
import mmap
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from atroposlib.processes.child_group import ChildGroup
from atroposlib.processes.groups import Group
from atroposlib.processes.identity import first_ticks
from tests.integration.conftest import session_members

pytestmark = pytest.mark.services

SLEEP = "import time; time.sleep(600)"
WITH_CHILD = (
    f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEP!r}]); print('UP', flush=True); {SLEEP}"
)
DEADLINE_S = 60


def start(code: str, folder: Path) -> ChildGroup:
    return ChildGroup([sys.executable, "-c", code], folder / "logs" / "server.log", os.environ)


def wait_for(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def test_stop_ends_the_whole_group(tmp_path: Path) -> None:
    server = start(WITH_CHILD, tmp_path)
    wait_for(lambda: "UP" in server.last_lines(), "the child")
    assert server.end() is None
    assert len(session_members(server.pid)) == 2
    server.stop(grace_s=30)
    assert session_members(server.pid) == []
    assert server.end() == "stopped"
    server.stop(grace_s=30)  # again is harmless


def test_a_group_that_ignores_term_is_killed_after_the_grace(tmp_path: Path) -> None:
    server = start(f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {WITH_CHILD}", tmp_path)
    wait_for(lambda: "UP" in server.last_lines(), "the child")
    server.stop(grace_s=0.5)
    assert session_members(server.pid) == []


def test_the_rest_of_a_group_whose_leader_has_died_is_ended(tmp_path: Path) -> None:
    server = start(f"import os; {WITH_CHILD.rpartition(';')[0].rpartition(';')[0]}; os._exit(0)", tmp_path)
    wait_for(lambda: server.end() == "exit status 0", "the leader's end")
    assert len(session_members(server.pid)) == 1
    server.stop(grace_s=30)
    assert session_members(server.pid) == []


@pytest.mark.parametrize(
    ("code", "end"),
    [("raise SystemExit(7)", "exit status 7"), ("import os; os.kill(os.getpid(), 9)", "killed by signal KILL")],
)
def test_an_end_by_itself_is_told(code: str, end: str, tmp_path: Path) -> None:
    server = start(f"print('last words', flush=True); {code}", tmp_path)
    wait_for(lambda: server.end() is not None, "its end")
    assert server.end() == end
    assert server.last_lines() == "    last words"
    server.stop(grace_s=30)


def has_ended(server: ChildGroup) -> bool:
    return server.end() is not None


def test_the_log_is_appended_to_and_only_the_last_start_is_shown(tmp_path: Path) -> None:
    for word in ("one", "two"):
        server = start(f"print('{word}')", tmp_path)
        wait_for(partial(has_ended, server), "its end")
        server.stop(grace_s=30)
    assert (tmp_path / "logs" / "server.log").read_text() == "one\ntwo\n"
    assert server.last_lines() == "    two"


def test_a_child_whose_record_cannot_be_written_never_runs(tmp_path: Path) -> None:
    def full_disk(group: Group) -> None:
        seen.append(group)
        raise OSError(errno.ENOSPC, "No space left on device")

    seen: list[Group] = []
    ran = tmp_path / "ran"
    with pytest.raises(OSError, match="No space left"):
        ChildGroup(["touch", str(ran)], tmp_path / "log", os.environ, ready=full_disk)
    assert not ran.exists()
    assert first_ticks(seen[0].pid) is None  # nor is it a zombie


def test_a_child_without_a_log_writes_where_its_parent_does(tmp_path: Path) -> None:
    code = (
        "import os; from atroposlib.processes.child_group import ChildGroup\n"
        "child = ChildGroup(['sh', '-c', 'pwd; echo two >&2; exit 3'], None, os.environ, directory='/')\n"
        "print(child.wait(30), child.end(), flush=True); child.stop(1); print(child.status(), child.end())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    assert done.stdout.splitlines() == ["/", "two", "3 exit status 3", "3 stopped"]


def test_waiting_ends_at_its_deadline(tmp_path: Path) -> None:
    server = start(SLEEP, tmp_path)
    assert server.wait(0.1) is None
    server.stop(grace_s=30)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_parent_takes_its_child_along_by_the_signal_that_it_chose(
    number: signal.Signals, tmp_path: Path
) -> None:
    handled = "import signal; signal.signal(15, lambda *_: exit(print('told', flush=True))); print('UP', flush=True)"
    script = f"{handled}; {SLEEP}"
    code = (
        "import os, sys, time; from pathlib import Path\n"
        "from atroposlib.processes.child_group import ChildGroup\n"
        f"child = ChildGroup([sys.executable, '-c', {script!r}], Path(sys.argv[1]), {{}}, die_with={int(number)})\n"
        "print(child.pid, flush=True); time.sleep(600)"
    )
    log = tmp_path / "child.log"
    parent = subprocess.Popen([sys.executable, "-c", code, str(log)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    wait_for(lambda: "UP" in log.read_text(), "the child")
    parent.send_signal(signal.SIGKILL)
    parent.wait(DEADLINE_S)
    wait_for(lambda: session_members(child) == [], "the child's end")
    assert ("told" in log.read_text()) == (number == signal.SIGTERM)


def holding(path: Path) -> str:
    return (
        f"import mmap; file = open('{path}', 'r+b'); held = mmap.mmap(file.fileno(), 0); print('UP', flush=True);"
        f" {SLEEP}"
    )


def test_a_users_own_file_in_shared_memory_stays_though_a_group_had_it_mapped(tmp_path: Path) -> None:
    """As weights that are kept there, to be read fast."""
    path = Path(f"/dev/shm/test-{uuid.uuid4().hex}")
    path.write_bytes(bytes(4096))
    server = start(holding(path), tmp_path)
    wait_for(lambda: "UP" in server.last_lines(), "the map")
    server.stop(grace_s=30)
    assert path.exists()
    path.unlink()


@pytest.mark.parametrize("shared_with_a_stranger", [False, True])
def test_shared_memory_of_a_killed_group_is_removed_unless_another_process_uses_it(
    shared_with_a_stranger: bool, tmp_path: Path
) -> None:
    path = Path(f"/dev/shm/test-{uuid.uuid4().hex}")
    server = start(f"open('{path}', 'wb').write(bytes(4096)); {holding(path)}", tmp_path)
    wait_for(lambda: "UP" in server.last_lines(), "the map")
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as held:
        if not shared_with_a_stranger:
            held.close()
        server.stop(grace_s=30)
        assert path.exists() == shared_with_a_stranger
    path.unlink(missing_ok=True)
