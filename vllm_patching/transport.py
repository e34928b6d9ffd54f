"""Process groups over which weight bytes travel; used by the trainer (rank 0) and by each updater thread (rank 1 + TP
rank). Where several trainer ranks send, each is rank 0 of a group of its own.

The groups are built directly on a TCPStore: torch.distributed's default group, which vLLM uses for tensor
parallelism, is never touched. Gloo always carries the barrier; the data group is the same Gloo group on CPUs and an
NCCL group on GPUs.

A dead or silent peer is a RuntimeError at the deadline, on both sides, and never the end of this process.
"""

import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from atroposlib.errors import AtroposError, reaching

Group: TypeAlias = Any  # ProcessGroupGloo | ProcessGroupNCCL; PyTorch ships no complete stubs for them

CHUNK_BYTES = 16 << 20  # of one broadcast or message over Gloo; measured best over loopback
TAG = 0  # of messages: those from one peer to another keep their order
BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
SILENT = re.compile(  # Gloo's wait, the store's, and NCCL's
    r"[Tt]imed out waiting (\d+)ms|wait timeout after (\d+)ms|Timeout\(ms\)=(\d+)\).*tim(?:ed|ing) out"
)


class TransportError(AtroposError):
    """A peer died, went silent past its deadline, or could not be reached."""


class PeerLost(RuntimeError):
    """A process group has failed; the message names the group and the reason in one short line."""


def describe(error: BaseException) -> str:
    """Describe what went wrong with a peer, as one short line, from the long messages of Gloo, NCCL and the store."""
    text = str(error)
    if isinstance(error, PeerLost):
        return text
    first = text.splitlines()[0] if text else ""
    if silent := SILENT.search(first):
        return f"peer silent for {int(next(filter(None, silent.groups()))) / 1000:.0f} s, its deadline"
    if cause := re.search(r"Last error:\s*(\S.*)", text):  # of NCCL; its first line names a source file
        return f"NCCL: {cause[1][:200]}"
    if re.search(r"Connection (was likely )?(reset|closed)|Broken pipe", first):
        return "connection closed by the peer"
    return f"{type(error).__name__}: {first[:200]}"


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Wrap what a group does: its failure becomes PeerLost("WHAT: why")."""
    try:
        yield
    except AtroposError:
        raise
    except RuntimeError as error:
        raise PeerLost(f"{what}: {describe(error)}") from error


class Transfer:
    """A message over Gloo that is under way: `work` reads or writes `memory`, which lives for as long as it does."""

    def __init__(self, work: Any, memory: torch.Tensor) -> None:
        self._work = work
        self._memory = memory

    def __del__(self) -> None:
        self._work = None  # first: a peer may still send into the memory of a transfer that nobody waits for

    def wait(self) -> None:
        """Return when the peer has it, or this process has. Raises RuntimeError on a dead or silent peer, at most the
        group's deadline after the call.
        """
        self._work.wait()


@dataclass
class Groups:
    """One session's groups. `close` is final: a failed group is never used again."""

    control: Group
    data: Group
    backend: str

    def barrier(self) -> None:
        self.control.barrier().wait()

    def broadcast(self, buffer: torch.Tensor) -> None:
        """Send (rank 0) or receive `buffer`: flat uint8 [nbytes]. Raises RuntimeError on a dead or silent peer, at
        most the group's deadline after the call for NCCL, and after the last CHUNK_BYTES for Gloo.
        """
        for chunk in [buffer] if self.backend == "nccl" else buffer.split(CHUNK_BYTES):
            self.data.broadcast([chunk], from_rank_0()).wait()

    def begin(self, buffer: torch.Tensor) -> list[Transfer]:
        """Begin a `broadcast` by messages that are still under way. Over Gloo, one of 1 MB takes half of the
        processor time of a broadcast. None for NCCL, where the groups of one device take turns, in the same order on
        all workers, so that none waits for another.
        """
        if self.backend == "nccl":
            self.broadcast(buffer)
            return []
        chunks = buffer.split(CHUNK_BYTES)
        if self.data.rank() > 0:
            return [Transfer(self.data.recv([chunk], 0, TAG), chunk) for chunk in chunks]
        peers = range(1, self.data.size())
        return [Transfer(self.data.send([chunk], peer, TAG), chunk) for chunk in chunks for peer in peers]

    def announce(self, numbers: torch.Tensor) -> None:
        """Send (rank 0) or receive a few `numbers`, int64 on the CPU. Raises RuntimeError as `broadcast`."""
        self.control.broadcast([numbers], from_rank_0()).wait()

    def close(self) -> None:
        """Let go of the peers, whatever state they are in: a kernel that still waits for one would run forever."""
        if self.backend == "nccl":
            self.data.abort()


