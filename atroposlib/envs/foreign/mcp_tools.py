"""Tools of an MCP server: of a program that is started here, over its standard input and output, or of an address.

    --env.mcp_command "python server.py"             connected to for the first rollout, closed, and the program ended,
    --env.mcp_url http://localhost:8100/mcp          with the environment; all rollouts share one connection

What a tool of the server reports as its error is told to the model. A server that died, or no longer answers, fails the
rollouts that ask it: RolloutFailed, never a reward of 0. The next rollout connects again. A server that cannot be
connected to at the start, or three times in a row later, ends the environment.
"""

import asyncio
import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any, Self

from atroposlib.envs.errors import EnvError, WrongSetting
from atroposlib.envs.failures import RolloutFailed
from atroposlib.envs.limits.time_limit import paused
from atroposlib.envs.tools import Tool, ToolError, WrongArguments
from atroposlib.extras import MissingExtra, install, need
from atroposlib.logs import get_logger

log = get_logger(__name__)

START_LIMIT_S = 60.0
END_LIMIT_S = 10.0  # the package ends a program in less
ALIVE_LIMIT_S = 5.0  # for a server whose tool was late to list its tools
FRUITLESS_STARTS = 3
MOST_PAGES = 100  # of a server's list of tools


@dataclass
class Connection:
    """A connection of the package `mcp`, which belongs to the task that opened it."""

    client: Any
    tools: list[Tool]
    ends: asyncio.Event
    task: asyncio.Task[None] | None = field(default=None)


