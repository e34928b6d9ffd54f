"""The policy as a LoRA adapter: loads each version, and decides which one requests sample from. In vLLM's API process.

    trainer ── POST /v1/bridge/adapter ─▶ checked ─▶ loaded beside the one served ─▶ current: sampled from
                                               the former is unloaded when its last request ends ◀─┘

A request keeps the adapter that it started with, so a new version neither stops nor fails one. A server never uses a
name twice, because names are keys of vLLM's prefix cache. After a refusal or a failure, the previous adapter is still
served.
"""

import asyncio
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct

from atroposlib.wire.bridge import AdapterLoaded, AdapterOffer, Served
from atroposlib.wire.typed import Name, PolicyVersion, printable
from vllm_patching import vllm_types
from vllm_patching.compat import vllm_engine, vllm_server
from vllm_patching.engines.adapter_files import Pairs, read_config, read_pairs
from vllm_patching.engines.base import Engine, FileFault, Refused, Serving, WorkerFailed, log
from vllm_patching.engines.session import Route, Sessions

DEFAULT = "default"  # the policy that is served now, as environments may ask for it
BASE = "base"  # the model without an adapter
POLL_S = 0.2


class PolicyTable(dict[str, Any]):
    """vLLM's table of adapters by name, in which the names of the base model mean the current policy.

    vLLM looks up a request's model here first, so every OpenAI route samples from the current adapter, whichever of
    these names the client sends.
    """

    def __init__(self, adapters: Mapping[str, object], aliases: set[str | None]) -> None:
        super().__init__(adapters)
        self._aliases = aliases
        self.current: vllm_types.LoRARequest = None  # None while the base model is the policy

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (self.current is not None and name in self._aliases)

    def __getitem__(self, name: str) -> object:
        return self.current if self.current is not None and name in self._aliases else super().__getitem__(name)


class Adapter(Struct):
    """An adapter's directory, and the name it gets."""

    name: Name
    path: Annotated[str, Meta(min_length=1, max_length=4096)]
    policy_version: PolicyVersion
    session: Name | None = None


@dataclass
class _Staged:
    version: int
    request: vllm_types.LoRARequest
    start: float


