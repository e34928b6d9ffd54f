"""Tells the fake ones among an environment's inference servers what they need to answer: the tokenizer that the
environment names and, under `process`, the reference answer of each item (`atroposlib/wire/fake_server.py`).
"""

from collections.abc import Sequence
from pathlib import Path

import aiohttp
import msgspec

from atroposlib.clients.replies import ReplyTooLong
from atroposlib.envs.errors import EnvError
from atroposlib.envs.payloads import Item
from atroposlib.envs.run.environment import Environment
from atroposlib.envs.server_handling.openai_server import OpenAIServer
from atroposlib.logs import get_logger
from atroposlib.utils.tokenizers import NO_TOKENIZER
from atroposlib.wire.fake_server import FAKE, ROUTE, FakeModel, FakeModels, Told

log = get_logger(__name__)

TIMEOUT = aiohttp.ClientTimeout(total=10.0)
LOADING = aiohttp.ClientTimeout(total=60.0)  # a tokenizer may have to come from the hub
REMEDY = "start it with --answer or --random"


class FakeServers:
    """The fake inference servers of `env`: usually none, and then nothing is told."""

    def __init__(self, env: Environment, servers: Sequence[tuple[OpenAIServer, FakeModel]]) -> None:
        self._env = env
        self._servers = servers

    async def tell_tokenizer(self) -> None:
        """Raises EnvError if a server cannot load it, or gives right answers, which are for `process` alone."""
        for server, model in self._servers:
            if model.right_answers:
                raise EnvError(f"{server.name} was started with --right, which answers `process` alone; {REMEDY}")
        await self.tell()

    async def tell_item(self, item: Item) -> None:
        """Before `item` is sampled, and no other with it. Raises EnvError if a server needs its reference answer and
        there is none.
        """
        if not self._servers:
            return
        samples = self._env._env_run.samples
        reference = samples.reference(item)
        for server, model in self._servers:
            if model.right_answers and reference is None:
                lacks, remedy = "has no reference answer to this item", "write reference_answer(item)"
                if where := samples.failed.get("reference_answer"):
                    lacks, remedy = f"could not give this item's reference answer: {where}", "correct that line"
                raise EnvError(
                    f"{server.name} was started with --right, but {type(self._env).__name__} {lacks}: {remedy}, or"
                    f" {REMEDY}"
                )
        await self.tell(reference)

    async def tell(self, reference: str | None = None) -> None:
        """Tell each the environment's tokenizer and the `reference` answer. Raises EnvError if one cannot load it."""
        body = msgspec.json.encode(Told(_name_anywhere(self._env.config.tokenizer_name), reference))
        for server, _ in self._servers:
            url = f"{server.base_url.removesuffix('/v1')}{ROUTE}"
            try:
                async with server.http.post(url, data=body, timeout=LOADING, allow_redirects=False) as reply:
                    if reply.status != 200:
                        raise EnvError(f"{url} replied {reply.status}: {(await reply.text())[:300]}")
            except (aiohttp.ClientError, TimeoutError) as error:
                raise EnvError(f"{url}: {error or 'no reply within 60 s'}") from error


def _name_anywhere(tokenizer: str) -> str | None:
    """The absolute path of a tokenizer's directory, or its hub name; None for no tokenizer."""
    if tokenizer == NO_TOKENIZER:
        return None
    return str(Path(tokenizer).resolve()) if Path(tokenizer).is_dir() else tokenizer


async def fake_servers(env: Environment) -> FakeServers:
    """Find the servers that say in /v1/models that they are fake ones."""
    servers = [server for server in env.server.servers if isinstance(server, OpenAIServer)]
    models = [(server, await _fake_model(server)) for server in servers]
    fakes = [(server, model) for server, model in models if model is not None]
    for server, _ in fakes:
        log.info("%s is a fake inference server", server.name)
    return FakeServers(env, fakes)


async def _fake_model(server: OpenAIServer) -> FakeModel | None:
    """Ask a fake server to describe itself; None for any other server, whatever it replies."""
    try:
        url = f"{server.base_url}/models"
        async with server.http.get(url, timeout=TIMEOUT, allow_redirects=False) as reply:
            models = msgspec.json.decode(await reply.read(), type=FakeModels).data
    except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError, ReplyTooLong):
        return None
    return models[0] if models and models[0].owned_by == FAKE else None
