"""The conversation that a request names, for the request that is being answered alone."""

import asyncio

import pytest
from starlette.types import Receive, Scope, Send

from vllm_patching.kv_cache.session import InSession, current_session, session_of


def scope_of(*values: bytes, path: str = "/") -> Scope:
    return {
        "type": "http",
        "path": path,
        "headers": [(b"host", b"here"), *((b"x-session-id", value) for value in values)],
    }


@pytest.mark.parametrize(
    ("values", "session"),
    [
        ((b"abc",), "abc"),
        ((), None),
        ((b"",), None),
        ((b"x" * 128,), "x" * 128),
        ((b"x" * 129,), None),
        ((b"\t",), None),
    ],
)
def test_a_session_is_what_the_header_says_within_its_limits(values: tuple[bytes, ...], session: str | None) -> None:
    assert session_of(scope_of(*values)) == session


def test_requests_side_by_side_have_their_own_sessions() -> None:
    seen: dict[str, str | None] = {}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(0)  # the other one is being answered meanwhile
        seen[scope["path"]] = current_session()

    async def answer() -> None:
        within = InSession(app)
        scopes = [scope_of(b"a", path="/a"), scope_of(b"b", path="/b"), scope_of(path="/none")]
        await asyncio.gather(*(within(scope, None, None) for scope in scopes))  # type: ignore[arg-type]

    asyncio.run(answer())
    assert seen == {"/a": "a", "/b": "b", "/none": None}
