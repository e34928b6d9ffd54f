"""TERM, a time of grace, KILL: every process of the groups ends, and no other one."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from atroposlib.processes import groups, identity
from atroposlib.processes.groups import Group, Marked, end_groups, left_after
from atroposlib.processes.identity import descendants
from tests.waiting import wait_until

pytestmark = pytest.mark.services

DEAF = "trap '' TERM; touch {ready}; while :; do sleep 0.02; done"
WITH_CHILD = "sleep 60 & touch {ready}; wait"
LEFT = "sleep 60 & touch {ready}; exit 0"  # whose leader has ended
# A deaf leader, and a deaf child that reads of its end, and then ends in order.
FOLLOWED = (
    "trap '' TERM; mkfifo {ready}.pipe; (cat {ready}.pipe; touch {ready}.closed) & exec 3>{ready}.pipe;"
    " touch {ready}; while :; do sleep 0.02; done"
)
Start = Callable[[str], Group]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a shell script in a session of its own; it has begun when it has touched its file."""
    started: list[subprocess.Popen[bytes]] = []

    def start(script: str) -> Group:
        ready = tmp_path / str(len(started))
        words = ["sh", "-c", script.format(ready=ready)]
        process = subprocess.Popen(words, start_new_session=True)
        started.append(process)
        wait_until(ready.exists)
        return Group.of(process.pid)

    yield start
    for process in started:
        for pid in Group.of(process.pid).members():
            os.kill(pid, signal.SIGKILL)
        process.wait()


@pytest.mark.parametrize(
    ("scripts", "deaf"), [((WITH_CHILD, LEFT), ()), ((DEAF, WITH_CHILD), (0,)), ((DEAF, FOLLOWED), (0, 1))]
)
def test_groups_end_and_those_that_ignore_term_are_told_of_before_they_are_killed(
    start: Start, scripts: tuple[str, ...], deaf: tuple[int, ...]
) -> None:
    running = [start(script) for script in scripts]
    told = list[tuple[str, list[Group]]]()
    left = end_groups(
        running,
        1.0,
        asked=lambda found: told.append(("asked", found)),
        killing=lambda found: told.append(("kill", found)),
    )
    assert left == []
    assert [group.members() for group in running] == [[], []]
    assert told == [("asked", running), *([("kill", [running[number] for number in deaf])] if deaf else [])]


def test_what_has_ended_is_not_told_of(start: Start) -> None:
    group = start("touch {ready}")
    wait_until(lambda: not group.members())
    assert end_groups([group], 5, asked=lambda found: pytest.fail("it had ended")) == []


def test_of_a_group_that_is_killed_the_leader_goes_first(start: Start, tmp_path: Path) -> None:
    assert end_groups([start(FOLLOWED)], 0.1) == []
    assert (tmp_path / "0.closed").exists()


def test_those_that_outlive_kill_are_returned(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    group = start(DEAF)
    monkeypatch.setattr("os.killpg", lambda pid, number: None)
    monkeypatch.setattr("os.kill", lambda pid, number: None)
    assert end_groups([group], 0.05, groups.FOLLOW_S + 0.05) == [group]
    monkeypatch.undo()
    assert left_after([group], 10, signal.SIGKILL) == []


@pytest.mark.parametrize("change", [{"start": 7}, {"boot": "another"}])
def test_a_later_process_with_the_number_of_a_group_is_left_alone(start: Start, change: dict[str, object]) -> None:
    group = start(WITH_CHILD)
    former = replace(group, **change)  # type: ignore[arg-type]
    assert former.members() == []
    assert not former.signal(signal.SIGKILL)
    assert len(group.members()) == 2


def marked(mark: str, tmp_path: Path, script: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(["sh", "-c", script], env={**os.environ, "MARK": mark, "READY": str(tmp_path / mark)})


def test_what_carries_a_mark_is_killed_whatever_session_it_has_made_and_nothing_else(tmp_path: Path) -> None:
    deserter = "trap '' TERM; setsid sh -c 'touch $READY; sleep 60' & wait"
    ours, other = marked("one", tmp_path, deserter), marked("two", tmp_path, "touch $READY; sleep 60")
    found, others = Marked("MARK", "one"), Marked("MARK", "two")
    for name in ("one", "two"):
        wait_until((tmp_path / name).exists)
    assert len(found.members()) >= 2
    try:
        assert left_after([found], 10, signal.SIGKILL) == []
        assert found.members() == []
        assert len(others.members()) >= 1
        assert ours.wait(10) == -signal.SIGKILL
    finally:
        left_after([others], 10, signal.SIGKILL)
        other.wait(10)


def test_a_marked_process_is_waited_for_when_it_has_no_variables_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one has that is ending, with its ports still open."""
    process = marked("one", tmp_path, "touch $READY; exec sleep 60")
    found = Marked("MARK", "one")
    wait_until((tmp_path / "one").exists)
    wait_until(partial(found.members))
    monkeypatch.setattr(Marked, "_has", lambda self, pid: False)
    assert found.members() == [process.pid]
    process.kill()
    process.wait()
    assert found.members() == []


def test_ending_groups_needs_nothing_but_python() -> None:
    """The remote agent does it with the interpreter of another machine."""
    code = "import sys; sys.path.append(sys.argv[1]); import atroposlib.processes.child_group"
    root = str(Path(groups.__file__).parents[2])
    subprocess.run([sys.executable, "-I", "-S", "-c", code, root], check=True, timeout=60)


def test_processes_of_others_that_proc_hides_do_not_hide_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """With hidepid=1 their numbers are listed, and no file of theirs can be opened."""
    fields = identity._fields

    def hidden(pid: int) -> list[str]:
        if pid == 1:
            raise PermissionError
        return fields(pid)

    monkeypatch.setattr(identity, "_fields", hidden)
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            assert child.pid in descendants(os.getpid())
        finally:
            child.kill()
