"""Which GPU is whose, and what follows from it for vLLM and the trainer.

no GPU            both on the CPU, in float32
one GPU           both on it, vLLM with 0.4 of its memory
more              vLLM on about half of them by tensor parallelism (1, 2, 4, ...), the trainer's ranks on the others;
                  on fewer, where the trainer needs more by the memory plan. A single copy: both on vLLM's
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from atroposlib.flags import ConfigError
from example_trainer.config import TrainerConfig
from example_trainer.launcher.run_file import Layout, RunFile
from example_trainer.memory import available_memory
from example_trainer.memory_plan import (
    PROCESSES,
    SHARED_UTILIZATION,
    UTILIZATION,
    VLLM_OWN,
    MemoryItem,
    Room,
    Serving,
    Training,
    amount,
    refusal,
    settled,
    table,
    trainer_table,
)
from example_trainer.model_size import ModelSize
from example_trainer.modes import MODES


@dataclass(frozen=True)
class Placement:
    """GPUs as CUDA_VISIBLE_DEVICES names them; none without a GPU. `utilization` is the share of a GPU that vLLM must
    not exceed, where its default is too much.
    """

    vllm: tuple[str, ...] = ()
    trainer: tuple[str, ...] = ()
    utilization: float | None = None

    @property
    def on_gpus(self) -> bool:
        return bool(self.vllm)

    @property
    def is_shared(self) -> bool:
        """Whether vLLM and the trainer have a GPU in common."""
        return bool(set(self.vllm) & set(self.trainer))


@dataclass(frozen=True)
class Need:
    """What the plan of a run is made of, and the memory of one GPU."""

    config: TrainerConfig
    size: ModelSize
    gpu: int
    dtype: str
    max_model_len: int
    utilization: float | None = None  # of vLLM, where the run says one

    def share(self, placement: Placement) -> float:
        """Of a GPU's memory, what vLLM takes."""
        default = SHARED_UTILIZATION if placement.is_shared else UTILIZATION
        return self.utilization or placement.utilization or default

    def serving(self, placement: Placement) -> Serving:
        """A rank of vLLM."""
        return Serving(
            self.config,
            self.size,
            self.dtype,
            max(1, len(placement.vllm)),
            placement.on_gpus,
            self.max_model_len,
            self.share(placement),
        )

    def training(self, placement: Placement) -> tuple[Training, Room]:
        """A rank of the trainer, with --offload resolved, and what it may take."""
        same = self.config.bridge.same_devices
        alone = same or self.config.batch_invariant or not placement.on_gpus
        typed = self.config.trainer_ranks
        ranks = typed if isinstance(typed, int) else 1 if alone else len(placement.trainer)
        served = 2 if self.dtype != "float32" else 4
        split = len(placement.vllm) if same and placement.on_gpus else 1
        training = Training(self.config, self.size, ranks, placement.on_gpus, served, split)
        host = available_memory() // ranks
        if not placement.on_gpus:
            return settled(training, Room(host, host)), Room(host, host)
        taken = 0
        if placement.is_shared:
            taken = int(self.gpu * self.share(placement)) + self.serving(placement).staging
        room = Room(self.gpu - taken, host)
        return settled(training, room), room

    def refusal(self, placement: Placement) -> str | None:
        """Why vLLM or the trainer does not fit the GPUs; None where both do."""
        if not placement.on_gpus:
            return None
        if why := self.serving_refusal(placement):
            return ": ".join(why)
        training, room = self.training(placement)
        return refusal(training, room, f"GPU {', '.join(placement.trainer)}") if room.lacks(training) > 0 else None

    def serving_refusal(self, placement: Placement) -> tuple[str, str] | None:
        """Why vLLM does not fit, and what to do; None where it does."""
        serving = self.serving(placement)
        if serving.utilization(self.gpu) is not None:
            return None
        share = f" of which it may take {serving.share:.0%}"
        return (
            f"vLLM needs {amount(serving.least)} on each of {serving.ranks} GPU(s), its staging buffer"
            f" {amount(serving.staging)} on top, and a GPU has {amount(self.gpu)}{share}",
            "give vLLM more GPUs (--tensor-parallel-size), mode lora, which needs no staging, or take a smaller model",
        )

    def lines(self, placement: Placement, cache: int) -> list[str]:
        """The tables of --dry-run: of a rank of vLLM and one of the trainer; of this machine where there is no GPU.
        `cache` is vLLM's KV cache there.
        """
        training, room = self.training(placement)
        serving = self.serving(placement)
        lines = [f"Memory of {self.config.model_name}, {self.size.count / 1e6:.0f} M weights ({self.size.source}):"]
        if not placement.on_gpus:
            ranks = f" of each of {training.ranks} ranks" if training.ranks > 1 else ""
            named = [
                MemoryItem(f"trainer{ranks}: {item.what}", item.nbytes * training.ranks, item.shared)
                for item in [*training.items, *training.states["host"]]
            ]
            own = MemoryItem("the processes themselves, about", PROCESSES)
            return lines + table("This machine", [*serving.items(cache), *named, own], available_memory())
        share = self.share(placement)
        cache = max(0, int(share * self.gpu) - serving.weights - VLLM_OWN)
        lines += table(f"Each GPU of vLLM ({', '.join(placement.vllm)})", serving.items(cache), self.gpu)
        lines.append(f"  vLLM takes {share:.0%} of the GPU, and the KV cache what that leaves")
        return [*lines, f"Each GPU of the trainer ({', '.join(placement.trainer)})", *trainer_table(training, room)]

    def fits(self, placement: Placement, without_offload: bool = False) -> bool:
        """Whether vLLM and trainer both have what they need on GPUs."""
        training, room = self.training(placement)
        heads, kv_heads, ranks = self.size.heads or 0, self.size.kv_heads or 1, len(placement.vllm)
        if heads % ranks or (kv_heads % ranks and ranks % kv_heads) or (without_offload and training.offload != "none"):
            return False
        return self.serving(placement).utilization(self.gpu) is not None and room.lacks(training) <= 0


