"""Weights by files: the running server reads a directory in the Hugging Face format, and swaps them in between two
forward passes.

    POST /v1/bridge/reload ─▶ checked here ─▶ every worker's updater thread reads it into staging ─▶ all ranks swap
    POST /reload_weights      the same by hand, while no trainer holds the server

Needs only a file system that trainer and vLLM share. A directory must match its `manifest.json`, digests included. By
hand, one without a manifest is accepted if its safetensors files are complete by their own headers. If a directory is
refused, or reading it fails, the previous weights stay served.
"""

import asyncio
import contextlib
import functools
import queue
import time
import uuid
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import torch
from msgspec import Meta, Struct
from safetensors import SafetensorError, safe_open

from atroposlib.errors import reading
from atroposlib.wire.bridge import (
    POLICY_FILE,
    Bucket,
    Manifest,
    Opened,
    ReloadOffer,
    Served,
    compare,
    read_policy_version,
)
from atroposlib.wire.folders import MANIFEST, digest, is_sharded, needs_export, read_manifest
from atroposlib.wire.published import InFiles, in_memory
from atroposlib.wire.typed import MAX_LEASE_S, PolicyVersion, brief, printable
from vllm_patching.engines.base import FileFault, Receiver, Refused, StagingEngine, WorkerFailed
from vllm_patching.engines.session import Commit, Route, Sessions
from vllm_patching.memory.experts import read_experts

BY_HAND_S = 3600.0  # deadline of POST /reload_weights
POLL_S = 0.05
DTYPES = ("BF16", "F16", "F32")  # as safetensors calls them; cast to what is served

Directory = Annotated[str, Meta(min_length=1, max_length=4096)]


class Reload(Commit):
    """A trainer's next version, and the directory that has it."""

    path: Directory


class ReloadWeights(Struct):
    """By hand: the version is the directory's own (policy.json) where it names one, else the next."""

    path: Directory
    policy_version: PolicyVersion | None = None


class ReloadEngine(StagingEngine):
    """The server's half: checks a directory once, before any worker reads it."""

    manifest: Manifest

    async def open(self, offer: ReloadOffer) -> Opened:
        self.manifest = await self.serving.manifest()
        return await super().open(offer)

    async def stage(self, version: int, request: Reload | ReloadWeights) -> None:
        try:
            files = await asyncio.to_thread(
                tensor_files, Path(request.path), self.manifest, written=isinstance(request, Reload)
            )
        except (OSError, ValueError, FileFault) as fault:
            raise Refused(
                f"{printable(request.path, 300)} cannot be served: {printable(str(fault), 900)}", 422
            ) from fault
        await self.serving.rpc("bridge_request", self.offer.session, version, msgspec.to_builtins(files))
        deadline = time.monotonic() + self.offer.timeout_s
        while not await self._staged(version):
            if time.monotonic() > deadline:
                raise Refused(
                    f"reading {printable(request.path, 300)} took longer than {self.offer.timeout_s:.0f} s: raise"
                    " --bridge-timeout-s, or use a faster file system",
                    504,
                )
            await asyncio.sleep(POLL_S)

    async def close(self) -> None:
        await self.serving.rpc("bridge_leave")

    async def _staged(self, version: int) -> bool:
        """Return whether every worker has read `version`. Raises WorkerFailed for one that cannot."""
        workers = await self.serving.workers()
        for worker in workers:
            if worker.state == "failed":
                raise WorkerFailed("reading", f"on rank {worker.rank}", str(worker.error))
        return all(worker.state == "staged" and worker.staged_version == version for worker in workers)


class ReloadReceiver(Receiver):
    """Reads the tensors of a checked directory, each cast to the dtype that is served."""

    def __init__(self, offer: ReloadOffer, rank: int) -> None:
        super().__init__(offer, rank)
        self._requests: queue.Queue[tuple[int, object] | None] = queue.Queue()  # None: the session is over
        self._files = TensorFiles({}, {})

    def request(self, version: int, request: object) -> None:
        self._requests.put((version, request))

    def end(self) -> None:
        super().end()
        self._requests.put(None)

    def next_version(self) -> int | None:
        requested = self._requests.get()
        if requested is None or self.over:
            return None
        version, request = requested
        self._files = msgspec.convert(request, TensorFiles)
        return version

    def fill(self, bucket: Bucket, buffer: torch.Tensor) -> None:
        with contextlib.ExitStack() as held:
            opened = functools.cache(lambda path: held.enter_context(safe_open(path, "pt")))

            def read(name: str) -> torch.Tensor:
                values: torch.Tensor = opened(self._files.paths[name]).get_tensor(name)
                return values

            for tensor in bucket.tensors:
                start = tensor.offset - bucket.start
                target = buffer[start : start + tensor.nbytes].view(getattr(torch, tensor.dtype)).view(tensor.shape)
                content = self._files.tensors[tensor.name]
                if not content.experts:
                    target.copy_(read(content.name))
                for expert in range(len(content.experts)):  # one at a time: all of them would be there twice
                    target[expert].copy_(read_experts(content, read, expert, 1)[0])


