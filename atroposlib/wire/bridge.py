"""The weight bridge's protocol: every record that a trainer and a vLLM server exchange, and the rules they keep.

A trainer posts an `Offer` of its bridge's kind, gets a reply, and from then on holds a session (vllm_patching/engines
on the server's side, example_trainer/bridges on the trainer's).

Broadcast

    trainer                                vLLM server (API process)            worker r (updater thread)
       │ GET  /v1/bridge/manifest  ───────────▶│  what each parameter is               │
       │ TCPStore listens                      │                                       │
       │ POST /v1/bridge/session   ───────────▶│── open_session ──────────────────────▶│ manifest digest compared
       │        ◀──────────────── Gloo (and NCCL) group: trainer rank 0, workers 1..TP ┤ joins once, never rejoins
       │ store[id/go/k] = Announced            │                                       │
       │ bucket 0, bucket 1, ... broadcast  ──────────────────────────────────────────▶│ into the staging arena
       │        ◀─────────────────────────────────────────────── store[id/ack/k/r] ────┤
       │ POST /v1/bridge/commit    ───────────▶│ pause(keep) → apply on all ranks      │
       │        ◀───── stall, apply ───────────│ → set version → resume                │

Protocol 2: an offer with `senders`. Each of several trainer ranks has a group of its own with the workers, and sends
the part of every tensor that it holds (senders.py); the rest is as above. `protocol` in a server's status tells what
it takes.

Single copy: the trainer's parameters are the workers' own memory, on the same machine and the same device

    trainer                                vLLM server (API process)            worker r
       │ GET  /v1/bridge/manifest  ───────────▶│                                       │
       │ POST /v1/bridge/attach    ───────────▶│── bridge_attach ─────────────────────▶│ memory handle, offsets, shards
       │        ◀──────────────────────────────┤                                       │
       │ POST /v1/bridge/pause     ───────────▶│ pause(keep); watches the trainer      │
       │ optimizer step ─────────────────────────────────────────────────────────────▶ │ live weights, no byte moves
       │ POST /v1/bridge/resume    ───────────▶│ set version → resume                  │

Invariants
- A session is one trainer's hold on one server: a random id that no other process can guess. A worker joins it once;
  a failure ends the session; the trainer must open a new one. vLLM keeps serving the last committed weights.
- Nothing is applied before every byte arrived on every rank, and all ranks apply between the same two forward steps.
- Only single copy writes live weights, and only between pause and resume. A trainer that dies, falls silent or
  oversteps its deadline in between leaves weights that are half stepped: they are poisoned, and generation is refused
  until a trainer completes a sync.
- The first commit of a session may set any policy version (a resumed trainer); after that it rises by exactly one.
- A trainer that feeds several servers holds one session with each and commits once all have staged. One that fails
  is fenced off (POST /v1/bridge/fence): its session ends and it refuses to generate until a trainer has committed a
  whole version to it.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal, get_args

import msgspec
from msgspec import Meta, Struct

from atroposlib.wire.processes import Process
from atroposlib.wire.typed import MAX_POLICY_VERSION, Lease, Name, TokenId, WrongValue, brief, typed_body

ALIGNMENT = 256  # bytes; every vLLM parameter starts at a multiple, as a cudaMalloc'ed tensor would
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
POLICY_FILE = "policy.json"  # beside a checkpoint's weights: {"policy_version": N}
PROTOCOL = 2  # 1: one sender; 2: several, in an offer that names them
NCCL_BUCKET = 256 << 20  # bytes; on a GPU the usual size of a bucket
GOODBYE = "goodbye"  # value of go_key when the trainer ends its session


class ManifestMismatch(ValueError):
    """Trainer and vLLM do not hold the same model; the message names the first difference."""


class WireTensor(Struct, frozen=True):
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


class Bucket(Struct, frozen=True):
    """Consecutive tensors sent by one broadcast: bytes [start, end) of the wire image."""

    start: int
    end: int
    tensors: tuple[WireTensor, ...]


class Manifest(Struct, frozen=True):
    """What vLLM holds and in which order it expects to receive it; identical on every rank."""

    model: str
    tp_size: int
    nbytes: int
    tensors: tuple[WireTensor, ...]

    def digest(self) -> str:
        """SHA-256 over names, shapes, dtypes, order and offsets."""
        rows = [[t.name, list(t.shape), t.dtype, t.offset] for t in self.tensors]
        return hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()

    @property
    def largest_bucket(self) -> int:
        """Bytes of it over NCCL, unless the trainer sets another size."""
        return max(NCCL_BUCKET, *(tensor.nbytes for tensor in self.tensors))

    def buckets(self, bucket_bytes: int) -> list[Bucket]:
        """Whole tensors grouped up to `bucket_bytes`; a larger tensor is a bucket of its own."""
        groups: list[list[WireTensor]] = []
        for tensor in self.tensors:
            if groups and tensor.offset + tensor.nbytes - groups[-1][0].offset <= bucket_bytes:
                groups[-1].append(tensor)
            else:
                groups.append([tensor])
        return [Bucket(group[0].offset, group[-1].offset + group[-1].nbytes, tuple(group)) for group in groups]


class Offer(Struct, frozen=True, kw_only=True, tag_field="kind"):
    """What a trainer posts to hold a server's bridge; `kind` chooses the server's engine."""

    session: Name
    trainer: Name  # host:pid, for messages
    lease_s: Lease  # how long the session lives without a sign of life from the trainer
    process: Process | None = None  # so that a server on the same machine sees at once when the trainer is gone

    @property
    def kind(self) -> str:
        return str(self.__struct_config__.tag)


class Senders(Struct, frozen=True, omit_defaults=True):
    """The trainer ranks that send, each what it holds: a mesh of `shard_size` x `tp_size`, in row-major order.

    Tensor parallelism cuts each tensor of `tp_dims` along that dimension, then FSDP2 cuts each part along its first.
    What tensor parallelism does not cut is sent by its first ranks.
    """

    shard_size: Annotated[int, Meta(ge=1, le=4096)]
    tp_size: Annotated[int, Meta(ge=1, le=4096)] = 1
    tp_dims: dict[str, Annotated[int, Meta(ge=0, le=8)]] = {}  # by Hugging Face name
    layouts: tuple[str, ...] = ()  # what each sends and in which order: layout_digest, which the server compares

    @property
    def count(self) -> int:
        return self.shard_size * self.tp_size


class BroadcastOffer(Offer, frozen=True, kw_only=True, tag="broadcast", omit_defaults=True):
    """Weights come by broadcast: where the trainer's store listens and what both sides must agree on."""

    address: Name
    port: Annotated[int, Meta(ge=1, le=65535)]
    world_size: Annotated[int, Meta(ge=2, le=4096)]  # 1 trainer rank + TP workers, in each group
    backend: Annotated[str, Meta(pattern=r"\A(gloo|nccl)\Z")]  # of the data group
    manifest_digest: Name
    bucket_bytes: Annotated[int, Meta(ge=1, le=2**32)]
    timeout_s: Annotated[float, Meta(gt=0, le=3600)]  # deadline of each collective and of each store wait
    senders: Senders | None = None  # protocol 2; None: rank 0 alone sends whole tensors
    delta: bool = False  # buckets travel as vllm_patching/delta.py encodes them; not from several senders


