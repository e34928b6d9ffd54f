"""The ranks of one trainer, and how rank 0 makes all of them run the same method.

    rank 0   fetches, decides, reports    learner.update(7) ──▶ update(7) ┐
    rank 1   follows                                           update(7) ├─▶ did it work on every rank?
    rank 2   follows                                           update(7) ┘

Only rank 0 talks to the batching API, to vLLM and to people; when it asks, the others send their weights to vLLM's
workers. A method marked `collective` runs on every rank: rank 0 sends its name and arguments (msgpack, no pickle), all
ranks execute it, and an error of one ends all. Between two calls the others wait at the store, however long rank 0
waits for a batch; there each rank shows once a second that it lives. With one rank all of this is a plain method call.
"""

import contextlib
import functools
import hashlib
import inspect
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, get_type_hints

import msgspec
import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from atroposlib.clients.waiting import NotYet, Wait, wait_for, waiting
from atroposlib.errors import AtroposError, reading
from atroposlib.logs import get_logger
from example_trainer.errors import TrainerError
from example_trainer.memory.plan import computes_in, offloads
from example_trainer.ranks.partition import REPLICATE, SHARD, TP, has_tp
from example_trainer.ranks.place import CHOSEN, INTERFACE, LOST, Place, check_ranks
from example_trainer.settings.config import TrainerConfig
from vllm_patching.transport import address_towards, describe, host_store

log = get_logger(__name__)

P = ParamSpec("P")
R = TypeVar("R")
PULSE_S = 1.0  # between two signs of life of a rank
FIRST_PAUSE_S, LAST_PAUSE_S = 0.0002, 0.03  # between two looks of a rank for the next call
LOOPBACK = "lo"
FAILURES = "failures"  # how many ranks have failed, in the store


class RanksLost(TrainerError):
    """Another rank of this trainer ended, or was silent for --dist-timeout-s."""

    exit_status = LOST  # tells spawn.py, which knows why, from errors that are reported already


class ToldElsewhere(TrainerError):
    """An error that another rank prints."""


class HasRanks(Protocol):
    """Declares that an object has `ranks`, so that it can have collective methods."""

    ranks: "Ranks"


class Call(msgspec.Struct):
    """Carries what rank 0 asks of the others; they get the arguments by broadcast."""

    method: str
    nbytes: int


