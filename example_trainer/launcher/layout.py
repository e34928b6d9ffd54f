"""Which GPU is whose, and what follows from it for vLLM and the trainer.

no GPU            both on the CPU, in float32
one GPU           both on it, vLLM with 0.4 of its memory
two               vLLM on the first, trainer on the second; a single copy on the first alone
three or more     vLLM on two by tensor parallelism, trainer on the third; a single copy on the two
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from atroposlib.flags import ConfigError
from example_trainer.launcher.run_file import Layout, RunFile
from example_trainer.modes import MODES

SHARED_UTILIZATION = 0.4  # of a GPU's memory, for vLLM beside a trainer


@dataclass(frozen=True)
class Placement:
    """GPUs as CUDA_VISIBLE_DEVICES names them; none without a GPU."""

    vllm: tuple[str, ...] = ()
    trainer: tuple[str, ...] = ()

    @property
    def on_gpus(self) -> bool:
        return bool(self.vllm)

    @property
    def is_shared(self) -> bool:
        """Whether vLLM and the trainer have a GPU in common."""
        return bool(set(self.vllm) & set(self.trainer))


def place(run: RunFile, gpus: list[str]) -> Placement:
    """The GPUs of vLLM and of the trainer. Raises ConfigError where there are too few."""
    asked = run.layout
    if not gpus:
        if asked != Layout():
            raise ConfigError("layout names GPUs, and there is none here: leave it out, or see CUDA_VISIBLE_DEVICES")
        return Placement()
    same = MODES[run.kind].same_devices
    ranks = int(run.vllm.get("tensor_parallel_size") or (2 if len(gpus) > 2 and asked.vllm == "auto" else 1))
    if asked.vllm == "auto":
        mine = [] if asked.trainer == "auto" or same else asked.trainer
        vllm = [gpu for gpu in gpus if gpu not in mine][:ranks] or gpus[:ranks]
    else:
        vllm = list(asked.vllm)
    if asked.trainer != "auto":
        trainer = list(asked.trainer)
    elif same or len(gpus) == 1:
        trainer = vllm
    else:
        trainer = [gpu for gpu in gpus if gpu not in vllm][:1]
    _check(run, gpus, vllm, trainer, ranks)
    return Placement(tuple(vllm), tuple(trainer))


def _check(run: RunFile, gpus: list[str], vllm: list[str], trainer: list[str], ranks: int) -> None:
    shown = f"the visible GPUs are {', '.join(gpus)}"
    if unknown := [gpu for gpu in [*vllm, *trainer] if gpu not in gpus]:
        raise ConfigError(f"layout: there is no GPU {unknown[0]}; {shown}")
    if not trainer:
        raise ConfigError(f"layout: vLLM takes {', '.join(vllm)}, which leaves none for the trainer; {shown}")
    given = run.vllm.get("tensor_parallel_size")
    if len(vllm) < ranks or (given and len(vllm) != int(given)):
        raise ConfigError(
            f"vllm.tensor_parallel_size {ranks} takes as many GPUs, and vLLM has {', '.join(vllm)}; {shown}"
        )


def device_flags(run: RunFile, placement: Placement) -> dict[str, Any]:
    """The flags of vLLM that follow from the devices, below those of the run."""
    if not placement.on_gpus:
        return {"dtype": run.dtype or "float32", "block_size": 32, "max_num_seqs": 64}
    flags: dict[str, Any] = {"dtype": run.dtype or "bfloat16", "max_num_seqs": 256}
    if len(placement.vllm) > 1:
        flags["tensor_parallel_size"] = len(placement.vllm)
    if placement.is_shared:
        flags["gpu_memory_utilization"] = SHARED_UTILIZATION  # the trainer needs the rest
    return flags


def device_variables(placement: Placement, environ: Mapping[str, str]) -> dict[str, str]:
    """Environment variables of every service that follow from the devices."""
    return {} if placement.on_gpus else {"VLLM_CPU_KVCACHE_SPACE": environ.get("VLLM_CPU_KVCACHE_SPACE", "1")}  # GiB


def device_bridge(run: RunFile, placement: Placement) -> dict[str, Any]:
    """Settings of the bridge that follow from the devices."""
    shares = placement.is_shared and not MODES[run.kind].same_devices
    return {"backend": "gloo"} if shares and run.kind == "broadcast" else {}  # NCCL refuses two ranks on one GPU


def seen(gpus: tuple[str, ...]) -> dict[str, str]:
    """The variable by which a process sees these GPUs alone; as it is where there are none."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
