"""Our routes inside vLLM's own OpenAI server.

    GET    /v1/bridge/status                  policy version, session, lease, every worker's updater
    GET    /v1/bridge/manifest                what vLLM holds, in wire order
    POST   /v1/bridge/session                 a trainer offers a session           409 if another one lives
    POST   /v1/bridge/session/{id}/heartbeat  sign of life, renews the lease       404 if it is not the current one
    DELETE /v1/bridge/session/{id}            orderly leave
    POST   /v1/bridge/commit                  pause(keep) → apply on all ranks → version → resume
    POST   /v1/bridge/fence                   the trainer goes on with other servers only: refuse to generate
    POST   /v1/bridge/...                     what only one mode has: ROUTES of its engine
    POST   /generate, /v1/generate            token ids in and out, log-probabilities, policy versions

`/v1/*` is guarded by vLLM's `--api-key`; the others check the same key themselves. What the rules forbid is answered
with the reason, in vLLM's own form of an error. An HTTPException would reach the trainer with the paths in its reason
blotted out.
"""

import asyncio
import hmac
from collections.abc import Awaitable, Coroutine
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Body, HTTPException, Request, Response
from msgspec import Struct
from starlette.types import Scope

from atroposlib.wire.typed import WrongValue
from vllm_patching.engines import ROUTES
from vllm_patching.engines.base import Refused
from vllm_patching.engines.session import Route, Sessions
from vllm_patching.http.generate import run_generate

SESSION_PATHS = ("/v1/bridge/session", "/v1/bridge/adapter/session")


def bridge_routes() -> APIRouter:
    """Routes of the bridge; `app.state.sessions` is the server's Sessions."""
    router = APIRouter(tags=["bridge"])

    @router.get("/v1/bridge/status")
    async def status(request: Request) -> Response:
        reply = msgspec.to_builtins(await _sessions(request).status())
        if reply["max_lora_rank"] is None:  # by its presence a server that takes adapters is known
            del reply["max_lora_rank"], reply["adapters_in_use"]
        return _json(reply)

    @router.get("/v1/bridge/manifest")
    async def manifest(request: Request) -> Response:
        return await answer(_sessions(request).manifest())

    for path in SESSION_PATHS:

        @router.post(f"{path}/{{session}}/heartbeat")
        async def heartbeat(request: Request, session: str) -> Response:
            return await answer(_sessions(request).heartbeat(session))

        @router.delete(f"{path}/{{session}}")
        async def close_session(request: Request, session: str) -> Response:
            return await answer(_whole(_sessions(request).close(session)))

    for route in ROUTES:
        _mount(router, route)
    return router


def _mount(router: APIRouter, route: Route) -> None:
    @router.post(route.path)
    async def act(request: Request, body: Annotated[Any, Body()]) -> Response:
        if not route.path.startswith("/v1/"):
            check_key(request)
        return await answer(_whole(route.answer(_sessions(request), body)))


def generate_routes() -> APIRouter:
    """The ancestor's /generate, also under /v1."""
    router = APIRouter(tags=["generate"])

    @router.post("/generate")
    @router.post("/v1/generate")
    async def generate(request: Request, body: Annotated[dict[str, Any], Body()]) -> Response:
        check_key(request)
        return await answer(run_generate(request, body))

    return router


async def answer(act: Awaitable[Any]) -> Response:
    """What `act` returns, or why it was refused."""
    try:
        return _json(await act)
    except Refused as refused:
        return _json({"error": {"message": str(refused), "code": refused.status}}, refused.status)
    except WrongValue as error:
        return _json({"error": {"message": str(error), "code": 400}}, 400)


async def _whole(act: Coroutine[Any, Any, Struct]) -> Struct:
    """`act` to its end, also for a trainer that hangs up: the engine must not be left paused in the middle of it."""
    return await asyncio.shield(asyncio.create_task(act))


def _json(content: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


def _sessions(request: Request) -> Sessions:
    sessions: Sessions = request.app.state.sessions
    return sessions


def check_key(request: Request) -> None:
    """Raise the 401 that vLLM's own middleware gives for /v1."""
    keys: list[str] = request.app.state.generate_keys
    if keys and not bears_key(request.scope, keys):
        raise HTTPException(401, "Unauthorized: send the server's --api-key as 'Authorization: Bearer KEY'")


def bears_key(scope: Scope, keys: list[str]) -> bool:
    """Whether the request carries one of the server's keys, as vLLM itself reads them."""
    header = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
    scheme, _, given = header.partition(b" ")
    return scheme.lower() == b"bearer" and any([hmac.compare_digest(given, key.encode()) for key in keys])
