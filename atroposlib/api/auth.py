"""Who may use the API: whoever sends its token as `Authorization: Bearer TOKEN`. Without a token configured, everyone who reaches it.

Only /health and /ready answer without one. The comparison takes the same time wherever two tokens differ. The check stands before all
routes, so that none can forget it.
"""

import hmac

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
