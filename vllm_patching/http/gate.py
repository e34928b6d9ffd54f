"""Whether this server may generate: the ASGI gate that answers 503 instead, with the reason, while its weights must
not be served.

Inside vLLM's own authentication. /health, /metrics and everything that only reads stay open: the process is well and
must not be restarted by whoever watches it; a trainer's next complete sync puts it right.
"""

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
App = Callable[[Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]

# POST routes that do not generate; whatever vLLM adds to the others is refused too
OPEN_PREFIXES = ("/v1/bridge/", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/tokenize", "/detokenize", "/ping")
RETRY_AFTER_S = 5
ENGINE_DEADLINE_S = 300.0  # default of --engine-deadline-s; one step of a long prefill on a CPU takes tens of seconds
TRY_AGAIN_LATER = 1013  # WebSocket close code


class Gate:
    """The reasons not to generate, each under the name of its cause; open while there is none."""

    def __init__(self) -> None:
        self._reasons: dict[str, str] = {}

    def close(self, cause: str, reason: str) -> None:
        self._reasons[cause] = reason

    def open(self, cause: str) -> None:
        self._reasons.pop(cause, None)

    def reason(self, cause: str | None = None) -> str | None:
        """Why generation is refused, for `cause` or for any; None if it is not."""
        if cause is not None:
            return self._reasons.get(cause)
        return "; ".join(self._reasons.values()) or None


class GateMiddleware:
    """ASGI middleware in front of every route."""

    def __init__(self, app: App, gate: Gate, open_paths: tuple[str, ...] = ()) -> None:
        self._app = app
        self._gate = gate
        self._open_paths = open_paths  # that do not generate, beside OPEN_PREFIXES

    async def __call__(
        self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
    ) -> None:
        reason = self._gate.reason()
        if reason is None or not generates(scope) or scope.get("path") in self._open_paths:
            await self._app(scope, receive, send)
        else:
            await unavailable(reason, scope, send)


def generates(scope: Message) -> bool:
    """Whether a request, as ASGI describes it, may make the engine generate."""
    if scope["type"] == "websocket":
        return True
    return scope["type"] == "http" and scope["method"] == "POST" and not scope["path"].startswith(OPEN_PREFIXES)


async def unavailable(reason: str, scope: Message, send: Callable[[Message], Awaitable[None]]) -> None:
    """Refuse a request with 503, or a WebSocket, for `reason`."""
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": TRY_AGAIN_LATER, "reason": reason[:120]})
        return
    body = json.dumps({"error": {"message": reason, "type": "ServiceUnavailableError", "code": 503}}).encode()
    headers = [(b"content-type", b"application/json"), (b"retry-after", str(RETRY_AFTER_S).encode())]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": body})
