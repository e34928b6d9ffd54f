"""A checkpoint's tensors as the parts of each trainer rank: all ranks write them while training continues, and any
number of ranks can read them.

    rank r's parts ──copy to host memory──▶ training continues
                                └──thread──▶ shards/rank_R.safetensors, hashed on the way, flushed

Where host memory has no room for the copy, training waits until the rows are written.

The files are those of torch.distributed.checkpoint's safetensors format (each says at which row and column its part of
a tensor begins), so `torch.distributed.checkpoint.load` reads them by its HuggingFaceStorageReader. We write them
ourselves: its writer makes a second copy of a rank's whole shard in memory, and synchronises with the other ranks while
it writes, so it would wait for a rank that is gone. Reading loads no pickle.
"""

import hashlib
import json
import math
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path

import msgspec
import torch
from safetensors import safe_open
from torch import Tensor

from atroposlib.errors import reason
from atroposlib.files import sync
from atroposlib.logs import get_logger
from atroposlib.wire.folders import SHARDS, is_sharded
from example_trainer.model.files import WeightFiles, safetensors_header
from example_trainer.model.loading import ModelError

log = get_logger(__name__)

OFFSETS = "DCP_SHARDING_INFO"  # torch.distributed.checkpoint's key for where the parts begin
WEIGHTS = "model."
BLOCK_BYTES = 16 << 20
STOP_S = 2.0  # for a block to be written


@dataclass(frozen=True)
class Rows:
    """A rank's part of a tensor, from row `start` on, and from column `column` on."""

    start: int
    content: Tensor
    column: int = 0

    @property
    def offsets(self) -> list[int]:
        """Return where it begins in each dimension of the whole tensor."""
        return [self.start, self.column, *(0 for _ in self.content.shape)][: self.content.ndim]


class Written(msgspec.Struct):
    """The state of a rank's file: as long as it is being written, `bytes` so far and nothing else."""

    name: str = ""
    bytes: int = 0
    sha256: str = ""
    failed: str = ""


