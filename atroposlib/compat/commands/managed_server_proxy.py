"""The routes by which the ancestor's agents call the agent endpoint: OpenAI's chat in a session that they have created.

    POST /sessions/create ─▶ uuid      POST /<uuid>/v1/chat/completions (OpenAI's form)
    DELETE /<uuid>                     POST /<uuid>/v1/chat/completions/render (the prompt)
    GET /sessions /servers             GET /<uuid>/nodes ─▶ tokens, masks, logprobs
    GET /v1/models /health

    python -m atroposlib.envs.server_handling.managed_server_proxy --config servers.json --port 9100

`servers.json` is {"model_name", "tokenizer_name", "servers": [{"base_url", "server_type", ...}]}. Loopback by
default; with `--token` every request but /health needs it. A session that is not used for `--session-timeout`
seconds is forgotten. Errors have OpenAI's form. Unlike in the endpoint's own sessions, a call that is repeated is
sampled again, as by a ManagedServer in the environment's process.
"""

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from pydantic import BaseModel, Field
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from atroposlib.agents.dialects import chat
from atroposlib.agents.endpoint import ANY_MODEL, Endpoint, EndpointSettings, Handler, answered_in
from atroposlib.agents.model_call import NOT_FOUND, UNAUTHORISED, JsonObject, Refused
from atroposlib.agents.sessions import Limits, Session, Sessions, SessionSettings, nodes_as_json
from atroposlib.config import Config, load_config
from atroposlib.envs.server_handling.server_config import APIServerConfig
from atroposlib.envs.server_handling.server_manager import ServerManager
from atroposlib.errors import one_line_errors
from atroposlib.http_guard import HostGuard, HostName, OwnHosts
from atroposlib.logs import configure_logging, get_logger
from atroposlib.utils.tokenizers import Tokenizer, load_tokenizer

log = get_logger(__name__)

SESSION_TIMEOUT_S = 3600.0
BODY_BYTES = 1 << 30
NO_LIMIT = 2**53


class SessionRequest(BaseModel):
    """Body of /sessions/create."""

    tool_parser: str | None = "hermes"
    track_tree: bool = False
    base_url: str | None = None
    preserve_think_blocks: bool = False


@dataclass(frozen=True)
class Proxy(Endpoint):
    """See the module's head. Sessions that are unused for `timeout_s` seconds are dropped as others come."""

    timeout_s: float = SESSION_TIMEOUT_S

    def routes(self) -> Iterator[Route]:
        """The ancestor's."""
        yield Route("/health", self._health)
        for method, path, handler in (
            ("GET", "/v1/models", self._models),
            ("GET", "/servers", self._servers),
            ("GET", "/sessions", self._list),
            ("POST", "/sessions/create", self._create),
            ("POST", "/{session}/v1/chat/completions", self._chat),
            ("POST", "/{session}/v1/chat/completions/render", self._render),
            ("GET", "/{session}/nodes", self._nodes),
            ("DELETE", "/{session}", self._end),
        ):
            yield Route(path, self._guarded(handler), methods=[method])

    def _guarded(self, handler: Handler) -> Handler:
        """`handler` for whoever has the token; the code of an error is its status."""

        async def allowed(request: Request) -> Response:
            if self.settings.token and not self.opens_anything(request.scope):
                raise Refused(UNAUTHORISED, "the Authorization header lacks the right bearer token")
            return await handler(request)

        async def guarded(request: Request) -> Response:
            reply = await answered_in(chat, allowed)(request)
            if reply.status_code < 400 or not reply.body:
                return reply
            said = json.loads(bytes(reply.body))
            return JSONResponse({"error": said["error"] | {"code": reply.status_code}}, reply.status_code)

        return guarded

    def _of(self, request: Request) -> Session:
        """The session of the address, which is used now. Raises Refused."""
        name = request.path_params["session"]
        if name not in self.sessions.by_id:
            raise Refused(
                NOT_FOUND,
                f"no session {name}: it was never created, was deleted, or was not used for {self.timeout_s:g} s",
            )
        session = self.sessions.get(name)
        session.used_at = time.monotonic()
        return session

    async def _session(self, request: Request, body: JsonObject) -> Session:
        return self._of(request)

    def _description(self, session: Session) -> JsonObject:
        return {
            "uuid": session.record.id,
            "model_name": self.settings.model,
            "tool_parser": session.settings.tool_parser,
            "base_url": session.settings.base_url,
            "created_at": session.record.created_at,
        }

    async def _servers(self, request: Request) -> Response:
        servers = [
            {"base_url": server.name, "model_name": server.model_name, "healthy": server.server_healthy}
            for server in self.sessions.manager.servers
        ]
        return JSONResponse({"servers": servers})

    async def _list(self, request: Request) -> Response:
        return JSONResponse({"sessions": [self._description(each) for each in self.sessions.by_id.values()]})

    async def _create(self, request: Request) -> Response:
        now = time.monotonic()
        unused = [each for each in self.sessions.by_id.values() if now - each.used_at > self.timeout_s]
        await self.sessions.end(unused)
        body, _ = await self._body(request, may_be_empty=True)
        asked = SessionRequest.model_validate(body)
        limits = Limits(turns=NO_LIMIT, tokens=NO_LIMIT, time_s=NO_LIMIT, idle_s=NO_LIMIT, megabytes=NO_LIMIT)
        settings = SessionSettings(**asked.model_dump(), limits=limits, samples_again=True)
        return JSONResponse(self._description(await self.sessions.create(settings)))

    async def _render(self, request: Request) -> Response:
        managed = self._of(request).managed
        body, _ = await self._body(request)
        call = chat.read(body)
        text = managed.render(call.messages, call.tools)
        ids = managed.tokenizer.encode(text, add_special_tokens=False)
        return JSONResponse({"prompt_text": text, "token_ids": ids, "num_tokens": len(ids)})

    async def _nodes(self, request: Request) -> Response:
        return JSONResponse({"nodes": nodes_as_json(self._of(request).nodes)})

    async def _end(self, request: Request) -> Response:
        session = self._of(request)
        await self.sessions.end([session])
        return JSONResponse({"status": "deleted", "uuid": session.record.id})


def create_app(
    server_manager: ServerManager,
    tokenizer: Tokenizer,
    model_name: str = "default",
    token: str = "",
    session_timeout_s: float = SESSION_TIMEOUT_S,
    hosts: OwnHosts = OwnHosts(),  # noqa: B008  immutable
) -> Starlette:
    """The proxy before `server_manager`'s servers, for clients that call it by one of `hosts`."""
    settings = EndpointSettings(model_name, (ANY_MODEL,), token, hosts, BODY_BYTES)
    proxy = Proxy(Sessions(server_manager, tokenizer), settings, timeout_s=session_timeout_s)
    return Starlette(
        routes=list(proxy.routes()),
        middleware=[Middleware(HostGuard, hosts=hosts, bears_token=proxy.opens_anything)],
    )


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
