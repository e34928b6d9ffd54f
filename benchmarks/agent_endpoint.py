"""What the agent endpoint costs a call of the model: calls per second, its own time, and its journal's.

    python benchmarks/agent_endpoint.py [--sessions 64] [--turns 12] [--rate 200]

The fake inference server runs in a process of its own and replies at once. The endpoint and its clients share this
process, so that the time of each call can be split: its own time is that from the request's first byte to the reply's
last, without what the session waited for the inference server and for the journal. Its client sees all of it, and what
both sockets take. Every turn continues its session's conversation; the sequences are checked at the end. Prints a
Markdown table.
"""

import asyncio
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, aclosing, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import aiohttp
from pydantic import Field

from atroposlib.addresses import netloc
from atroposlib.agents.endpoint import EndpointSettings
from atroposlib.agents.serve import listening, modules_uncollected
from atroposlib.agents.sessions import Sessions
from atroposlib.agents.tape import TapedRoute
from atroposlib.agents.turn_journal import TurnJournal
from atroposlib.config import Config, load_config
from atroposlib.envs.server_handling.server_config import APIServerConfig
from atroposlib.envs.server_handling.server_manager import ServerManager
from atroposlib.logs import configure_logging
from atroposlib.testing.tiny_tokenizer import make_tiny_tokenizer
from atroposlib.wire.batching import NOT_TRAINED

HOST = "127.0.0.1"
START_LIMIT_S = 60.0
ANSWER = "It is 4."
Seconds = list[float]


class Flags(Config):
    """Measure the agent endpoint over a fake inference server."""

    sessions: int = Field(64, ge=1, description="Sessions at once.")
    turns: int = Field(12, ge=1, description="Calls of each session, one after the other.")
    rate: float = Field(0.0, ge=0, description="Calls per second of all sessions together; 0: as fast as it goes.")
    port: int = Field(19317, ge=1, le=65535, description="Port of the fake inference server.")


_waited: ContextVar[Seconds | None] = ContextVar("waited", default=None)


@contextmanager
def timed(method: str, owner: type, into: Seconds) -> Iterator[None]:
    """Append the seconds of each call of a coroutine method to `into`, and to those that its request waited."""
    original: Callable[..., Awaitable[Any]] = getattr(owner, method)

    async def call(self: object, *args: object, **named: object) -> object:
        start = time.perf_counter()
        try:
            return await original(self, *args, **named)
        finally:
            into.append(time.perf_counter() - start)
            if (waited := _waited.get()) is not None:
                waited.append(into[-1])

    setattr(owner, method, call)
    try:
        yield
    finally:
        setattr(owner, method, original)


class Timed:
    """ASGI application: `app`, and the own time of each of its calls of the model."""

    def __init__(self, app: Any, own: Seconds) -> None:
        self.app, self.own = app, own

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if not scope.get("path", "").endswith("/chat/completions"):
            await self.app(scope, receive, send)
            return
        waited: Seconds = []
        _waited.set(waited)
        start = time.perf_counter()
        await self.app(scope, receive, send)
        self.own.append(time.perf_counter() - start - sum(waited))


async def converse(http: aiohttp.ClientSession, flags: Flags, number: int, seen: Seconds) -> None:
    """One session from its creation to its check; the seconds of each call are appended to `seen`."""
    made = await asked(http.post("/sessions", json={}))
    messages: list[dict[str, str]] = []
    key = {"Authorization": f"Bearer {made['key']}"}
    start, turns = time.perf_counter(), flags.turns
    for turn in range(turns):
        if flags.rate:
            due = start + (turn * flags.sessions + number) / flags.rate
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
        messages.append({"role": "user", "content": f"Turn {turn}: what is 2 plus 2?"})
        body = {"messages": messages, "max_tokens": 32}
        sent = time.perf_counter()
        reply = await asked(http.post("/v1/chat/completions", json=body, headers=key))
        seen.append(time.perf_counter() - sent)
        messages.append({"role": "assistant", "content": reply["choices"][0]["message"]["content"]})
    nodes = (await asked(http.get(f"/sessions/{made['id']}/nodes")))["nodes"]
    trained = sum(token != NOT_TRAINED for node in nodes for token in node["masked_tokens"])
    assert (len(nodes), trained) == (1, turns * (len(ANSWER) + 1)), (len(nodes), trained)
    await asked(http.delete(f"/sessions/{made['id']}"))


async def asked(request: AbstractAsyncContextManager[aiohttp.ClientResponse]) -> Any:
    """The JSON of a reply."""
    async with request as reply:
        return await reply.json(content_type=None)


async def wait_for(url: str) -> None:
    """Raises TimeoutError."""
    async with asyncio.timeout(START_LIMIT_S), aiohttp.ClientSession() as http:
        while True:
            try:
                async with http.get(url) as reply:
                    reply.raise_for_status()
                return
            except aiohttp.ClientConnectionError:
                await asyncio.sleep(0.1)


def percentile(values: Seconds, share: float) -> float:
    """The value in milliseconds below which this share lies."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] * 1e3


async def measure(flags: Flags, folder: Path) -> None:
    """Print the table."""
    base = f"http://{netloc(HOST, flags.port)}"
    await wait_for(f"{base}/health")
    manager = ServerManager([APIServerConfig(server_type="vllm", base_url=f"{base}/v1", model_name="fake")])
    journal = TurnJournal(folder / "turns.journal")
    own: Seconds = []
    seen: Seconds = []
    sampling: Seconds = []
    writing: Seconds = []
    sessions = Sessions(manager, make_tiny_tokenizer(), journal)
    settings = EndpointSettings("fake")
    with (
        modules_uncollected(),
        timed("sample_tokens", TapedRoute, sampling),
        timed("write_turn", TurnJournal, writing),
    ):
        async with (
            aclosing(manager),
            listening(sessions, settings, wrapped=lambda app: Timed(app, own)) as endpoint,
            aiohttp.ClientSession(endpoint.url, connector=aiohttp.TCPConnector(limit=0)) as http,
        ):
            start = time.perf_counter()
            await asyncio.gather(*(converse(http, flags, number, seen) for number in range(flags.sessions)))
            seconds = time.perf_counter() - start
    journal.close()
    load = os.getloadavg()[0]
    print(f"{flags.sessions} sessions of {flags.turns} turns, {os.cpu_count()} cores, load average {load:.1f}\n")
    print("| | |\n|---|---|")
    print(f"| calls per second | {len(own) / seconds:.0f} |")
    parts = {"seen by the client": seen, "own time": own, "journal": writing, "wait for the server": sampling}
    for name, values in parts.items():
        print(
            f"| {name}, median and p99 (ms) | {statistics.median(values) * 1e3:.1f}, {percentile(values, 0.99):.1f} |"
        )


async def main() -> None:
    """Start the fake server, measure, and end it."""
    flags = load_config(Flags, prog="agent_endpoint")
    configure_logging("benchmark", level=logging.WARNING)
    server = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "atroposlib.testing.fake_inference_server"),
        *("--port", str(flags.port), "--answer", ANSWER),
    )
    try:
        with tempfile.TemporaryDirectory() as folder:
            await measure(flags, Path(folder))
    finally:
        server.terminate()
        await server.wait()


if __name__ == "__main__":
    asyncio.run(main())
