"""The policy as a LoRA adapter: which one this server samples from, and who may change it. Lives in vLLM's API
process.

    trainer ── POST /v1/bridge/adapter ─▶ checked ─▶ loaded beside the one served ─▶ current: new requests sample from it
                                                                                └─▶ the former leaves when its last request ends

A request keeps the adapter that it started with, so a change of policy stops and fails none. Names are never used
twice in a server's life: vLLM's prefix cache is keyed by them. Whatever is refused or fails leaves the adapter
served before. One trainer at a time: it holds a session by heartbeats; a newcomer is refused while the lease runs,
unless the holder is known to be gone.
"""

import asyncio
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atroposlib.wire.bridge import AdapterOffer, parse_offer
from atroposlib.wire.processes import is_alive, this_process
from atroposlib.wire.typed import WrongValue, brief, printable
from vllm_patching import compat
from vllm_patching.engines.adapter_files import Pairs, read_config, read_pairs
from vllm_patching.http.replies import Refused

log = compat.init_logger("vllm.atropos_bridge")

DEFAULT = "default"  # the policy that is served now, as environments may ask for it
BASE = "base"  # the model without an adapter
LOAD_DEADLINE_S = 60.0
POLL_S = 0.2


@dataclass
class _Session:
    offer: AdapterOffer
    renewed: float
    served: int | None = None

    def lease_left(self) -> float:
        return self.renewed + self.offer.lease_s - time.monotonic()

    def gone(self) -> bool:
        process = self.offer.process
        return process.same_place(this_process()) and not is_alive(process)


class PolicyTable(dict[str, Any]):
    """vLLM's table of adapters by name, in which the base model's own names stand for the current policy.

    vLLM looks a request's model up here first, so every OpenAI route samples from the current adapter whatever name
    the client knew.
    """

    def __init__(self, adapters: dict[str, Any], aliases: set[str | None]) -> None:
        super().__init__(adapters)
        self._aliases = aliases
        self.current: Any = None  # a LoRARequest; None while the base model is the policy

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (self.current is not None and name in self._aliases)

    def __getitem__(self, name: str) -> Any:
        return self.current if self.current is not None and name in self._aliases else super().__getitem__(name)


