"""How our routes answer: what was done, or why it was not, in vLLM's own form of an error. And the routes that every
bridge has.

An HTTPException would reach the trainer with the paths in its reason blotted out.
"""

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Protocol

from fastapi import APIRouter, Body, Depends, Request
from fastapi.responses import JSONResponse

from atroposlib.wire.typed import MAX_POLICY_VERSION, PRINTABLE, WrongValue

_name, _version = Body(pattern=f"^{PRINTABLE}$"), Body(ge=0, le=MAX_POLICY_VERSION, strict=True)
BodyName = Annotated[str, _name]
BodyNameOrNone = Annotated[str | None, _name]
BodyVersion = Annotated[int, _version]
BodyVersionOrNone = Annotated[int | None, _version]


class Refused(RuntimeError):
    """A request that cannot be served, or that the current state forbids; `status` is the HTTP code."""

    def __init__(self, message: str, status: int = 409) -> None:
        super().__init__(message)
        self.status = status


class Sessions(Protocol):
    """Who keeps the one session of a bridge. Every method raises Refused."""

    async def open(self, data: dict[str, Any]) -> dict[str, Any]: ...

    async def heartbeat(self, session: str) -> dict[str, Any]: ...

    async def close(self, session: str) -> dict[str, Any]: ...


async def answer(act: Awaitable[dict[str, Any]]) -> JSONResponse:
    """What `act` returns, or why it was refused."""
    try:
        return JSONResponse(await act)
    except Refused as refused:
        return _error(str(refused), refused.status)
    except WrongValue as error:
        return _error(str(error), 400)


def _error(message: str, status: int) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "code": status}}, status)


def add_session_routes(router: APIRouter, find: Callable[[Request], Sessions]) -> None:
    """Opening, renewing and leaving a session, of the bridge that `find` finds."""
    found: Any = Depends(find)

    @router.post("/session")
    async def open_session(offer: Annotated[dict[str, Any], Body()], bridge: Sessions = found) -> JSONResponse:
        return await answer(bridge.open(offer))

    @router.post("/session/{session}/heartbeat")
    async def heartbeat(session: str, bridge: Sessions = found) -> JSONResponse:
        return await answer(bridge.heartbeat(session))

    @router.delete("/session/{session}")
    async def close_session(session: str, bridge: Sessions = found) -> JSONResponse:
        return await answer(bridge.close(session))
