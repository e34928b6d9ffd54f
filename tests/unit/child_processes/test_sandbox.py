"""What a child of `ChildPool` cannot do, tried by code that a model might write, with each means missing."""

import asyncio
import contextlib
import json
import platform
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from landlock import SyscallError, landlock_abi_version

from atroposlib.child_processes.pool import ChildFailed, ChildPool
from atroposlib.child_processes.sandbox import bubblewrap
from tests.unit.common.refusals import without

pytestmark = pytest.mark.services

CHILD = "tests.unit.child_processes.code_child"
CALL = "import ctypes\nif ctypes.CDLL(None).syscall({}) < 0: raise OSError('refused')"
UNSHARE, KEYCTL = (272, 250) if platform.machine() == "x86_64" else (97, 219)
# What must fail in a child. Each does what it says in a process without a sandbox, which the first test shows.
ACTS = {
    "run a shell": "import os; assert os.system('true') == 0",
    "run a program": "import subprocess; subprocess.run(['true'], check=True)",
    "spawn a program": "import os, sys; os.posix_spawn(sys.executable, [sys.executable, '-c', ''], {})",
    "run a program from memory": (
        "import os\nfd = os.memfd_create('x'); os.write(fd, open('/bin/true', 'rb').read())\n"
        "pid = os.fork()\nif not pid:\n    os.execve(fd, ['true'], {})\nassert os.waitpid(pid, 0)[1] == 0"
    ),
    "fork": "import os\npid = os.fork()\nif not pid: os._exit(0)\nos.waitpid(pid, 0)",
    "start a thread": "import threading; threading.Thread(target=int).start()",
    "open an internet socket": "import socket; socket.socket(socket.AF_INET)",
    "open an IPv6 datagram socket": "import socket; socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)",
    "open a local socket": "import socket; socket.socket(socket.AF_UNIX)",
    "open a netlink socket": "import socket; socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)",
    "make a pair of sockets": "import socket; socket.socketpair()",
    "signal the parent": "import os; os.kill(os.getppid(), 0)",
    "have the parent signalled": "import fcntl, os; fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, os.getppid())",
    "lock a file against others": "import fcntl, os; fcntl.flock(os.open(os.__file__, os.O_RDONLY), fcntl.LOCK_EX)",
    "signal everyone it may": "import os; os.kill(-1, 0)",
    "get a handle of the parent": "import os; os.pidfd_open(os.getppid())",
    "read the parent's environment": "import os; open(f'/proc/{os.getppid()}/environ', 'rb').read()",
    "read its own start": "open('/proc/self/environ', 'rb').read()",
    "read the parent's memory": "import os; open(f'/proc/{os.getppid()}/mem', 'rb')",
    "read a file of the user": "open({secret!r}).read()",
    "read it through a link": "import os; os.symlink({secret!r}, 'link')\nif open('link').read(): os.unlink('link')",
    "read the system's users": "open('/etc/passwd').read()",
    "read a file of the project": "open({project!r} + '/pyproject.toml').read()",
    "list the home directory": "import os; assert os.listdir(os.path.dirname({secret!r}))",
    "write a file of the user": "open({secret!r}, 'a')",
    "make a file": "open({secret!r} + '.new', 'w')",
    "make a file in /dev/shm": "open('/dev/shm/atropos-escape', 'w')",
    "write into the library": "open({project!r} + '/atroposlib/escape.py', 'w')",
    "truncate a file": "import os; os.truncate({secret!r}, 5)",
    "delete a file": "import os; os.unlink({secret!r} + '.new')",
    "make a directory": "import os; os.mkdir({secret!r} + '.folder')",
    "make a link": "import os; os.link({secret!r}, {secret!r} + '.link')",
    "change a file's mode": "import os; os.chmod({secret!r}, 0o600)",
    "change a file's time": "import os; os.utime({secret!r})",
    "have a thousand open files": "import os; fds = [os.open('.', os.O_RDONLY) for _ in range(1000)]",
    "write a large file": "import os\nwith open('large', 'wb') as f: f.seek(2**25); f.write(b'x')\nos.unlink('large')",
    "have 5 GiB of memory": "import mmap; mmap.mmap(-1, 5 * 2**30)",
    "raise its limit of memory": "import resource as r; r.setrlimit(r.RLIMIT_AS, (r.RLIM_INFINITY, r.RLIM_INFINITY))",
    "make namespaces": CALL.format(f"{UNSHARE}, 0"),
    "reach the kernel's keys": CALL.format(f"{KEYCTL}, 0, -3, 1"),
    "become the tracer's child": (
        "import ctypes, os\npid = os.fork()\nif not pid: os._exit(ctypes.CDLL(None).ptrace(0, 0, 0, 0) != 0)\n"
        "assert os.waitpid(pid, 0)[1] == 0"
    ),
}
LEVELS: dict[str, tuple[str, ...]] = {"everything": (), "no namespaces": ("namespaces",), "no Landlock": ("landlock",)}