def from_rank_0() -> dist.BroadcastOptions:
    """Options of a broadcast."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    return options


def host_store(address: str, port: int, timeout_s: float) -> tuple[dist.TCPStore, int]:
    """The trainer's store, bound to `address` only (port 0 = any free one), and its port. Raises TransportError if
    taken.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with reaching(
            f"cannot listen on {address}:{port}",
            TransportError,
            remedy="choose another --master-port or 0 for any free one",
        ):
            listener.bind((address, port))
        listener.listen()
        bound = listener.getsockname()[1]
        store = dist.TCPStore(
            address,
            bound,
            None,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    return store, bound


def join_store(address: str, port: int, timeout_s: float) -> dist.TCPStore:
    """A worker's connection to the trainer's store."""
    return dist.TCPStore(
        address, port, None, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
    )


def address_towards(host: str) -> str:
    """This machine's own IPv4 address from which it would connect to `host`: loopback for loopback. Raises OSError
    without a route.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # a datagram socket only looks up the route, nothing is sent
        return str(probe.getsockname()[0])


def make_control_group(
    store: dist.Store, session: str, rank: int, world_size: int, timeout_s: float, address: str = "127.0.0.1"
) -> Group:
    """The Gloo group `session` of `world_size` ranks; blocks until all have joined, at most `timeout_s` seconds.

    Peers connect to this rank at `address`. By default, Gloo takes what the host name resolves to, which may be
    loopback.
    """
    return gloo_group(dist.PrefixStore(f"gloo/{session}", store), rank, world_size, timeout_s, address)


def gloo_group(store: dist.Store, rank: int, world_size: int, timeout_s: float, address: str) -> Group:
    """The ranks that meet in `store`; blocks until all have joined."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=timeout_s)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    return dist.ProcessGroupGloo(store, rank, world_size, options)


def make_data_group(
    control: Group, store: dist.Store, session: str, rank: int, world_size: int, timeout_s: float, backend: str
) -> Group:
    """The group that carries weights: `control` itself for gloo, a group of its own for nccl."""
    if backend == "gloo":
        return control
    return nccl_group(dist.PrefixStore(f"nccl/{session}", store), rank, world_size, timeout_s)


def join_groups(
    store: dist.Store, name: str, rank: int, world_size: int, timeout_s: float, backend: str, address: str
) -> Groups:
    """The groups `name` with all members in them. Peers connect to this rank at `address`."""
    ranks = (store, name, rank, world_size, timeout_s)
    control = make_control_group(*ranks, address)
    groups = Groups(control, make_data_group(control, *ranks, backend), backend)
    groups.barrier()
    return groups


def nccl_group(store: dist.Store, rank: int, world_size: int, timeout_s: float) -> Group:
    """The ranks that meet in `store`, at their first collective."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    with _waits_that_raise():
        return dist.ProcessGroupNCCL(store, rank, world_size, options)


@contextmanager
def _waits_that_raise() -> Iterator[None]:
    """Wrap the making of an NCCL group, which reads this variable then. By PyTorch's source `wait` blocks until the
    collective is done and raises at the deadline. Without it a watchdog would end the process: the vLLM worker for a
    dead trainer, the trainer for a dead worker.
    """
    before = os.environ.get(BLOCKING_WAIT)
    os.environ[BLOCKING_WAIT] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[BLOCKING_WAIT]
        else:
            os.environ[BLOCKING_WAIT] = before
