"""Direct sends: every trainer rank that holds rows sends them to vLLM's workers itself, and nothing is gathered.

    rank 0   learner.join_senders, send_rows ──▶ every rank: RowSender ──its rows──▶ every worker of the server

Which rank sends what is computed in atroposlib/wire/senders.py. Of ranks that hold the same rows (replicas), the first
ones send. A rank that fails reports it and continues, so that one server's failure is not the trainer's.
"""

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import cycle

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from atroposlib.logs import get_logger
from atroposlib.wire.bridge import PROTOCOL, BroadcastOffer, Bucket, Manifest, Senders
from atroposlib.wire.senders import (
    PIECE_ALIGNMENT,
    Message,
    Piece,
    block,
    group_name,
    layout_digest,
    messages,
    sender_ack_key,
)
from example_trainer.bridges.base import BridgeError
from example_trainer.ranks.partition import REPLICATE, SHARD, TP, copies, local
from example_trainer.ranks.place import Place
from example_trainer.weights.gathered import Memory, RankSends, ShardedModel
from example_trainer.weights.written import TrainedModel
from vllm_patching import transport

log = get_logger(__name__)

NCCL_SENDERS = 8  # a worker's GPU holds the buffers of a communicator with each


class CannotSend(ValueError):
    """The ranks cannot send what they hold; the message says why."""


@dataclass(frozen=True)
class Direct:
    """Ranks that send for themselves."""

    senders: Senders  # without layouts
    ranks: RankSends


def chosen(
    sends: str,
    trained: TrainedModel,
    backend: str,
    address: str,
    protocols: Mapping[str, int],
    only_changes: bool = False,
) -> Direct | None:
    """Choose by --bridge-sends how the weights are sent: None where rank 0 sends them all. Logs why.

    Gathering moves most bytes twice, so every rank sends where it can. `protocols` are the servers', by URL; with
    `only_changes`, `sends` is gathered. Raises BridgeError if `sends` is direct and that cannot be.
    """
    why_not = "with --bridge-delta, only rank 0 sends changes" if only_changes else "--bridge-sends gathered"
    if sends != "gathered":
        try:
            direct = _direct(trained, address, protocols)
            if sends == "direct" or backend == "gloo" or direct.senders.count <= NCCL_SENDERS:
                log.info("[Bridge] %d trainer ranks send what they hold (direct)", direct.senders.count)
                return direct
            why_not = f"{direct.senders.count} senders over NCCL, at most {NCCL_SENDERS} with --bridge-sends auto"
        except CannotSend as error:
            if sends == "direct":
                raise BridgeError(f"--bridge-sends direct: {error}; use auto or gathered") from error
            why_not = str(error)
    log.info("[Bridge] Trainer rank 0 sends the weights of all ranks: %s", why_not)
    return None


def _direct(trained: TrainedModel, address: str, protocols: Mapping[str, int]) -> Direct:
    if not isinstance(trained, ShardedModel):
        raise CannotSend("the trainer has one rank")
    senders = senders_of(dict(trained.model.named_parameters()))
    if senders.count == 1:
        raise CannotSend("one trainer rank holds all weights")
    if old := [url for url, protocol in protocols.items() if protocol < PROTOCOL]:
        raise CannotSend(
            f"the vLLM server at {old[0]} speaks protocol {protocols[old[0]]}, and this trainer protocol {PROTOCOL}"
            " (run both from the same version)"
        )
    if ipaddress.ip_address(address).is_loopback and not Place.of_this_process().is_on_one_machine:
        raise CannotSend(f"trainer ranks on other machines do not reach --master-addr {address}")
    return Direct(senders, trained.sends)


def senders_of(parameters: Mapping[str, Tensor]) -> Senders:
    """The ranks that send, without layouts. Raises CannotSend."""
    sizes, tp_dims = {REPLICATE: 1, SHARD: 1, TP: 1}, {}
    whole = [name for name, parameter in parameters.items() if not isinstance(parameter, DTensor)]
    for name, parameter in parameters.items():
        for dim, (size, placement) in _placed(name, parameter).items():
            along = None if isinstance(placement, Replicate) else getattr(placement, "dim", -1)
            if along not in {REPLICATE: (None,), SHARD: (0,), TP: (None, *range(parameter.ndim))}[dim]:
                raise CannotSend(f"{name} is placed as {placement} on the dimension {dim} of the trainer's mesh")
            if sizes[dim] not in (1, size):
                raise CannotSend(f"{name} is divided into {size} parts ({dim}), and others into {sizes[dim]}")
            sizes[dim] = size
            if dim == TP and along is not None:
                tp_dims[name] = along
    if whole and sizes[SHARD] > 1:
        raise CannotSend(f"{whole[0]} is not divided among the {sizes[SHARD]} trainer ranks that share the weights")
    return Senders(shard_size=sizes[SHARD], tp_size=sizes[TP], tp_dims=tp_dims)


def with_layouts(senders: Senders, manifest: Manifest, bucket_bytes: int) -> Senders:
    """The senders as an offer names them."""
    buckets = manifest.buckets(bucket_bytes)
    layouts = tuple(layout_digest(buckets, senders, sender) for sender in range(senders.count))
    return Senders(senders.shard_size, senders.tp_size, senders.tp_dims, layouts)


