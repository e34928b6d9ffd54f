"""The routes of the adapter bridge, guarded by vLLM's `--api-key` as all of /v1 is.

POST   /v1/bridge/adapter/session                 a trainer takes the bridge                 409 if another one lives
POST   /v1/bridge/adapter/session/{id}/heartbeat  sign of life, renews the lease             404 if it is not the current one
DELETE /v1/bridge/adapter/session/{id}            orderly leave
POST   /v1/bridge/adapter                         {"name", "path", "policy_version", "session"?}: sample from that folder
"""

import asyncio
from typing import Annotated

from fastapi import APIRouter, Body, Depends, HTTPException, Request
from fastapi.responses import JSONResponse

from vllm_patching.engines.adapters import Adapters
from vllm_patching.http.replies import BodyName, BodyNameOrNone, BodyVersion, add_session_routes, answer


def _adapters(request: Request) -> Adapters:
    adapters: Adapters | None = request.app.state.adapters
    if adapters is None:
        raise HTTPException(
            409,
            "this server takes no adapters: restart it with --enable-lora --max-lora-rank 16 (or the rank you train)",
        )
    return adapters


Found = Annotated[Adapters, Depends(_adapters)]


def adapter_routes() -> APIRouter:
    """Routes under /v1/bridge/adapter; what the rules forbid is a 4xx with the reason."""
    router = APIRouter(prefix="/v1/bridge/adapter", tags=["bridge"])
    add_session_routes(router, _adapters)

    @router.post("")
    async def load(
        adapters: Found,
        name: BodyName,
        path: Annotated[str, Body(min_length=1, max_length=4096)],
        policy_version: BodyVersion,
        session: BodyNameOrNone = None,
    ) -> JSONResponse:
        # shielded: a trainer that hangs up in the middle leaves either adapter current, never a half-done change
        return await answer(asyncio.shield(asyncio.create_task(adapters.load(session, name, path, policy_version))))

    return router
