"""Who may use the API: whoever sends its token as `Authorization: Bearer TOKEN`. Without a token configured, everyone who reaches it.

Only /health and /ready answer without one. The comparison takes the same time wherever two tokens differ. The check
stands before all routes, so that none can forget it; whether a web page asks is checked before it, by http_guard.py.
"""

import hmac

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

OPEN_PATHS = frozenset({"/health", "/ready"})


class RequireToken:
    """ASGI middleware: 401 without the right token."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and not bears_token(scope, self._token):
            refusal = JSONResponse(
                {"detail": "this API wants its token: send 'Authorization: Bearer TOKEN' (clients of Atropos read ATROPOS_API_TOKEN)"},
                status_code=401,
                headers={"WWW-Authenticate": "Bearer"},
            )
            await refusal(scope, receive, send)
            return
        await self._app(scope, receive, send)


def bears_token(scope: Scope, token: str | None) -> bool:
    """Whether the request carries this token; never where there is none."""
    given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
    return token is not None and hmac.compare_digest(given, f"Bearer {token}".encode())