class TensorFiles(Struct):
    """A directory's files: the path of each of its tensors, and those of the model, made of them."""

    paths: dict[str, str]
    tensors: dict[str, InFiles]


def tensor_files(folder: Path, manifest: Manifest, *, written: bool) -> TensorFiles:
    """Find where the tensors of `manifest` are in `folder`, and check all of it. With `written`, a trainer wrote it,
    and without a manifest it is unfinished. Raises FileFault, ManifestMismatch, OSError, ValueError.
    """
    if not folder.is_absolute():
        raise FileFault("its path is not absolute: give the absolute path, the same for trainer and vLLM")
    paths = sorted(folder.glob("*.safetensors"))
    if is_sharded(folder):
        raise FileFault(needs_export(folder))
    if not paths:
        raise FileFault("no directory with safetensors files is there: trainer and vLLM must see it under one path")
    for path in paths:
        _check_inside(folder, path)
    _check_digests(folder, {path.name for path in paths}, written=written)
    files: dict[str, str] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for path in paths:
        for name, shape in _shapes(path).items():
            if name in files:
                raise FileFault(f"{path.name} and {Path(files[name]).name} both contain {brief(name)}")
            files[name], shapes[name] = str(path), shape
    tensors = in_memory(shapes)
    compare(manifest, {name: content.shape for name, content in tensors.items()}, "the directory")
    return TensorFiles(files, tensors)


def _check_inside(folder: Path, path: Path) -> None:
    """Reading a FIFO would wait forever, and a link could lead anywhere."""
    if not path.resolve().is_relative_to(folder.resolve()):
        raise FileFault(f"{path.name} is outside the directory, or is a link out of it")
    if not path.is_file():
        raise FileFault(f"{path.name} is not a regular file")


def _check_digests(folder: Path, weights: set[str], *, written: bool) -> None:
    path = folder / MANIFEST
    if not path.exists() and not written:
        return
    _check_inside(folder, path)
    with reading(f"{MANIFEST} is damaged", FileFault):
        files = read_manifest(folder)
    if unknown := sorted(weights - set(files)):
        raise FileFault(f"{MANIFEST} does not name {brief(unknown)}")
    for name, expected in files.items():
        file = folder / name
        _check_inside(folder, file)
        if (size := file.stat().st_size) != expected.bytes:
            raise FileFault(f"{brief(name)} has {size} bytes, it was written with {expected.bytes}")
        if digest(file) != expected.sha256:
            raise FileFault(f"{brief(name)} has its size but other contents than were written (SHA-256 differs)")


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the tensors in a file. Raises FileFault for a file or dtype that cannot be read."""
    shapes = {}
    with reading(f"{path.name} cannot be read", FileFault, also=(SafetensorError,)), safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118  it is not a mapping
            content = file.get_slice(name)
            if content.get_dtype() not in DTYPES:
                raise FileFault(f"{path.name}: {brief(name)} is {content.get_dtype()}, not one of {DTYPES}")
            shapes[name] = tuple(content.get_shape())
    return shapes


def _own_version(path: str) -> int | None:
    """The version that the directory names, or None. Raises Refused."""
    what = f"the {POLICY_FILE} of {printable(path, 300)} cannot be read"
    with reading(what, partial(Refused, status=422), also=(KeyError, TypeError)):
        return read_policy_version(path) if (Path(path) / POLICY_FILE).is_file() else None


async def _reload_by_hand(sessions: Sessions, body: ReloadWeights) -> Served:
    """A session of its own, for this one version."""
    version = body.policy_version
    if version is None:
        version = await asyncio.to_thread(_own_version, body.path)
    if version is None:
        version = sessions.serving.policy_version + 1
    offer = ReloadOffer(
        session=uuid.uuid4().hex,
        trainer="POST /reload_weights",
        lease_s=MAX_LEASE_S,
        manifest_digest=(await sessions.manifest()).digest(),
        timeout_s=BY_HAND_S,
    )
    await sessions.open(offer)
    try:
        return await sessions.commit(offer.session, version, body)
    finally:
        with contextlib.suppress(Refused):  # a trainer may have taken over when its lease was up
            await sessions.close(offer.session)


ROUTES = (
    Route("/v1/bridge/reload", ReloadOffer, Reload, lambda s, b: s.commit(b.session, b.policy_version, b)),
    Route("/reload_weights", ReloadOffer, ReloadWeights, _reload_by_hand),
)
