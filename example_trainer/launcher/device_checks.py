"""What the doctor knows of devices and memory: pure functions, as in doctor_checks.py. Estimates, in bytes."""

from collections.abc import Sequence

from atroposlib.wire.bridge import DTYPE_BYTES
from example_trainer.launcher.doctor_checks import Finding
from example_trainer.launcher.machine import MIB, Gpu
from example_trainer.launcher.memory_plan import GIB, PROCESSES
from example_trainer.launcher.model_files import Model
from example_trainer.modes import Mode

# vLLM 0.32's message queues to workers that are processes of their own: 160 and 240 MiB with one rank
QUEUE_BYTES = 400 * MIB


def check_heads(tensor_parallel: int, model: Model) -> Finding:
    """vLLM splits attention heads evenly, and key-value heads evenly or copies them evenly."""
    heads, kv_heads = model.heads, model.kv_heads
    if heads % tensor_parallel or (kv_heads % tensor_parallel and tensor_parallel % kv_heads):
        fitting = [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
        return Finding(
            "fail",
            "heads",
            f"{heads} heads and {kv_heads} key-value heads do not split into {tensor_parallel}",
            f"--tensor-parallel-size one of {', '.join(map(str, fitting))}",
        )
    return Finding("ok", "heads", f"{heads} and {kv_heads} key-value heads for {tensor_parallel} rank(s)")


def check_gpus(mode: type[Mode], tensor_parallel: int, gpus: int) -> Finding:
    """Ranks against the GPUs that are visible."""
    wanted = tensor_parallel if mode.same_devices else tensor_parallel + 1
    shown = f"{gpus} visible, {tensor_parallel} rank(s) of vLLM and the trainer"
    if gpus < tensor_parallel:
        return Finding("fail", "GPUs", shown, f"--tensor-parallel-size {gpus}, or widen CUDA_VISIBLE_DEVICES")
    if gpus < wanted:
        return Finding(
            "warn",
            "GPUs",
            f"{shown} must share one",
            "give vLLM --gpu-memory-utilization 0.4 and, to broadcast, the trainer --bridge-backend gloo",
        )
    return Finding("ok", "GPUs", f"{shown} on {'the same' if mode.same_devices else 'one of its own'}")


def check_cores(tensor_parallel: int, cores: int) -> Finding:
    if cores < tensor_parallel:
        return Finding(
            "fail",
            "CPU cores",
            f"{cores} for {tensor_parallel} rank(s) of vLLM",
            f"--tensor-parallel-size {cores} at most",
        )
    return Finding("ok", "CPU cores", f"{cores} for {tensor_parallel} rank(s) of vLLM, without a GPU")


def check_shared_memory(free: int, separate_workers: bool) -> Finding:
    """/dev/shm holds vLLM's queues to its workers, always on CPUs; weights that are shared are not in it."""
    need = 64 * MIB + (QUEUE_BYTES if separate_workers else 0)
    return _enough(
        "/dev/shm",
        free,
        need,
        f"{_size(free)} free, {_size(need)} needed",
        "mount -o remount,size=... /dev/shm, or docker run --shm-size=... (--ipc=host)",
    )


def check_memory(
    available: int, mode: type[Mode], model: Model, served_dtype: str, kv_cache: int, running: bool
) -> Finding:
    """A CPU's memory: weights, gradients and moments, vLLM's copies, KV cache, the processes themselves. An
    estimate.
    """
    trainer = model.parameters * mode.trainer_bytes(DTYPE_BYTES[served_dtype])
    vllm = (
        0
        if running
        else model.parameters * DTYPE_BYTES[served_dtype] * (mode.vllm_copies + mode.packed_copies) + kv_cache
    )
    need = trainer + vllm + PROCESSES
    shown = f"{_size(available)} available, about {_size(need)} needed (trainer {_size(trainer)}, vLLM {_size(vllm)})"
    return _enough("memory", available, need, shown, "a smaller model, a lower VLLM_CPU_KVCACHE_SPACE, or mode lora")


def check_gpu_memory(
    gpus: Sequence[Gpu], mode: type[Mode], model: Model, served_dtype: str, tensor_parallel: int, running: bool
) -> Finding:
    """The fullest GPU of the layout: vLLM on the first ranks, the trainer on the next one or, single copy, on the
    same. An estimate.
    """
    need = [0] * len(gpus)
    if not running:
        for rank in range(tensor_parallel):
            need[rank] += model.parameters * DTYPE_BYTES[served_dtype] * mode.vllm_copies // tensor_parallel
    trainer_ranks = range(tensor_parallel) if mode.same_devices else [min(tensor_parallel, len(gpus) - 1)]
    for rank in trainer_ranks:
        need[rank] += model.parameters * mode.trainer_bytes(DTYPE_BYTES[served_dtype]) // len(trainer_ranks)
    gpu, most = min(zip(gpus, need, strict=True), key=lambda pair: pair[0].free - pair[1])
    shown = f"GPU {gpu.index} ({gpu.name}): {_size(gpu.free)} free, about {_size(most)} needed beside the KV cache"
    # more GPUs would not help: the trainer is on one
    return _enough("GPU memory", gpu.free, most, shown, "end what runs there, take a smaller model, or mode lora")


def check_disk(free: int, model: Model, mode: type[Mode], folder: str) -> Finding:
    """Two checkpoints of weights and, where all of them are trained, moments."""
    need = 2 * model.parameters * (1 if mode.trains_adapter else 12)
    return _enough(
        "disk",
        free,
        need,
        f"{_size(free)} free in {folder}, two checkpoints take {_size(need)}",
        "free some, or give the trainer another --save-path",
    )


def _enough(check: str, free: int, need: int, shown: str, remedy: str) -> Finding:
    return Finding("ok", check, shown) if free >= need else Finding("fail", check, shown, remedy)


def _size(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.0f} MiB"