def means_left(level: str) -> set[str]:
    """What the machine that runs this test grants, less what the level takes away."""
    left = {"seccomp"} | ({"namespaces"} if bubblewrap() else set())
    with contextlib.suppress(SyscallError):
        left |= {"Landlock"} if landlock_abi_version() else set()
    return {means for means in left if means.lower() not in LEVELS[level]}


@contextlib.asynccontextmanager
async def running_pool(**settings: Any) -> AsyncIterator[ChildPool]:
    pool = ChildPool(CHILD, **{"count": 1, "time_limit_s": 20, "start_limit_s": 60, **settings})
    try:
        yield pool
    finally:
        await pool.close()


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_text("the user's own")
    return tmp_path / "secret"


def codes(secret: Path) -> dict[str, str]:
    places = {"{secret!r}": repr(str(secret)), "{project!r}": repr(str(Path(__file__).parents[3]))}
    acts = dict(ACTS)
    for place, value in places.items():
        acts = {name: code.replace(place, value) for name, code in acts.items()}
    return acts


def outcome_of(code: str, folder: Path) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=60)
    return done.stderr if done.returncode else ""


def test_without_a_sandbox_every_act_succeeds(secret: Path) -> None:
    stays = {"write into the library"}  # shown by the others; the project is left alone
    failed = {name: outcome_of(code, secret.parent)[-300:] for name, code in codes(secret).items() if name not in stays}
    refused_by_the_machine = ("PermissionError", "refused", "Operation not permitted")
    assert not {
        name: why for name, why in failed.items() if why and not any(word in why for word in refused_by_the_machine)
    }
    assert sum(not why for why in failed.values()) > len(ACTS) * 0.7
    Path("/dev/shm/atropos-escape").unlink()


