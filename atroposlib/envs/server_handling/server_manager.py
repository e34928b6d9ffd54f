"""All inference servers of an environment behind one client: the least loaded live one takes the next request."""

import asyncio
import contextlib
import functools
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from atroposlib.addresses import server_address
from atroposlib.envs.errors import NoTokenIds
from atroposlib.envs.metrics import Metrics
from atroposlib.envs.server_handling.dispatching.affinity import session
from atroposlib.envs.server_handling.dispatching.dispatch import (
    SPLITS,
    Dispatcher,
    RetryPolicy,
    Split,
    run_with_retries,
)
from atroposlib.envs.server_handling.managed_server import DummyManagedServer, ManagedServer
from atroposlib.envs.server_handling.openai_server import OpenAIServer
from atroposlib.envs.server_handling.proxy_client import create_proxy_session
from atroposlib.envs.server_handling.reasoning import ReasoningConfig
from atroposlib.envs.server_handling.server_baseline import APIServer, InferenceCalls
from atroposlib.envs.server_handling.server_config import (
    APIServerConfig,
    ServerBaseline,
    ServerEnvironment,
    ServerManagerConfig,
    ServerType,
)
from atroposlib.envs.server_handling.server_harness import ServerHarness
from atroposlib.envs.server_handling.sglang_server import SGLangServer
from atroposlib.envs.server_handling.topology import server_configs
from atroposlib.envs.server_handling.trl_vllm_server import TrlVllmServer
from atroposlib.envs.server_handling.vllm_server import VLLMServer
from atroposlib.logs import get_logger
from atroposlib.utils.tokenizers import load_tokenizer
from atroposlib.wire.servers import State

__all__ = ["APIServerConfig", "ServerBaseline", "ServerManager", "ServerManagerConfig"]

T = TypeVar("T")
log = get_logger(__name__)

# A new backend is one file and one line here.
SERVER_TYPES: dict[ServerType, type[APIServer]] = {
    "openai": OpenAIServer,
    "vllm": VLLMServer,
    "sglang": SGLangServer,
    "trl": TrlVllmServer,
}


def make_server(
    config: APIServerConfig,
    server_class: type[APIServer],
    reasoning_config: ReasoningConfig | None,
    retry: RetryPolicy,
) -> APIServer:
    """The client for `config`: of `server_class`, or, when that is the abstract one, by `config.server_type`."""
    chosen = SERVER_TYPES[config.server_type] if server_class is APIServer else server_class
    server = chosen(config, reasoning_config=reasoning_config)
    server.retry = retry
    server.health.dead_interval_s = retry.dead_interval_s
    return server


