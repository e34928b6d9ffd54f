"""Our routes and guards in vLLM's OpenAI server, mounted through its endpoint-plugin hook.

The routes are in http/routes.py. While the weights must not be served, http/gate.py answers 503 for all routes that
generate; while the engine does not answer, http/engine_watch.py does so for /health and the bridge too. All routes,
vLLM's own included, answer only requests for one of the server's host names, none that a web page sends, and where the
server has a key, only those that carry it (http/keys.py).
"""

import asyncio
from typing import Any

from fastapi import FastAPI

from atroposlib.http_guard import HostGuard, OwnHosts
from vllm_patching import structured_outputs, vllm_types
from vllm_patching.compat import vllm_engine, vllm_requests, vllm_server
from vllm_patching.engines import ROUTES, engines_of
from vllm_patching.engines.base import Serving
from vllm_patching.engines.session import Sessions
from vllm_patching.http.engine_watch import EngineWatch
from vllm_patching.http.gate import ENGINE_DEADLINE_S, Gate, GeneratingTime, Timed, Unavailable
from vllm_patching.http.grammars import GrammarCheck
from vllm_patching.http.keys import RequireKey, bears_key
from vllm_patching.http.limited_work import LimitedWork
from vllm_patching.http.routes import add_routes
from vllm_patching.http.tool_calls import ToolCallParsing
from vllm_patching.kv_cache.counted import ReadTokens
from vllm_patching.kv_cache.salts import tagged
from vllm_patching.kv_cache.session import InSession, current_session

log = vllm_engine.init_logger("vllm.atropos_bridge")


class BridgeEndpoints:
    """vLLM's `EndpointPlugin` contract; enabled by naming `atropos_bridge_http` in VLLM_PLUGINS (the launcher does)."""

    name = "atropos_bridge_http"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        self._app = app
        app.state.gate = Gate(open_paths=tuple(route.path for route in ROUTES))
        app.state.generating = GeneratingTime()
        app.add_middleware(Timed, time=app.state.generating)
        app.add_middleware(InSession)
        app.add_middleware(Unavailable, why=app.state.gate.why_not)
        app.state.engine_watch = EngineWatch()
        app.add_middleware(Unavailable, why=app.state.engine_watch.why_not)
        add_routes(app)

    async def init_state(self, engine_client: vllm_types.EngineClient, state: Any, args: vllm_types.Arguments) -> None:
        vllm_requests.refuse_undecodable_requests(engine_client)
        state.limited_work = LimitedWork(_child_order(engine_client, args))
        structured = getattr(args, "structured_outputs", False)
        bounds = structured_outputs.refusal if structured else structured_outputs.off
        vllm_requests.check_structured_outputs(bounds)
        vllm_requests.check_requests(engine_client, GrammarCheck(state.limited_work, bounds).expect_fast)
        bridge = (args.additional_config or {}).get("atropos_bridge")
        serving = Serving(
            engine_client,
            state.gate,
            model=args.model,
            tp_size=args.tensor_parallel_size,
            bridge_on=bridge is not None,
            staging=bridge is not None and bridge["staging"] != "none",
            max_model_len=vllm_engine.longest_sequence(engine_client),
            max_lora_rank=args.max_lora_rank if args.enable_lora else None,
            models=state.openai_serving_models,
            kv_on_sync=getattr(args, "kv_on_sync", "reset"),
        )
        if serving.kv_on_sync == "salt":
            vllm_engine.tag_requests(engine_client, lambda salt: tagged(current_session(), salt))
        state.read_tokens = ReadTokens()
        vllm_engine.count_read_tokens(engine_client, state.read_tokens)
        await serving.start(await_sync=getattr(args, "await_sync", False))
        state.sessions = Sessions(serving, engines_of(serving))
        chosen = getattr(args, "tool_call_parser", None)
        state.tool_calls = ToolCallParsing(state.limited_work, chosen)
        if structured or chosen:  # otherwise most servers never need it
            state.starting = asyncio.create_task(state.limited_work.warm_up())
        self._guard_hosts(args, vllm_server.api_keys(args))
        state.engine_watch.start(engine_client, getattr(args, "engine_deadline_s", ENGINE_DEADLINE_S))
        on = "for LoRA adapters" if args.enable_lora else "off: VLLM_ENABLE_SHARED_WEIGHTS was not 1"
        log.info("Uvicorn running on http://%s:%d (bridge %s)", args.host, args.port, "on" if serving.bridge_on else on)

    def _guard_hosts(self, args: vllm_types.Arguments, keys: list[str]) -> None:
        """Guard the whole app. A middleware of `attach_router` would be inside those that vLLM adds later, such as
        CORS.
        """
        hosts = OwnHosts.of(args.host or "", getattr(args, "allowed_host", ()))
        inside = self._app.middleware_stack or self._app.build_middleware_stack()
        keyed = RequireKey(inside, keys)
        self._app.middleware_stack = HostGuard(keyed, hosts, bears_token=lambda scope: bears_key(scope, keys))


def _child_order(engine: vllm_types.EngineClient, args: vllm_types.Arguments) -> dict[str, object]:
    model = engine.model_config
    return {
        "tokenizer": vllm_server.tokenizer_of(model),
        "vocabulary": model.get_vocab_size(),
        "tool_parser_plugin": getattr(args, "tool_parser_plugin", None) or None,
    }