class Ranks:
    """This rank among `size`. `Ranks()` is the trainer of one process, which needs no process group.

    `mesh` is what the weights are spread over: ("shard",), ("replicate", "shard"), or one of them and "tp" behind it
    (partition.py). The ranks along "tp" compute the same micro-batches; they are one of `shares` of a batch.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        *,
        store: dist.Store | None = None,
        mesh: DeviceMesh | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self.rank = rank
        self.size = size
        self.mesh = mesh
        tp = mesh.size((mesh.mesh_dim_names or ()).index(TP)) if mesh is not None and has_tp(mesh) else 1
        self.share, self.shares = rank // tp, size // tp
        self.counts = rank % tp == 0  # whether what it measures is not another rank's, too
        self._timeout_s = timeout_s
        self._calls = 0
        self._together = False  # inside a collective method
        self._left = False
        self._parted = False  # rank 0 has nobody to call any more
        if size > 1:
            assert store is not None
            self._store = store
            self._control = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
            self._seen = {other: ("", time.monotonic()) for other in range(size) if other != rank}
            self._looked = 0.0
            self._pulse(0)
            self._stop = threading.Event()
            self._pulses = threading.Thread(target=self._keep_pulse, name="TrainerPulse", daemon=True)
            self._pulses.start()

    @property
    def leads(self) -> bool:
        """Return whether this is rank 0."""
        return self.rank == 0

    @property
    def parted(self) -> bool:
        """On rank 0, whether a call has begun that not every rank came out of: what the others did is not known."""
        return self._parted

    # --- what every rank does -----------------------------------------------------------------------------------------

    def together(self, method: Callable[..., R], owner: HasRanks, *args: object) -> R:
        """Run `method` on every rank; what it returns here. Raises TrainerError if it failed on this one, ToldElsewhere
        on another one, RanksLost if one is gone.
        """
        if self.size == 1 or self._together:
            return method(owner, *args)
        assert self.leads, f"rank {self.rank} calls {method.__name__} by itself"
        if self._parted:
            raise RanksLost(f"the trainer ranks have diverged: {method.__name__} is not done")
        payload = msgspec.msgpack.encode(args, enc_hook=_pack_array)
        self._parted = True  # unless all of them come out of it
        with self._reaching_ranks(method.__name__):
            self._store.set(self._key(), msgspec.json.encode(Call(method.__name__, len(payload))).decode())
            self._send(payload)
            result = self._agreed(functools.partial(method, owner, *args))
            self._store.delete_key(self._key())
            self._store.delete_key(f"met/{self._calls}")
        self._parted = False
        self._calls += 1
        return result

    def follow(self, owner: HasRanks) -> None:
        """On a rank other than 0: do what rank 0 asks for, until it leaves. Raises as `together` does."""
        while (call := self._next_call()) is not None:
            method = getattr(type(owner), call.method).__wrapped__
            with self._reaching_ranks(call.method):
                args = msgspec.msgpack.decode(self._receive(call.nbytes), type=_arguments(method), dec_hook=_array)
                self._agreed(functools.partial(method, owner, *args))
            self._calls += 1
        with contextlib.suppress(RuntimeError):  # rank 0 waits for it for a moment only
            self._store.add("left", 1)
        self.leave()

    def check(self) -> None:
        """Raise RanksLost if a rank has been silent for --dist-timeout-s. Rank 0 watches all others, and they watch
        it alone. Never waits.
        """
        now = time.monotonic()
        if self.size == 1 or now - self._looked < PULSE_S:
            return
        self._looked = now
        watched = [other for other in self._seen if self.leads or other == 0]
        with self._reaching_ranks("waiting"):
            counts = self._store.multi_get([f"pulse/{other}" for other in watched])
        for other, count in zip(watched, map(str, counts), strict=True):
            before, since = self._seen[other]
            if count != before:
                self._seen[other] = (count, now)
            elif now - since > self._timeout_s:
                raise RanksLost(
                    f"trainer rank {other} of {self.size} has been silent for {now - since:.0f} s"
                    f" (--dist-timeout-s {self._timeout_s:g})"
                )

    def leave(self) -> None:
        """End this rank's part; rank 0 has the others end, too. Does nothing a second time."""
        if self._left:
            return
        self._left = True
        if self.size > 1:
            try:
                if self.leads:
                    self._store.set(self._key(), "")
                    self._await_others()
            except RuntimeError as error:
                log.warning("Could not tell the other trainer ranks that this one leaves: %s", describe(error))
            self._stop.set()
            self._pulses.join(2 * PULSE_S)  # it waits for the store, which may be in a rank that is stopped
            # C++ threads must end while the interpreter still lives
            del self._store, self._control
        if self.mesh is not None:
            dist.destroy_process_group()

    def _await_others(self) -> None:
        """Keep the store, which is in rank 0, until the others know that they end; not if one of them may be lost."""
        deadline = time.monotonic() + 2 * PULSE_S
        while not self._parted and self._store.add("left", 0) < self.size - 1 and time.monotonic() < deadline:
            time.sleep(LAST_PAUSE_S / 10)

    def meet(self) -> None:
        """Return when every rank has come here, once per call, however long the others take. Raises RanksLost if one is
        gone, or gives no sign of life for --dist-timeout-s; ToldElsewhere if one has failed. A collective would also
        end for a rank that is still at work after that time.
        """
        if self.size == 1:
            return
        key = f"met/{self._calls}"

        def all_came() -> bool:
            if self._store.add(FAILURES, 0):
                raise ToldElsewhere("another trainer rank failed")
            return self._store.add(key, 0) == self.size

        with self._store_of_rank_0():
            self._store.add(key, 1)
            self._look_until(all_came)

    # --- sums over ranks ----------------------------------------------------------------------------------------------

    def sum(self, values: Tensor) -> Tensor:
        """The sum over shares of the batch of `values`, on the CPU in float64; with one rank as they are."""
        if self.size == 1:
            return values
        return self._reduced(values if self.counts else torch.zeros_like(values), dist.ReduceOp.SUM)

    def largest(self, values: Tensor) -> Tensor:
        """The largest over ranks of each of `values`."""
        return values if self.size == 1 else self._reduced(values, dist.ReduceOp.MAX)

    def rows(self, column: Tensor) -> Tensor:
        """The ranks' columns [n of each] one after the other, on every rank, on the CPU."""
        if self.size == 1:
            return column
        mine = column.detach().cpu()
        lengths = [int(length) for length in self._gathered(torch.tensor([len(mine)]))]
        if max(lengths) == 0:
            return mine
        padded = torch.cat([mine, mine.new_zeros(max(lengths) - len(mine))])
        return torch.cat([row[:length] for row, length in zip(self._gathered(padded), lengths, strict=True)])

    def _gathered(self, mine: Tensor) -> list[Tensor]:
        tensors = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(tensors, mine, group=self._control)
        return tensors

    def _reduced(self, values: Tensor, how: object) -> Tensor:
        values = values.detach().to("cpu", torch.float64)
        dist.all_reduce(values, how, group=self._control)
        return values

    # --- the wire between ranks ---------------------------------------------------------------------------------------

    def _key(self) -> str:
        return f"call/{self._calls}"

    def _next_call(self) -> Call | None:
        with self._store_of_rank_0():
            # the store's own `wait` logs a warning whenever its time is over
            self._look_until(lambda: self._store.check([self._key()]))
            message = self._store.get(self._key())
        return msgspec.json.decode(message, type=Call) if message else None

    def _look_until(self, done: Callable[[], bool]) -> None:
        """Return once `done`, after longer and longer pauses. Raises RanksLost as `check` does."""
        pause_s = FIRST_PAUSE_S
        while not done():
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, LAST_PAUSE_S)
            self.check()

    @contextmanager
    def _store_of_rank_0(self) -> Iterator[None]:
        try:
            yield
        except TrainerError:
            raise
        except RuntimeError as error:
            raise RanksLost(f"trainer rank 0 of {self.size} is gone: {describe(error)}") from error

    def _send(self, payload: bytes) -> None:
        if payload:
            dist.broadcast(torch.frombuffer(bytearray(payload), dtype=torch.uint8), 0, group=self._control)

    def _receive(self, nbytes: int) -> bytes:
        buffer = torch.empty(nbytes, dtype=torch.uint8)
        dist.broadcast(buffer, 0, group=self._control)
        return buffer.numpy().tobytes()

    def _agreed(self, act: Callable[[], R]) -> R:
        """Return what `act` returns, once every rank has done it.

        Raises its TrainerError. That ends this process, which the others notice, at the end of `act` or in its midst.
        Of several ranks that fail the first one has the error, and the others ToldElsewhere.
        """
        self._together = True
        try:
            result = act()
        except RanksLost:
            raise
        except TrainerError as error:
            if self._store.add(FAILURES, 1) == 1:
                raise
            raise ToldElsewhere(str(error)) from error
        finally:
            self._together = False
        self._gathered(torch.zeros(1))
        return result

    @contextmanager
    def _reaching_ranks(self, what: str) -> Iterator[None]:
        try:
            yield
        except AtroposError:
            raise
        except RuntimeError as error:  # torch.distributed's, for a rank that is gone or silent
            if not isinstance(error, dist.DistError) and "gloo" not in str(error).lower():
                raise
            if self.leads and self._store.add(FAILURES, 0):
                raise ToldElsewhere(f"another trainer rank failed in `{what}`") from error
            raise RanksLost(
                f"another of the {self.size} trainer ranks is gone, or silent for {self._timeout_s:g} s"
                f" (--dist-timeout-s), in `{what}`: {describe(error)}"
            ) from error

    def _pulse(self, count: int) -> None:
        self._store.set(f"pulse/{self.rank}", str(count))

    def _keep_pulse(self) -> None:
        count = 0
        while not self._stop.wait(PULSE_S):
            count += 1
            try:
                self._pulse(count)
            except RuntimeError:  # the store went with rank 0, which the next wait reports
                return


