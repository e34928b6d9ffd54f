"""Who may use vLLM's server where it has a key: a client that sends one as `Authorization: Bearer KEY`.

vLLM checks the key under some prefixes only (/v1, /v2, /inference), and attaches routes beside them that sample, such
as /invocations. So endpoint.py puts this in front of the whole app, vLLM's own routes and middleware included. Only
/health answers without a key, for supervisors. Without a key of the server everyone is answered, as in vLLM.
"""

import hmac
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from atroposlib.http_guard import POLICY_VIOLATION

OPEN_PATH = "/health"
REASON = "Unauthorized: send the server's --api-key as 'Authorization: Bearer KEY'"


@dataclass
class RequireKey:
    """ASGI middleware: 401 without one of `keys`, whatever the path, method and body; nothing of the body is read."""

    app: ASGIApp
    keys: Sequence[str]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._is_open(scope) or bears_key(scope, self.keys):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket" and "websocket.http.response" not in scope.get("extensions", {}):
            await WebSocketClose(POLICY_VIOLATION)(scope, receive, send)
        else:
            content = {"error": {"message": REASON, "type": "AuthenticationError", "code": 401}}
            await JSONResponse(content, 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        # the exact path alone: an app under a prefix, or another spelling, may route elsewhere
        return not self.keys or (scope["type"] == "http" and scope["path"] == OPEN_PATH)


def bears_key(scope: Scope, keys: Sequence[str]) -> bool:
    """Return whether the request carries one of the server's keys, as vLLM itself reads them. The comparison takes
    the same time wherever two keys of one length differ.
    """
    header = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
    scheme, _, given = header.partition(b" ")
    return scheme.lower() == b"bearer" and any([hmac.compare_digest(given, key.encode()) for key in keys])
