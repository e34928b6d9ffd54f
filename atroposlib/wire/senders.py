"""What each of several senders sends (protocol 2): a pure function of the manifest and the offer, which
trainer and workers compute alike.

    bucket ──▶ the sender's block of each tensor ──▶ messages to every worker

A block is what the sender holds of a tensor, row-major. A large block whose bytes lie together in the bucket is a
message by itself, which neither side copies; the others of a bucket are packed into one message.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from atroposlib.wire.bridge import Bucket, Manifest, Senders, WireTensor, ack_key

Block = tuple[range, ...]  # indices of the tensor, by dimension

PIECE_ALIGNMENT = 8  # bytes
ALONE_BYTES = 256 << 10  # from which a block is a message by itself


class Piece(NamedTuple):
    """A block of a tensor."""

    tensor: WireTensor
    block: Block

    @property
    def numel(self) -> int:
        return math.prod(map(len, self.block))

    @property
    def nbytes(self) -> int:
        whole = math.prod(self.tensor.shape)
        return self.tensor.nbytes // whole * self.numel if whole else 0

    @property
    def together(self) -> bool:
        """Return whether the piece's bytes lie together in the tensor."""
        return all(len(part) == size for part, size in zip(self.block[1:], self.tensor.shape[1:], strict=True))


class Message(NamedTuple):
    """Bytes that are sent at once: of pieces, one after the other, each from a multiple of PIECE_ALIGNMENT on."""

    pieces: tuple[Piece, ...]
    places: tuple[slice, ...]  # the bytes of the message that each piece is
    nbytes: int
    in_bucket: slice | None  # the bytes of the bucket that the message is; None if it is packed from several places

    def packed(self) -> Iterator[tuple[Piece, slice]]:
        """Each piece with its bytes of the message."""
        return zip(self.pieces, self.places, strict=True)


def block(tensor: WireTensor, senders: Senders, sender: int) -> Block:
    """Return the block that the sender sends of the tensor; empty parts where that is nothing."""
    shard, tp = divmod(sender, senders.tp_size)
    parts = [range(size) for size in tensor.shape]
    if not parts:  # a scalar, which the first sends
        return () if sender == 0 else (range(0),)
    if (dim := senders.tp_dims.get(tensor.name)) is not None:
        parts[dim] = _chunk(parts[dim], senders.tp_size, tp)
    elif tp > 0:
        parts[0] = range(0)
    parts[0] = _chunk(parts[0], senders.shard_size, shard)
    return tuple(parts)


def messages(bucket: Bucket, senders: Senders, sender: int) -> list[Message]:
    """Return what the sender sends of the bucket, in order."""
    pieces = [Piece(tensor, block(tensor, senders, sender)) for tensor in bucket.tensors]
    pieces = [piece for piece in pieces if piece.numel]
    alone = [_message(bucket, (piece,)) for piece in pieces if _alone(piece)]
    packed = tuple(piece for piece in pieces if not _alone(piece))
    return [*alone, _message(bucket, packed)] if packed else alone


def layout_digest(buckets: Iterable[Bucket], senders: Senders, sender: int) -> str:
    """SHA-256 of all that the sender sends and of its order, but not of the values."""
    rows = [
        [[piece.tensor.name, [[part.start, part.stop] for part in piece.block]] for piece in message.pieces]
        for bucket in buckets
        for message in messages(bucket, senders, sender)
    ]
    return hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()


def expect_layouts(manifest: Manifest, bucket_bytes: int, senders: Senders) -> None:
    """Raise ValueError unless each sender's layout is what it is here, and their number is right."""
    dims = {tensor.name: len(tensor.shape) for tensor in manifest.tensors}
    for name, dim in senders.tp_dims.items():
        if dim >= dims.get(name, 0):
            raise ValueError(
                f"tensor parallelism cuts {name} along dimension {dim}, but it has {dims[name]}"
                if name in dims
                else f"tensor parallelism cuts {name}, which does not exist"
            )
    if len(senders.layouts) != senders.count:
        raise ValueError(f"{len(senders.layouts)} layouts for {senders.count} senders")
    buckets = manifest.buckets(bucket_bytes)
    for sender, given in enumerate(senders.layouts):
        if (own := layout_digest(buckets, senders, sender)) != given:
            raise ValueError(
                f"sender {sender} divides the tensors differently (layout {given[:12]}, here {own[:12]}): run trainer"
                " and vLLM from the same version"
            )


def group_name(session: str, sender: int) -> str:
    """Under which the sender's group meets in the trainer's store."""
    return f"{session}/sender/{sender}"


def sender_ack_key(session: str, sequence: int, rank: int, sender: int) -> str:
    """Store key under which worker `rank` reports that it has all that the sender sent in transfer `sequence`."""
    return f"{ack_key(session, sequence, rank)}/{sender}"


def _message(bucket: Bucket, pieces: tuple[Piece, ...]) -> Message:
    places, end = [], 0
    for piece in pieces:
        start = -(-end // PIECE_ALIGNMENT) * PIECE_ALIGNMENT
        end = start + piece.nbytes
        places.append(slice(start, end))
    return Message(pieces, tuple(places), end, _in_bucket(bucket, pieces))


def _in_bucket(bucket: Bucket, pieces: tuple[Piece, ...]) -> slice | None:
    (tensor, block), *others = pieces
    if others or not pieces[0].together:
        return None
    start = tensor.offset - bucket.start
    if block:
        start += block[0].start * (tensor.nbytes // tensor.shape[0])
    return slice(start, start + pieces[0].nbytes)


def _alone(piece: Piece) -> bool:
    return piece.together and piece.nbytes >= ALONE_BYTES


def _chunk(whole: range, parts: int, index: int) -> range:
    """Even chunks, the last ones shorter or empty, as torch.chunk's."""
    size = -(-len(whole) // parts)
    return whole[index * size : (index + 1) * size]
