"""The manifest of a directory, written and compared, and the SHA-256 of a model's weights, of what is in memory and of
what is in files alike. Without torch, so that a command that only checks is fast.
"""

import hashlib
import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from atroposlib.errors import MakeError
from atroposlib.files import expect_regular
from atroposlib.wire.folders import MANIFEST, FileRecord, digest, read_manifest

__all__ = ["MANIFEST", "FileRecord", "digest", "digest_of_files", "expect_whole", "weights_digest", "write_manifest"]


def write_manifest(folder: Path, known: Mapping[str, FileRecord] | None = None) -> None:
    """Note every file of `folder` in its manifest; those whose records are `known` are not read. Raises OSError."""
    records = known or {}
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    manifest = {
        name: records.get(name) or FileRecord((folder / name).stat().st_size, digest(folder / name)) for name in names
    }
    (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1))


def expect_whole(
    folder: Path, raises: MakeError, remedy: str = "resume from another step_N directory"
) -> dict[str, FileRecord]:
    """The files of the manifest; raises `raises(line)` unless every one is there with its size and digest."""
    manifest_path = folder / MANIFEST
    try:
        if not manifest_path.is_file():
            raise raises(f"{folder} is not a complete checkpoint: it has no {MANIFEST}; {remedy}")
        manifest = read_manifest(folder)
        for name, expected in manifest.items():
            path = folder / name
            size = path.stat().st_size if path.is_file() else None
            if size != expected.bytes:
                found = "is missing" if size is None else f"has {size} bytes"
                raise raises(f"{path} {found}, the checkpoint was written with {expected.bytes}; {remedy}")
        with ThreadPoolExecutor() as pool:  # hashing is what takes long, and shards are several large files
            digests = pool.map(lambda name: digest(folder / name), manifest)
            if changed := [
                name for name, found in zip(manifest, digests, strict=True) if found != manifest[name].sha256
            ]:
                what = "has its size but other contents than were written (SHA-256 differs)"
                raise raises(f"{folder / changed[0]} {what}; {remedy}")
    except (UnicodeDecodeError, RecursionError, msgspec.DecodeError) as error:
        raise raises(f"{manifest_path} is damaged ({error}); {remedy}") from None
    except OSError as error:
        raise raises(f"{folder} cannot be read ({error}); {remedy}") from None
    return manifest


def weights_digest(tensors: Iterable[tuple[str, str, Sequence[int], Any]]) -> str:
    """Compute the digest of weights, given as name, safetensors' dtype, shape and bytes, in any order."""
    parts = [
        f"{name} {dtype} {list(shape)} {hashlib.sha256(content).hexdigest()}" for name, dtype, shape, content in tensors
    ]
    return hashlib.sha256("\n".join(sorted(parts)).encode()).hexdigest()


class _Entry(msgspec.Struct):
    """A tensor in the header of a safetensors file; its place is counted from the header's end."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def digest_of_files(folder: Path) -> str:
    """Compute the digest of the weights in a model's directory. Raises OSError, ValueError for damaged files."""
    return weights_digest(tensor for path in sorted(folder.glob("*.safetensors")) for tensor in _tensors(path))


def _tensors(path: Path) -> Iterator[tuple[str, str, Sequence[int], memoryview]]:
    with expect_regular(path).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        size = int.from_bytes(mapped[:8], "little")
        if size > len(mapped):
            raise ValueError(f"{path.name} has {len(mapped)} bytes, and a header of {size}")
        header = msgspec.json.decode(mapped[8 : 8 + size], type=dict[str, msgspec.Raw])
        for name, raw in header.items():
            if name != "__metadata__":
                entry = msgspec.json.decode(raw, type=_Entry)
                start, end = (8 + size + place for place in entry.data_offsets)
                if not 8 + size <= start <= end <= len(mapped):
                    raise ValueError(f"{path.name} was cut: {name} would end at byte {end} of {len(mapped)}")
                with memoryview(mapped) as whole, whole[start:end] as content:
                    yield name, entry.dtype, entry.shape, content