def place(run: RunFile, gpus: list[str], need: Need | None = None) -> Placement:
    """The GPUs of vLLM and of the trainer: the first of `candidates` that fits `need`; the first of all where none
    does. Raises ConfigError where there are too few.
    """
    if not gpus:
        if run.layout != Layout():
            raise ConfigError("layout names GPUs, and there is none here: leave it out, or see CUDA_VISIBLE_DEVICES")
        return Placement()
    typed = need.config.trainer_ranks if need else run.trainer.get("trainer_ranks", "auto")
    found = list(candidates(run, gpus, 1 if run.batch_invariant else len(gpus) if typed == "auto" else int(typed)))
    if need is None:
        return found[0]
    limited = [_limited(placement, need) for placement in found]
    choice = next((placement for placement in limited if need.fits(placement, without_offload=True)), None)
    return choice or next((placement for placement in limited if need.fits(placement)), limited[0])


def candidates(run: RunFile, gpus: list[str], most: int) -> Iterator[Placement]:
    """Ways to share the GPUs out, the most balanced first; the trainer gets at most `most`. Raises ConfigError where
    there are too few.
    """
    asked, same = run.layout, MODES[run.kind].same_devices
    given = run.vllm.get("tensor_parallel_size")
    powers = [1 << power for power in range(len(gpus).bit_length()) if 1 << power < max(2, len(gpus))]
    sizes = [int(given)] if given else sorted(powers, key=lambda ranks: (ranks > -(-len(gpus) // 2), -ranks))
    if asked.vllm != "auto":
        sizes = [len(asked.vllm)] if not given else sizes
    for ranks in sizes:
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
            trainer = [gpu for gpu in gpus if gpu not in vllm][:most]
        _check(run, gpus, vllm, trainer, ranks)
        yield Placement(tuple(vllm), tuple(trainer))


def _limited(placement: Placement, need: Need) -> Placement:
    """With the share of its GPUs that vLLM may take, where its default leaves too little for staging."""
    share = need.serving(placement).utilization(need.gpu)
    is_less = share is not None and share < need.share(placement)
    return Placement(placement.vllm, placement.trainer, share if is_less else None)


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


def served_dtype(run: RunFile, on_gpus: bool) -> str:
    """What vLLM serves in."""
    return run.dtype or ("bfloat16" if on_gpus else "float32")


def device_flags(run: RunFile, placement: Placement) -> dict[str, Any]:
    """The flags of vLLM that follow from the devices, below those of the run."""
    flags: dict[str, Any] = {"dtype": served_dtype(run, placement.on_gpus)}
    if not placement.on_gpus:
        return flags | {"block_size": 32, "max_num_seqs": 64}
    flags["max_num_seqs"] = 256
    if len(placement.vllm) > 1:
        flags["tensor_parallel_size"] = len(placement.vllm)
    if placement.is_shared:
        flags["gpu_memory_utilization"] = SHARED_UTILIZATION  # the trainer needs the rest
    if placement.utilization is not None:
        flags["gpu_memory_utilization"] = placement.utilization  # staging needs the rest
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
