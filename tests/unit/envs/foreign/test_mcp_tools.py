"""Tools of an MCP server that a test starts: over standard streams and HTTP, killed, frozen, and slow."""

import asyncio
import contextlib
import json
import os
import shlex
import signal
import sys
from collections.abc import AsyncIterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from atroposlib import extras
from atroposlib.envs.errors import EnvError
from atroposlib.envs.evaluation.evaluation import EvaluationFailed
from atroposlib.envs.failures import RolloutFailed
from atroposlib.envs.foreign import mcp_tools
from atroposlib.envs.foreign.mcp_tools import McpServer
from atroposlib.envs.limits.time_limit import time_limit
from atroposlib.envs.tools import CallResult, Toolbox
from atroposlib.extras import MissingExtra
from atroposlib.testing.fake_inference_server import FakeInferenceServer
from tests.serving import free_port
from tests.unit.environments.support import running_env, sampled_texts
from tests.unit.envs.test_tool_env import SETTINGS, SquareEnv, call, turns
from tests.waiting import until

pytestmark = [pytest.mark.services, pytest.mark.slow]

SERVER = Path(__file__).with_name("mcp_server.py")
COMMAND = shlex.join([sys.executable, str(SERVER)])


@contextlib.asynccontextmanager
async def connected(command: str | None = COMMAND, url: str | None = None, limit_s: float = 30.0) -> AsyncIterator[Any]:
    """A function that calls a tool of the server, as a rollout does."""
    (server,) = McpServer.of(command, url, limit_s)

    async def ask(name: str, **arguments: Any) -> CallResult:
        return await Toolbox(await server.tools(), limit_s).call(name, json.dumps(arguments))

    try:
        yield ask
    finally:
        await server.close()


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def has_ended(pid: int) -> bool:
    return not is_alive(pid)


