"""Our routes inside vLLM's own OpenAI server.

    GET    /v1/bridge/status                  policy version, session, lease, every worker's updater
    GET    /v1/bridge/manifest                the weights that vLLM has, in wire order
    GET    /v1/bridge/digest                  a checksum of every live tensor, rank by rank
    POST   /v1/bridge/decode                  answers prompts greedily, with whole distributions (decode.py)
    GET    /v1/bridge/activity                seconds of generating, tokens read
    POST   /v1/bridge/session                 a trainer offers a session           409 if another one is open
    POST   /v1/bridge/session/{id}/heartbeat  renews the lease                     404 if it is not the current one
    DELETE /v1/bridge/session/{id}            ends the session
    POST   /v1/bridge/commit                  pause(keep) → apply on all ranks → version → resume
    POST   /v1/bridge/fence                   the trainer continues with other servers only: refuse to generate
    POST   /v1/bridge/...                     what only one mode has: ROUTES of its engine
    POST   /v1/tool_calls/parse               what vLLM's own tool parsers find in a text (tool_calls.py)
    POST   /generate, /v1/generate            token ids in and out, log-probabilities, policy versions
           /renderers/...                     vLLM's own token route as the package `renderers` reads it (renderers.py)

keys.py guards all routes by the server's `--api-key`. A refused request gets the reason, in the form of vLLM's own
errors. It is not an HTTPException, because vLLM removes paths from the reason of one.
"""

import asyncio
from collections.abc import Coroutine
from enum import Enum
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Body, Depends, FastAPI, Request, Response
from msgspec import Struct

from atroposlib.wire.bridge import DecodeProbe, ServerActivity
from atroposlib.wire.sessions import MODELS_ROUTE, PREFIX, SESSION_ROUTE, TOKEN_ROUTE, SessionCalls
from atroposlib.wire.tool_calls import ROUTE as TOOL_CALLS
from atroposlib.wire.tool_calls import ParseToolCalls
from atroposlib.wire.typed import WrongValue, typed_body
from vllm_patching.engines import ROUTES
from vllm_patching.engines.base import Refused
from vllm_patching.engines.session import Route, Sessions
from vllm_patching.http.decode import Probing
from vllm_patching.http.generate import run_generate
from vllm_patching.http.renderers import Conversations, relayed, run_token_route


async def _sessions(request: Request) -> object:
    return request.app.state.sessions


Server = Annotated[Sessions, Depends(_sessions)]

router = APIRouter()
BRIDGE: list[str | Enum] = ["bridge"]


def add_routes(app: FastAPI) -> None:
    """Answer for the bridge and under /generate; `app.state.sessions` is the server's Sessions."""
    app.state.conversations = Conversations()
    app.state.probing = Probing()
    app.include_router(router)
    app.add_exception_handler(Refused, _refusal)
    app.add_exception_handler(WrongValue, _refusal)


@router.get("/v1/bridge/status", tags=BRIDGE)
async def status(sessions: Server) -> Response:
    reply = msgspec.to_builtins(await sessions.status())
    if reply["max_lora_rank"] is None:  # a trainer recognises a server for adapters by this field
        del reply["max_lora_rank"], reply["adapters_in_use"]
    return _json(reply)


@router.get("/v1/bridge/manifest", tags=BRIDGE)
async def manifest(sessions: Server) -> Response:
    return _json(await sessions.manifest())


@router.get("/v1/bridge/digest", tags=BRIDGE)
async def digest(sessions: Server) -> Response:
    return _json(await sessions.live())


@router.post("/v1/bridge/decode", tags=BRIDGE)
async def decode(request: Request, sessions: Server, body: Annotated[object, Body()]) -> Response:
    return _json(await request.app.state.probing.decoded(sessions, typed_body("probe", body, DecodeProbe)))


@router.get("/v1/bridge/activity", tags=BRIDGE)
async def activity(request: Request) -> Response:
    read = request.app.state.read_tokens
    generating = request.app.state.generating
    return _json(ServerActivity(generating.seconds, read.prompt, read.cached, read.again, generating.running))


@router.post("/v1/bridge/session/{session}/heartbeat", tags=BRIDGE)
@router.post("/v1/bridge/adapter/session/{session}/heartbeat", tags=BRIDGE)
async def heartbeat(sessions: Server, session: str) -> Response:
    return _json(await sessions.heartbeat(session))


@router.delete("/v1/bridge/session/{session}", tags=BRIDGE)
@router.delete("/v1/bridge/adapter/session/{session}", tags=BRIDGE)
async def close_session(sessions: Server, session: str) -> Response:
    return await _whole(sessions.close(session))


def _mount(route: Route) -> None:
    @router.post(route.path, tags=BRIDGE)
    async def act(sessions: Server, body: Annotated[object, Body()]) -> Response:
        return await _whole(route.answer(sessions, body))


for route in ROUTES:
    _mount(route)


@router.post("/generate", tags=["generate"])  # the ancestor's
@router.post("/v1/generate", tags=["generate"])
async def generate(request: Request, sessions: Server, body: Annotated[dict[str, Any], Body()]) -> Response:
    return _json(await run_generate(request, sessions, body))


@router.post(TOOL_CALLS, tags=["generate"])
async def parse_tool_calls(request: Request, body: Annotated[object, Body()]) -> Response:
    return _json(await request.app.state.tool_calls.found(typed_body("body", body, ParseToolCalls)))


@router.post(f"{PREFIX}{TOKEN_ROUTE}", tags=["generate"])
async def generate_for_renderers(request: Request, sessions: Server) -> Response:
    return await run_token_route(request, sessions, request.app.state.conversations)


@router.get(f"{PREFIX}{MODELS_ROUTE}", tags=["generate"])
async def models_for_renderers(request: Request) -> Response:
    return await relayed(request, MODELS_ROUTE)


@router.get(f"{PREFIX}{SESSION_ROUTE}/{{session}}", tags=["generate"])
async def versions_of_session(request: Request, session: str) -> Response:
    return _json(SessionCalls(request.app.state.conversations.calls(session)))


async def _refusal(request: Request, error: Exception) -> Response:
    status = error.status if isinstance(error, Refused) else 400
    return _json({"error": {"message": str(error), "code": status}}, status)


async def _whole(act: Coroutine[object, object, Struct]) -> Response:
    """The reply of `act`, which runs to its end even if the trainer disconnects: otherwise the engine could stay
    paused.
    """
    return _json(await asyncio.shield(asyncio.create_task(act)))


def _json(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")
