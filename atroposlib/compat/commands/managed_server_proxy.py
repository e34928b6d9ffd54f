"""ManagedServer over HTTP: agents in any process use OpenAI's API, and the proxy keeps the sampled tokens for training.

    POST /sessions/create ─▶ uuid      POST /<uuid>/v1/chat/completions (OpenAI's form)
    DELETE /<uuid>                     POST /<uuid>/v1/chat/completions/render (the prompt)
    GET /sessions /servers             GET /<uuid>/nodes ─▶ tokens, masks, logprobs
    GET /v1/models /health

    python -m atroposlib.envs.server_handling.managed_server_proxy --config servers.json --port 9100

`servers.json` is {"model_name", "tokenizer_name", "servers": [{"base_url", "server_type", ...}]}. Loopback by
default; with `--token` every request but /health needs it. A session that is not used for `--session-timeout`
seconds is forgotten. Errors have OpenAI's form.
"""

import asyncio
import contextlib
import hmac
import json
import sys
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.datastructures import Headers
from starlette.types import Scope

from atroposlib.api.http.docs_page import add_docs_page
from atroposlib.config import Config, load_config
from atroposlib.envs.server_handling.errors import PermanentServerError, ServerError
from atroposlib.envs.server_handling.managed_server import ManagedServer
from atroposlib.envs.server_handling.server_config import APIServerConfig
from atroposlib.envs.server_handling.server_manager import ServerManager, StickyRoute
from atroposlib.errors import one_line_errors
from atroposlib.http_guard import HostGuard, HostName, OwnHosts
from atroposlib.logs import configure_logging, get_logger
from atroposlib.utils.tokenizers import Tokenizer, load_tokenizer

JsonObject = dict[str, Any]
log = get_logger(__name__)

DEFAULT_MAX_TOKENS = 1024
SESSION_TIMEOUT_S = 3600.0


class SessionRequest(BaseModel):
    """Body of /sessions/create."""

    tool_parser: str | None = "hermes"
    track_tree: bool = False
    base_url: str | None = None
    preserve_think_blocks: bool = False


