"""`atropos agent-endpoint`: the endpoint as a process of its own."""

import asyncio
import contextlib
import gc
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import uvicorn
from pydantic import ValidationError
from starlette.types import ASGIApp

from atroposlib.addresses import listening_socket, netloc
from atroposlib.agents.endpoint import EndpointSettings, create_app
from atroposlib.agents.flags import API_TOKEN, PROG, AgentEndpointConfig
from atroposlib.agents.sessions import Sessions
from atroposlib.agents.turn_journal import TurnJournal
from atroposlib.api.http.connections import Connection, Connections, Limits, connections_allowed
from atroposlib.clients.batching_api import ApiRefused, ApiUnreachable, AsyncBatchingApi, Flags
from atroposlib.clients.waiting import NotYet
from atroposlib.config import load_config
from atroposlib.envs.limits.waits import wait_for_peer
from atroposlib.envs.sampling.chat_template import with_template
from atroposlib.envs.server_handling.server_baseline import APIServer
from atroposlib.envs.server_handling.server_config import APIServerConfig
from atroposlib.envs.server_handling.server_manager import ServerManager
from atroposlib.errors import WRONG_USE, AtroposError, one_line_errors, reason
from atroposlib.http_guard import OwnHosts, is_loopback
from atroposlib.logs import configure_logging, get_logger, print_error
from atroposlib.utils.tokenizers import load_tokenizer
from atroposlib.wire import routes
from atroposlib.wire.servers import LISTED_EVERY_S

log = get_logger(__name__)

POLL_S = 0.02


@dataclass(frozen=True)
class Listening:
    """An endpoint that serves in this event loop."""

    sessions: Sessions
    url: str


@contextlib.asynccontextmanager
async def listening(
    sessions: Sessions,
    settings: EndpointSettings,
    host: str = "127.0.0.1",
    port: int = 0,
    wrapped: Callable[[ASGIApp], ASGIApp] = lambda app: app,
) -> AsyncIterator[Listening]:
    """The endpoint on a port of its own while the block runs, once its journal's sessions are there again; `wrapped`
    puts something around it that sees each request. Raises OSError where it cannot listen, JournalError.
    """
    await sessions.restore()
    listener = _listener(host, port)
    limits = Limits(most=connections_allowed(Limits.most))
    config = uvicorn.Config(
        wrapped(create_app(sessions, settings)),
        http=partial(Connection, Connections(limits)),  # type: ignore[arg-type]
        ws="none",
        log_config=None,
        log_level="warning",
        access_log=False,
    )
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # type: ignore[assignment,method-assign]
    task = asyncio.create_task(server.serve([listener]))
    try:
        while not server.started:
            if task.done():
                await task
                raise OSError(f"the agent endpoint ended before it served {netloc(host, port)}: see its log")
            await asyncio.sleep(POLL_S)
        yield Listening(sessions, f"http://{netloc(host, listener.getsockname()[1])}")
    finally:
        server.should_exit = True
        await task


def _listener(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return listening_socket(str(address[0]), port, family, backlog=2048)
    except OSError as error:
        where = netloc(host, port)
        raise OSError(
            f"the agent endpoint cannot listen on {where}: {reason(error)}; correct --host or --port"
        ) from None


async def _context_of(server: APIServer, wait_s: float) -> int | None:
    """The tokens of the server's context, once it answers. Raises PeerError."""

    async def attempt() -> int | None:
        if (problem := await server.probe()) is not None:
            raise NotYet(str(problem))
        return await server.context_length()

    return await wait_for_peer(
        "answer of the inference server", server.name, attempt, timeout_s=wait_s, remedy="start it, or correct --server"
    )


@contextlib.contextmanager
def modules_uncollected() -> Iterator[None]:
    """Have the garbage collector pass over all that is loaded by now while the block runs. Modules last as long, and
    each full collection of theirs would hold up every call for a tenth of a second.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.asynccontextmanager
async def following(manager: ServerManager, url: str, token: str = "") -> AsyncIterator[None]:
    """Call servers that join the run, and no more those that leave it, as its batching API at `url` lists them, while
    the block runs. Without a `url`, the servers stay those of `manager`.
    """
    if not url:
        yield
        return
    async with (
        contextlib.aclosing(AsyncBatchingApi(url, token, Flags("--api", API_TOKEN))) as api,
        asyncio.TaskGroup() as tasks,
    ):
        task = tasks.create_task(_follow(manager, api))
        yield
        task.cancel()


async def _follow(manager: ServerManager, api: AsyncBatchingApi) -> None:
    while True:
        try:
            await manager.follow((await api.call(routes.SERVERS)).servers)
        except ApiUnreachable as error:
            log.debug("The list of servers is asked for again: %s", error)
        except ApiRefused as error:
            log.warning("Servers that join the run get no calls: %s", error)
            return
        await asyncio.sleep(LISTED_EVERY_S)


def _servers(config: AgentEndpointConfig) -> list[APIServerConfig]:
    key = {"api_key": config.server_key.get_secret_value()}
    tokenizer = config.tokenizer or config.model
    try:
        return [
            APIServerConfig(base_url=url, server_type="vllm", model_name=config.model, tokenizer_name=tokenizer, **key)
            for url in config.server
        ]
    except ValidationError as error:
        raise ValueError(f"--server: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from None


async def _serve(config: AgentEndpointConfig) -> None:
    manager = ServerManager(_servers(config))
    journal = TurnJournal(config.journal) if config.journal is not None else None
    settings = EndpointSettings(
        model=config.model,
        models=tuple(config.also_model),
        token=config.token.get_secret_value(),
        hosts=OwnHosts.of(config.host, config.allowed_host),
        body_bytes=int(config.max_body_mb * 2**20),
        keep_alive_s=config.keep_alive_s,
    )
    kept = contextlib.closing(journal) if journal is not None else contextlib.nullcontext()
    async with contextlib.aclosing(manager):
        context = await _context_of(manager.servers[0], config.wait_s)
        tokenizer = load_tokenizer(manager.servers[0].tokenizer_id)
        if config.chat_template is not None or config.chat_template_kwargs:
            tokenizer = with_template(tokenizer, config.chat_template, config.chat_template_kwargs)
        sessions = Sessions(manager, tokenizer, journal, context)
        with kept, modules_uncollected():  # calls under way end in the journal, so it is closed last
            async with (
                listening(sessions, settings, config.host, config.port) as endpoint,
                following(manager, config.api, config.api_token.get_secret_value()),
            ):
                log.info("The agent endpoint for %s listens on %s", ", ".join(config.server), endpoint.url)
                await asyncio.Event().wait()


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until interrupted. Returns the exit status."""
    config = load_config(AgentEndpointConfig, argv, prog=PROG)
    configure_logging("agents")
    if not is_loopback(config.host) and not config.token.get_secret_value():
        said = f"--host {config.host} is reachable by other machines: give --token, or listen on 127.0.0.1"
        print_error(PROG, said)
        return WRONG_USE
    with one_line_errors(PROG, ValueError, OSError, AtroposError), contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(config))
    return 0


if __name__ == "__main__":
    main()
