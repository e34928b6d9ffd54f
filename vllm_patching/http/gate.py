"""The ASGI gate in front of routes that generate: it answers 503 with the reason while the weights must not be served.

It runs inside the check of the key (keys.py). /health, /metrics and all routes that only read stay open: the process is
healthy, and a supervisor must not restart it. A trainer's next complete sync opens the gate.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocketClose

# POST routes that do not generate; all others are refused, also those that a later vLLM adds
OPEN_PREFIXES = (
    "/v1/bridge/",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/v1/tool_calls/",
    "/tokenize",
    "/detokenize",
    "/ping",
)
RETRY_AFTER_S = 5
ENGINE_DEADLINE_S = 300.0  # default of --engine-deadline-s; one step of a long prefill on a CPU takes tens of seconds
TRY_AGAIN_LATER = 1013  # WebSocket close code


class Gate:
    """The reasons not to generate, by cause; open while there are none."""

    def __init__(self, open_paths: tuple[str, ...] = ()) -> None:
        self._open_paths = open_paths  # that do not generate, beside OPEN_PREFIXES
        self._reasons: dict[str, str] = {}

    def close(self, cause: str, reason: str) -> None:
        self._reasons[cause] = reason

    def open(self, cause: str) -> None:
        self._reasons.pop(cause, None)

    def reason(self, cause: str | None = None) -> str | None:
        """Explain why generation is refused, for `cause` or for any; None if it is not."""
        if cause is not None:
            return self._reasons.get(cause)
        return "; ".join(self._reasons.values()) or None

    def why_not(self, request: Scope) -> str | None:
        """Explain why `request` is refused, if it is."""
        return self.reason() if generates(request) and request["path"] not in self._open_paths else None


@dataclass
class Unavailable:
    """ASGI middleware in front of every route: 503, or the end of a WebSocket, where `why` gives a reason."""

    app: ASGIApp
    why: Callable[[Scope], str | None]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reason = self.why(scope)
        if reason is None:
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await WebSocketClose(TRY_AGAIN_LATER, reason[:120])(scope, receive, send)
        else:
            await JSONResponse(
                {"error": {"message": reason, "type": "ServiceUnavailableError", "code": 503}},
                503,
                {"retry-after": str(RETRY_AFTER_S)},
            )(scope, receive, send)


class GeneratingTime:
    """Measures how long at least one request was generating, since the start: the time of several at once counts
    once. While generation is paused for a sync, a request that waits counts, too.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self.running = 0  # requests
        self._until_now_s = 0.0  # of spans that are over
        self._since = 0.0

    @property
    def seconds(self) -> float:
        """So far."""
        return self._until_now_s + (self._now() - self._since if self.running else 0.0)

    @contextmanager
    def of_a_request(self) -> Iterator[None]:
        """The time of one request."""
        if not self.running:
            self._since = self._now()
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1
            if not self.running:
                self._until_now_s += self._now() - self._since


@dataclass
class Timed:
    """ASGI middleware that adds the requests that generate to `time`."""

    app: ASGIApp
    time: GeneratingTime

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self.time.of_a_request() if generates(scope) else nullcontext():
            await self.app(scope, receive, send)


def generates(scope: Scope) -> bool:
    """Return whether a request, as ASGI describes it, may make the engine generate."""
    if scope["type"] == "websocket":
        return True
    return scope["type"] == "http" and scope["method"] == "POST" and not scope["path"].startswith(OPEN_PREFIXES)
