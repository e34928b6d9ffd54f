"""The text of each token, by the tokenizer of a run's model, if that is on this machine. Nothing is downloaded."""

import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FILE = "tokenizer.json"
MAX_BYTES = 64 << 20


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

    stream, found = DecodeStream(skip_special_tokens=False), []
    for token in tokens:
        try:
            text = stream.step(tokenizer, token)
            found.append(f"<{token}>" if text is None and tokenizer.id_to_token(token) is None else text or "")
        except Exception:  # tokenizers raises nothing narrower, for an id outside the vocabulary or broken text
            stream = DecodeStream(skip_special_tokens=False)
            found.append(f"<{token}>")
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
        return Tokenizer.from_file(str(path))
    except Exception:  # tokenizers raises nothing narrower for a damaged file
        return None


def _in_hub_cache(model: str) -> Path | None:
    with suppress(ValueError, OSError):  # no valid id
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(model, FILE)
        return Path(found) if isinstance(found, str) else None
    return None
