"""Compares the plan of a run with this machine, by memory/fits.py, before anything is loaded, and reports in one line
when memory still runs out. Importing this module loads no torch.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from atroposlib.errors import AtroposError, reason
from atroposlib.logs import get_logger
from example_trainer.errors import TrainerError
from example_trainer.memory.fits import Room, fits
from example_trainer.memory.model_size import model_size, size_of
from example_trainer.memory.plan import BesideVllm, Training, amount, offloads, table
from example_trainer.ranks.place import Place, ranks_to_start
from example_trainer.settings.bridges import SingleCopy
from example_trainer.settings.config import TrainerConfig
from example_trainer.settings.gpus import gpu_bytes, visible_gpus
from vllm_patching.free_memory import available_memory

if TYPE_CHECKING:
    import torch

log = get_logger(__name__)


class Ranks(Protocol):
    """Declares what is needed of parallel.Ranks."""

    size: int

    def largest(self, values: "torch.Tensor") -> "torch.Tensor":
        """Over ranks."""
        ...


def settled_config(config: TrainerConfig, device: "torch.device", ranks: Ranks, local_ranks: int) -> TrainerConfig:
    """The configuration with --offload resolved, the same on every rank. Every rank calls this before it loads
    anything (Learner.settled). Raises TrainerError with the table and the flags that help if training does not fit.

    A single copy is checked once vLLM has told what it shares (`check_single_copy`).
    """
    if isinstance(config.bridge, SingleCopy):
        return config.model_copy(update={"offload": "none"})
    training = planned(config, device, ranks)
    room = smallest_room(free_room(device, local_ranks), ranks)
    verdict = fits(training, room)
    for line in verdict.table:
        log.info("%s", line)
    if not verdict.fits:
        raise TrainerError(verdict.refusal(str(device)))
    chosen = verdict.training
    if config.offload == "auto" and chosen.on_gpu and chosen.offload != "none":
        passed = [training.having(offload=offload) for offload in offloads(config, True)]
        log.info(
            "--offload %s: without it, a rank needs %s, and its GPU has %s free",
            chosen.offload,
            amount(passed[0].need),
            amount(room.device),
        )
    return chosen.config


def planned(config: TrainerConfig, device: "torch.device", ranks: Ranks) -> Training:
    """The plan of a rank, from the model's config.json."""
    from example_trainer.model.loading import meta_model

    model = meta_model(config.model_name)
    about = model.config.get_text_config()
    heads = getattr(about, "num_attention_heads", None)
    size = size_of(
        {name: weight.shape for name, weight in model.named_parameters()},
        heads=heads,
        kv_heads=getattr(about, "num_key_value_heads", None) or heads,
        experts_per_token=getattr(about, "num_experts_per_tok", None) or 0,
    )
    return Training(config, size, ranks.size, on_gpu=device.type == "cuda")


def plan_of_run(config: TrainerConfig) -> list[str]:
    """Return what --dry-run prints: the table of a rank on this machine, without loading torch, and why it does not
    fit.
    """
    size = model_size(config.model_name)
    if size is None:
        return [f"Memory: unknown, because neither config.json nor the name of {config.model_name} gives its size"]
    if why := size.tp_refusal(config.tp_size):
        return [f"Memory: {why}"]
    gpus = [] if config.device == "cpu" else visible_gpus(os.environ)
    ranks = Place.of_this_process().size if "WORLD_SIZE" in os.environ else ranks_to_start(config) or 1
    host = available_memory() // ranks
    room = Room(gpu_bytes(gpus) if gpus else host, host)
    training = Training(config, size, ranks, on_gpu=bool(gpus))
    if config.bridge.same_devices and config.tp_size > 1:  # by ranks, each over the float32 weights of one of vLLM's
        training = replace(training, served=4, split=config.tp_size)
    verdict = fits(training, room)
    return verdict.table if verdict.fits else [*verdict.table, verdict.refusal("this machine")]


def free_room(device: "torch.device", local_ranks: int) -> Room:
    """Measure what this rank may take."""
    host = available_memory() // local_ranks
    if device.type != "cuda":
        return Room(host, host)
    import torch

    return Room(int(torch.cuda.mem_get_info(device)[0]), host)


def smallest_room(room: Room, ranks: Ranks) -> Room:
    """That of the rank that has least, so that all ranks decide alike."""
    import torch

    device, host = (-ranks.largest(-torch.tensor([room.device, room.host], dtype=torch.float64))).tolist()
    return Room(int(device), int(host))


def check_single_copy(config: TrainerConfig, count: int, is_half: bool, device: "torch.device", ranks: int = 1) -> None:
    """Log what `ranks` that train `count` of vLLM's own weights together take on `device`. Raises TrainerError if it
    does not fit beside them.
    """
    training, room = BesideVllm(config, count, is_half, ranks), free_room(device, 1)
    for line in table(f"Memory on {device}, activations on top", training.items, room.device):
        log.info("%s", line)
    if (lacking := room.lacks(training)) > 0:
        raise TrainerError(
            f"training {config.model_name} needs {amount(training.need)} on {device} beside the shared weights,"
            f" {amount(room.device)} are free ({amount(lacking)} too little): {_beside_vllm(config)}"
        )


@contextmanager
def one_line_when_out_of_memory(config: TrainerConfig) -> Iterator[None]:
    """Wrap a run: memory that a device does not give becomes a TrainerError that names the flags to change."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # PyTorch has a class for CUDA's, and for a CPU's a text alone
        said = any(text in str(error) for text in ("out of memory", "can't allocate memory"))
        if not isinstance(error, MemoryError) and (isinstance(error, AtroposError) or not said):
            raise
        flags = [
            f"lower --micro-batch-tokens ({config.pass_tokens}), --logits-chunk-mb ({config.logits_mb}) or"
            f" --seq-len ({config.seq_len})",
            "" if config.gradient_checkpointing else "add --gradient-checkpointing",
            "" if config.offload == "all" or config.bridge.same_devices else "use a larger --offload or --fsdp-size",
            "drop --kl-coef" if config.kl_coef > 0 else "",
        ]
        raise TrainerError(
            f"out of memory: {reason(error).rstrip('.')}; {', or '.join(filter(None, flags))}"
        ) from error


def _beside_vllm(config: TrainerConfig) -> str:
    stochastic = isinstance(config.bridge, SingleCopy) and config.bridge.bf16_update == "stochastic"
    by_ranks = config.tp_size > 1  # which takes AdamW and a float32 server alone
    ways = [
        "give vLLM less KV cache (--gpu-memory-utilization, VLLM_CPU_KVCACHE_SPACE)",
        "" if by_ranks or config.optimizer == "adafactor" else "use --optimizer adafactor",
        "" if by_ranks or stochastic else "--bf16-update stochastic with a bfloat16 server",
        "drop --kl-coef (no reference model)" if config.kl_coef > 0 else "",
        "use a smaller model",
    ]
    return " or ".join(filter(None, ways))
