"""The protocol of both shared bridges, in one place. Imports neither vLLM nor torch nor the trainer.

Broadcast

    trainer                                vLLM server (API process)            worker r (updater thread)
       │ GET  /v1/bridge/manifest  ───────────▶│  what each parameter is               │
       │ TCPStore listens                      │                                       │
       │ POST /v1/bridge/session   ───────────▶│── open_session ──────────────────────▶│ manifest digest compared
       │        ◀──────────────── Gloo (and NCCL) group: trainer rank 0, workers 1..TP ┤ joins once, never rejoins
       │ store[id/go/k] = version              │                                       │
       │ bucket 0, bucket 1, ... broadcast  ──────────────────────────────────────────▶│ into the staging arena
       │        ◀─────────────────────────────────────────────── store[id/ack/k/r] ────┤
       │ POST /v1/bridge/commit    ───────────▶│ pause(keep) → apply on all ranks      │
       │        ◀───── stall, apply ───────────│ → set version → resume                │

Single copy: the trainer's parameters are the workers' own memory, on the same machine and the same device

    trainer                                vLLM server (API process)            worker r
       │ GET  /v1/bridge/manifest  ───────────▶│                                       │
       │ POST /v1/bridge/attach    ───────────▶│── bridge_attach ─────────────────────▶│ descriptor or IPC handle, offsets, shards
       │        ◀──────────────────────────────┤                                       │
       │ POST /v1/bridge/pause     ───────────▶│ pause(keep); watches the trainer      │
       │ optimizer step ─────────────────────────────────────────────────────────────▶ │ live weights, no byte moves
       │ POST /v1/bridge/resume    ───────────▶│ set version → resume                  │

Invariants
- A session is one trainer's hold on one server: a random id that no other process can guess. A worker joins it once;
  after any failure the session is dead and only a new one can go on. Serving goes on with the last committed
  weights.
- Nothing is applied before every byte arrived on every rank, and all ranks apply between the same two forward steps.
- Only single copy writes live weights, and only between pause and resume. Whoever dies, falls silent or oversteps
  its deadline in between leaves weights that are half stepped: they are poisoned, and generation is refused until a
  trainer completes a sync.
- The first commit of a session may set any policy version (a resumed trainer); after that it rises by exactly one.
- A trainer that feeds several servers holds one session with each and commits once all have staged. One that fails
  is fenced off (POST /v1/bridge/fence): its session ends and it refuses to generate until a trainer has committed a
  whole version to it.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from vllm_patching.processes import Process
from vllm_patching.typed import MAX_POLICY_VERSION, Lease, Name, typed_body

ALIGNMENT = 256  # bytes; every vLLM parameter starts at a multiple, as a cudaMalloc'ed tensor would
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


POLICY_FILE = "policy.json"  # beside a checkpoint's weights: {"policy_version": N}


def write_policy_version(folder: Path, policy_version: int) -> None:
    """Say in a checkpoint folder which policy version it holds."""
    (folder / POLICY_FILE).write_text(json.dumps({"policy_version": policy_version}) + "\n")


def read_policy_version(model: str) -> int:
    """What a server that loads `model` serves: the version that its folder names, else 0. Raises ValueError for a
    damaged file.
    """
    path = Path(model) / POLICY_FILE
    if not path.is_file():
        return 0
    version = json.loads(path.read_text())["policy_version"]
    if type(version) is not int or not 0 <= version <= MAX_POLICY_VERSION:
        raise ValueError(
            f"{path}: policy_version {version!r} is not a whole number from 0 to {MAX_POLICY_VERSION}; "
            "remove the file to serve it as version 0"
        )
    return version


class ManifestMismatch(ValueError):
    """Trainer and vLLM do not hold the same model; the message names the first difference."""


@dataclass(frozen=True)
class WireTensor:
    """One Hugging Face tensor as it travels: whole (never a TP shard), row-major, at `offset` bytes of the wire
    image.
    """

    name: str  # Hugging Face name, e.g. model.layers.0.self_attn.q_proj.weight
    shape: tuple[int, ...]
    dtype: str  # a key of DTYPE_BYTES: the dtype vLLM holds, so the trainer casts
    vllm_name: str  # the parameter it becomes part of, e.g. model.layers.0.self_attn.qkv_proj.weight
    offset: int  # bytes

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Bucket:
    """Consecutive tensors sent by one broadcast: bytes [start, end) of the wire image."""

    start: int
    end: int
    tensors: tuple[WireTensor, ...]


@dataclass(frozen=True)
class Manifest:
    """What vLLM holds and in which order it expects to receive it; identical on every rank."""

    model: str
    tp_size: int
    nbytes: int
    tensors: tuple[WireTensor, ...]

    def digest(self) -> str:
        """SHA-256 over names, shapes, dtypes, order and offsets."""
        rows = [[t.name, list(t.shape), t.dtype, t.offset] for t in self.tensors]
        return hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()

    def buckets(self, bucket_bytes: int) -> list[Bucket]:
        """Whole tensors grouped up to `bucket_bytes`; a larger tensor is a bucket of its own."""
        groups: list[list[WireTensor]] = []
        for tensor in self.tensors:
            if groups and tensor.offset + tensor.nbytes - groups[-1][0].offset <= bucket_bytes:
                groups[-1].append(tensor)
            else:
                groups.append([tensor])
        return [Bucket(group[0].offset, group[-1].offset + group[-1].nbytes, tuple(group)) for group in groups]

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @staticmethod
    def from_json(data: dict) -> "Manifest":
        """Raises KeyError or TypeError when `data` is not a manifest."""
        tensors = tuple(
            WireTensor(t["name"], tuple(t["shape"]), t["dtype"], t["vllm_name"], t["offset"]) for t in data["tensors"]
        )
        return Manifest(data["model"], data["tp_size"], data["nbytes"], tensors)


@dataclass(frozen=True)
class SessionOffer:
    """What a trainer posts to open a session: where its store listens and what both sides must agree on."""

    session: Name
    address: Name
    port: Annotated[int, Meta(ge=1, le=65535)]
    world_size: Annotated[int, Meta(ge=2, le=4096)]  # 1 trainer rank + TP workers
    backend: Annotated[str, Meta(pattern=r"\A(gloo|nccl)\Z")]  # of the data group
    manifest_digest: Name
    bucket_bytes: Annotated[int, Meta(ge=1, le=2**32)]
    timeout_s: Annotated[float, Meta(gt=0, le=3600)]  # deadline of each collective and of each store wait
    lease_s: Lease  # how long the session lives without a sign of life from the trainer
    trainer: Name  # host:pid, for messages

    @staticmethod
    def from_json(data: Any) -> "SessionOffer":
        """Raises WrongValue naming the field that is missing, unknown, of another type or out of range."""
        return typed_body("session offer", data, SessionOffer)


@dataclass(frozen=True)
class AttachOffer:
    """What a trainer posts to share the weights themselves."""

    session: Name
    manifest_digest: Name
    lease_s: Lease
    trainer: Name  # host:pid, for messages
    process: Process  # the trainer, so that the server sees at once when it is gone

    @staticmethod
    def from_json(data: Any) -> "AttachOffer":
        """Raises WrongValue, as above."""
        return typed_body("attach offer", data, AttachOffer)


@dataclass(frozen=True)
class AdapterOffer:
    """What a trainer posts to hold the adapter bridge."""

    session: Name
    trainer: Name  # host:pid, for messages
    lease_s: Lease
    model: Annotated[str, Meta(min_length=1, max_length=4096)]  # --model-name
    rank: Annotated[int, Meta(ge=1, le=4096)]
    process: Process  # so that the server sees at once when a trainer of this machine is gone

    @staticmethod
    def from_json(data: Any) -> "AdapterOffer":
        """Raises WrongValue, as above."""
        return typed_body("adapter offer", data, AdapterOffer)


def go_key(session: str, sequence: int) -> str:
    """Store key under which the trainer announces transfer number `sequence` of the session."""
    return f"{session}/go/{sequence}"


def ack_key(session: str, sequence: int, rank: int) -> str:
    """Store key under which worker `rank` (0..TP-1) reports that transfer `sequence` is staged."""
    return f"{session}/ack/{sequence}/{rank}"


GOODBYE = "goodbye"  # value of go_key when the trainer leaves in an orderly way


def align(offset: int) -> int:
    return (offset + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def lay_out(parts: Sequence[tuple[str, Sequence[tuple[str, tuple[int, ...], str]]]]) -> Iterator[WireTensor]:
    """Offsets for `(vllm_name, [(hf_name, shape, dtype), ...])`: parts of one fused parameter touch, parameters are
    aligned.
    """
    offset = 0
    for vllm_name, tensors in parts:
        offset = align(offset)
        for name, shape, dtype in tensors:
            tensor = WireTensor(name, shape, dtype, vllm_name, offset)
            offset += tensor.nbytes
            yield tensor


def compare(manifest: Manifest, trainer: dict[str, tuple[int, ...]]) -> None:
    """Raise ManifestMismatch unless the trainer's tensors (name -> shape, tied ones once) are exactly the
    manifest's.
    """
    mapped = sum(trainer.get(t.name) == t.shape for t in manifest.tensors)
    where = (
        f"{mapped}/{len(manifest.tensors)} tensors agree; vLLM serves {manifest.model!r}. Start both with the same"
        " model"
    )
    for tensor in manifest.tensors:
        if tensor.name not in trainer:
            raise ManifestMismatch(f"vLLM holds {tensor.name} {list(tensor.shape)}, the trainer does not ({where})")
        if trainer[tensor.name] != tensor.shape:
            raise ManifestMismatch(
                f"{tensor.name}: vLLM holds {list(tensor.shape)}, the trainer {list(trainer[tensor.name])} ({where})"
            )
    if extra := sorted(set(trainer) - {t.name for t in manifest.tensors}):
        raise ManifestMismatch(
            f"the trainer holds {extra[0]} {list(trainer[extra[0]])}, vLLM does not; {len(extra)} such ({where})"
        )