class ServerManager(InferenceCalls):
    """The environment's `self.server`.

    `configs` is a list (one server each), one APIServerConfig (that server), or a ServerBaseline (see
    `topology.py`). With `proxy_url` (or ATROPOS_PROXY_URL) managed servers are sessions of that proxy. Raises
    ValueError for a topology or server type that cannot be.
    """

    retry = RetryPolicy()
    tool_parser: str | None = None
    proxy_url: str | None = None
    allows_text_only: bool = False  # for an evaluation: servers that give no token ids will do

    def __init__(
        self,
        configs: ServerBaseline | Sequence[APIServerConfig],
        server_class: type[APIServer] = APIServer,
        slurm: bool = False,
        testing: bool = False,
        max_n_completions: int = 8,
        reasoning_config: ReasoningConfig | None = None,
        proxy_url: str | None = None,
        use_proxy: bool = False,
        tool_parser: str | None = None,
        *,
        retry: RetryPolicy | None = None,
        environment: ServerEnvironment | None = None,
    ) -> None:
        if environment is not None:
            self._environment = environment
        self.proxy_url = proxy_url or self._environment.proxy_url
        if use_proxy and not self.proxy_url:
            raise ValueError("use_proxy needs proxy_url, or ATROPOS_PROXY_URL")
        self.max_n_completions = max_n_completions
        self.retry = retry or RetryPolicy()
        self.tool_parser = tool_parser
        self._make = functools.partial(
            make_server, server_class=server_class, reasoning_config=reasoning_config, retry=self.retry
        )
        self._weight = 1.0
        self._left: list[APIServer] = []  # that get no more calls, and may still answer some
        self.servers: list[APIServer] = (
            [ServerHarness()] if testing else [*map(self._make, server_configs(configs, slurm, self._environment))]
        )
        for server in self.servers:
            server.ledger = self.ledger

    @functools.cached_property
    def _environment(self) -> ServerEnvironment:
        return ServerEnvironment.read()

    @functools.cached_property
    def _dispatchers(self) -> dict[tuple[APIServer, ...], dict[Split, Dispatcher[APIServer]]]:
        return {}

    @functools.cached_property
    def _pinned(self) -> dict[tuple[APIServer, ...], dict[Split, Dispatcher[APIServer]]]:
        return {}

    @property
    def tokenizer_id(self) -> str:
        return self.servers[0].tokenizer_id

    @property
    def model_name(self) -> str:
        return self.servers[0].model_name

    def dispatchers(self, servers: Sequence[APIServer], pinned: bool = False) -> dict[Split, Dispatcher[APIServer]]:
        """The queues of calls for any of `servers`, the same for the same servers. Servers that join or leave change
        those that are not `pinned`.
        """
        key, known = tuple(servers), self._pinned if pinned else self._dispatchers
        if key not in known:
            known[key] = {split: Dispatcher(key, split) for split in SPLITS}
        return known[key]

    async def follow(self, listed: Mapping[str, State]) -> bool:
        """Send requests to servers that have joined, as the batching API lists them, and no new ones to those that
        leave. Return whether any has come or gone. A server that joins is asked as the first of the configuration is.
        """
        known = {_listed_as(server): server for server in self.servers}
        changed = False
        for url, state in listed.items():
            server = known.get(url)
            if state == "serving" and server is None:
                await self._add(url)
            elif state in ("leaving", "left") and server is not None and not self._is_needed(server):
                self._remove(server)
            else:
                continue
            changed = True
        for server in [server for server in self._left if not self._is_used(server)]:
            self._left.remove(server)
            await server.close()
        return changed

    async def _add(self, url: str) -> None:
        server = self._make(self.servers[0].config.model_copy(update={"base_url": f"{url}/v1"}))
        server.ledger = self.ledger
        await server.update_weight(self._weight)
        log.info("The inference server at %s has joined: it gets requests", url)
        for servers in [*self._dispatchers]:
            dispatchers = self._dispatchers.pop(servers)
            for each in dispatchers.values():
                each.add(server)
            self._dispatchers[*servers, server] = dispatchers
        self.servers.append(server)

    def _is_needed(self, server: APIServer) -> bool:
        """Return whether some call could go nowhere else."""
        return any(servers == (server,) for servers in [tuple(self.servers), *self._dispatchers])

    def _is_used(self, server: APIServer) -> bool:
        """Return whether a call runs on it, or may yet: what is pinned to a server calls it after it has left."""
        return any(gate.in_use for gate in server.gates.values()) or any(server in each for each in self._pinned)

    def _remove(self, server: APIServer) -> None:
        log.info("The inference server at %s leaves: it gets no new requests", server.name)
        for servers in [servers for servers in self._dispatchers if server in servers]:
            dispatchers = self._dispatchers.pop(servers)
            for each in dispatchers.values():
                each.remove(server)
            self._dispatchers[tuple(other for other in servers if other is not server)] = dispatchers
        self.servers.remove(server)
        self._left.append(server)

    async def close(self) -> None:
        """Stop all health checks and close all connections."""
        await asyncio.gather(*(server.close() for server in [*self.servers, *self._left]))

    aclose = close  # as `contextlib.aclosing` calls it

    async def update_weight(self, weight: float) -> None:
        """Scale the request limits of all servers by the environment's share (0..1)."""
        self._weight = weight
        for server in self.servers:
            await server.update_weight(weight)

    async def wandb_metrics(self, metrics: Metrics | None = None) -> Metrics:
        """`metrics` with the request timings of every server since the last call."""
        gathered = dict(metrics or {})
        for index, server in enumerate(self.servers):
            gathered = await server.wandb_metrics(gathered, f"server_{index}")
        return gathered

    @contextlib.asynccontextmanager
    async def dedicated_server(self) -> AsyncIterator[APIServer]:
        """The live server with most free slots, for several requests; others are sent elsewhere first while this lasts.

        Its calls retry on that one server.
        """
        async with self.dispatchers(self.servers)["train"].slot() as server:
            server.dedicated_users += 1
        try:
            yield server
        finally:
            server.dedicated_users -= 1

    @contextlib.asynccontextmanager
    async def managed_server(
        self,
        tokenizer: Any = None,
        base_url: str | None = None,
        preserve_think_blocks: bool = False,
        track_tree: bool = False,
    ) -> AsyncIterator[Any]:
        """A client that keeps token ids and log-probabilities of all it samples; see `ManagedServer`.

        Its requests stay with the server that took the first one while that is live. `base_url` pins one server.
        Raises NoTokenIds when no server gives token ids, unless ATROPOS_ALLOW_DUMMY_MANAGED_SERVER is set.
        """
        if self.proxy_url:
            async with await create_proxy_session(
                self.proxy_url, base_url, self.tool_parser or "hermes", track_tree, preserve_think_blocks
            ) as session:
                session.ledger = self.ledger
                yield session
            return
        servers = self.servers_at(base_url) if base_url else self.servers
        able = [server for server in servers if server.supports_token_ids]
        if not able and (self.allows_text_only or self._environment.allow_dummy_managed_server):
            route = StickyRoute(self, servers, pinned=base_url is not None)
            yield DummyManagedServer(route, tokenizer, track_tree, self.tool_parser)
            return
        if not able:
            raise NoTokenIds(
                f"{', '.join(server.name for server in servers)} returns no token ids, which ManagedServer needs: use"
                " --openai.server_type vllm, or set ATROPOS_ALLOW_DUMMY_MANAGED_SERVER=1 to get placeholder tokens that"
                " must not be trained on"
            )
        route = StickyRoute(self, able, pinned=base_url is not None)
        tokenizer = tokenizer or self.tokenizer or await asyncio.to_thread(load_tokenizer, route.tokenizer_id)
        await asyncio.gather(*(server.compare_tokenizer(tokenizer) for server in able))
        yield ManagedServer(route, tokenizer, track_tree, self.tool_parser, preserve_think_blocks)

    def servers_at(self, base_url: str) -> list[APIServer]:
        """The servers at `base_url`. Raises ValueError when there is none."""
        servers = [server for server in self.servers if server.config.base_url.rstrip("/") == base_url.rstrip("/")]
        if not servers:
            raise ValueError(
                f"no inference server at {base_url}; there are: {', '.join(server.name for server in self.servers)}"
            )
        return servers

    async def _run(self, what: str, operation: Callable[[APIServer], Awaitable[T]], split: Split) -> T:
        result, _ = await run_with_retries(self.dispatchers(self.servers)[split], self.retry, split, what, operation)
        return result


class StickyRoute(InferenceCalls):
    """Calls that stay with one of the manager's servers, for its prefix cache, and move on when it dies. They carry one
    session id, for a router behind the server's address.
    """

    def __init__(self, manager: ServerManager, servers: Sequence[APIServer], pinned: bool = False) -> None:
        self.max_n_completions = manager.max_n_completions
        self.ledger = manager.ledger
        self._retry = manager.retry
        self._servers = servers
        self._server: APIServer | None = None
        self._dispatchers = manager.dispatchers(servers, pinned)
        self._session_id = uuid.uuid4().hex

    @property
    def tokenizer_id(self) -> str:
        return self._servers[0].tokenizer_id

    @property
    def model_name(self) -> str:
        return self._servers[0].model_name

    async def _run(self, what: str, operation: Callable[[APIServer], Awaitable[T]], split: Split) -> T:
        with session(self._session_id):
            result, self._server = await run_with_retries(
                self._dispatchers[split], self._retry, split, what, operation, self._server
            )
        return result


def _listed_as(server: APIServer) -> str:
    """Return a server's address as the batching API lists it; its own where it cannot be listed."""
    try:
        return server_address(server.config.base_url or "")
    except ValueError:
        return server.name
