"""What verifiers' client and our environment ask of a vLLM server of ours, with a fixed answer; no model."""

from collections.abc import Callable, Sequence
from typing import Any

from aiohttp import web

from atroposlib.wire.sessions import MODELS_ROUTE, PREFIX, SESSION_ROUTE, TOKEN_ROUTE, digest


class FakeRenderersServer:
    """An async context; `answer` gives the ids that a prompt of ids is answered with."""

    def __init__(self, answer: Callable[[Sequence[int]], list[int]], policy_version: int = 3) -> None:
        self.answer = answer
        self.policy_version = policy_version
        self.calls: dict[str, list[dict[str, Any]]] = {}
        self.asked: list[dict[str, Any]] = []
        self.has_routes = True
        self.port = 0

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def __aenter__(self) -> "FakeRenderersServer":
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get(f"{PREFIX}{MODELS_ROUTE}", self._models)
        app.router.add_get(f"{PREFIX}{SESSION_ROUTE}/{{session}}", self._versions)
        app.router.add_post(f"{PREFIX}{TOKEN_ROUTE}", self._generate)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._runner.cleanup()

    def note(self, session: str, ids: list[int]) -> None:
        version = self.policy_version
        call = {"sampled": digest(ids), "policy_versions": [version, version], "version_spans": [[0, version]]}
        self.calls.setdefault(session, []).append(call)

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        if not self.has_routes:
            return web.json_response({"detail": "Not Found"}, status=404)
        return web.json_response({"data": [{"id": "fake", "max_model_len": 4096}]})

    async def _versions(self, request: web.Request) -> web.Response:
        return web.json_response({"calls": self.calls.get(request.match_info["session"], [])})

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append(body)
        ids = self.answer(body["token_ids"])
        self.note(request.headers["X-Session-ID"], ids)
        content = [{"token_id": token, "token": f"token_id:{token}", "logprob": -0.5} for token in ids]
        choice = {"index": 0, "token_ids": ids, "finish_reason": "stop", "logprobs": {"content": content}}
        return web.json_response({"request_id": "r", "choices": [choice]})