class RowSender:
    """The part of one rank of `mesh`; `device` is where the groups take bytes from."""

    def __init__(self, parameters: Mapping[str, Tensor], device: torch.device, mesh: DeviceMesh) -> None:
        self._parameters = dict(parameters)
        self._device = device
        self._place = dict(zip(mesh.mesh_dim_names or (), mesh.get_coordinate() or (), strict=True))
        self._memory = (Memory(), Memory())  # of the bucket that is sent, and of the next
        self._joined: dict[str, _Joined] = {}  # by session

    def join(self, offer: BroadcastOffer, manifest: Manifest) -> None:
        """Meet the workers of the server that takes `offer`, if this rank is a sender. Raises RuntimeError for a worker
        that does not come.
        """
        assert offer.senders is not None
        sender = self._number(offer.senders)
        if sender is None:
            return
        self._expect_blocks(manifest, offer.senders, sender)
        self._joined[offer.session] = _Joined(offer, manifest.buckets(offer.bucket_bytes), sender)

    def send(self, session: str) -> None:
        """Send what this rank holds, and return when every worker has all of it. Raises RuntimeError."""
        if (joined := self._joined.get(session)) is None:
            return
        under_way: list[transport.Transfer] = []
        for carried, memory in zip(joined.messages, cycle(self._memory), strict=False):
            begun = [transfer for sent in self._bytes(carried, memory) for transfer in joined.groups.begin(sent)]
            for transfer in under_way:
                transfer.wait()
            under_way = begun
        for transfer in under_way:
            transfer.wait()
        joined.await_acks()

    def leave(self, session: str) -> None:
        """Let go of a session's groups, if this rank is in it."""
        if (joined := self._joined.pop(session, None)) is not None:
            joined.groups.close()

    def _number(self, senders: Senders) -> int | None:
        """Return which sender this rank is; None for a replica, which sends nothing."""
        is_replica = self._place.get(REPLICATE, 0) > 0
        return None if is_replica else self._place.get(SHARD, 0) * senders.tp_size + self._place.get(TP, 0)

    def _expect_blocks(self, manifest: Manifest, senders: Senders, sender: int) -> None:
        """Raise CannotSend unless this rank holds what that sender is to send."""
        for tensor in manifest.tensors:
            held, due = local(self._parameters[tensor.name]), Piece(tensor, block(tensor, senders, sender))
            if due.numel and tuple(held.shape) != tuple(map(len, due.block)):
                raise CannotSend(f"{tensor.name}: this rank holds {list(held.shape)}, and should send {due.block}")

    @torch.no_grad()
    def _bytes(self, carried: Sequence[Message], memory: Memory) -> list[Tensor]:
        """The messages, flat uint8: views of the weights, or copies in `memory`."""
        blocks: list[Tensor | None] = []
        copied = []
        for message in carried:
            piece, *others = message.pieces
            held = local(self._parameters[piece.tensor.name])
            as_it_is = held.dtype == getattr(torch, piece.tensor.dtype) and held.device.type == self._device.type
            if not others and as_it_is and held.is_contiguous():
                blocks.append(held.view(-1).view(torch.uint8))
            else:
                blocks.append(None)
                copied.append(message)
        sizes = [-(-message.nbytes // PIECE_ALIGNMENT) * PIECE_ALIGNMENT for message in copied]
        rooms = memory.of(sum(sizes), self._device).split(sizes)
        packed = iter([self._packed(message, room) for message, room in zip(copied, rooms, strict=True)])
        return [next(packed) if each is None else each for each in blocks]

    def _packed(self, message: Message, room: Tensor) -> Tensor:
        for piece, place in message.packed():
            held = local(self._parameters[piece.tensor.name])
            room[place].view(getattr(torch, piece.tensor.dtype)).view(held.shape).copy_(held)
        return room[: message.nbytes]


class _Joined:
    """A session as its sender `sender` sees it, once all workers have joined its group. Raises RuntimeError."""

    def __init__(self, offer: BroadcastOffer, buckets: Sequence[Bucket], sender: int) -> None:
        assert offer.senders is not None
        self.messages = [messages(bucket, offer.senders, sender) for bucket in buckets]
        self._sender = sender
        self._offer = offer
        self._sequence = 0
        log.info(
            "[Bridge] Joining %d weight updater(s) as sender %d of %d at %s:%d, at most %.0f s",
            offer.world_size - 1,
            sender,
            offer.senders.count,
            offer.address,
            offer.port,
            offer.timeout_s,
        )
        self._store = transport.join_store(offer.address, offer.port, offer.timeout_s)
        self.groups = transport.join_groups(
            self._store,
            group_name(offer.session, sender),
            0,
            offer.world_size,
            offer.timeout_s,
            offer.backend,
            transport.address_towards(offer.address),
        )

    def await_acks(self) -> None:
        """Return when every worker has acknowledged what this rank has sent in this transfer."""
        offer, workers = self._offer, range(self._offer.world_size - 1)
        keys = [sender_ack_key(offer.session, self._sequence, rank, self._sender) for rank in workers]
        with transport.naming("not acknowledged by every worker"):
            self._store.wait(keys, timedelta(seconds=offer.timeout_s))
        for key in keys:  # a long run must not fill the store
            self._store.delete_key(key)
        self._sequence += 1


def _placed(name: str, parameter: Tensor) -> dict[str, tuple[int, Placement]]:
    """Return how a parameter is divided, by dimension of the mesh. Raises CannotSend."""
    if not isinstance(parameter, DTensor):
        return {}
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names or ()
    if copies(parameter) > 1:
        raise CannotSend(f"several trainer ranks hold each key-value head, as of {name}")
    if not names or not set(names) <= {REPLICATE, SHARD, TP}:
        raise CannotSend(f"{name} is on a mesh with the dimensions {list(names)}, not {REPLICATE}, {SHARD} and {TP}")
    return {dim: (mesh.size(number), parameter.placements[number]) for number, dim in enumerate(names)}
