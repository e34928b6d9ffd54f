"""What a test's markers promise, held by the run itself.

`services`       the test starts a process. One that does so unmarked fails, at the place where it starts it; so
                 `-m "not services"`, which is --fast, is every test that starts none.
`rotating`       the test is one of many drills that find the same kind of fault: a third of them runs for each commit,
                 chosen by it, and all by night.
skips in CI      where CI=true, a skip fails the run unless EXPECTED_SKIPS names it: nothing is left out unseen.
"""

import os
import platform
import subprocess
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest

THIRDS = ("0", "1", "2", "all")
# Audit events of what makes another process: https://docs.python.org/3/library/audit_events.html
STARTS = {"subprocess.Popen", "os.posix_spawn", "os.fork", "os.forkpty", "os.system", "os.exec"}
# A part of the test's id, a part of the reason, and why CI cannot be made to run it.
EXPECTED_SKIPS = (
    ("test_two_hosts.py", "lets nobody make network namespaces"),  # a privilege that containers seldom have
    ("test_ray.py", "lets nobody make network namespaces"),
    ("test_ray_runs.py", "lets nobody make network namespaces"),  # all by a fixture of conftest.py
    ("test_sandbox.py", "calls of another ABI"),  # only x86-64 has one
    ("test_sandbox.py", "a sandbox that hides no file"),  # neither namespaces nor Landlock: containers on old kernels
    ("test_full_disk.py", "lets nobody mount a file system"),  # a privilege that containers seldom have
    ("test_ends.py", "lets nobody make a control group of memory"),  # the same
    ("test_tokens.py", "only root can give a file away"),  # CI need not run as root
    ("test_records.py", "only root can give a file away"),
)


def third_of_commit() -> str:
    """Which rotating tests run for the checkout's commit; for files without one the first third."""
    command = ["git", "rev-parse", "HEAD"]
    found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False).stdout
    return THIRDS[int(found or "0", 16) % 3]


def of_other_thirds(rotating: Sequence[pytest.Item], third: str) -> set[pytest.Item]:
    """Those that do not run. Tests that share a start of something, `rotating(together=True)`, of one file all do, or
    none.
    """
    groups: dict[object, list[pytest.Item]] = {}
    for item in rotating:
        mark = item.get_closest_marker("rotating")
        together = mark is not None and mark.kwargs.get("together")
        groups.setdefault(item.nodeid.partition("::")[0] if together else item, []).append(item)
    return {
        item for place, items in enumerate(groups.values()) for item in items if third not in (THIRDS[place % 3], "all")
    }


class NoProcess:
    """Refuses to start a process for a test that is not marked `services`."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._unmarked: str | None = None
        self._refused = ""
        platform.processor()  # starts `uname -p`, once in a process: whichever test asks first would be the one
        sys.addaudithook(self._audit)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in STARTS and self._unmarked and os.getpid() == self._pid:
            self._refused = f"{self._unmarked} starts a process ({event}): mark it with pytest.mark.services"
            pytest.fail(self._refused)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Watch the test with its fixtures."""
        self._unmarked = None if item.get_closest_marker("services") else item.nodeid
        self._refused = ""
        try:
            return (yield)
        finally:
            self._unmarked = None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Generator[None, object, object]:
        """Fail also where the refusal was caught, or raised in another thread."""
        result = yield
        if self._refused:
            pytest.fail(self._refused)
        return result


class NoUnseenSkip:
    """Fails the run at its end when something was skipped that EXPECTED_SKIPS does not name."""

    def __init__(self) -> None:
        self._unseen: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One report of a test; of a module that is skipped as a whole, the next hook."""
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if not report.skipped or hasattr(report, "wasxfail"):
            return
        why = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
        if not any(test in report.nodeid and reason in why for test, reason in EXPECTED_SKIPS):
            self._unseen.append(f"{report.nodeid}: {why}")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """With xdist the controller, which sees every report, decides."""
        if self._unseen:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Name what was skipped."""
        for skip in self._unseen:
            terminalreporter.write_line(f"SKIPPED IN CI, and not in EXPECTED_SKIPS of tests/marks.py: {skip}", red=True)