class AdapterEngine(Engine):
    """Replaces the adapter table of vLLM's OpenAIServingModels by a PolicyTable; `stage` loads an adapter beside the
    one served, `apply` makes it the current one.
    """

    takes_adapters = True

    def __init__(self, serving: Serving) -> None:
        super().__init__(serving)
        models = serving.models
        self._staged: _Staged | None = None
        self._versions: dict[str, int] = {}  # of every adapter name ever used
        aliases = {None, "", DEFAULT, *(path.name for path in models.base_model_paths)}
        vllm_server.add_base_names(models, [DEFAULT, BASE])
        self._table = models.lora_requests = PolicyTable(models.lora_requests, aliases - {BASE})
        started_with = {name: int(match[1]) for name in self._table if (match := re.match(r"policy-v(\d+)", name))}
        if started_with:  # --lora-modules policy-v7=DIR: a server restarted in the middle of a run
            self._versions.update(started_with)
            self._table.current = self._table[max(started_with, key=lambda name: started_with[name])]
            serving.served_model = self._table.current.lora_name
        serving.policy_version = self._version_of(self._table.current)

    def resolve(self, name: str | None) -> tuple[vllm_types.LoRARequest, int]:
        """The adapter that a request for model `name` samples from (None: the base model), and its policy version."""
        name = name or DEFAULT
        if name in self._table:
            adapter = self._table[name]
            return adapter, self._version_of(adapter)
        if self.serving.models.is_base_model(name):
            return None, 0
        raise Refused(
            f"the model {name!r} is not served: ask for {DEFAULT!r}, the current policy, or see /v1/models", 404
        )

    async def fits(self, offer: AdapterOffer) -> None:
        await asyncio.to_thread(self._check_base, offer.model, f"--model-name {offer.model}")
        self._check_rank(offer.rank)

    async def open(self, offer: AdapterOffer) -> Served:
        return Served(self.serving.policy_version)

    async def stage(self, version: int, request: Adapter) -> None:
        name, models = request.name, self.serving.models
        if name in self._versions or name in self._table or models.is_base_model(name):
            raise Refused(
                f"the adapter name {name!r} was used before on this server: choose a new name for every version", 422
            )
        pairs = await asyncio.to_thread(self._check_folder, request.path)
        start = time.perf_counter()
        log.info("Loading policy version %d from %s", version, request.path)
        lora_id = models.lora_id_counter.inc(1)
        try:
            await self.serving.rpc("bridge_add_adapter", request.name, lora_id, request.path, pairs)
        except WorkerFailed as failed:
            await self.serving.client.remove_lora(lora_id)
            raise Refused(
                f"vLLM cannot load {request.path}: {failed.reason}; it keeps serving {self.serving.served_model}", 422
            ) from None
        self._staged = _Staged(version, vllm_server.adapter_request(request.name, lora_id, request.path), start)

    async def apply(self, version: int) -> AdapterLoaded:
        staged, self._staged = self._staged, None
        if staged is None or staged.version != version:
            raise Refused(f"policy version {version} is not loaded: POST /v1/bridge/adapter loads and serves it")
        name = staged.request.lora_name
        former, self._table.current = self._table.current, staged.request
        self._table[name] = staged.request
        self._versions[name] = self.serving.policy_version = version
        self.serving.served_model = name
        needed = {name} | vllm_server.adapters_in_use(self.serving.client)
        if former is not None:
            needed.add(former.lora_name)  # a request may have chosen it a moment ago
            del self._table[former.lora_name]
            self.serving.in_background(self._unload_when_unused(former))
        seconds = time.perf_counter() - staged.start
        log.info("Serving policy version %d as %s after %.1f ms", version, name, seconds * 1e3)
        return AdapterLoaded(version, seconds, sorted(needed))

    async def _unload_when_unused(self, former: vllm_types.LoRARequest) -> None:
        while former.lora_name in vllm_server.adapters_in_use(self.serving.client):  # noqa: ASYNC110  vLLM sends no event
            await asyncio.sleep(POLL_S)
        await self.serving.client.remove_lora(former.lora_int_id)
        log.info("Unloaded %s", former.lora_name)

    def _version_of(self, adapter: vllm_types.LoRARequest) -> int:
        return 0 if adapter is None else self._versions.get(adapter.lora_name, 0)

    def _check_folder(self, path: str) -> Pairs:
        """Return what `path` adapts. Raises Refused unless it has an adapter for this model that fits this server."""
        if not Path(path).is_absolute():
            raise Refused(f"path {path!r} is not absolute: give the absolute path of the directory", 422)
        try:
            config = read_config(Path(path))
            self._check_rank(max(config.ranks))
            if config.base_model_name_or_path is not None:
                self._check_base(config.base_model_name_or_path, path)
            return read_pairs(Path(path), config, vllm_engine.served_dtype(self.serving.client))
        except (FileFault, OSError, ValueError) as error:  # ValueError: a path with a zero byte
            raise Refused(
                f"{printable(path, 300)} cannot be read as a PEFT adapter directory ({printable(str(error), 900)}): "
                "trainer and vLLM must see it under the same path",
                422,
            ) from error

    def _check_rank(self, rank: int) -> None:
        limit = self.serving.max_lora_rank
        if limit is not None and rank > limit:
            raise Refused(
                f"an adapter of rank {rank} is more than this server's --max-lora-rank {limit}: "
                "restart vLLM with a higher one, or train with a lower --lora-r",
                422,
            )

    def _check_base(self, base: str, whose: str) -> None:
        if base != self.serving.model and not _same_directory(base, self.serving.model):
            raise Refused(
                f"{whose} is for the model {base}, this server serves {self.serving.model}:"
                " give both the same name or path",
                422,
            )


def _same_directory(one: str, other: str) -> bool:
    with suppress(OSError, ValueError):  # ids are no paths, and a path may be another user's
        return Path(one).is_dir() and Path(one).samefile(other)
    return False


async def _load(sessions: Sessions, body: Adapter) -> Served:
    """For a session's trainer, or by hand while no trainer holds the server."""
    if body.session is not None:
        return await sessions.commit(body.session, body.policy_version, body)
    async with sessions.lock:
        await sessions.refuse_second_trainer()
        engine = sessions.engine_for(AdapterOffer)
        await engine.stage(body.policy_version, body)
        return await engine.apply(body.policy_version)


ROUTES = (
    Route("/v1/bridge/adapter/session", AdapterOffer, AdapterOffer, Sessions.open),
    Route("/v1/bridge/adapter", AdapterOffer, Adapter, _load),
)