class Adapters:
    """`models` is vLLM's OpenAIServingModels, whose table of adapters is replaced by a PolicyTable."""

    def __init__(self, engine: Any, models: Any, model: str, max_rank: int) -> None:
        self._engine = engine
        self._models = models
        self._model = model
        self._max_rank = max_rank
        self._session: _Session | None = None
        self._versions: dict[str, int] = {}  # of every adapter name ever used
        self._retiring: set[asyncio.Task[None]] = set()
        self._lock = asyncio.Lock()
        aliases = {None, "", DEFAULT, *(path.name for path in models.base_model_paths)}
        compat.add_base_names(models, [DEFAULT, BASE])
        self._table = models.lora_requests = PolicyTable(models.lora_requests, aliases - {BASE})
        started_with = {name: int(match[1]) for name in self._table if (match := re.match(r"policy-v(\d+)", name))}
        if started_with:  # --lora-modules policy-v7=FOLDER: a server that is started again where a run stood
            self._versions.update(started_with)
            self._table.current = self._table[max(started_with, key=lambda name: started_with[name])]

    @property
    def policy_version(self) -> int:
        return self._version_of(self._table.current)

    def status(self) -> dict[str, Any]:
        session = self._session
        return {
            "policy_version": self.policy_version,
            "served_model": self._table.current.lora_name if self._table.current else self._model,
            "max_lora_rank": self._max_rank,
            "adapters_in_use": sorted(compat.adapters_in_use(self._engine)),
            "session": session.offer.session if session else None,
            "trainer": session.offer.trainer if session else None,
            "lease_left_s": round(session.lease_left(), 1) if session else None,
        }

    def resolve(self, name: str | None) -> tuple[Any, int]:
        """The adapter that a request for model `name` samples from (None: the base model), and its policy version."""
        name = name or DEFAULT
        if name in self._table:
            adapter = self._table[name]
            return adapter, self._version_of(adapter)
        if self._models.is_base_model(name):
            return None, 0
        raise Refused(
            f"the model {name!r} is not served: ask for {DEFAULT!r}, the current policy, or see /v1/models", 404
        )

    async def open(self, data: dict[str, Any]) -> dict[str, Any]:
        """Give the bridge to a trainer whose model and rank fit. Raises Refused, WrongValue."""
        offer = parse_offer(data, AdapterOffer)
        if not isinstance(offer, AdapterOffer):
            raise WrongValue(f"kind={brief(data['kind'])}: another route takes it")
        async with self._lock:
            self._check_base(offer.model, f"--model-name {offer.model}")
            self._check_rank(offer.rank)
            self._refuse_second_trainer()
            self._session = _Session(offer, time.monotonic())
            log.info("Trainer %s opens adapter session %s (lease %.0f s)", offer.trainer, offer.session, offer.lease_s)
            return {"policy_version": self.policy_version}

    async def heartbeat(self, session: str) -> dict[str, Any]:
        self._current(session).renewed = time.monotonic()
        return {"policy_version": self.policy_version}

    async def close(self, session: str) -> dict[str, Any]:
        current = self._current(session)
        log.info(
            "Trainer %s closes adapter session %s at policy version %d",
            current.offer.trainer,
            session,
            self.policy_version,
        )
        self._session = None
        return {"policy_version": self.policy_version}

    async def load(self, session: str | None, name: str, path: str, policy_version: int) -> dict[str, Any]:
        """Sample from the adapter folder `path` from now on, as `policy_version`; without a session only while no
        trainer holds one.
        """
        async with self._lock:
            if session is None:
                self._refuse_second_trainer()
            else:
                self._check_next(self._current(session), policy_version)
            self._check_name(name)
            pairs = await asyncio.to_thread(self._check_folder, path)
            start = time.perf_counter()
            log.info("Loading policy version %d from %s, at most %.0f s", policy_version, path, LOAD_DEADLINE_S)
            adapter = await self._load(name, path, pairs)
            former, self._table.current = self._table.current, adapter
            self._versions[name] = policy_version
            seconds = time.perf_counter() - start
            if session is not None:
                self._current(session).served = policy_version
            needed = {name} | compat.adapters_in_use(self._engine)
            if former is not None:
                needed.add(former.lora_name)  # a request may have chosen it a moment ago
                self._retire(former)
            log.info("Serving policy version %d as %s after %.1f ms", policy_version, name, seconds * 1e3)
            return {"policy_version": policy_version, "load_s": seconds, "needed": sorted(needed)}

    async def _load(self, name: str, path: str, pairs: Pairs) -> Any:
        """Load an adapter into every worker, and enter it in vLLM's table."""
        lora_id = self._models.lora_id_counter.inc(1)
        loading = self._engine.collective_rpc("bridge_add_adapter", args=(name, lora_id, path, pairs))
        try:
            errors = [error for error in await asyncio.wait_for(loading, LOAD_DEADLINE_S) if error is not None]
        except TimeoutError:
            errors = [f"not done within {LOAD_DEADLINE_S:.0f} s"]
        if errors:
            await self._engine.remove_lora(lora_id)
            raise Refused(f"vLLM cannot load {path}: {errors[0]}; it goes on with {self.status()['served_model']}", 422)
        self._table[name] = adapter = compat.adapter_request(name, lora_id, path)
        return adapter

    def _retire(self, former: Any) -> None:
        """Unload an adapter that is not current any more: its name at once, its weights when its last request has
        ended.
        """
        del self._table[former.lora_name]

        async def drop_when_unused() -> None:
            while former.lora_name in compat.adapters_in_use(self._engine):  # noqa: ASYNC110  vLLM tells nobody
                await asyncio.sleep(POLL_S)
            await self._engine.remove_lora(former.lora_int_id)
            log.info("Unloaded %s", former.lora_name)

        task = asyncio.create_task(drop_when_unused())
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    def _version_of(self, adapter: Any) -> int:
        return 0 if adapter is None else self._versions.get(adapter.lora_name, 0)

    def _current(self, session: str) -> _Session:
        if self._session is None or self._session.offer.session != session:
            holder = (
                f"session {self._session.offer.session} of {self._session.offer.trainer}"
                if self._session
                else "no session"
            )
            raise Refused(
                f"session {printable(session, 128)} is not the current one ({holder} is): open a new session", 404
            )
        return self._session

    def _refuse_second_trainer(self) -> None:
        current = self._session
        if current is not None and current.lease_left() > 0 and not current.gone():
            raise Refused(
                f"trainer {current.offer.trainer} holds session {current.offer.session} for another "
                f"{current.lease_left():.0f} s: stop it, or wait for its lease to end"
            )

    def _check_next(self, session: _Session, policy_version: int) -> None:
        session.renewed = time.monotonic()
        if session.served is not None and policy_version != session.served + 1:
            raise Refused(f"policy version {policy_version} does not follow {session.served}: it rises by one")

    def _check_name(self, name: str) -> None:
        if not name or name in self._versions or name in self._table or self._models.is_base_model(name):
            raise Refused(
                f"the adapter name {name!r} was used before on this server: take a new one for every version", 422
            )

    def _check_folder(self, path: str) -> Pairs:
        """What `path` adapts. Raises Refused unless it holds an adapter for this model that fits this server."""
        if not Path(path).is_absolute():
            raise Refused(f"path {path!r} is not absolute: give the folder's whole path", 422)
        try:
            config = read_config(Path(path))
            self._check_rank(max(config.ranks))
            if config.base_model_name_or_path is not None:
                self._check_base(config.base_model_name_or_path, path)
            return read_pairs(Path(path), config, compat.served_torch_dtype(self._engine))
        except (OSError, ValueError) as error:  # ValueError: AdapterFault, and a path with a zero byte
            raise Refused(
                f"{printable(path, 300)} cannot be read as a PEFT adapter folder ({printable(str(error), 900)}): "
                "trainer and vLLM must see it under the same path",
                422,
            ) from error

    def _check_rank(self, rank: int) -> None:
        if rank > self._max_rank:
            raise Refused(
                f"an adapter of rank {rank} is more than this server's --max-lora-rank {self._max_rank}: "
                "restart vLLM with a higher one, or train with a lower --lora-r",
                422,
            )

    def _check_base(self, base: str, whose: str) -> None:
        if base != self._model and not (
            Path(base).is_dir() and Path(self._model).is_dir() and Path(base).samefile(self._model)
        ):
            raise Refused(
                f"{whose} is for the model {base}, this server serves {self._model}: give both the same name or path",
                422,
            )
