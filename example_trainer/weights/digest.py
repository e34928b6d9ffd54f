"""The SHA-256 of a model's weights, of what is in memory and of what is in files alike. Loads no torch."""

import hashlib
import json
import mmap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any


def weights_digest(tensors: Iterable[tuple[str, str, Sequence[int], Any]]) -> str:
    """Compute the digest of weights, given as name, safetensors' dtype, shape and bytes, in any order."""
    parts = [
        f"{name} {dtype} {list(shape)} {hashlib.sha256(content).hexdigest()}" for name, dtype, shape, content in tensors
    ]
    return hashlib.sha256("\n".join(sorted(parts)).encode()).hexdigest()


def digest_of_files(folder: Path) -> str:
    """Compute the digest of the weights in a model's directory. Raises OSError, ValueError for damaged files."""
    return weights_digest(tensor for path in sorted(folder.glob("*.safetensors")) for tensor in _tensors(path))


def _tensors(path: Path) -> Iterator[tuple[str, str, Sequence[int], memoryview]]:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        size = int.from_bytes(mapped[:8], "little")
        header = json.loads(mapped[8 : 8 + size])
        for name, entry in header.items():
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                with memoryview(mapped) as whole, whole[8 + size + start : 8 + size + end] as content:
                    yield name, entry["dtype"], entry["shape"], content