ALONE = Ranks()


def collective(method: "Callable[Concatenate[Any, P], R]") -> "Callable[Concatenate[Any, P], R]":
    """A method that rank 0 calls and every rank runs. Its arguments are of types that msgspec decodes, and arrays."""

    signature = inspect.signature(method)

    @functools.wraps(method)
    def on_every_rank(owner: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        assert not kwargs, "pass the arguments by position"
        given = signature.bind(owner, *args)
        given.apply_defaults()  # which the others have to get, too
        return owner.ranks.together(method, *given.args)  # type: ignore[no-any-return]

    return on_every_rank  # type: ignore[return-value]


def join(config: TrainerConfig, device: torch.device) -> Ranks:
    """Meet the other ranks that torchrun or spawn.py started. Raises TrainerError."""
    place = Place.of_this_process()
    rank, size = place.rank, place.size
    if config.trainer_ranks not in ("auto", size):
        raise TrainerError(
            f"--trainer-ranks {config.trainer_ranks}, and torchrun started {size}: drop the flag, or give torchrun"
            f" --nproc-per-node {config.trainer_ranks}"
        )
    check_ranks(config, size, sharded=size > 1 or shards_alone(config, device))
    if size == 1 and not shards_alone(config, device):
        return Ranks()
    timeout = timedelta(seconds=config.dist_timeout_s)
    address, port = _meeting_point(place)
    with waiting(log, f"{size} trainer ranks", peer=f"{address}:{port}", deadline_s=config.dist_timeout_s):
        try:
            store = _store(place, address, port, config.dist_timeout_s)
            _meet(store, place, f"{address}:{port}", config.dist_timeout_s)
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
                store=dist.PrefixStore("trainer", store),
                rank=rank,
                world_size=size,
                timeout=timeout,
                device_id=device if device.type == "cuda" else None,
            )
            mesh = _mesh(device, size, config, timeout)
            ranks = Ranks(rank, size, store=store, mesh=mesh, timeout_s=config.dist_timeout_s)
        except TrainerError:
            raise
        except RuntimeError as error:
            raise TrainerError(
                f"the {size} trainer ranks did not meet at {address}:{port} within {config.dist_timeout_s:g} s"
                f" (--dist-timeout-s): {describe(error)}"
            ) from error
    return ranks


