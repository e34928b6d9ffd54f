"""What the kernel does not bound in a child of `ChildPool`: the number of its files, and the time of each request."""

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from atroposlib.child_processes.pool import ChildFailed, ChildPool
from atroposlib.child_processes.sandbox import FILES_LIMIT, FOLDER_LIMIT_BYTES, flatten
from atroposlib.child_processes.warden import Ended, usage_of
from tests.unit.child_processes.test_sandbox import LEVELS, means_left, running_pool
from tests.unit.common.refusals import without

pytestmark = pytest.mark.services

MANY = 200_000
NOBODY = 65534
FORGED = """
import json, os, sys
frame = sys._getframe()
while 'replies' not in frame.f_locals:
    frame = frame.f_back
line = json.dumps({'id': frame.f_locals['request']['id'], 'result': 'forged'}) + chr(10)
frame.f_locals['replies'].write(line); frame.f_locals['replies'].flush()
while True: pass
"""
DEEPER = "os.mkdir(name, dir_fd=at); at, was = os.open(name, os.O_RDONLY, dir_fd=at), at; os.close(was)"
# Programs that a model might write. Each continues until it is ended, or is refused.
HOARDERS = {
    "empty files": f"for i in range({MANY}): open(f'f{{i}}', 'w').close()",
    "files that it closes by number": f"for i in range({MANY}): os.close(os.open(str(i), os.O_CREAT | os.O_WRONLY))",
    "directories": f"for i in range({MANY}): os.mkdir(f'd{{i}}')",
    "directories that it cannot list": f"for i in range({MANY}): os.mkdir(f'd{{i}}', 0o300)",
    "files in many directories": (
        f"for i in range({MANY}):\n    if i % 50 == 0: os.mkdir(f'd{{i}}')\n"
        "    open(f'd{i - i % 50}/f{i}', 'w').close()"
    ),
    "deep directories": f"name = 'd'; at = os.open('.', os.O_RDONLY)\nfor i in range({MANY}): {DEEPER}",
    "deep directories with long names": (
        f"name = 'd' * 255; at = os.open('.', os.O_RDONLY)\nfor i in range({MANY}): {DEEPER}"
    ),
    "files in a directory that moves": (
        f"os.mkdir('a'); names = ['a', 'b']\nfor i in range({MANY}):\n    open(f'{{names[0]}}/f{{i}}', 'w').close()\n"
        "    os.rename(*names); names.reverse()"
    ),
    "files that have many names": f"open('f', 'w').close()\nfor i in range({MANY}): os.link('f', f'l{{i}}')",
    "links": f"for i in range({MANY}): os.symlink('nowhere', f'l{{i}}')",
}
REFUSED = {"files that have many names", "links"}  # by seccomp


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", HOARDERS)
def test_a_program_that_makes_files_without_end_is_ended_by_name_and_the_next_answer_is_right(
    kind: str, level: str
) -> None:
    async def hoard(pool: ChildPool) -> tuple[str, Any, float]:
        await pool.sandbox_report()
        started = time.monotonic()
        said = await outcome(pool, f"import os\n{HOARDERS[kind]}")
        took_s = time.monotonic() - started
        return said, await pool.ask({"code": "import os; result = os.listdir()"}), took_s

    said, reply, took_s = in_a_pool(level, hoard)
    if kind in REFUSED and "seccomp" in means_left(level):
        assert "Operation not permitted" in said
    else:
        assert f"more than {FILES_LIMIT:,} files and directories" in said or "cannot be counted" in said
        assert reply["result"] == []
    assert took_s < 10  # of a time limit of 20


def test_links_are_counted_where_the_kernel_grants_no_seccomp() -> None:
    for kind in sorted(REFUSED):
        link = f"import os\n{HOARDERS[kind]}"
        assert f"more than {FILES_LIMIT:,} files" in str(_without_seccomp(link))


def _without_seccomp(code: str) -> object:
    return without(("seccomp", "namespaces"), lambda: _with_pool(lambda pool: outcome(pool, code)))


@pytest.mark.parametrize("level", LEVELS)
def test_an_answer_that_is_ready_before_anyone_looks_does_not_hide_its_files(level: str) -> None:
    async def answer(pool: ChildPool) -> None:
        made = "for i in range({}): open(str(i), 'w').close()\nresult = 'right'"
        assert (await pool.ask({"code": made.format(FILES_LIMIT)}))["result"] == "right"
        with pytest.raises(ChildFailed, match=f"more than {FILES_LIMIT:,} files"):
            await pool.ask({"code": "open('one more', 'w').close()"})
        with pytest.raises(ChildFailed, match=f"more than {FILES_LIMIT:,} files"):
            await pool.ask({"code": made.format(FILES_LIMIT + 1)})

    in_a_pool(level, answer)


@pytest.mark.parametrize("level", LEVELS)
def test_many_files_have_no_more_bytes_than_one(level: str) -> None:
    code = "for i in range(50): open(str(i), 'wb').write(bytes(2**20))"
    said = in_a_pool(level, lambda pool: outcome(pool, code))
    in_namespaces = "namespaces" in means_left(level)
    assert ("No space left" if in_namespaces else f"more than {FOLDER_LIMIT_BYTES:,} bytes") in said