class SingleCopyOffer(Offer, frozen=True, kw_only=True, tag="single_copy"):
    """The trainer shares the weights themselves."""

    manifest_digest: Name
    process: Process


class AdapterOffer(Offer, frozen=True, kw_only=True, tag="adapter"):
    """The trainer writes LoRA adapters."""

    model: Annotated[str, Meta(min_length=1, max_length=4096)]  # --model-name
    rank: Annotated[int, Meta(ge=1, le=4096)]
    process: Process


class ReloadOffer(Offer, frozen=True, kw_only=True, tag="reload"):
    """The trainer writes whole models into directories."""

    manifest_digest: Name
    timeout_s: Annotated[float, Meta(gt=0, le=3600)]  # to check and read one of them


AnyOffer = BroadcastOffer | SingleCopyOffer | AdapterOffer | ReloadOffer
OFFERS: dict[str, type[Offer]] = {str(offer.__struct_config__.tag): offer for offer in get_args(AnyOffer)}


def parse_offer(body: object, default: type[Offer]) -> Offer:
    """`body` as the offer that its `kind` names, or as `default` where it names none. Raises WrongValue, naming the
    field that is missing, unknown, of another type or out of range.
    """
    kind = default
    if isinstance(body, dict) and "kind" in body:
        body = dict(body)
        name = body.pop("kind")
        if not isinstance(name, str) or name not in OFFERS:
            raise WrongValue(f"session offer: kind={brief(name)}: expected one of {sorted(OFFERS)}")
        kind = OFFERS[name]
    return typed_body(f"session offer ({kind.__struct_config__.tag})", body, kind)