@pytest.mark.parametrize("level", LEVELS)
def test_no_act_succeeds_in_a_child(level: str, secret: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATROPOS_API_TOKEN", "a-token-of-the-user")
    monkeypatch.setenv("OPENAI_API_KEY", "a-key-of-the-user")

    async def attack() -> dict[str, Any]:
        async with running_pool() as pool:
            report = await pool.sandbox_report()
            replies = {name: await pool.ask({"code": code}) for name, code in codes(secret).items()}
            return {
                "report": report,
                "replies": replies,
                "variables": await pool.ask({"code": "import os; result = dict(os.environ)"}),
            }

    left = means_left(level)
    seen = without(LEVELS[level], attack)
    assert "-of-the-user" not in json.dumps(seen["variables"])
    assert len(seen["variables"]["result"]) < 15
    assert {word for word in ("namespaces", "Landlock", "seccomp") if word in " ".join(seen["report"].means)} == left
    if len(left) < 2:  # this machine grants too little by itself
        assert not seen["report"].holds
        return
    assert seen["report"].holds, seen["report"]
    assert {name: reply for name, reply in seen["replies"].items() if "raised" not in reply} == {}
    assert secret.read_text() == "the user's own"
    assert sorted(path.name for path in secret.parent.iterdir()) == ["secret"]


@pytest.mark.parametrize(
    ("missing", "way_out"),
    [
        (("landlock", "namespaces"), "read a file outside"),
        (("seccomp",), "start a program"),
        (("landlock", "namespaces", "seccomp"), "open an internet socket"),
    ],
)
def test_a_child_that_can_break_out_reports_how_and_works(missing: tuple[str, ...], way_out: str) -> None:
    async def compute() -> Any:
        async with running_pool() as pool:
            return await pool.sandbox_report(), await pool.ask({"code": "result = 6 * 7"})

    report, reply = without(missing, compute)
    assert way_out in report.escapes
    assert not report.holds
    assert way_out in str(report)
    assert reply["result"] == 42


def test_a_child_that_starts_again_with_more_rights_is_refused() -> None:
    async def start_again() -> None:
        async with running_pool() as pool:
            assert (await pool.sandbox_report()).holds
            await pool.close()
            await asyncio.to_thread(without, ("seccomp",), lambda: pool.ask({"code": ""}))

    with pytest.raises(ChildFailed, match=r"weaker than that of the first child: it can .*fork"):
        asyncio.run(start_again())


async def test_a_child_has_a_folder_of_its_own_and_its_packages() -> None:
    async with running_pool() as pool:
        written = "open('notes', 'w').write('kept'); result = open('notes').read()"
        assert (await pool.ask({"code": written}))["result"] == "kept"
        same = "import os, tempfile; result = tempfile.gettempdir() == os.getcwd()"
        assert (await pool.ask({"code": same}))["result"]
        assert (await pool.ask({"code": "import wave, sympy, yaml; result = str(sympy.Integer(6) * 7)"}))[
            "result"
        ] == "42"
        sandbox = pool._children[0]._sandbox
        assert sandbox is not None
        assert sandbox.folder.exists()
    assert not sandbox.folder.exists()
    assert not sandbox.folder.parent.exists()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="calls of another ABI")
async def test_a_call_of_another_abi_ends_the_child() -> None:
    async with running_pool() as pool:
        with pytest.raises(ChildFailed):
            await pool.ask({"code": "import ctypes; ctypes.CDLL(None).syscall(0x40000000 | 41, 2, 1, 0)"})
        assert (await pool.ask({"code": "result = 1"}))["result"] == 1


async def test_an_ended_child_is_replaced_by_one_that_is_confined_again() -> None:
    async with running_pool(time_limit_s=1.0) as pool:
        for end in (
            "while True: pass",
            "import os; os._exit(0)",
            "import signal; signal.setitimer(signal.ITIMER_REAL, 0)\nwhile True: pass",
        ):
            with pytest.raises(ChildFailed):
                await pool.ask({"code": end})
            assert "raised" in await pool.ask({"code": "open('/etc/passwd')"})


@pytest.mark.parametrize(
    "forgery",
    [
        'for fd in range(3, 30):\n    os.write(fd, b\'{"id": "0", "result": "forged"}\\n\') if writable(fd) else None',
        "for fd in range(3, 30):\n    os.write(fd, b'[1]\\n') if writable(fd) else None",
        "for fd in range(3, 30):\n    os.write(fd, b'[' * 100000 + b'\\n') if writable(fd) else None",
        "for fd in range(3, 30):\n    os.write(fd, b'x' * 60000) if writable(fd) else None\nos._exit(0)",
    ],
)
async def test_a_forged_reply_is_no_reply(forgery: str) -> None:
    writable = (
        "import os, stat\ndef writable(fd):\n    try:\n        return stat.S_ISFIFO(os.fstat(fd).st_mode)\n"
        "    except OSError:\n        return False\n"
    )
    async with running_pool() as pool:
        with pytest.raises(ChildFailed):
            await pool.ask({"code": writable + forgery})
        assert (await pool.ask({"code": "result = 'honest'"}))["result"] == "honest"


