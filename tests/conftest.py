"""What holds for every test: Ctrl-C reaches children, property tests neither race the clock nor, in CI, change from
run to run, long drills wait for --nightly, and where several tests run at a time, which may not. What the markers
promise is held by `tests/marks.py`.
"""

import asyncio
import logging
import os
import signal
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import PurePosixPath
from types import SimpleNamespace

import pytest
import uvicorn.server
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from atroposlib.logs import LineHandler
from atroposlib.processes.imports import without_garbage_collection
from tests.marks import THIRDS, NoProcess, NoUnseenSkip, of_other_thirds, third_of_commit

# a run started in the background by a shell ignores Ctrl-C, and one under nohup a hang-up; so would every process that
# the tests start and interrupt
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# as in the services: several processes compute on few cores, and who waits must not spin
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# a server of a test's own process looks a hundred times as often whether it is told to end, and whether its connections
# have: uvicorn's tenths of a second cost each such test 0.3 s
TICK_S = 0.001
uvicorn.server.asyncio = SimpleNamespace(  # type: ignore[assignment, attr-defined]
    **vars(asyncio) | {"sleep": lambda delay: asyncio.sleep(min(delay, TICK_S))}
)

settings.register_profile("here", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
IN_CI = os.environ.get("CI") == "true"
settings.load_profile("ci" if IN_CI else "here")

LANES = (
    # one server for all
    {
        "test_bridge",
        "test_single_copy",
        "test_lora",
        "test_reload",
        "test_restart",
        "test_trainer_ranks",
        "test_hostile_requests",
    },
    {
        "test_guide",
        "test_launcher",
        "test_launcher_drills",
        "test_quickstart",
        "test_recipes",
        "test_training_scripts",
        "test_bit_exact",
        "test_server_death",
        "test_two_hosts",
        "test_ray",
        "test_ray_runs",
        "test_engine_watch",
    },
)


class Lanes(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """A worker takes a file of unit tests at a time, or one lane whole: integration tests that share a server, or have
    their own.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = PurePosixPath(nodeid.split("::")[0])
        lane = next((lane for lane in LANES if file.stem in lane and "integration" in file.parts), {str(file)})
        return " ".join(sorted(lane))


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """A `main` that a test calls sends the log of its process to stderr: not that of the tests after it."""
    root = logging.getLogger()
    level = root.level
    yield
    root.setLevel(level)
    for handler in [each for each in root.handlers if isinstance(each, LineHandler)]:
        root.removeHandler(handler)


@pytest.fixture(scope="module", autouse=True)
def _memory_for_the_next_file() -> Iterator[None]:
    """A trainer in this process has malloc keep what is freed: 4 GB that processes of later tests lacked."""
    yield
    if (malloc := sys.modules.get("atroposlib.processes.malloc")) is not None:
        malloc.give_back_freed_memory()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="only tests that start no process and take no 5 s")
    parser.addoption("--nightly", action="store_true", help="run the long drills too")
    parser.addoption(
        "--pictures", metavar="DIR", help="write the pictures of docs/watch.md (unit/view/test_pictures.py)"
    )
    parser.addoption("--third", choices=THIRDS, help="of the tests marked `rotating` (default: by the commit)")


def pytest_configure(config: pytest.Config) -> None:
    config.option.third = "all" if config.option.nightly else config.option.third or third_of_commit()
    config.pluginmanager.register(NoProcess())
    if IN_CI and not hasattr(config, "workerinput"):  # a worker of xdist reports to the controller
        config.pluginmanager.register(NoUnseenSkip())


def pytest_report_header(config: pytest.Config) -> str:
    return f"third of the rotating tests: {config.option.third} (--third all, or --nightly, runs all of them)"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Thousands of tests, and what they import, stay to the end."""
    with without_garbage_collection():
        return (yield)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose the set of tests. Refuse equal ids: xdist runs one test of each and leaves out the others without a
    word.
    """
    for item in items:
        if "integration" in item.path.parts:
            item.add_marker("integration")
            item.add_marker("services")
    left_out = set() if config.getoption("--nightly") else {"nightly"}
    if config.getoption("--fast"):
        left_out |= {"slow", "services"}
    marks = {item: {mark.name for mark in item.iter_markers()} for item in items}
    others = of_other_thirds([item for item in items if "rotating" in marks[item]], config.option.third)
    out = [item for item in items if item in others or marks[item] & left_out]
    config.hook.pytest_deselected(items=out)
    items[:] = [item for item in items if item not in {*out}]
    twice = sorted(nodeid for nodeid, count in Counter(item.nodeid for item in items).items() if count > 1)
    if twice:
        raise pytest.UsageError(
            f"{len(twice)} id(s) belong to several tests, the first is {twice[0]}: give each test an id of its own"
        )


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    return Lanes(config, log)
