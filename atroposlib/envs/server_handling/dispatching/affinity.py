"""One id for all requests of a conversation, sent as a header, so that any router can keep it on one server.

A `StickyRoute` has an id; requests inside `session(id)` carry it. verifiers and vLLM's routers use the same header.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from atroposlib.wire.sessions import SESSION_HEADER

_session: ContextVar[str | None] = ContextVar("session", default=None)


@contextlib.contextmanager
def session(session_id: str) -> Iterator[None]:
    """Requests that begin inside belong to this conversation."""
    token = _session.set(session_id)
    try:
        yield
    finally:
        _session.reset(token)


def session_headers() -> dict[str, str]:
    """The header of the conversation that a request belongs to; none outside of one."""
    current = _session.get()
    return {} if current is None else {SESSION_HEADER: current}
