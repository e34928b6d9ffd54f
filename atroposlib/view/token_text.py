"""The text of each token, by the tokenizer of a run's model, if that is on this machine. Nothing is downloaded.

The file may be somebody else's, and tokenizers obeys it: a pattern that takes hours, a step that makes terabytes of
text. So only the pieces are taken from it, and a decoder whose steps make no text longer.
"""

import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FILE = "tokenizer.json"
MAX_BYTES = 64 << 20
MAX_PIECE = 512  # characters; longer pieces are shown by their ids
MAX_STEPS = 16  # of a decoder
BROKEN = 8  # tokens without a text: a character has at most four bytes, so they are no part of one


class _Model(Struct):
    """The pieces: with their ids, or (Unigram) with their scores in the order of the ids."""

    vocab: dict[str, int] | list[tuple[str, float]]


class _Added(Struct):
    id: int
    content: str


class _File(Struct):
    """What is read of tokenizer.json."""

    model: _Model
    added_tokens: list[_Added] = []
    decoder: dict[str, object] | None = None


def find_tokenizer(run: Path, model: str | None) -> "Tokenizer | None":
    """The tokenizer of the model that the run trained, or of what it has trained so far."""
    folders = [Path(model)] if model is not None and os.path.isabs(model) else []
    for candidate in [*folders, run / "checkpoints" / "final_model", run / "checkpoints" / "final_adapter"]:
        if (found := _loaded(candidate / FILE)) is not None:
            return found
    cached = _in_hub_cache(model) if model is not None and not folders else None
    return None if cached is None else _loaded(cached)


def pieces(tokenizer: "Tokenizer", tokens: Sequence[int]) -> list[str]:
    """The text that each token adds. A character that several tokens make stands at the last of them."""
    from tokenizers.decoders import DecodeStream

    stream, found, waiting = DecodeStream(skip_special_tokens=False), [], 0
    for place, token in enumerate(tokens, 1):
        try:
            text = stream.step(tokenizer, token)
            found.append(f"<{token}>" if text is None and tokenizer.id_to_token(token) is None else text or "")
        except Exception:  # tokenizers raises nothing narrower, for an id outside the vocabulary or broken text
            stream, text = DecodeStream(skip_special_tokens=False), ""
            found.append(f"<{token}>")
        waiting = waiting + 1 if text is None else 0
        if waiting == BROKEN:  # the stream would decode all of them again with each token that follows
            stream, waiting = DecodeStream(skip_special_tokens=False), 0
            found[-1] += tokenizer.decode(tokens[place - BROKEN : place], skip_special_tokens=False)
    return found


def _loaded(path: Path) -> "Tokenizer | None":
    try:
        found = path.stat()  # of what a link of the hub's cache leads to
    except OSError:
        return None
    if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_BYTES:
        return None
    return _cached(path, found.st_mtime_ns)


@lru_cache(maxsize=2)  # a tokenizer takes tens of MB
def _cached(path: Path, changed: int) -> "Tokenizer | None":
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_str(_harmless(path.read_bytes()))
    except Exception:  # tokenizers raises nothing narrower for a damaged file
        return None


def _harmless(content: bytes) -> str:
    """A tokenizer.json for decoding alone, with the pieces and the decoder of `content`. Raises ValueError."""
    read = msgspec.json.decode(content, type=_File)
    if not all(map(_makes_none_longer, _steps(read.decoder))):
        raise ValueError("its decoder may make text longer")
    given = read.model.vocab
    pieces = given if isinstance(given, dict) else {piece: place for place, (piece, _) in enumerate(given)}
    pieces |= {added.content: added.id for added in read.added_tokens}
    vocab = {piece: number for piece, number in pieces.items() if len(piece) <= MAX_PIECE}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": ""}
    return msgspec.json.encode({"version": "1.0", "model": model, "decoder": read.decoder}).decode()


def _steps(decoder: dict[str, object] | None) -> list[object]:
    match decoder:
        case None:
            return []
        case {"type": "Sequence", "decoders": list(steps)} if len(steps) <= MAX_STEPS:
            return steps
    return [decoder]


def _makes_none_longer(step: object) -> bool:
    """Return whether a step of a decoder is of a kind that models have, and has no text of its own to add."""
    match step:
        case {"type": "ByteLevel" | "ByteFallback" | "Fuse" | "Metaspace" | "WordPiece"}:
            return True
        case {"type": "BPEDecoder", "suffix": str(suffix)}:
            return bool(suffix)
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
            return len(new) <= len(old) != 0
        case {"type": "Strip", "stop": 0}:  # tokenizers panics where it is to strip more than there is
            return True
    return False


def _in_hub_cache(model: str) -> Path | None:
    with suppress(ValueError, OSError):  # no valid id
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(model, FILE)
        return Path(found) if isinstance(found, str) else None
    return None