class McpServer:
    """The server at `target`, as messages name it. `open_client` gives the package's client, not connected yet."""

    def __init__(self, target: str, open_client: Callable[[], Any], call_limit_s: float) -> None:
        self.target = target
        self._open_client = open_client
        self._call_limit_s = call_limit_s
        self._connection: Connection | None = None
        self._connecting = asyncio.Lock()
        self._was_connected = False
        self._fruitless = 0
        self._tasks: set[asyncio.Task[None]] = set()  # of connections that have not ended

    @classmethod
    def of(cls, command: str | None, url: str | None, call_limit_s: float) -> list[Self]:
        """The servers that are named. Raises MissingExtra without the package, EnvError for a command that is none."""
        servers = []
        if command is not None:
            try:
                program, *arguments = shlex.split(command)
            except ValueError:
                raise WrongSetting(f"--env.mcp_command {command!r}: expected a program and its arguments") from None
            mcp = _package()
            target = mcp.StdioServerParameters(command=program, args=arguments)
            servers.append(cls(f"'{command}'", partial(mcp.Client, target), call_limit_s))
        if url is not None:
            servers.append(cls(url, partial(_package().Client, url), call_limit_s))
        return servers

    async def tools(self) -> list[Tool]:
        """The server's tools, once it is connected to. Raises EnvError or RolloutFailed."""
        with paused():  # who waits for the server to start is not slow
            async with self._connecting:
                if self._connection is None or self._connection.task is None or self._connection.task.done():
                    self._connection = await self._connected()
                return self._connection.tools

    async def close(self) -> None:
        """End the connection, those that a frozen server has left to end, and the programs behind them."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.ends.set()
        if self._tasks:  # one that is cancelled while it ends its program would wait for that program forever
            await asyncio.wait(self._tasks, timeout=END_LIMIT_S)

    async def _connected(self) -> Connection:
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[Connection] = loop.create_future()
        log.info("Connecting to the MCP server %s (at most %.0f s)", self.target, START_LIMIT_S)
        task = loop.create_task(self._hold(ready))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            async with asyncio.timeout(START_LIMIT_S):
                connection = await ready
        except Exception as error:
            task.cancel()
            self._fruitless += 1
            reason = f"not ready within {START_LIMIT_S:g} s" if isinstance(error, TimeoutError) else _reason(error)
            if not self._was_connected or self._fruitless >= FRUITLESS_STARTS:
                raise EnvError(f"cannot connect to the MCP server {self.target}: {reason}") from error
            raise RolloutFailed(f"the MCP server {self.target} is gone: {reason}") from error
        connection.task = task
        self._was_connected, self._fruitless = True, 0
        log.info("The MCP server %s has %d tools", self.target, len(connection.tools))
        return connection

    async def _hold(self, ready: "asyncio.Future[Connection]") -> None:
        """Keep the connection in this task, which the package asks for, until `ends` is set."""
        try:
            async with self._open_client() as client:
                connection = Connection(client, await self._listed(client), asyncio.Event())
                ready.set_result(connection)
                await connection.ends.wait()
        except Exception as error:  # of whichever transport, often in an ExceptionGroup
            if not ready.done():
                ready.set_exception(error)
            else:
                log.warning("The connection to the MCP server %s broke: %s", self.target, _reason(error))
        finally:
            if not ready.done():
                ready.set_exception(EnvError("the connection was cancelled"))

    async def _listed(self, client: Any) -> list[Tool]:
        tools: list[Tool] = []
        cursor: str | None = None
        for _ in range(MOST_PAGES):
            page = await client.list_tools(cursor=cursor)
            for each in page.tools:
                run = partial(self._call, each.name)
                tools.append(Tool(each.name, each.description or "", each.input_schema, run, has_own_limit=True))
            cursor = page.next_cursor
            if cursor is None:
                return tools
        raise EnvError(f"its list of tools has more than {MOST_PAGES} pages")

    async def _call(self, name: str, arguments: str) -> object:
        """A tool's result as text. Raises ToolError for what the server reports, and RolloutFailed for a dead one."""
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED

        given = _object(arguments)
        connection = self._connection
        if connection is None or connection.task is None or connection.task.done():
            raise RolloutFailed(f"the MCP server {self.target} is gone")
        asking = asyncio.ensure_future(connection.client.call_tool(name, given))
        try:
            await asyncio.wait({asking, connection.task}, timeout=self._call_limit_s, return_when="FIRST_COMPLETED")
            if asking.done():
                return _text(asking.result())
        except MCPError as error:
            if error.code != CONNECTION_CLOSED:
                raise ToolError(f"Error: {name}: {error.message}") from None
        except ToolError:
            raise
        except Exception as error:
            log.warning("A call of the MCP server %s failed: %s", self.target, _reason(error))
        finally:
            asking.cancel()
        if not asking.done() and not connection.task.done() and await self._lives(connection):
            raise TimeoutError(f"{name} took longer than {self._call_limit_s:g} s")
        connection.ends.set()
        if self._connection is connection:
            self._connection = None
        raise RolloutFailed(f"the MCP server {self.target} died, or no longer answers, in a call of {name}")

    async def _lives(self, connection: Connection) -> bool:
        """Return whether the server answers anything."""
        try:
            async with asyncio.timeout(ALIVE_LIMIT_S):
                await connection.client.session.list_tools()
        except Exception as error:  # of whichever transport, often in an ExceptionGroup
            log.warning("The MCP server %s does not list its tools either: %s", self.target, _reason(error))
            return False
        return True


def _package() -> ModuleType:
    """The package `mcp`. Raises MissingExtra without it, or with its first major version, which has no `Client`."""
    need("mcp", "an MCP server", "mcp")
    import mcp

    if not hasattr(mcp, "Client"):
        raise MissingExtra(f"an MCP server needs mcp 2, and an older one is installed; {install('mcp')}")
    return mcp


def _object(arguments: str) -> dict[str, object]:
    try:
        given = json.loads(arguments)
    except (ValueError, RecursionError) as error:
        raise WrongArguments(f"invalid JSON: {error}") from None
    if not isinstance(given, dict):
        raise WrongArguments("expected a JSON object")
    return given


def _text(result: Any) -> str:
    """A result's text, and the kinds of what is not text. Raises ToolError for one that is an error."""
    parts = [part.text if part.type == "text" else f"[{part.type}]" for part in result.content]
    text = "\n".join(parts) or ("" if result.structured_content is None else json.dumps(result.structured_content))
    if result.is_error:
        raise ToolError(f"Error: {text}")
    return text


def _reason(error: BaseException) -> str:
    """One line; of a group of exceptions its first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return " ".join(f"{type(error).__name__}: {error}".split())
