"""A small server of OpenEnv's protocol, which tests steer: refusals, breaks, silence, and whatever it should say."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any

from aiohttp import WSMsgType, web

Data = dict[str, Any]
Step = Callable[[Data, int], Data | Awaitable[Data]]

NUMBER: Data = {
    "type": "object",
    "title": "Guess",
    "properties": {
        "metadata": {"type": "object", "title": "Metadata"},
        "number": {"type": "integer", "title": "Number", "description": "from 1 to 9"},
    },
    "required": ["number"],
    "additionalProperties": False,
}


def observation(text: str, reward: Any = 0.0, done: Any = False) -> Data:
    """An answer to reset or step."""
    return {
        "type": "observation",
        "data": {"observation": {"metadata": {}, "text": text}, "reward": reward, "done": done},
    }


def error(code: str, message: str = "no", **more: Any) -> Data:
    """An answer that is an error."""
    return {"type": "error", "data": {"message": message, "code": code, **more}}


def guess(action: Data, turn: int) -> Data:
    """The game: 4 is right; two tries."""
    if not isinstance(action.get("number"), int):
        wrong = {"type": "int_type", "loc": ["number"], "msg": "Input should be a valid integer", "input": None}
        return error("VALIDATION_ERROR", "Invalid message", errors=[wrong])
    right = action["number"] == 4
    return observation("right" if right else "too low", float(right), right or turn >= 2)


class FakeOpenEnv:
    """Listens on a free loopback port. `resets` and `steps` are what was asked; `step(action, turn)` answers, with a
    dict, or with text that is sent as it is.
    """

    def __init__(self, step: Step = guess, schema: Any = None, max_sessions: int = 100) -> None:
        self.step: Any = step
        self.schema = {"action": NUMBER if schema is None else schema, "observation": {}, "state": {}}
        self.max_sessions = max_sessions
        self.first: Any = observation("Guess a number from 1 to 9.")
        self.state_data: Data = {"step_count": 0}
        self.status = 200
        self.heartbeat_s: float | None = None
        self.resets: list[Data] = []
        self.steps: list[Data] = []
        self.open = 0
        self.peak = 0
        self.refused = 0
        self.tokens: set[str | None] = set()
        self.port = 0
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> "FakeOpenEnv":
        app = web.Application()
        app.add_routes(
            [web.get("/schema", self._schema), web.get("/metadata", self._metadata), web.get("/ws", self._episode)]
        )
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def _schema(self, request: web.Request) -> web.Response:
        self.tokens.add(request.headers.get("Authorization"))
        if self.status in (301, 302, 307):
            return web.Response(status=self.status, headers={"Location": "http://127.0.0.1:9/schema"})
        return web.json_response(self.schema, status=self.status)

    async def _metadata(self, request: web.Request) -> web.Response:
        return web.json_response({"name": "GuessEnv", "description": "a game of numbers"})

    async def _episode(self, request: web.Request) -> web.StreamResponse:
        self.tokens.add(request.headers.get("Authorization"))
        if self.status in (301, 302, 307):
            return web.Response(status=self.status, headers={"Location": "http://127.0.0.1:9/ws"})
        socket = web.WebSocketResponse(heartbeat=self.heartbeat_s)
        await socket.prepare(request)
        if self.open >= self.max_sessions:
            self.refused += 1
            full = {"active_sessions": self.open, "max_sessions": self.max_sessions}
            await socket.send_json(error("CAPACITY_REACHED", "Server at capacity", **full))
            await socket.close()
            return socket
        self.open += 1
        self.peak = max(self.peak, self.open)
        try:
            await self._play(socket)
        finally:
            self.open -= 1
        await socket.close()
        return socket

    async def _play(self, socket: web.WebSocketResponse) -> None:
        turn = 0
        async for message in socket:
            if message.type != WSMsgType.TEXT:  # the client did not answer a ping
                return
            asked = json.loads(message.data)
            if asked["type"] == "close":
                return
            if asked["type"] == "reset":
                self.resets.append(asked["data"])
                answer = self.first(asked["data"]) if callable(self.first) else self.first
            elif asked["type"] == "state":
                answer = {"type": "state", "data": self.state_data}
            else:
                turn += 1
                self.steps.append(asked["data"])
                answer = self.step(asked["data"], turn)
            if asyncio.iscoroutine(answer):
                answer = await answer
            if answer is None:  # a server that dies
                assert socket._req is not None
                assert socket._req.transport is not None
                socket._req.transport.abort()
                return
            if isinstance(answer, bytes):
                await socket.send_bytes(answer)
            else:
                await socket.send_str(answer if isinstance(answer, str) else json.dumps(answer))
            if isinstance(answer, dict) and answer["data"].get("code") == "SESSION_ERROR":
                return
