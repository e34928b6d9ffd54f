"""Our routes inside vLLM's own OpenAI server, mounted through its endpoint-plugin hook.

    GET    /v1/bridge/status                  policy version, session, lease, every worker's updater
    GET    /v1/bridge/manifest                what vLLM holds, in wire order
    POST   /v1/bridge/session                 a trainer offers a session           409 if another one lives
    POST   /v1/bridge/session/{id}/heartbeat  sign of life, renews the lease       404 if it is not the current one
    DELETE /v1/bridge/session/{id}            orderly leave
    POST   /v1/bridge/commit                  pause(keep) → apply on all ranks → version → resume
    POST   /v1/bridge/fence                   the trainer goes on with other servers only: refuse to generate
    POST   /v1/bridge/attach                  a trainer of this machine shares the live weights itself (single copy)
    POST   /v1/bridge/pause                   it is about to step them: pause(keep)
    POST   /v1/bridge/resume                  it has: version → resume
    *      /v1/bridge/adapter...              LoRA adapters: adapter_routes.py
    POST   /generate, /v1/generate            token ids in and out, log-probabilities, policy versions

`/v1/*` is guarded by vLLM's `--api-key`; `/generate` checks the same key itself. While the weights must not be
served, gate.py answers 503 for all routes that generate; while the engine does not answer, engine_watch.py does for
/health and the bridge too. All routes, vLLM's own too, answer only under the server's own names, and no web page.
"""

import asyncio
import hmac
from argparse import Namespace
from collections.abc import Coroutine
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from starlette.types import Scope

from atroposlib.http_guard import HostGuard, OwnHosts
from vllm_patching import compat
from vllm_patching.adapter_routes import adapter_routes
from vllm_patching.bridge_state import BridgeState
from vllm_patching.engines.adapters import Adapters
from vllm_patching.http.engine_watch import EngineWatch, EngineWatchMiddleware
from vllm_patching.http.gate import ENGINE_DEADLINE_S, Gate, GateMiddleware
from vllm_patching.http.generate import run_generate
from vllm_patching.http.replies import BodyName, BodyVersion, BodyVersionOrNone, add_session_routes, answer

log = compat.init_logger("vllm.atropos_bridge")


class BridgeEndpoints:
    """vLLM's `EndpointPlugin` contract; enabled by naming `atropos_bridge_http` in VLLM_PLUGINS (the launcher does)."""

    name = "atropos_bridge_http"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        self._app = app
        app.state.gate = Gate()
        app.add_middleware(GateMiddleware, gate=app.state.gate)
        app.state.engine_watch = EngineWatch()
        app.add_middleware(EngineWatchMiddleware, watch=app.state.engine_watch)
        app.include_router(bridge_routes())
        app.include_router(adapter_routes())
        app.include_router(generate_routes())

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        compat.refuse_undecodable_requests(engine_client)
        enabled = "atropos_bridge" in (args.additional_config or {})
        state.bridge = BridgeState(engine_client, args.model, args.tensor_parallel_size, enabled, state.gate)
        models = state.openai_serving_models
        state.adapters = Adapters(engine_client, models, args.model, args.max_lora_rank) if args.enable_lora else None
        state.generate_keys = compat.api_keys(args)
        self._guard_hosts(args, state.generate_keys)
        await state.bridge.start()
        state.engine_watch.start(engine_client, getattr(args, "engine_deadline_s", ENGINE_DEADLINE_S))
        log.info(
            "Uvicorn running on http://%s:%d (bridge %s)",
            args.host,
            args.port,
            (
                "on"
                if enabled
                else "for LoRA adapters"
                if args.enable_lora
                else "off: VLLM_ENABLE_SHARED_WEIGHTS was not 1"
            ),
        )

    def _guard_hosts(self, args: Namespace, keys: list[str]) -> None:
        """Around the whole app: what `attach_router` adds stands inside the middleware that vLLM adds later, as
        CORS.
        """
        hosts = OwnHosts.of(args.host or "", getattr(args, "allowed_host", ()))
        inside = self._app.middleware_stack or self._app.build_middleware_stack()
        self._app.middleware_stack = HostGuard(inside, hosts, bears_token=lambda scope: bears_key(scope, keys))


def _bridge(request: Request) -> BridgeState:
    state: BridgeState = request.app.state.bridge
    if request.app.state.adapters is not None:
        raise HTTPException(
            409, "this server takes LoRA adapters (--weight-bridge-mode lora_only): restart it without --enable-lora"
        )
    if not state.enabled:
        raise HTTPException(409, "the weight bridge is off: start the server with VLLM_ENABLE_SHARED_WEIGHTS=1")
    return state


Bridge = Annotated[BridgeState, Depends(_bridge)]


def bridge_routes() -> APIRouter:
    """Routes under /v1/bridge; a conflict with the session's rules is a 409 with the reason."""
    router = APIRouter(prefix="/v1/bridge", tags=["bridge"])

    @router.get("/status")
    async def status(request: Request) -> dict[str, Any]:
        state: BridgeState = request.app.state.bridge
        adapters: Adapters | None = request.app.state.adapters
        return await state.status() | (adapters.status() if adapters else {})

    @router.get("/manifest")
    async def manifest(bridge: Bridge) -> dict[str, Any]:
        return await bridge.manifest()

    add_session_routes(router, _bridge)

    @router.post("/commit")
    async def commit(bridge: Bridge, session: BodyName, policy_version: BodyVersion) -> JSONResponse:
        return await _whole(bridge.commit(session, policy_version))

    @router.post("/fence")
    async def fence(bridge: Bridge, session: BodyName, reason: Annotated[str, Body(max_length=2000)]) -> JSONResponse:
        return await _whole(bridge.fence(session, reason))

    @router.post("/attach")
    async def attach(bridge: Bridge, offer: Annotated[dict[str, Any], Body()]) -> JSONResponse:
        return await _whole(bridge.attach(offer))

    @router.post("/pause")
    async def pause(
        bridge: Bridge,
        session: BodyName,
        policy_version: BodyVersion,
        deadline_s: Annotated[float, Body(gt=0, le=86400)],
    ) -> JSONResponse:
        return await _whole(bridge.pause(session, policy_version, deadline_s))

    @router.post("/resume")
    async def resume(bridge: Bridge, session: BodyName, policy_version: BodyVersionOrNone = None) -> JSONResponse:
        return await _whole(bridge.resume(session, policy_version))

    return router


async def _whole(act: Coroutine[Any, Any, dict[str, Any]]) -> JSONResponse:
    """`act` to its end, also for a trainer that hangs up: the engine must not be left paused in the middle of it."""
    return await answer(asyncio.shield(asyncio.create_task(act)))


def generate_routes() -> APIRouter:
    """The ancestor's /generate, also under /v1."""
    router = APIRouter(tags=["generate"])

    @router.post("/generate")
    @router.post("/v1/generate")
    async def generate(request: Request, body: Annotated[dict[str, Any], Body()]) -> JSONResponse:
        _check_key(request)
        return await answer(run_generate(request, body))

    return router


def _check_key(request: Request) -> None:
    keys: list[str] = request.app.state.generate_keys
    if keys and not bears_key(request.scope, keys):
        raise HTTPException(401, "Unauthorized: send the server's --api-key as 'Authorization: Bearer KEY'")


def bears_key(scope: Scope, keys: list[str]) -> bool:
    """Whether the request carries one of the server's keys, as vLLM itself reads them."""
    header = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
    scheme, _, given = header.partition(b" ")
    return scheme.lower() == b"bearer" and any([hmac.compare_digest(given, key.encode()) for key in keys])