def expect_the_same(ranks: Ranks, config: TrainerConfig) -> None:
    """Raise TrainerError unless all ranks run the same code, on the same torch, with the same settings."""
    if ranks.size == 1:
        return
    own = {"code": _digest(), "torch": torch.__version__, **json.loads(config.model_dump_json())}
    store = ranks._store
    if ranks.leads:
        store.set("about", json.dumps(own))

    def compare() -> None:
        of_first = json.loads(store.get("about"))
        if other := [name for name in own if own[name] != of_first.get(name)]:
            name = other[0]
            what = {"code": "another version of the code", "torch": f"torch {own[name]}, not {of_first.get(name)}"}
            raise TrainerError(
                f"it runs {what.get(name, f'with {name} {own[name]}, not {of_first.get(name)}')} as rank 0 does:"
                " install the same on every machine, and give every rank the same flags and variables"
            )

    with ranks._reaching_ranks("the comparison of settings"):
        ranks._agreed(compare)


def shards_alone(config: TrainerConfig, device: torch.device) -> bool:
    """Return whether one rank computes as several do: in bfloat16, or with weights or moments that may be in host
    memory.
    """
    kept = offloads(config, device.type == "cuda")
    return compute_dtype(config, device) is not torch.float32 or "moments" in kept or "all" in kept


def compute_dtype(config: TrainerConfig, device: torch.device) -> torch.dtype:
    """In which the layers compute."""
    return torch.bfloat16 if computes_in(config, device.type == "cuda") == "bfloat16" else torch.float32