WorkerState = Literal["idle", "joining", "joined", "receiving", "staged", "failed"]


class WorkerStatus(Struct):
    """What one worker's updater is doing."""

    rank: int
    state: WorkerState = "idle"
    session: str | None = None
    staged_version: int | None = None
    receive_s: float | None = None
    error: str | None = None


class ServerActivity(Struct):
    """GET /v1/bridge/activity: what a server has done since its start."""

    generating_s: float  # in which at least one request was generating
    prompt_tokens: int = 0  # of requests
    cached_tokens: int = 0  # of these, found in the KV cache
    tokens_again: int = 0  # of sequences under way, read once more after a sync, or because the cache was full
    running: int = 0  # requests that are generating now


class ServerStatus(Struct):
    """GET /v1/bridge/status."""

    model: str
    policy_version: int
    protocol: int = 1  # of broadcasts; a server that does not say knows only 1
    served_model: str = ""  # the adapter's name, or `model`
    enabled: bool = False  # whether whole weights can be handed over
    dtype: str = ""
    tp_size: int = 1
    max_model_len: int | None = None  # of a server that says it
    batch_invariant: bool = False
    kv_on_sync: str = "reset"  # what its KV cache keeps when it serves a new version
    paused: bool = False
    poisoned: str | None = None  # why the weights must not be served
    refusing: str | None = None  # why nothing is generated, for whatever cause
    session: str | None = None
    trainer: str | None = None
    lease_left_s: float | None = None
    workers: list[WorkerStatus] = []
    max_lora_rank: int | None = None  # of a server that takes adapters; absent from any other's
    adapters_in_use: list[str] = []


class Shard(Struct, frozen=True):
    """Says where one Hugging Face tensor, or one block of it, lives on one rank: `length` slices of a vLLM parameter.

    A rank that holds several blocks of a tensor has a shard for each, all along one dimension: of stacked experts with
    gate and up projection in one tensor, the gate's part and the up projection's.
    """

    name: str  # Hugging Face
    vllm_name: str
    dim: int  # sharded dimension: 0 rows, 1 columns; of stacked experts [experts, rows, columns] one more
    start: int  # within the vLLM parameter of this rank
    length: int
    full_start: int  # within the whole Hugging Face tensor
    full_shape: tuple[int, ...]

    @property
    def whole(self) -> bool:
        return self.length == self.full_shape[self.dim]


class LiveShard(Struct, frozen=True):
    """The checksum of what one rank computes with, of one Hugging Face tensor."""

    name: str
    dim: int  # it is `length` slices along this dimension from `start` of the whole tensor
    start: int
    length: int
    digest: int  # vllm_patching/memory/digest.py


class IpcHandle(Struct, frozen=True):
    """What `UntypedStorage._share_cuda_` gives; bytes are base64 in JSON."""

    gpu: str  # UUID
    handle: bytes
    size: int
    offset: int
    counter_handle: bytes
    counter_offset: int
    event_handle: bytes
    event_sync: bool


