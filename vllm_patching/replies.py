"""How our routes answer: what was done, or why it was not, in vLLM's own form of an error. And the routes that every bridge has.

An HTTPException would reach the trainer with the paths in its reason blotted out.
"""

import reprlib
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Protocol

from fastapi import APIRouter, Body, Depends, Request
from fastapi.responses import JSONResponse


class Refused(RuntimeError):
    """A request that cannot be served, or that the current state forbids; `status` is the HTTP code."""

    def __init__(self, message: str, status: int = 409) -> None:
        super().__init__(message)
        self.status = status


def brief(value: object, limit: int = 80) -> str:
    """What a client sent, or an error about it, as at most `limit` printable ASCII characters."""
    text = str(value) if isinstance(value, Exception) else reprlib.repr(value)
    text = text[:limit].encode("ascii", "backslashreplace").decode()
    text = "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)
    return text if len(text) < limit else text[: limit - 3] + "..."


class Sessions(Protocol):
    """Who keeps the one session of a bridge. Every method raises Refused."""

    async def open(self, offer: Any) -> dict[str, Any]: ...

    async def heartbeat(self, session: str) -> dict[str, Any]: ...

    async def close(self, session: str) -> dict[str, Any]: ...


async def answer(act: Awaitable[dict[str, Any]]) -> JSONResponse:
    """What `act` returns, or why it was refused."""
    try:
        return JSONResponse(await act)
    except Refused as refused:
        return JSONResponse({"error": {"message": str(refused), "code": refused.status}}, refused.status)


def add_session_routes(router: APIRouter, find: Callable[[Request], Sessions], offer_type: Any) -> None:
    """Opening, renewing and leaving a session, of the bridge that `find` finds; an offer that is no `offer_type` is a 422."""
    found: Any = Depends(find)

    @router.post("/session")
    async def open_session(offer: Annotated[offer_type, Body()], bridge: Sessions = found) -> JSONResponse:  # type: ignore[valid-type]
        return await answer(bridge.open(offer))

    @router.post("/session/{session}/heartbeat")
    async def heartbeat(session: str, bridge: Sessions = found) -> JSONResponse:
        return await answer(bridge.heartbeat(session))

    @router.delete("/session/{session}")
    async def close_session(session: str, bridge: Sessions = found) -> JSONResponse:
        return await answer(bridge.close(session))
