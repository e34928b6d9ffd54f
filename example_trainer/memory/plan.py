"""The memory that a run needs, computed from the model's shapes before anything is loaded.

Whether it fits is fits.py's to tell. This module loads no torch.

    Training ──▶ phases: what one rank's device holds at once ──▶ the fullest one
             └─▶ what each rank keeps in host memory (--offload, --bridge-delta)

A rank of FSDP2 keeps its rows of weights, gradients and moments in float32; with tensor parallelism it computes with a
part of each layer, and these are rows of that. On top come, phase by phase:

    forward     root group (embedding, norm, head) in float32, gradient of the head, activations, a chunk of logits
    backward    the same, activations, and of the layers: this one gathered, the next one gathered, this one's gradient,
                and a float32 buffer in which the previous one is summed over ranks
    summing     the root group three times in float32: gathered, its gradient, the buffer in which it is summed
    handing     two buckets of weights: one that is sent, and the next, which is gathered

tests/unit/trainer/memory/test_memory_plan.py compares the sums with what PyTorch allocates for a sharded step, and the
activations with what autograd saves.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from atroposlib.wire.bridge import DTYPE_BYTES, NCCL_BUCKET
from example_trainer.memory.model_size import BY_NAME, ModelSize
from example_trainer.settings.bridges import MODES, Adapter, Broadcast, Grouped, SingleCopy
from example_trainer.settings.config import TrainerConfig

GB = 10**9
GIB = 1 << 30
MIB = 1 << 20
FLOAT32 = 4  # bytes
# bytes per weight; Adafactor's are one number per row and column
MOMENTS = {
    "adamw": 2 * FLOAT32,
    "adamw_8bit": 2,
    "adafactor": 0,
}
CUDA = GB  # CUDA context, NCCL's buffers, gaps of the allocator: an allowance, not measured
PROCESSES = 3 * GIB  # vLLM, trainer, environment and API without weights and KV cache, on a CPU
VLLM_PROCESSES = 1300 * MIB  # of it, those of one vLLM server
VLLM_OWN = 2 * GB  # activations and CUDA graphs of vLLM beside weights and KV cache: an allowance, not measured
UTILIZATION = 0.92  # vLLM's default of --gpu-memory-utilization
SHARED_UTILIZATION = 0.4  # of a GPU's memory, for vLLM beside a trainer
FILE_BUCKET = 256 * MIB  # of a sharded model that is written
GATHERED = 64 * MIB  # of one that is sent, in buckets that may be smaller

Offload = Literal["none", "moments", "all"]
OFFLOADS: tuple[Offload, ...] = ("none", "moments", "all")  # cheapest first


Kind = Literal[
    "weights",  # a rank's rows, and frozen ones
    "gradients",
    "moments",
    "reference",  # of --kl-coef
    "activations",
    "logits",
    "gathered",  # weights that a rank has whole for a while, and their gradients that go on to the others
    "bucket",  # weights on their way to vLLM
    "runtime",  # CUDA, NCCL, the processes themselves
    "vLLM's weights",
    "vLLM's staging",
    "KV cache",
]


@dataclass(frozen=True)
class MemoryItem:
    """One line of a table: what code asks for is the `kind`; `what` is for people."""

    kind: Kind
    what: str
    nbytes: int
    shared: bool = False  # vLLM's own, counted there


def total(items: Sequence[MemoryItem]) -> int:
    """Add up the bytes that are not counted elsewhere."""
    return sum(item.nbytes for item in items if not item.shared)


def computes_in(config: TrainerConfig, on_gpu: bool) -> Literal["float32", "bfloat16"]:
    """The dtype of the layers. A bit-exact run and a single copy compute as vLLM does, and an optimizer that takes
    whole tensors in float32.
    """
    if config.compute_dtype == "auto":
        return "bfloat16" if on_gpu and not config.keeps_tensors_whole else "float32"
    return config.compute_dtype


def offloads(config: TrainerConfig, on_gpu: bool) -> tuple[Offload, ...]:
    """List what --offload may become, cheapest first."""
    if config.offload != "auto":
        return (config.offload,)
    return OFFLOADS if on_gpu and not config.keeps_tensors_whole else ("none",)


@dataclass(frozen=True)
class Training:
    """Holds what decides on the memory of a trainer rank."""

    config: TrainerConfig
    size: ModelSize
    ranks: int = 1
    on_gpu: bool = True
    served: int = 2  # bytes of a weight in vLLM
    split: int = 1  # of a single copy: vLLM's ranks

    @property
    def offload(self) -> Offload:
        """Return what is in host memory; none until `auto` is resolved."""
        return "none" if self.config.offload == "auto" else self.config.offload

    @property
    def tp(self) -> int:
        """Ranks that split each layer."""
        return self.config.tp_size

    @property
    def shard(self) -> int:
        """Ranks that share one set of weights, or the part of it that tensor parallelism leaves to each of them."""
        most = max(1, self.ranks // self.tp)
        return min(self.config.fsdp_size or most, most)

    @cached_property
    def own(self) -> ModelSize:
        """The model as one rank of tensor parallelism computes with it; without any, the model."""
        return self.size.split(self.tp)

    @property
    def width(self) -> int:
        """Bytes of a number in the layers."""
        return 2 if computes_in(self.config, self.on_gpu) == "bfloat16" else FLOAT32

    @property
    def is_sharded(self) -> bool:
        """Return whether FSDP2 takes part."""
        return self.ranks > self.tp or self.width < FLOAT32 or self.offload != "none"

    @cached_property
    def adapter(self) -> int:
        """Weights of the adapter that is trained, if one is."""
        bridge = self.config.bridge
        return self.own.adapter(bridge.r, bridge.target_modules) if isinstance(bridge, Adapter) else 0

    # --- what stays ---------------------------------------------------------------------------------------------------

    @cached_property
    def states(self) -> dict[str, list[MemoryItem]]:
        """Weights, gradients and moments of one rank, by where they are: `device` and `host`."""
        config, shard = self.config, self.shard
        if config.bridge.same_devices:
            weights = single_copy(config, self.size.count // self.split, self.served < FLOAT32)
            return {"device": weights, "host": []}
        trained = self.adapter or self.own.count
        frozen = self.own.count if self.adapter else 0
        whole = config.sync_gradients == "last" and shard > 1
        weights = [
            MemoryItem("weights", "frozen weights", -(-frozen * (self.width if self.is_sharded else FLOAT32) // shard)),
            MemoryItem(
                "weights",
                "adapter in float32" if self.adapter else "weights in float32",
                -(-FLOAT32 * trained // shard),
            ),
        ]
        gradients = MemoryItem(
            "gradients",
            "gradients, whole until the last micro-batch" if whole else "gradients",
            FLOAT32 * trained if whole else -(-FLOAT32 * trained // shard),
        )
        moments = moments_of(config, trained, shard)
        reference = MemoryItem(
            "reference",
            "reference model for --kl-coef",
            -(-FLOAT32 * self.own.count // shard) if config.kl_coef > 0 else 0,
        )
        every = [*weights, gradients, moments, reference]
        away = {"none": [], "moments": [moments], "all": every}[self.offload]
        return {"device": _real(item for item in every if item not in away), "host": _real(away)}

    @property
    def host(self) -> int:
        """Bytes of host memory that a rank on a GPU keeps."""
        return total(self.host_items)

    @property
    def host_items(self) -> list[MemoryItem]:
        """The same as a table. What was sent to each server is on rank 0, and counted for all ranks alike."""
        config = self.config
        sends_changes = isinstance(config.bridge, Broadcast) and config.bridge.delta
        sent = self.served * self.size.count * len(config.vllm_servers) if sends_changes else 0
        kept = MemoryItem("bucket", "copy of the weights last sent (--bridge-delta)", -(-sent // self.ranks))
        return _real([*self.states["host"], kept])

    # --- what comes and goes ------------------------------------------------------------------------------------------

    @property
    def tokens(self) -> int:
        """The most tokens of a micro-batch."""
        config = self.config
        if config.shares_prefixes:
            from example_trainer.data.prefixes import most_tokens  # numpy: nothing that --help loads

            return most_tokens(config.pass_tokens, config.seq_len)
        return max(config.pass_tokens, config.seq_len)

    @property
    def masks(self) -> int:
        """Compute the bytes of the masks of attention, of which two rows are kept (attention_blocks.py): behind a
        shared prefix, on a CPU, at most 0.65 of a row's square; where layers have a window, that of the row.
        """
        if self.size.window is not None and self.size.window < self.config.seq_len:
            return 2 * self.width * self.tokens**2
        shares = self.config.shares_prefixes and not self.on_gpu
        return int(2 * 0.65 * FLOAT32 * self.tokens**2) if shares else 0

    @cached_property
    def activations(self) -> int:
        """Bytes that autograd saves in one micro-batch, and the largest gradients of them."""
        layers, tokens = self.size.layers, self.tokens
        final = tokens * self.size.hidden * (3 * FLOAT32 + 4 * FLOAT32)  # its norm; hidden states for the head, twice
        if self.config.gradient_checkpointing:
            return layers * self.kept_of_layer + self.of_layer + self.largest_gradients + final
        return layers * self.of_layer + self.largest_gradients + final

    @property
    def of_layer(self) -> int:
        """Bytes that autograd saves in one layer: what the modules of transformers 5 multiply, and packed attention.

        Per token, c being the bytes of a number: two norms save their input in float32, the normed value, and what the
        next module reads (4 + 2c each, times the width); attention the rotated queries, its output and a copy in the
        order of heads (3c times their width), keys and values (c each), and a number per head; the feed-forward part
        four values (c times its width): before and after the activation, the other factor, the product. A Qwen3 norms
        queries and keys, too. A token that takes k experts has k times what is saved of one, and the input and output
        of each (c each, times the width). Where prefixes are shared, keys and values are copied for the calls of
        attention, at most twice the row's, and on a CPU queries and outputs of long answers (attention_blocks.py).
        """
        c, size = self.width, self.own
        query, keys, inner = size.out("q_proj"), size.out("k_proj"), size.inner
        wide = 0 if self.fuses_norms else FLOAT32  # of a norm: its input in float32
        token = 2 * (wide + 2 * c) * size.hidden + 3 * c * query + 2 * c * keys + 4 * c * inner
        token += 2 * c * size.experts_per_token * size.hidden
        token += FLOAT32 * (size.heads or query // 64)
        if self.config.shares_prefixes:
            token += 2 * 2 * c * keys + (0 if self.on_gpu else 2 * c * query)
        if any(name.endswith("q_norm.weight") for name in size.shapes):
            token += (wide + c) * (query + keys)
        return token * self.tokens

    @property
    def fuses_norms(self) -> bool:
        """Return whether norms are one kernel (fused_norms.py), which keeps its input as it is."""
        return self.on_gpu and self.width < FLOAT32

    @property
    def kept_of_layer(self) -> int:
        """Compute the bytes of a layer that remain by --gradient-checkpointing: its input."""
        return self.width * self.size.hidden * self.tokens

    @property
    def largest_gradients(self) -> int:
        """Compute the bytes of the feed-forward part's gradients: three of its four values."""
        return 3 * self.width * self.own.inner * self.tokens

    @property
    def logits(self) -> int:
        """Logits, their probabilities and gradient; the head's next gradient beside the sum of those before. Where a
        teacher names tokens, probabilities twice: of what the sampler kept, too (policy.py).
        """
        chunk = min(self.config.logits_mb * MIB, FLOAT32 * self.size.embedding[0] * self.tokens)
        parts = chunk // self.tp if self.tp > 1 else 0  # which are put together
        kept = 3 if self.config.teacher_top_k else 2
        return kept * chunk + parts + max(chunk, 0 if self.adapter else FLOAT32 * self.own.head)

    @cached_property
    def phases(self) -> dict[str, list[MemoryItem]]:
        """List by phase what one rank's device holds at once."""
        stays = [
            *self.states["device"],
            *([MemoryItem("runtime", "CUDA and NCCL, about", CUDA)] if self.on_gpu else []),
        ]
        size, layer, shard = self.own, self.own.layer, self.shard
        activations = MemoryItem("activations", "activations of one micro-batch", self.activations + self.masks)
        logits = MemoryItem("logits", "logits, --logits-chunk-mb", self.logits)
        if not self.is_sharded or self.config.bridge.same_devices:
            gradient = MemoryItem("gathered", "a tensor's next gradient", 0 if self.adapter else FLOAT32 * size.largest)
            return {
                "forward pass": [*stays, activations, logits],
                "backward pass": [*stays, activations, *_real([gradient])],
            }
        c = self.width
        copied = 1 if self.offload == "all" else 0  # rows on their way from and to host memory
        root = MemoryItem(
            "gathered", "embedding and head, gathered", FLOAT32 * (size.root + copied * size.root // shard)
        )
        alone = shard == 1  # then nothing is gathered from others, only cast
        kept = not self.config.reshard_after_forward
        every = MemoryItem("gathered", "layers, gathered", c * (size.count - size.root) if kept else 0)
        trains = 0 if self.adapter else 1
        whole = self.config.sync_gradients == "last" and shard > 1  # then gradients are counted already
        head = MemoryItem("gathered", "gradient of the head", 0 if whole else trains * FLOAT32 * size.head)
        gathered = (0 if kept else c * layer * (1 if alone else 2)) + copied * FLOAT32 * layer // shard
        first = self.activations + gathered + trains * c * layer
        later = first - (self.kept_of_layer if self.config.gradient_checkpointing else self.of_layer)
        later += trains * FLOAT32 * layer
        buffers = MemoryItem("gathered", "layers, gathered, and their gradients", max(first, later) - self.activations)
        forward = MemoryItem("gathered", "layers, gathered", 0 if kept else c * layer * (1 if alone else 3))
        phases = {
            "forward pass": [*stays, root, head, every, forward, activations, logits],
            "backward pass": [*stays, root, head, every, activations, buffers],
        }
        if trains:
            gradients = MemoryItem("gathered", "their gradients", 0 if whole else FLOAT32 * size.root)
            summed = MemoryItem(
                "gathered", "buffer that sums them over ranks", FLOAT32 * (size.root + copied * size.root // shard)
            )
            phases["sum of the last gradients"] = [*stays, root, gradients, summed]
            if self.offload == "moments":
                moved = MemoryItem("moments", "moments of one tensor", -(-MOMENTS["adamw"] * size.largest // shard))
                phases["update"] = [*stays, moved]
        updated = [item for item in stays if item.kind != "gradients"]  # and cleared
        phases["handing over the weights"] = [*updated, MemoryItem("bucket", "buckets of the bridge", 2 * self.bucket)]
        return {name: _real(items) for name, items in phases.items()}

    @property
    def bucket(self) -> int:
        """Bytes of weights that are gathered at once to be sent or written; a tensor is never split."""
        bridge = self.config.bridge
        largest = self.size.largest * self.served
        if self.adapter:
            return FLOAT32 * self.adapter
        if not isinstance(bridge, Grouped):
            return max(largest, FILE_BUCKET)
        automatic = "nccl" if self.on_gpu else "gloo"
        sent = bridge.bucket_bytes(automatic if bridge.backend == "auto" else bridge.backend)
        return max(largest, sent, GATHERED)

    @property
    def peak(self) -> str:
        """The fullest phase."""
        return max(self.phases, key=lambda phase: total(self.phases[phase]))

    @property
    def items(self) -> list[MemoryItem]:
        """List what a rank's device holds when it is fullest."""
        return self.phases[self.peak]

    @property
    def need(self) -> int:
        """Bytes of it."""
        return total(self.items)

    def having(self, **settings: object) -> "Training":
        """The same with other settings of the configuration."""
        return replace(self, config=self.config.model_copy(update=settings))


def single_copy(config: TrainerConfig, count: int, is_half: bool) -> list[MemoryItem]:
    """List what training `count` weights takes on the device where vLLM has them."""
    halves = count if is_half else 0
    bridge = config.bridge
    rounds = isinstance(bridge, SingleCopy) and bridge.bf16_update == "stochastic"
    mastered = 0 if rounds else halves
    return _real(
        [
            MemoryItem("weights", "weights, vLLM's own", FLOAT32 * count - 2 * halves, shared=True),
            MemoryItem("weights", "float32 masters of bfloat16 weights", FLOAT32 * mastered),
            MemoryItem("gradients", "gradients", FLOAT32 * count - 2 * (halves - mastered)),
            moments_of(config, count),
            MemoryItem("reference", "reference model for --kl-coef", FLOAT32 * count if config.kl_coef > 0 else 0),
        ]
    )


def moments_of(config: TrainerConfig, trained: int, shard: int = 1) -> MemoryItem:
    """Count what the optimizer keeps of `trained` weights, on each of `shard` ranks that share them."""
    average = FLOAT32 if config.ema_decay else 0
    what = f"moments of {config.optimizer}" + (", and the average" if average else "")
    return MemoryItem("moments", what, -(-(MOMENTS[config.optimizer] + average) * trained // shard))


@dataclass(frozen=True)
class BesideVllm:
    """Holds what `ranks` that train `count` of vLLM's own weights together take on one device, activations apart."""

    config: TrainerConfig
    count: int
    is_half: bool
    ranks: int = 1
    on_gpu = True
    host = 0

    @property
    def items(self) -> list[MemoryItem]:
        """List it as a table."""
        chunks = 4 if self.config.teacher_top_k else 3
        logits = MemoryItem("logits", "logits, --logits-chunk-mb", self.ranks * chunks * self.config.logits_mb * MIB)
        return [*single_copy(self.config, self.count, self.is_half), logits]

    @property
    def need(self) -> int:
        """Bytes of it."""
        return total(self.items)


# --- vLLM -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Serving:
    """Holds what decides on the memory of a rank of vLLM."""

    config: TrainerConfig
    size: ModelSize
    dtype: str
    ranks: int = 1
    on_gpu: bool = True
    max_model_len: int = 2048
    staging_on_host: bool = False

    @property
    def weights(self) -> int:
        """Bytes of a rank's part of them, once."""
        return self.size.count * DTYPE_BYTES[self.dtype] // self.ranks

    @property
    def staging(self) -> int:
        """Bytes in which new weights are received, which the worker takes from the KV cache: of all of them or, on the
        way to host memory, of one bucket.
        """
        copies = MODES[self.config.bridge.kind].vllm_copies - 1
        bucket = max(NCCL_BUCKET, self.size.largest * DTYPE_BYTES[self.dtype])
        return copies * (bucket if self.host_staging else self.weights)

    @property
    def host_staging(self) -> int:
        """Bytes of page-locked host memory that a rank on a GPU takes for it."""
        copies = MODES[self.config.bridge.kind].vllm_copies - 1
        return copies * self.weights if self.on_gpu and self.staging_on_host else 0

    @property
    def packed(self) -> int:
        """Bytes of the copy that it multiplies by on a CPU."""
        return 0 if self.on_gpu else self.weights * MODES[self.config.bridge.kind].packed_copies

    @property
    def cache_of_one(self) -> int:
        """Bytes of the KV cache of one sequence of full length: keys and values of each layer."""
        held = max(1, self.ranks // max(1, self.size.kv_heads or self.ranks))  # ranks that hold the same heads
        return (
            2
            * self.size.layers
            * self.size.out("k_proj")
            * DTYPE_BYTES[self.dtype]
            * self.max_model_len
            * held
            // self.ranks
        )

    def conversations(self, cache: int) -> str:
        """Say how many tokens, and sequences of full length, a rank's `cache` holds: each rank has its heads of all."""
        count = cache / self.cache_of_one
        return (
            f"By arithmetic, the KV cache of a server holds {count * self.max_model_len / 1000:,.0f} thousand tokens:"
            f" {int(count)} sequences of {self.max_model_len} at once"
            f"{', as for the known model nearest in size' if self.size.source == BY_NAME else ''}"
        )

    @property
    def least(self) -> int:
        """Compute the bytes that a rank needs inside of --gpu-memory-utilization."""
        return self.weights + self.staging + self.cache_of_one + VLLM_OWN

    def share(self, gpu: int, beside_trainer: bool = False) -> float:
        """--gpu-memory-utilization on a GPU of as many bytes, where the user gives none: vLLM's default, or more where
        that is too little; beside a trainer enough for a cache of some size.
        """
        if beside_trainer:
            return min(UTILIZATION, math.ceil(100 * (SHARED_UTILIZATION + self.staging / gpu)) / 100)
        return UTILIZATION if self.least <= UTILIZATION * gpu else math.floor(100 * (gpu - CUDA) / gpu) / 100

    def items(self, cache: int) -> list[MemoryItem]:
        """A table with `cache` bytes of KV cache."""
        return _real(
            [
                MemoryItem("vLLM's weights", f"vLLM: weights in {self.dtype}", self.weights),
                MemoryItem(
                    "vLLM's staging",
                    f"vLLM: {'a bucket' if self.host_staging else 'staging buffer'} for new weights",
                    self.staging,
                ),
                MemoryItem("vLLM's weights", "vLLM: packed copy that it multiplies by", self.packed),
                MemoryItem("KV cache", "vLLM: KV cache", cache),
                *([MemoryItem("runtime", "vLLM: activations and CUDA graphs, about", VLLM_OWN)] if self.on_gpu else []),
            ]
        )


# --- tables -----------------------------------------------------------------------------------------------------------


def amount(nbytes: int) -> str:
    """In GB, or MB where it is less than one."""
    return f"{nbytes / GB:.1f} GB" if nbytes >= GB else f"{math.ceil(nbytes / 1e6)} MB"


def table(title: str, items: Sequence[MemoryItem], free: int | None = None) -> list[str]:
    """A line for each item, their sum, and what is free."""
    lines = [title]
    for item in items:
        note = "  (vLLM's, counted there)" if item.shared else ""
        lines.append(f"  {item.what:<46} {item.nbytes / GB:>9.3f} GB{note}")
    lines.append(
        f"  {'in all':<46} {total(items) / GB:>9.3f} GB" + ("" if free is None else f" of {free / GB:.3f} GB free")
    )
    return lines


def _real(items: Iterable[MemoryItem]) -> list[MemoryItem]:
    return [item for item in items if item.nbytes]