class ChatRequest(BaseModel):
    """A chat request in OpenAI's form; further sampling parameters are passed on as they come."""

    model_config = ConfigDict(extra="allow")

    messages: list[dict[str, Any]]
    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    n: int | None = Field(default=None, ge=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | None = None

    def arguments(self) -> JsonObject:
        """Return the arguments of `ManagedServer.chat_completion`."""
        return self.model_dump(exclude={"model", "max_completion_tokens"}, exclude_none=True) | {
            "max_tokens": self.max_tokens or self.max_completion_tokens or DEFAULT_MAX_TOKENS,
            "temperature": 1.0 if self.temperature is None else self.temperature,
        }


@dataclass
class Session:
    """One conversation's (or rollout's) ManagedServer."""

    managed: ManagedServer
    request: SessionRequest
    created_at: float = field(default_factory=time.time)
    used_at: float = field(default_factory=time.monotonic)
    uuid: str = field(default_factory=lambda: str(uuid.uuid4()))

    def description(self, model_name: str) -> JsonObject:
        """Return the session's entry in /sessions."""
        return {
            "uuid": self.uuid,
            "model_name": model_name,
            "tool_parser": self.request.tool_parser,
            "base_url": self.request.base_url,
            "created_at": self.created_at,
        }


@dataclass
class Sessions:
    """The sessions of one proxy; those unused for `timeout_s` seconds are dropped as others come."""

    manager: ServerManager
    tokenizer: Any
    timeout_s: float
    by_id: dict[str, Session] = field(default_factory=dict)

    def create(self, request: SessionRequest) -> Session:
        """A new session. Raises ValueError for a server or a tool parser that there is not."""
        self.by_id = {
            key: each for key, each in self.by_id.items() if time.monotonic() - each.used_at <= self.timeout_s
        }
        servers = self.manager.servers_at(request.base_url) if request.base_url else self.manager.servers
        session = Session(
            ManagedServer(
                StickyRoute(self.manager, servers),
                self.tokenizer,
                request.track_tree,
                request.tool_parser,
                request.preserve_think_blocks,
            ),
            request,
        )
        self.by_id[session.uuid] = session
        return session

    def get(self, session_id: str) -> Session:
        """The session. Raises HTTPException when there is none."""
        if session_id not in self.by_id:
            raise HTTPException(
                404,
                f"no session {session_id}: it was never created, was deleted, or was not used for {self.timeout_s:g} s",
            )
        self.by_id[session_id].used_at = time.monotonic()
        return self.by_id[session_id]


def create_app(  # noqa: C901  its routes
    server_manager: ServerManager,
    tokenizer: Tokenizer,
    model_name: str = "default",
    token: str = "",
    session_timeout_s: float = SESSION_TIMEOUT_S,
    hosts: OwnHosts = OwnHosts(),  # noqa: B008  immutable
) -> FastAPI:
    """The proxy before `server_manager`'s servers, for clients that call it by one of `hosts`."""
    app = FastAPI(title="Atropos managed-server proxy", docs_url=None, redoc_url=None)
    add_docs_page(app)
    sessions = Sessions(server_manager, tokenizer, session_timeout_s)

    def bears_token(scope: Scope) -> bool:
        given = Headers(scope=scope).get("authorization", "").removeprefix("Bearer ")
        return bool(token) and hmac.compare_digest(given.encode(), token.encode())

    @app.middleware("http")
    async def authorise(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        if token and request.scope["path"] != "/health" and not bears_token(request.scope):
            return _error(401, "the Authorization header lacks the right bearer token")
        return await call_next(request)

    app.add_middleware(HostGuard, hosts=hosts, bears_token=bears_token)

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        return _error(error.status_code, error.detail)

    @app.exception_handler(ValueError)  # about what the client asked for
    async def bad_request(request: Request, error: ValueError) -> Response:
        return _error(400, str(error))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return _error(400, "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()))

    @app.exception_handler(ServerError)
    async def server_error(request: Request, error: ServerError) -> Response:
        return _error(400 if isinstance(error, PermanentServerError) else 502, str(error))

    @app.get("/health")
    async def health() -> JsonObject:
        return {"status": "ok", "model": model_name, "sessions": len(sessions.by_id)}

    @app.get("/v1/models")
    async def models() -> JsonObject:
        return {"object": "list", "data": [{"id": model_name, "object": "model", "owned_by": "atropos"}]}

    @app.get("/servers")
    async def servers() -> JsonObject:
        return {
            "servers": [
                {"base_url": server.name, "model_name": server.model_name, "healthy": server.server_healthy}
                for server in server_manager.servers
            ]
        }

    @app.get("/sessions")
    async def list_sessions() -> JsonObject:
        return {"sessions": [session.description(model_name) for session in sessions.by_id.values()]}

    @app.post("/sessions/create")
    async def create_session(request: SessionRequest) -> JsonObject:
        return sessions.create(request).description(model_name)

    @app.post("/{session_id}/v1/chat/completions")
    async def chat(session_id: str, request: ChatRequest) -> JsonObject:
        managed = sessions.get(session_id).managed
        _require_messages(request)
        reply = await managed.chat_completion(**request.arguments())
        return reply.model_dump(exclude_none=True) | {"model": model_name}

    @app.post("/{session_id}/v1/chat/completions/render")
    async def render(session_id: str, request: ChatRequest) -> JsonObject:
        managed = sessions.get(session_id).managed
        _require_messages(request)
        text = managed.render(request.messages, request.tools)
        ids = managed.tokenizer.encode(text, add_special_tokens=False)
        return {"prompt_text": text, "token_ids": ids, "num_tokens": len(ids)}

    @app.get("/{session_id}/nodes")
    async def nodes(session_id: str) -> JsonObject:
        return {"nodes": [node.model_dump() for node in sessions.get(session_id).managed.current_nodes]}

    @app.delete("/{session_id}")
    async def delete(session_id: str) -> JsonObject:
        sessions.get(session_id).managed.reset()
        del sessions.by_id[session_id]
        return {"status": "deleted", "uuid": session_id}

    return app


def _require_messages(request: ChatRequest) -> None:
    if not request.messages:
        raise HTTPException(400, "messages is empty; a chat completion needs at least one")


def _error(status: int, message: str) -> JSONResponse:
    kind = "server_error" if status >= 500 else "authentication_error" if status == 401 else "invalid_request_error"
    return JSONResponse({"error": {"message": message, "type": kind, "code": status}}, status)


class ProxyConfig(Config):
    """An OpenAI-compatible proxy that keeps the tokens of every completion for training."""

    servers: Path | None = Field(
        default=None,
        description="JSON file with model_name, tokenizer_name and servers (also --config, if it is .json).",
    )
    host: str = Field(default="127.0.0.1", description="Address to listen on; any address but loopback needs a token.")
    allowed_host: list[HostName] = Field(
        default=[], description="Another host name under which clients may address it; repeatable."
    )
    port: int = Field(default=9100, ge=0, le=65535, description="Port to listen on.")
    token: str = Field(default="", repr=False, description="Bearer token that every request but /health must carry.")
    session_timeout: float = Field(
        default=SESSION_TIMEOUT_S, gt=0, description="Seconds after which an unused session is forgotten."
    )


def read_servers(path: Path) -> tuple[str, str, list[APIServerConfig]]:
    """(model name, tokenizer name, servers) of the JSON file. Raises ValueError that says what is wrong with it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        name = content["model_name"]
        servers = [
            APIServerConfig(**{"model_name": name, "server_type": "vllm", **server}) for server in content["servers"]
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path}: {error!r}; expected model_name, tokenizer_name and a list of servers with base_url"
        ) from error
    return name, content.get("tokenizer_name") or name, servers


async def _serve(config: ProxyConfig, servers_file: Path) -> None:
    model_name, tokenizer_name, servers = read_servers(servers_file)
    async with contextlib.aclosing(ServerManager(servers)) as manager:
        app = create_app(
            manager,
            load_tokenizer(tokenizer_name),
            model_name,
            config.token,
            config.session_timeout,
            OwnHosts.of(config.host, config.allowed_host),
        )
        log.info(
            "Proxy for %s listens on http://%s:%d",
            ", ".join(server.name for server in manager.servers),
            config.host,
            config.port,
        )
        await uvicorn.Server(uvicorn.Config(app, host=config.host, port=config.port, log_level="warning")).serve()


def main(argv: list[str] | None = None) -> None:
    """Serve until interrupted."""
    arguments = [
        "--servers" if argument == "--config" else argument for argument in (sys.argv[1:] if argv is None else argv)
    ]
    config = load_config(ProxyConfig, arguments, prog="managed_server_proxy")
    configure_logging("proxy")
    if config.servers is None:
        raise SystemExit("managed_server_proxy: name the servers with --config servers.json")
    if config.host not in ("127.0.0.1", "localhost", "::1") and not config.token:
        raise SystemExit(
            f"managed_server_proxy: --host {config.host} is reachable by other machines: give --token, or listen on "
            "127.0.0.1"
        )
    with one_line_errors("managed_server_proxy", ValueError, OSError):
        asyncio.run(_serve(config, config.servers))


if __name__ == "__main__":
    main()