class SharedRank(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One rank's live weights, as a trainer of the same machine can open them: by `fd` of `process`, or by `ipc`."""

    rank: int
    nbytes: int
    process: Process
    layout: dict[str, tuple[int, tuple[int, ...], str]]  # vLLM's name -> offset in bytes, shape, dtype
    shards: list[Shard]
    fd: int | None = None
    ipc: IpcHandle | None = None


class Served(Struct):
    """What the server serves now: the reply to a session's end, and to a fence."""

    policy_version: int


class Renewed(Served):
    """Reply to a heartbeat."""

    lease_s: float


class Opened(Served):
    """A session is accepted, and its workers begin to join."""

    workers: list[WorkerStatus] = []


class Attached(Served):
    """A session of single copy is accepted."""

    workers: list[SharedRank]


class LiveWeights(Served):
    """GET /v1/bridge/digest: every rank's live weights, rank by rank."""

    ranks: list[list[LiveShard]]


class DecodeProbe(Struct, frozen=True):
    """POST /v1/bridge/decode: prompts to answer greedily, and the places in each answer of which the whole distribution
    is asked for.
    """

    prompts: Annotated[list[Annotated[list[TokenId], Meta(min_length=1)]], Meta(min_length=1, max_length=8)]
    answer_tokens: Annotated[int, Meta(ge=1, le=64)]
    steps: Annotated[list[Annotated[list[Annotated[int, Meta(ge=0, le=63)]], Meta(max_length=8)]], Meta(max_length=8)]
    cache_salt: Name  # the sender's secret: nobody else's prompts share the prefix cache with these


class Decoded(Served):
    """What the server decoded: of each prompt its answer, and float32 logits [vocabulary] at each of its steps."""

    token_ids: list[list[int]]
    logits: list[list[bytes]]
    cached_tokens: list[int]  # of each prompt, those whose keys and values were in the prefix cache


class Paused(Served):
    """Generation is paused, and the trainer may write."""

    pause_s: float


class Resumed(Served):
    """Generation continues after a trainer's own write; seconds."""

    stall_s: float  # pause_s + update_s
    pause_s: float
    update_s: float


class Committed(Served):
    """A staged version is served; seconds."""

    stall_s: float  # generation stood still
    pause_s: float
    apply_s: float  # the slowest rank's
    commit_s: float


class AdapterLoaded(Served):
    """An adapter is served; `needed` names those that a request may still sample from."""

    load_s: float
    needed: list[str]


def write_policy_version(folder: Path, policy_version: int) -> None:
    """Say in a checkpoint directory which policy version it holds."""
    (folder / POLICY_FILE).write_text(json.dumps({"policy_version": policy_version}) + "\n")


def read_policy_version(model: str) -> int:
    """Return the version that a server of `model` serves: the one that its directory names, else 0.

    Raises ValueError for a damaged file.
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


class Announced(Struct, frozen=True, omit_defaults=True):
    """Announces what a trainer is about to send: a version, whole or as what has changed since `base`."""

    version: int
    base: int | None = None

    def encoded(self) -> str:
        """JSON; of a whole version the bare number, which is all that servers and trainers of protocol 1 know."""
        return str(self.version) if self.base is None else msgspec.json.encode(self).decode()

    @classmethod
    def decoded(cls, message: bytes) -> "Announced":
        """Decode what `encoded` has written."""
        read = msgspec.json.decode(message, type=int | Announced)
        return cls(read) if isinstance(read, int) else read


def go_key(session: str, sequence: int) -> str:
    """Store key under which the trainer puts `Announced`, encoded, of transfer number `sequence` of the session."""
    return f"{session}/go/{sequence}"


def ack_key(session: str, sequence: int, rank: int) -> str:
    """Store key under which worker `rank` (0..TP-1) reports that transfer `sequence` is staged."""
    return f"{session}/ack/{sequence}/{rank}"


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


def compare(manifest: Manifest, given: dict[str, tuple[int, ...]], holder: str = "the trainer") -> None:
    """Raise ManifestMismatch unless the tensors that `holder` has (name -> shape, tied ones once) are exactly the
    manifest's.
    """
    mapped = sum(given.get(t.name) == t.shape for t in manifest.tensors)
    where = (
        f"{mapped}/{len(manifest.tensors)} tensors agree; vLLM serves {manifest.model!r}. Start both with the same"
        " model"
    )
    for tensor in manifest.tensors:
        if tensor.name not in given:
            raise ManifestMismatch(f"vLLM holds {tensor.name} {list(tensor.shape)}, {holder} does not ({where})")
        if given[tensor.name] != tensor.shape:
            raise ManifestMismatch(
                f"{tensor.name}: vLLM holds {list(tensor.shape)}, {holder} {list(given[tensor.name])} ({where})"
            )
    if extra := sorted(set(given) - {t.name for t in manifest.tensors}):
        raise ManifestMismatch(
            f"{holder} holds {extra[0]} {list(given[extra[0]])}, vLLM does not; {len(extra)} such ({where})"
        )
