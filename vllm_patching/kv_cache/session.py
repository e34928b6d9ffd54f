"""The conversation of the request that is being answered: what its X-Session-ID says."""

from contextvars import ContextVar
from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

from atroposlib.wire.sessions import SESSION_HEADER

LONGEST_SESSION_ID = 128
_session: ContextVar[str | None] = ContextVar("session", default=None)


def session_of(scope: Scope) -> str | None:
    """The conversation that a request names; None for one that names none, or not in 1 to LONGEST_SESSION_ID printable
    characters.
    """
    name = SESSION_HEADER.lower().encode()
    given = next((value.decode("latin-1") for key, value in scope.get("headers", ()) if key == name), "")
    return given if 0 < len(given) <= LONGEST_SESSION_ID and given.isprintable() else None


def current_session() -> str | None:
    """The conversation of the request that this task answers."""
    return _session.get()


@dataclass
class InSession:
    """ASGI middleware: what it calls finds the request's conversation in `current_session`."""

    app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        _session.set(session_of(scope))  # in the context of this request's task alone
        await self.app(scope, receive, send)
