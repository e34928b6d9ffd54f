"""Who may use the API: whoever sends its token as `Authorization: Bearer TOKEN`. Without a token configured, everyone who reaches it.

Only /health and /ready answer without one. The comparison takes the same time wherever two tokens differ. And no web page may, not even
one that runs in the browser of somebody who may: browsers say on whose behalf they ask. Both checks stand before all routes, so that
none can forget them.
"""

import hmac
from urllib.parse import urlsplit

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

OPEN_PATHS = frozenset({"/health", "/ready"})


class RequireToken:
    """ASGI middleware: 401 without the right token."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and not self._is_right(scope):
            refusal = JSONResponse(
                {"detail": "this API wants its token: send 'Authorization: Bearer TOKEN' (clients of Atropos read ATROPOS_API_TOKEN)"},
                status_code=401,
                headers={"WWW-Authenticate": "Bearer"},
            )
            await refusal(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _is_right(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return hmac.compare_digest(given, self._expected)


class RefusePages:
    """ASGI middleware: 403 for what a browser sends for a page of another origin, with or without reading the reply."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and _is_from_elsewhere(dict(scope["headers"])):
            await JSONResponse({"detail": "web pages of other origins may not use this API"}, status_code=403)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _is_from_elsewhere(headers: dict[bytes, bytes]) -> bool:
    if headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin"):
        return True
    origin = headers.get(b"origin")
    return origin is not None and urlsplit(origin.decode("latin-1")).netloc != headers.get(b"host", b"").decode("latin-1")
