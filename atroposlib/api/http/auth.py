"""Who may use the API: a client that sends one of its tokens as `Authorization: Bearer TOKEN`; if no token is set,
everyone.

    the API's token   may do everything; for trainers and people
    the post token    may do what an environment does, and nothing else; for environments

Only /health and /ready answer without one. The comparison takes the same time wherever two tokens differ. The check
runs before all routes, so that none can forget it. http_guard.py runs before it and refuses web pages.
"""

import hmac
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import SecretStr
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from atroposlib.api.settings import RunApiConfig
from atroposlib.api.token_file import TokenFile
from atroposlib.wire.routes import ROUTES

Role = Literal["train", "post"]
ROLE = "atropos.role"  # in a request's scope, once its token is known

OPEN_PATHS = frozenset(route.path for route in ROUTES if route.sender == "anyone")
POST_ROUTES = frozenset((route.method, route.path) for route in ROUTES if route.sender == "environment")


class Tokens:
    """The tokens of one API, each given or in a file that is followed. Raises ValueError for an unusable file."""

    def __init__(self, settings: RunApiConfig) -> None:
        self._of: dict[Role, Callable[[], str]] = {}
        given: list[tuple[Role, SecretStr | None, Path | None, str]] = [
            ("train", settings.api_token, settings.api_token_file, "--api-token-file"),
            ("post", settings.post_token, settings.post_token_file, "--post-token-file"),
        ]
        for role, token, path, flag in given:
            if path is not None:
                self._of[role] = TokenFile(path, flag).current
            elif token is not None:
                self._of[role] = token.get_secret_value

    def __bool__(self) -> bool:
        return bool(self._of)

    def role(self, scope: Scope) -> Role | None:
        """Return what the sender of a request may do, by its token."""
        header = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, given = header.strip().partition(b" ")
        if scheme.lower() != b"bearer":
            return None
        return next(
            (role for role, token in self._of.items() if hmac.compare_digest(given.strip(), token().encode())), None
        )


@dataclass
class RequireToken:
    """ASGI middleware: 401 without a right token, 403 for what the post token does not open."""

    app: ASGIApp
    tokens: Tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self.app(scope, receive, send)
            return
        scope[ROLE] = role = self.tokens.role(scope)
        if role is None:
            detail = (
                "this API needs its token: send 'Authorization: Bearer TOKEN' "
                "(clients of Atropos read ATROPOS_API_TOKEN)"
            )
            await JSONResponse({"detail": detail}, 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)
        elif role == "post" and (scope["method"].replace("HEAD", "GET"), scope["path"]) not in POST_ROUTES:
            detail = "the post token is for environments only: this request needs the API's token, which trainers have"
            await JSONResponse({"detail": detail}, 403)(scope, receive, send)
        else:
            await self.app(scope, receive, send)