async def test_a_program_without_an_alarm_is_ended_while_its_pool_is_busy() -> None:
    async with running_pool(time_limit_s=1.0) as pool:
        await pool.sandbox_report()
        program = program_of(pool)
        stubborn = (
            "import signal\nfor number in (signal.SIGALRM, signal.SIGXCPU, signal.SIGCONT): signal.signal(number,"
            " lambda *_: None)\nsignal.setitimer(signal.ITIMER_REAL, 0)\nwhile True: pass"
        )
        asking = asyncio.create_task(pool.ask({"code": stubborn}))
        await asyncio.sleep(0.1)
        gone = wait_while_busy(lambda: not program.is_running() or program.status() == psutil.STATUS_ZOMBIE, 5.0)
        with pytest.raises(ChildFailed, match="no reply within 1 s"):
            await asking
        assert gone
        assert (await pool.ask({"code": "result = 1"}))["result"] == 1


KILLED_AS_THE_REQUEST_COMES = """
import os, signal, sys, time
from pathlib import Path
from atroposlib.child_processes.warden import Bounds, Warden, guarded
take = Warden._take_request
def then_kill(self):
    took = take(self)
    os.kill(self._program, signal.SIGKILL)
    os.waitid(os.P_PID, self._program, os.WEXITED | os.WNOWAIT)
    return took
Warden._take_request = then_kill
guarded(Path(sys.argv[1]), Bounds(20.0, 9, 9999, 9999))
time.sleep(60)  # the program
"""


def test_a_program_that_is_killed_before_it_has_its_request_was_killed_from_outside(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", KILLED_AS_THE_REQUEST_COMES, str(tmp_path)], input=b"{}\n")
    assert ended.returncode == Ended.KILLED


@pytest.mark.parametrize("level", LEVELS)
def test_no_limit_is_the_programs_own(level: str) -> None:
    async def raise_them(pool: ChildPool) -> dict[str, Any]:
        code = (
            "import resource\nnames = [name for name in dir(resource) if name.startswith('RLIMIT_')]\nresult = []\n"
            "for name in names:\n    try:\n        kind = getattr(resource, name)\n"
            "        resource.setrlimit(kind, resource.getrlimit(kind)); result.append(name)\n"
            "    except (ValueError, OSError): pass"
        )
        return await pool.ask({"code": code})

    assert in_a_pool(level, raise_them)["result"] == []


async def test_a_program_that_goes_on_after_its_reply_takes_no_time_of_a_processor() -> None:
    async with running_pool(time_limit_s=1.0) as pool:
        await pool.sandbox_report()
        program = program_of(pool)
        assert (await pool.ask({"code": FORGED}))["result"] == "forged"
        before = sum(program.cpu_times()[:2])
        await asyncio.sleep(0.5)
        assert sum(program.cpu_times()[:2]) - before < 0.05
        with pytest.raises(ChildFailed, match="no reply within 1 s"):
            await pool.ask({"code": "result = 1"})


async def test_a_long_request_and_a_long_reply_pass() -> None:
    async with running_pool() as pool:
        text = "x" * (3 << 20)
        assert (await pool.ask({"code": f"result = {text!r}"}))["result"] == text
        with pytest.raises(ChildFailed, match=r"its reply had more than 16,777,216 bytes"):
            await pool.ask({"code": "result = 'x' * 2**24"})


def test_a_deep_tree_is_flattened_so_that_it_can_be_removed(tmp_path: Path) -> None:
    at = os.open(tmp_path, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("d" * 200, dir_fd=at)
        at, was = os.open("d" * 200, os.O_RDONLY, dir_fd=at), at
        os.close(was)
    os.close(os.open("file", os.O_CREAT, dir_fd=at))
    os.close(at)
    with pytest.raises(OSError, match="File name too long"):
        usage_of(tmp_path, 10_000)
    flatten(tmp_path)
    assert usage_of(tmp_path, 10_000)[0] == 3001


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """Root may write everywhere, so it becomes another user for a while."""
    os.seteuid(os.geteuid() or NOBODY)
    try:
        yield
    finally:
        os.seteuid(os.getuid())


def test_directories_that_may_not_be_written_are_flattened_too() -> None:
    with as_nobody():
        folder = Path(tempfile.mkdtemp())
        try:
            for number in range(4):
                (folder / str(number) / "deep").mkdir(parents=True)
                (folder / str(number) / "deep" / "sealed").mkdir(0)
            flatten(folder)
            assert len(list(folder.iterdir())) == 12
        finally:
            shutil.rmtree(folder)


async def outcome(pool: ChildPool, code: str) -> str:
    """Why the program ended, what it raised, or what it computed."""
    try:
        reply = await pool.ask({"code": code})
    except ChildFailed as error:
        return str(error)
    return str(reply.get("raised", reply))


def in_a_pool(level: str, main: Callable[[ChildPool], Awaitable[Any]]) -> Any:
    return without(LEVELS[level], lambda: _with_pool(main))


async def _with_pool(main: Callable[[ChildPool], Awaitable[Any]]) -> Any:
    async with running_pool() as pool:
        result = await main(pool)
    return result


def program_of(pool: ChildPool) -> psutil.Process:
    """The innermost process of the pool's child: the others wait for it."""
    process = pool._children[0]._process
    assert process is not None
    return psutil.Process(process.pid).children(recursive=True)[-1]


def wait_while_busy(is_done: Callable[[], bool], limit_s: float) -> bool:
    """As an environment does that computes in its event loop."""
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        if is_done():
            return True
        time.sleep(0.02)
    return False
