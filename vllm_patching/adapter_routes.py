"""The routes of the adapter bridge, guarded by vLLM's `--api-key` as all of /v1 is.

    POST   /v1/bridge/adapter/session                 a trainer takes the bridge                 409 if another one lives
    POST   /v1/bridge/adapter/session/{id}/heartbeat  sign of life, renews the lease             404 if it is not the current one
    DELETE /v1/bridge/adapter/session/{id}            orderly leave
    POST   /v1/bridge/adapter                         {"name", "path", "policy_version", "session"?}: sample from that folder
"""

import asyncio
from collections.abc import Awaitable
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, HTTPException, Request
from fastapi.responses import JSONResponse

from vllm_patching.adapters import AdapterOffer, AdapterRefused, Adapters


def _adapters(request: Request) -> Adapters:
    adapters: Adapters | None = request.app.state.adapters
    if adapters is None:
        raise HTTPException(409, "this server takes no adapters: restart it with --enable-lora --max-lora-rank 16 (or the rank you train)")
    return adapters


Found = Annotated[Adapters, Depends(_adapters)]


def adapter_routes() -> APIRouter:
    """Routes under /v1/bridge/adapter; what the rules forbid is a 4xx with the reason."""
    router = APIRouter(prefix="/v1/bridge/adapter", tags=["bridge"])

    @router.post("/session")
    async def open_session(adapters: Found, offer: AdapterOffer) -> JSONResponse:
        return await _or_refused(adapters.open(offer))

    @router.post("/session/{session}/heartbeat")
    async def heartbeat(adapters: Found, session: str) -> JSONResponse:
        return await _or_refused(adapters.heartbeat(session))

    @router.delete("/session/{session}")
    async def close_session(adapters: Found, session: str) -> JSONResponse:
        return await _or_refused(adapters.close(session))

    @router.post("")
    async def load(
        adapters: Found,
        name: Annotated[str, Body()],
        path: Annotated[str, Body()],
        policy_version: Annotated[int, Body(ge=0)],
        session: Annotated[str | None, Body()] = None,
    ) -> JSONResponse:
        # shielded: a trainer that hangs up in the middle leaves either adapter current, never a half-done change
        return await _or_refused(asyncio.shield(asyncio.create_task(adapters.load(session, name, path, policy_version))))

    return router


async def _or_refused(act: Awaitable[dict[str, Any]]) -> JSONResponse:
    """The reply, or the reason in vLLM's form of an error; an HTTPException would reach the trainer with its paths blotted out."""
    try:
        return JSONResponse(await act)
    except AdapterRefused as refused:
        return JSONResponse({"error": {"message": str(refused), "code": refused.status}}, refused.status)