class ShardWriter:
    """Writes the files of one rank. The memory of the copy is kept from one checkpoint to the next."""

    def __init__(self) -> None:
        self._copies: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._written = Written()

    @property
    def written(self) -> Written:
        """The state of the file that was started last."""
        return self._written

    def start(self, path: Path, parts: Mapping[str, Rows], room: int) -> None:
        """Copy `parts`, which may change after that, and begin to write them. The file before is finished.

        If the copy took more than `room` bytes, they are written before this returns.
        """
        self.stop()
        held = {name: rows for name, rows in parts.items() if rows.content.numel()}
        needed = sum(rows.content.nbytes for name, rows in held.items() if name not in self._copies)
        offsets = {name: {"saved_offsets": rows.offsets} for name, rows in held.items()}
        header = safetensors_header(
            {name: (tuple(rows.content.shape), rows.content.dtype) for name, rows in held.items()},
            {OFFSETS: json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"},
        )
        self._stop, self._written = threading.Event(), Written()
        if needed > max(0, room):
            log.warning(
                "%s is written while training waits: a copy of its %.1f GB does not fit into the %.1f GB of host "
                "memory that are free",
                path,
                needed / 1e9,
                max(0, room) / 1e9,
            )
            contents = (rows.content.cpu().contiguous() for rows in held.values())
            self._write(path, chain([memoryview(header)], map(_bytes_of, contents)), self._stop)
            return
        # The thread touches no torch: it may outlive the interpreter
        blocks = [memoryview(header), *(_bytes_of(self._copy(name, rows.content)) for name, rows in held.items())]
        self._thread = threading.Thread(
            target=self._write, args=(path, blocks, self._stop), name="CheckpointWriter", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Leave a file that is not finished as it is."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(STOP_S)
            self._thread = None

    def _copy(self, name: str, rows: Tensor) -> Tensor:
        copy = self._copies.get(name)
        if copy is None or copy.shape != rows.shape:
            copy = self._copies[name] = torch.empty(rows.shape, dtype=rows.dtype)
        return copy.copy_(rows)

    def _write(self, path: Path, blocks: Iterable[memoryview], stop: threading.Event) -> None:
        digest, size = hashlib.sha256(), 0
        try:
            with path.open("wb") as file:
                for block in _cut(blocks):
                    if stop.is_set():
                        return
                    file.write(block)
                    digest.update(block)
                    size += len(block)
                    self._written = Written(bytes=size)
            sync(path)
        except OSError as error:
            written = Written(failed=reason(error))
        else:
            written = Written(path.name, size, digest.hexdigest())
        if not stop.is_set():
            self._written = written


def _bytes_of(content: Tensor) -> memoryview:
    return content.view(torch.uint8).flatten().numpy().data


def _cut(blocks: Iterable[memoryview]) -> Iterator[memoryview]:
    return (block[start : start + BLOCK_BYTES] for block in blocks for start in range(0, len(block), BLOCK_BYTES))


@dataclass(frozen=True)
class _Part:
    begin: tuple[int, ...]  # in each dimension of the whole tensor
    shape: tuple[int, ...]
    path: Path

    @property
    def end(self) -> tuple[int, ...]:
        return tuple(begin + size for begin, size in zip(self.begin, self.shape, strict=True))


class ShardFiles(WeightFiles):
    """The tensors of the sharded checkpoint `folder` whose names begin with `prefix`, which is left out."""

    def __init__(self, folder: Path, prefix: str = WEIGHTS) -> None:
        self._folder = folder
        self._prefix = prefix
        self._parts: dict[str, list[_Part]] = {}
        self.shapes = {}
        # mapped, and open until nobody reads any more
        self._open = cache(lambda path: safe_open(path, "pt"))
        for path in sorted((folder / SHARDS).glob("*.safetensors")):
            file = self._open(path)
            offsets = json.loads((file.metadata() or {}).get(OFFSETS, "{}"))
            for key in file.keys():  # noqa: SIM118  (not a mapping)
                if key.startswith(prefix):
                    shape = tuple(file.get_slice(key).get_shape())
                    begin = tuple(offsets[key]["saved_offsets"])[: len(shape)]
                    self._parts.setdefault(key.removeprefix(prefix), []).append(_Part(begin, shape, path))
        for name, parts in self._parts.items():
            parts.sort(key=lambda part: part.begin)
            self.shapes[name] = tuple(map(max, zip(*(part.end for part in parts), strict=True)))

    def expect(self, name: str, shape: tuple[int, ...]) -> None:
        end, parts = 0, self._parts.get(name, [])
        for part in parts:
            if part.begin and part.begin[0] > end:
                raise ModelError(
                    f"{self._folder}/{SHARDS} has no rows {end} to {part.begin[0]} of {name}: a file is missing"
                )
            end = max(end, *part.end[:1], 0)
        if self.shapes.get(name) != shape:
            found = list(self.shapes[name]) if name in self.shapes else "nothing with that name"
            raise ModelError(
                f"{self._folder}/{SHARDS} has {found} for {name} {list(shape)}: it belongs to another model"
            )
        if (held := sum(math.prod(part.shape) for part in parts)) != math.prod(shape):
            raise ModelError(
                f"{self._folder}/{SHARDS} has {held} of {math.prod(shape)} values of {name}: a file is missing"
            )

    def part(self, name: str, dim: int, start: int, length: int) -> Tensor:
        if not self.shapes[name]:
            scalar: Tensor = self._open(self._parts[name][0].path).get_tensor(self._prefix + name)
            return scalar
        asked = range(start, start + length)
        return self.block(name, range(self.shapes[name][0]), asked) if dim else self.block(name, asked)

    def block(self, name: str, rows: range, columns: range | None = None) -> Tensor:
        lows, highs = [rows.start], [rows.stop]
        if len(self.shapes[name]) > 1:
            columns = columns or range(self.shapes[name][1])
            lows, highs = [rows.start, columns.start], [rows.stop, columns.stop]
        sizes = [high - low for low, high in zip(lows, highs, strict=True)]
        whole: Tensor | None = None
        for part in self._parts[name]:
            inside = [
                (max(low, begin), min(high, end))
                for low, high, begin, end in zip(lows, highs, part.begin, part.end, strict=False)
            ]
            if any(low >= high for low, high in inside):
                continue
            content = self._open(part.path).get_slice(self._prefix + name)
            found: Tensor = content[
                tuple(slice(low - at, high - at) for (low, high), at in zip(inside, part.begin, strict=False))
            ]
            if list(found.shape[: len(sizes)]) == sizes:
                return found
            if whole is None:
                whole = torch.empty(*sizes, *self.shapes[name][len(sizes) :], dtype=found.dtype)
            whole[tuple(slice(low - at, high - at) for (low, high), at in zip(inside, lows, strict=True))] = found
        return torch.empty(*sizes, *self.shapes[name][len(sizes) :]) if whole is None else whole


def open_weights(source: str) -> WeightFiles:
    """The weights of a hub id, a Hugging Face directory or a sharded checkpoint."""
    return ShardFiles(Path(source)) if is_sharded(Path(source)) else WeightFiles(source)