async def test_what_a_child_writes_to_its_error_stream_is_bounded_and_in_one_escaped_line(
    capfd: pytest.CaptureFixture[str],
) -> None:
    forged = r"b'12:00:00 INFO [api] forged\n' * 1000 + b'\x1b[2J\x1b]0;owned\x07' + b'a' * 10**6"
    scream = f"import os\nos.write(2, {forged})\nos._exit(0)"
    async with running_pool() as pool:
        with pytest.raises(ChildFailed) as failure:
            await pool.ask({"code": scream})
        text = str(failure.value)
        assert "\n" not in text
        assert "\x1b" not in text
        assert len(text) < 800
        assert "aaa" in text
        assert "raised" in await pool.ask({"code": "import os\nfor _ in range(100): os.write(2, b'x' * 10**6)"})
        assert (await pool.ask({"code": "result = 1"}))["result"] == 1
    assert "forged" not in capfd.readouterr().err


async def test_the_log_names_what_confines_the_children_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with running_pool(count=2) as pool:
        await asyncio.gather(*(pool.ask({"code": "result = 1"}) for _ in range(4)))
    lines = [record.message for record in caplog.records if "sandbox" in record.message]
    assert len(lines) == 1
    assert "seccomp" in lines[0]
    assert "no escape found" in lines[0]


async def test_a_missing_package_of_a_child_is_named() -> None:
    pool = ChildPool("tests.unit.common.no_such_child", count=1, time_limit_s=5, start_limit_s=30)
    with pytest.raises(ChildFailed, match=r"No module named tests.unit.common.no_such_child"):
        await pool.ask({})
    await pool.close()


@pytest.mark.parametrize("level", LEVELS)
def test_the_scorer_of_the_guide_runs_from_anywhere_and_reads_what_it_is_given(
    level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guide = (Path(__file__).parents[3] / "docs/write_an_environment.md").read_text()
    blocks = [block.partition("```")[0] for block in guide.split("```python\n")]
    module = next(block for block in blocks if block.startswith('"""my_scorer.py'))
    (tmp_path / "my_scorer.py").write_text(module.replace('request["text"]', 'open(request["text"]).read()'))
    (tmp_path / "words.txt").write_text("anna greets otto")
    (tmp_path / "other.txt").write_text("not for scorers")
    monkeypatch.syspath_prepend(str(tmp_path))

    async def score(name: str) -> dict[str, Any]:
        settings: dict[str, Any] = {
            "count": 1,
            "time_limit_s": 5.0,
            "start_limit_s": 60.0,
            "readable": [tmp_path / "words.txt"],
        }
        pool = ChildPool("my_scorer", **settings)
        try:
            return await pool.ask({"text": str(tmp_path / name)})
        finally:
            await pool.close()

    assert without(LEVELS[level], lambda: score("words.txt"))["score"] == pytest.approx(2 / 3)
    if len(means_left(level)) < 2:
        pytest.skip(f"{level}: that leaves a sandbox that hides no file")
    with pytest.raises(ChildFailed, match=r"its last words: .*(PermissionError|FileNotFoundError)"):
        without(LEVELS[level], lambda: score("other.txt"))


async def test_a_killed_child_leaves_neither_process_nor_folder() -> None:
    async with running_pool(time_limit_s=0.5) as pool:
        await pool.sandbox_report()
        child = pool._children[0]
        assert child._process is not None
        assert child._sandbox is not None
        group, folder = child._process.pid, child._sandbox.folder
        stubborn = "import signal; signal.setitimer(signal.ITIMER_REAL, 0)\nwhile True: pass"
        with pytest.raises(ChildFailed):
            await pool.ask({"code": stubborn})
        for _ in range(100):
            members = running_members(group)
            if not members:
                break
            await asyncio.sleep(0.1)
        assert not members
        assert not folder.parent.exists()


def running_members(group: int) -> list[Path]:
    return [path for path in Path("/proc").glob("[0-9]*/stat") if is_running_member(path, group)]


def is_running_member(stat: Path, group: int) -> bool:
    """Whether the process is of `group` and has not ended."""
    try:
        state, _, of = stat.read_text().rpartition(")")[2].split()[:3]
    except OSError:  # it has just ended
        return False
    return int(of) == group and state != "Z"
