"""What training takes in memory, by arithmetic, before anything is loaded; and one line when it does not fit.

`needs` counts bytes from the number of weights alone, so config.json is enough: `check_model` refuses a run in every
mode before a weight is read. A single copy counts again once vLLM has told which dtype it shares
(bridges/single_copy.py). Importing this module loads no torch.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from atroposlib.errors import AtroposError, reason
from atroposlib.logs import get_logger
from example_trainer.config import TrainerConfig
from example_trainer.errors import TrainerError
from example_trainer.modes import Adapter, SingleCopy

if TYPE_CHECKING:
    import torch

FLOAT32 = 4  # bytes
# bytes per weight; Adafactor's are one number per row and column
MOMENTS = {
    "adamw": 2 * FLOAT32,
    "adamw_8bit": 2,
    "adafactor": 0,
}
CGROUP = Path("/sys/fs/cgroup")

log = get_logger(__name__)


@dataclass(frozen=True)
class MemoryItem:
    """One line of the table for one device."""

    what: str
    nbytes: int
    shared: bool = False


def needs(
    config: TrainerConfig, count: int, trained: int, *, halves: int = 0, shared: bool = False
) -> list[MemoryItem]:
    """What training takes on one device that holds `count` weights, activations apart; --kl-coef adds a frozen float32
    copy. `trained` of the weights take gradients and moments; `halves` are bfloat16; `shared` ones are vLLM's own.
    """
    mastered = 0 if _rounds(config) else halves
    lines = [
        MemoryItem("weights, vLLM's own" if shared else "weights in float32", FLOAT32 * count - 2 * halves, shared),
        MemoryItem("float32 masters of bfloat16 weights", FLOAT32 * mastered),
        MemoryItem("gradients", FLOAT32 * trained - 2 * (halves - mastered)),
        MemoryItem(f"moments of {config.optimizer}", MOMENTS[config.optimizer] * trained),
        MemoryItem("reference model for --kl-coef", FLOAT32 * count if config.kl_coef > 0 else 0),
        MemoryItem("logits, --logits-chunk-mb", 3 * (config.logits_chunk_mb << 20)),
    ]
    return [line for line in lines if line.nbytes]


def check_model(config: TrainerConfig, device: "torch.device") -> None:
    """Raise TrainerError if training --model-name does not fit on `device`, of which nothing is loaded yet."""
    from example_trainer.model import meta_model

    shapes = {name: weight.shape for name, weight in meta_model(config.model_name).named_parameters()}
    count = sum(shape.numel() for shape in shapes.values())
    held = trained = count
    if isinstance(config.bridge, Adapter):
        # two matrices, [r, in] and [out, r], beside each [out, in] that the adapter is put to
        adapted = tuple(f".{module}.weight" for module in config.bridge.target_modules)
        trained = sum(config.bridge.r * sum(shape) for name, shape in shapes.items() if name.endswith(adapted))
        held += trained
    check_memory(needs(config, held, trained), config, device)


def check_memory(lines: list[MemoryItem], config: TrainerConfig, device: "torch.device") -> None:
    """Log the table. Raises TrainerError if the private part does not fit."""
    free = available_memory()
    if device.type == "cuda":
        import torch

        free = int(torch.cuda.mem_get_info(device)[0])
    for line in memory_table(lines, device, free).splitlines():
        log.info("%s", line)
    private = sum(line.nbytes for line in lines if not line.shared)
    if private > free:
        beside = " beside the shared weights" if any(line.shared for line in lines) else ""
        raise TrainerError(
            f"training {config.model_name} needs {private / 1e6:.0f} MB on {device}{beside}, {free / 1e6:.0f} MB are"
            f" free ({math.ceil((private - free) / 1e6)} MB too little): {_remedies(lines, config)}"
        )


def memory_table(lines: list[MemoryItem], device: "torch.device", free: int) -> str:
    """The table, and its verdict."""
    private = sum(line.nbytes for line in lines if not line.shared)
    rows = [
        f"  {line.what:<40} {line.nbytes / 1e6:>12.1f} MB  {'shared' if line.shared else 'private'}" for line in lines
    ]
    rows.append(f"  {'private in all, activations on top':<40} {private / 1e6:>12.1f} MB  of {free / 1e6:.0f} MB free")
    return "\n".join([f"Memory on {device}:", *rows])


def available_memory() -> int:
    """What the machine has free, or a container's limit leaves."""
    available: int = psutil.virtual_memory().available
    limit = CGROUP / "memory.max"
    if limit.is_file() and (text := limit.read_text().strip()) != "max":
        available = min(available, int(text) - int((CGROUP / "memory.current").read_text()))
    return available


@contextmanager
def one_line_when_out_of_memory(config: TrainerConfig) -> Iterator[None]:
    """Around a run: memory that a device does not give becomes a TrainerError that names the flags to change."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # PyTorch has a class for CUDA's, and for a CPU's a text alone
        said = any(text in str(error) for text in ("out of memory", "can't allocate memory"))
        if not isinstance(error, MemoryError) and (isinstance(error, AtroposError) or not said):
            raise
        raise TrainerError(
            f"out of memory: {reason(error).rstrip('.')}; lower --micro-batch-tokens ({config.micro_batch_tokens}),"
            f" --logits-chunk-mb ({config.logits_chunk_mb}) or --seq-len ({config.seq_len})"
            f"{'' if config.gradient_checkpointing else ', add --gradient-checkpointing'}, or {_remedies([], config)}"
        ) from error


def _rounds(config: TrainerConfig) -> bool:
    return isinstance(config.bridge, SingleCopy) and config.bridge.bf16_update == "stochastic"


def _remedies(lines: list[MemoryItem], config: TrainerConfig) -> str:
    shared = any(line.shared for line in lines)
    remedies = [
        "give vLLM less KV cache (--gpu-memory-utilization, VLLM_CPU_KVCACHE_SPACE)" if shared else "",
        "" if config.optimizer == "adafactor" or config.bridge.trains_adapter else "take --optimizer adafactor",
        "--bf16-update stochastic with a bfloat16 server" if shared and not _rounds(config) else "",
        "leave out --kl-coef (no reference model)" if config.kl_coef > 0 else "",
        "" if config.bridge.trains_adapter or shared else "train a LoRA adapter",
        "take a smaller model",
    ]
    *most, last = [remedy for remedy in remedies if remedy]
    return f"{', '.join(most)} or {last}" if most else last
