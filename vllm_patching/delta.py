"""Weights as what has changed in them (--bridge-delta): the trainer and each updater thread send and receive with it.

At the learning rates of RL, most bfloat16 weights round to the word that they were before a step. Both sides hold the
words of the version before, so only the others travel, with their places:

    trainer   now != sent last ─▶ header [form, words, bytes of places] ─▶ words ─▶ places     of every PIECE
    worker    words of the live version, in the staging buffer ◀─ the new words, put at their places

The form is chosen by size for each piece: gaps between changed words, a bitmap, or the whole piece where both are
larger. All words are 16 bits wide, those of float32 too: the upper half of a float32 changes as rarely as a bfloat16.
Words are compared and copied as integers, so every value arrives bit by bit, NaN included.
"""

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from vllm_patching.transport import Groups, TransportError

WORD = 2  # bytes
PIECE = 4 << 20  # bytes that are compared and encoded at once: they stay in the processor's cache
SKIP = 255  # of a gap's bytes: so many words are unchanged, and the gap continues in the next byte


class Form(IntEnum):
    """Names how the places of a piece's changed words travel."""

    WHOLE = 0  # they do not: all words are sent
    GAPS = 1  # unchanged words before each changed one
    BITMAP = 2  # a bit per word


@dataclass
class Sent:
    """Counts what one transfer has sent so far, to one receiver."""

    nbytes: int = 0
    changed: int = 0  # words; all of them where the receiver has no base
    words: int = 0

    def __add__(self, other: "Sent") -> "Sent":
        return Sent(self.nbytes + other.nbytes, self.changed + other.changed, self.words + other.words)


@dataclass(frozen=True)
class Encoded:
    """A piece as it travels: the words that are sent, and flat uint8 places, empty for a whole piece."""

    form: Form
    words: Tensor  # int16 [sent]
    places: Tensor
    changed: int


def send(groups: Groups, now: Tensor, base: Tensor, *, whole: bool) -> Sent:
    """Send `now`, flat uint8 with an even number of bytes, to receivers that have `base`; `whole` if they have not.

    Afterwards `base`, of the same size and possibly in other memory, holds `now`. Raises RuntimeError for a dead or
    silent peer; `base` is then of no version.
    """
    sent = Sent()
    for piece, before in zip(_pieces(now), _pieces(base), strict=True):
        encoded = _whole(piece) if whole else encode(piece, before.to(piece.device))
        header = torch.tensor([encoded.form, len(encoded.words), len(encoded.places)])
        groups.announce(header)
        for part in (encoded.words.view(torch.uint8), encoded.places):
            if len(part):
                groups.broadcast(part)
            sent.nbytes += part.nbytes
        sent += Sent(header.nbytes, encoded.changed, len(piece))
        before.copy_(piece)
    return sent


def receive(groups: Groups, buffer: Tensor, *, has_base: bool) -> None:
    """Make `buffer` (flat uint8, with the words of the base version if `has_base`) what `send` was given.

    Raises RuntimeError for a dead or silent peer, and TransportError for bytes that no trainer sends.
    """
    for piece in _pieces(buffer):
        header = torch.zeros(3, dtype=torch.int64)
        groups.announce(header)
        form, count, nbytes = header.tolist()
        fits = nbytes == 0 and count == len(piece) if form == Form.WHOLE else has_base and form in tuple(Form)
        if not fits or not 0 <= count <= len(piece) or not 0 <= nbytes <= len(piece) * WORD:
            raise TransportError(f"a piece of {len(piece)} words came as form {form}, {count} words, {nbytes} bytes")
        words = piece if form == Form.WHOLE else piece.new_empty(count)
        if count:
            groups.broadcast(words.view(torch.uint8))
        if form != Form.WHOLE and (count or nbytes):
            places = torch.empty(nbytes, dtype=torch.uint8, device=piece.device)
            if nbytes:
                groups.broadcast(places)
            piece[decode(Form(form), places, count, len(piece))] = words


def encode(now: Tensor, base: Tensor) -> Encoded:
    """The smallest form of `now`, int16, for a receiver that has `base`."""
    differs = now != base
    changed = int(torch.count_nonzero(differs))
    bitmap_bytes = -(-len(now) // 8)
    if changed < bitmap_bytes:
        places = differs.nonzero().squeeze(1)
        gaps = places.diff(prepend=places.new_tensor([-1])) - 1
        skips = gaps // SKIP
        nbytes = changed + int(skips.sum())
        if nbytes < bitmap_bytes and nbytes + WORD * changed < now.nbytes:
            return Encoded(Form.GAPS, now[places], _gap_bytes(gaps, skips), changed)
    if bitmap_bytes + WORD * changed < now.nbytes:
        return Encoded(Form.BITMAP, now[differs], _bitmap(differs), changed)
    return Encoded(Form.WHOLE, now, _no_places(now), changed)


def decode(form: Form, places: Tensor, count: int, words: int) -> Tensor:
    """The places, int64 [count], of `words` that `encode` has found. Raises TransportError unless they are that many
    and all there.
    """
    if form is Form.GAPS:
        ends = places.long().cumsum(0)[places != SKIP]
        found = ends + torch.arange(len(ends), device=places.device)
    else:
        bits = torch.arange(8, dtype=torch.uint8, device=places.device)
        found = ((places[:, None] >> bits) & 1).flatten().nonzero().squeeze(1)
    if len(found) != count or (count and int(found[-1]) >= words):
        raise TransportError(f"{len(found)} places of changed words came for {count} words, in a piece of {words}")
    return found


def _whole(now: Tensor) -> Encoded:
    return Encoded(Form.WHOLE, now, _no_places(now), len(now))


def _no_places(now: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=now.device)


def _gap_bytes(gaps: Tensor, skips: Tensor) -> Tensor:
    """For each gap as many SKIP as fit into it, and the rest, below SKIP."""
    ends = (skips + 1).cumsum(0) - 1
    encoded = torch.full((int(ends[-1]) + 1 if len(ends) else 0,), SKIP, dtype=torch.uint8, device=gaps.device)
    encoded[ends] = (gaps - skips * SKIP).to(torch.uint8)
    return encoded


def _bitmap(differs: Tensor) -> Tensor:
    padded = torch.nn.functional.pad(differs, (0, -len(differs) % 8)).view(-1, 8)
    bits = torch.arange(8, dtype=torch.uint8, device=differs.device)
    return (padded.to(torch.uint8) << bits).sum(1, dtype=torch.uint8)


def _pieces(flat: Tensor) -> tuple[Tensor, ...]:
    return tuple(flat.view(torch.int16).split(PIECE // WORD))