@contextlib.asynccontextmanager
async def http_server(port: int) -> AsyncIterator[str]:
    """The server over HTTP, as a process; gives its address."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, str(SERVER), str(port), stderr=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL
    )

    async def listens() -> bool:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            return True
        assert child.returncode is None
        return False

    try:
        await until(listens, 60)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


async def test_tools_of_a_command_are_those_that_it_lists_and_it_ends_with_the_environment(tmp_path: Path) -> None:
    said = f"Let me see. {call('add', a=1, b=2)}{call('pid')}"
    async with (
        FakeInferenceServer(turns(said, "It is 9.0.")) as server,
        running_env(SquareEnv, tmp_path, server, **SETTINGS, mcp_command=COMMAND) as env,
    ):
        group, _ = await env.collect_trajectories(3)
        rollouts = await env.rollouts(3, 2, "train", 1.0, 1.0)
        await env._release()
    assert sampled_texts(group) == [f"{said}<|im_end|>It is 9.0.<|im_end|>"] * 4
    described = rollouts[0].sequences[0].full_text
    assert '"name": "square"' in described
    assert (
        '"name": "add", "description": "Adds two numbers.", "parameters": {"type": "object", "properties"' in described
    )
    replies = [[each["content"] for each in one.messages if each["role"] == "tool"] for one in rollouts]
    assert [reply[0] for reply in replies] == ["3", "3"]
    assert replies[0][1] == replies[1][1]  # one process for all
    await until(lambda: has_ended(int(replies[0][1])), 20)


async def test_what_the_server_reports_as_an_error_is_told_to_the_model() -> None:
    async with connected() as ask:
        wrong, refused, unknown = await ask("add", a="x"), await ask("refuse"), await ask("nope")
        assert (await ask("add", a=1, b=2)).text == "3"
    assert (wrong.error, refused.error, unknown.error) == ("raised", "raised", "unknown")
    assert "Input should be a valid integer" in wrong.text
    assert refused.text.startswith("Error: ")
    assert "there is no tool 'nope'" in unknown.text


async def test_a_killed_server_fails_the_rollout_and_the_next_one_has_another() -> None:
    async with connected() as ask:
        first = int((await ask("pid")).text)
        with pytest.raises(RolloutFailed, match="died, or no longer answers, in a call of die"):
            await ask("die")
        second = int((await ask("pid")).text)
        os.kill(second, signal.SIGKILL)
        with pytest.raises(RolloutFailed, match="died, or no longer answers"):
            await ask("add", a=1, b=2)
        third = int((await ask("pid")).text)
    assert len({first, second, third}) == 3
    await until(lambda: has_ended(third), 20)


async def test_a_dead_server_is_a_failed_sample_and_never_a_reward(tmp_path: Path) -> None:
    async with (
        FakeInferenceServer(turns(call("die"), "It is 9.0.")) as server,
        running_env(SquareEnv, tmp_path, server, **SETTINGS, mcp_command=COMMAND, group_size=1) as env,
    ):
        with pytest.raises(Exception, match="1 infrastructure"):
            await env.collect_trajectories(3)
        with pytest.raises(EvaluationFailed, match="1 of 1 held-out questions have no score"):
            await env.evaluate()
        await env._release()


async def test_a_late_call_of_a_live_server_is_the_models_and_one_of_a_frozen_server_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mcp_tools, "ALIVE_LIMIT_S", 5.0)
    async with connected(limit_s=1.0) as ask:
        result = await ask("sleep", seconds=30)
        assert (result.text, result.error) == ("Error: sleep took longer than 1 s", "timeout")
        monkeypatch.setattr(mcp_tools, "ALIVE_LIMIT_S", 0.5)
        with pytest.raises(RolloutFailed, match="died, or no longer answers, in a call of freeze"):
            await ask("freeze")
        assert (await ask("add", a=2, b=2)).text == "4"
    assert asyncio.all_tasks() == {asyncio.current_task()}  # the frozen server was ended, too


async def test_a_server_of_an_address_is_found_again_when_it_is_back() -> None:
    port = free_port()
    async with contextlib.AsyncExitStack() as stack:
        url = await stack.enter_async_context(http_server(port))
        ask = await stack.enter_async_context(connected(None, url))
        assert (await ask("add", a=1, b=2)).text == "3"
        with pytest.raises(RolloutFailed, match="died, or no longer answers"):
            await ask("die")
        with pytest.raises(RolloutFailed, match=f"the MCP server {url} is gone"):
            await ask("add", a=1, b=2)
        await stack.enter_async_context(http_server(port))
        assert (await ask("add", a=1, b=2)).text == "3"


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("no-such-program --flag", "cannot connect to the MCP server 'no-such-program --flag': FileNotFoundError"),
        (f"{sys.executable} -c 'raise SystemExit(3)'", "cannot connect to the MCP server"),
    ],
)
async def test_a_command_that_starts_no_server_ends_the_environment_in_one_line(command: str, reason: str) -> None:
    async with connected(command) as ask:
        with pytest.raises(EnvError, match=reason) as refused:
            await ask("add", a=1, b=2)
    assert "\n" not in str(refused.value)


async def test_a_server_that_starts_no_more_ends_the_environment_after_three_tries(tmp_path: Path) -> None:
    script = tmp_path / "server.py"
    script.write_text(SERVER.read_text())
    async with connected(shlex.join([sys.executable, str(script)])) as ask:
        assert (await ask("add", a=1, b=2)).text == "3"
        script.unlink()
        with pytest.raises(RolloutFailed, match="in a call of die"):
            await ask("die")
        for _ in range(2):
            with pytest.raises(RolloutFailed, match="is gone"):
                await ask("add", a=1, b=2)
        with pytest.raises(EnvError, match="cannot connect"):
            await ask("add", a=1, b=2)


async def test_the_start_of_a_server_is_not_the_rollouts_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_tools, "START_LIMIT_S", 0.5)
    async with connected("sleep 60") as ask:
        with pytest.raises(EnvError, match=r"not ready within 0.5 s"):
            async with time_limit(0.05):
                await ask("add", a=1, b=2)


@pytest.mark.parametrize("command", ["", "'unclosed"])
def test_a_command_that_is_none_is_refused(command: str) -> None:
    with pytest.raises(EnvError, match="expected a program and its arguments"):
        McpServer.of(command, None, 1.0)


def test_without_the_package_or_with_an_old_one_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    old = ModuleType("mcp")
    old.__spec__ = ModuleSpec("mcp", None)
    monkeypatch.setitem(sys.modules, "mcp", old)
    with pytest.raises(MissingExtra, match=r"needs mcp 2, and an older one is installed; pip install '\w+\[mcp\]'"):
        McpServer.of(None, "http://127.0.0.1:9/mcp", 1.0)
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"needs mcp, which is not installed; pip install '\w+\[mcp\]'"):
        McpServer.of(COMMAND, None, 1.0)
    assert McpServer.of(None, None, 1.0) == []