def _mesh(device: torch.device, size: int, config: TrainerConfig, timeout: timedelta) -> DeviceMesh:
    """Build the mesh that the weights are spread over. All its groups have our deadline; those that DeviceMesh makes
    would have torch's own. Ranks along "tp" are neighbours, as they talk most.
    """
    tp = config.tp_size
    shard = config.fsdp_size or size // tp
    if shard == size:
        return init_device_mesh(device.type, (size,), mesh_dim_names=(SHARD,))  # the group of all, which has it
    sizes = {REPLICATE: size // (shard * tp), SHARD: shard, TP: tp}
    kept = [name for name, count in sizes.items() if count > 1 or name == SHARD]
    grid = torch.arange(size).view([sizes[name] for name in kept])
    groups = [
        dist.new_subgroups_by_enumeration(grid.movedim(dim, -1).reshape(-1, count).tolist(), timeout=timeout)[0]
        for dim, count in enumerate(grid.shape)
    ]
    return DeviceMesh.from_group(groups, device.type, mesh=grid, mesh_dim_names=tuple(kept))


@contextmanager
def told_once_a_machine() -> Iterator[None]:
    """Wrap what every rank finds out by itself: of the ranks of one machine the first prints an error of it."""
    try:
        yield
    except TrainerError as error:
        if Place.of_this_process().local_rank == 0:
            raise
        raise ToldElsewhere(str(error)) from error


def _meeting_point(place: Place) -> tuple[str, int]:
    """Address and port of the store, 0 without one."""
    if place.size == 1:
        return "this process", 0
    if place.port is not None:
        return "127.0.0.1", place.port
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not address or not port.isdecimal():
        raise TrainerError(
            f"MASTER_ADDR={address} and MASTER_PORT={port} do not say where the {place.size} trainer ranks meet: "
            "start them with torchrun"
        )
    return address, int(port)


def _store(place: Place, address: str, port: int, timeout_s: float) -> dist.Store:
    """The store where the ranks meet. It and Gloo listen on loopback where all ranks are on one machine, else on the
    interface that leads to MASTER_ADDR.
    """
    timeout = timedelta(seconds=timeout_s)
    if INTERFACE not in os.environ or CHOSEN in os.environ:  # by another trainer, which may have started this one
        os.environ[INTERFACE] = LOOPBACK if place.is_on_one_machine else _interface_towards(address)
        os.environ[CHOSEN] = "1"
    if place.size == 1:
        return dist.HashStore()
    if place.port is None and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        store, _, _ = next(dist.rendezvous("env://", place.rank, place.size, timeout=timeout))
        return store  # type: ignore[no-any-return]
    if place.port is None and place.rank == 0:
        return host_store(address, port, timeout_s)[0]
    return dist.TCPStore(
        address,
        port,
        None,
        is_master=place.rank == 0,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=place.listener,
    )


def _interface_towards(address: str) -> str:
    with reading(f"cannot reach MASTER_ADDR={address}, where the trainer ranks meet", TrainerError):
        own = address_towards(address)
    interfaces = [name for name, held in psutil.net_if_addrs().items() if own in [each.address for each in held]]
    return interfaces[0] if interfaces else LOOPBACK


def _meet(store: dist.Store, place: Place, where: str, timeout_s: float) -> None:
    """Return when all ranks have come. Waits in Python, where Ctrl-C ends it, unlike torch.distributed."""

    def attempt() -> None:
        missing = [other for other in range(place.size) if not store.check([f"here/{other}"])]
        if missing:
            raise NotYet(f"rank {', '.join(map(str, missing[:8]))} of {place.size} has not connected")

    def failed(reason: str) -> TrainerError:
        return TrainerError(
            f"the trainer ranks did not meet at {where} within {timeout_s:g} s (--dist-timeout-s): {reason}"
        )

    store.set(f"here/{place.rank}", "")
    wait_for(attempt, Wait("trainer ranks", where, timeout_s, failed))


def _digest() -> str:
    """SHA-256 of the three packages that every rank runs."""
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for package in ("atroposlib", "example_trainer", "vllm_patching"):
        for path in sorted((root / package).rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return digest.hexdigest()


def _arguments(method: Callable[..., object]) -> object:
    types = [kind for name, kind in get_type_hints(method).items() if name != "return"]
    return tuple[tuple(types)] if types else tuple[()]  # type: ignore[misc]


def _pack_array(value: object) -> object:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    raise NotImplementedError(f"a {type(value).__name__} cannot be sent between ranks")


def _array(kind: type, value: Any) -> Any:
    return np.frombuffer(value[2], value[0]).reshape(value[1])
