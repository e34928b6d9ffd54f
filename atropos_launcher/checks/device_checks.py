"""The doctor's checks of devices and memory: pure functions, as in checks/checks.py. Estimates, in bytes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations

from atropos_launcher.checks.checks import Finding
from atropos_launcher.checks.model_files import Model
from atropos_launcher.placement.gpus import Need, Placement, ServerNeed, ServerPlace, vocabulary_refusal
from atropos_launcher.placement.this_machine import Gpu
from example_trainer.memory.fits import Room, fits
from example_trainer.memory.model_size import ModelSize, size_of
from example_trainer.memory.plan import GIB, MIB, PROCESSES, VLLM_PROCESSES, total
from example_trainer.memory.tp_plans import family_refusal, size_refusal, sizes
from example_trainer.settings.bridges import Mode
from example_trainer.settings.config import TrainerConfig

# vLLM 0.32's message queues to workers that are processes of their own: 160 and 240 MiB with one rank
QUEUE_BYTES = 400 * MIB
# docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html: --shm-size=1g for containers
NCCL_BYTES = GIB


def check_heads(tensor_parallel: int, model: Model) -> Finding:
    """vLLM splits attention heads evenly, and key-value heads evenly or copies them evenly."""
    heads, kv_heads = model.heads, model.kv_heads
    if heads % tensor_parallel or (kv_heads % tensor_parallel and tensor_parallel % kv_heads):
        fitting = [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
        return Finding(
            "fail",
            "heads",
            f"{heads} heads and {kv_heads} key-value heads cannot be split into {tensor_parallel}",
            f"--tensor-parallel-size one of {', '.join(map(str, fitting))}",
        )
    return Finding("ok", "heads", f"{heads} and {kv_heads} key-value heads for {tensor_parallel} rank(s)")


def split_checks(mode: type[Mode], tp: int, tensor_parallel: int, served_dtype: str, model: Model) -> Iterator[Finding]:
    """Check what --tp-size asks of the model and, of a single copy, of vLLM."""
    yield check_trainer_split(tp, model)
    if mode.same_devices:
        yield check_by_ranks(tp, tensor_parallel, served_dtype, model)


def check_trainer_split(tp: int, model: Model) -> Finding:
    """--tp-size of the trainer splits some families, and their heads and feed-forward features evenly."""
    held = sizes(model.heads, model.kv_heads, _size_of(model).out("gate_proj"))
    family = family_refusal(model.model_type, model.source) if model.model_type else None
    if why := family or size_refusal(held, tp, model.source):
        what, _, remedy = why.partition(": ")
        return Finding("fail", "trainer split", what, remedy)
    return Finding("ok", "trainer split", f"{tp} trainer ranks split each layer")


def check_by_ranks(tp: int, tensor_parallel: int, served_dtype: str, model: Model) -> Finding:
    """A single copy with --tp-size: one trainer rank for each of vLLM's, in float32, over all of its memory."""
    name = "single copy"
    if tp != tensor_parallel:
        shown = f"{tp} trainer ranks (--tp-size), each for a rank of vLLM, which has {tensor_parallel}"
        fitting = f"--tp-size {tensor_parallel}, or " if tensor_parallel > 1 else ""
        return Finding("fail", name, shown, f"{fitting}--tp-size 1")
    if served_dtype != "float32":
        shown = f"{tp} trainer ranks (--tp-size) train float32 weights, and vLLM serves {served_dtype}"
        return Finding("fail", name, shown, "serve with --dtype float32, or --tp-size 1")
    if why := vocabulary_refusal(_size_of(model), tp):
        return Finding("fail", name, why, "--mode broadcast, or --tp-size 1")
    return Finding("ok", name, f"{tp} trainer ranks, each over the memory of a rank of vLLM")


def check_gpus(mode: type[Mode], tensor_parallel: int, gpus: int, servers: int = 1) -> Finding:
    """Ranks of the servers on this machine against the GPUs that are visible."""
    ranks = servers * tensor_parallel
    wanted = ranks if mode.same_devices else ranks + 1
    shown = f"{gpus} visible, {_ranks(tensor_parallel, servers)} of vLLM and the trainer"
    if gpus < ranks:
        fewer = f"--tensor-parallel-size {gpus // servers}" if gpus >= servers else f"{gpus} server(s)"
        return Finding("fail", "GPUs", shown, f"{fewer}, or widen CUDA_VISIBLE_DEVICES")
    if gpus < wanted:
        return Finding(
            "warn",
            "GPUs",
            f"{shown} must share one",
            "give vLLM --gpu-memory-utilization 0.4 and, to broadcast, the trainer --bridge-backend gloo",
        )
    return Finding("ok", "GPUs", f"{shown} on {'the same' if mode.same_devices else 'one of its own'}")


def check_cores(tensor_parallel: int, cores: int, servers: int = 1) -> Finding:
    shown = f"{cores} for {_ranks(tensor_parallel, servers)} of vLLM"
    if cores < servers * tensor_parallel:
        fewer = f"--tensor-parallel-size {cores // servers}" if cores >= servers else f"{cores} server(s)"
        return Finding("fail", "CPU cores", shown, f"{fewer} at most")
    return Finding("ok", "CPU cores", f"{shown}, without a GPU")


def _ranks(tensor_parallel: int, servers: int) -> str:
    return f"{tensor_parallel} rank(s)" + (f" of each of {servers} servers" if servers > 1 else "")


def check_shared_memory(free: int, separate_workers: bool, nccl: bool = False) -> Finding:
    """/dev/shm holds vLLM's queues to its workers, always on CPUs, and what NCCL sends between GPUs without peer
    access; weights that are shared are not in it.
    """
    need = 64 * MIB + (QUEUE_BYTES if separate_workers else 0)
    shown = f"{_size(free)} free, {_size(need)} needed"
    remedy = "mount -o remount,size=... /dev/shm, or docker run --shm-size=... (--ipc=host)"
    if nccl and need <= free < NCCL_BYTES:
        return Finding("warn", "/dev/shm", f"{shown}, and NCCL asks containers for {_size(NCCL_BYTES)}", remedy)
    return _enough("/dev/shm", free, need, shown, remedy)


def check_peers(gpus: Sequence[Gpu], peers: Mapping[tuple[int, int], str]) -> Finding:
    """Check whether the GPUs of a run reach each other's memory, over NVLink or PCIe."""
    name, pairs = "peer access", list(combinations((gpu.index for gpu in gpus), 2))
    if not peers:
        return Finding("warn", name, "nvidia-smi topo -p2p r does not tell", "see NCCL_DEBUG=INFO in vLLM's log")
    apart = [pair for pair in pairs if peers.get(pair) != "OK"]
    if apart:
        shown = ", ".join(f"GPU {one} and {other}: {peers.get((one, other), 'unknown')}" for one, other in apart[:4])
        more = f" and {len(apart) - 4} more pairs" if len(apart) > 4 else ""
        return Finding(
            "warn",
            name,
            f"{shown}{more}",
            "NCCL copies through /dev/shm, which is slower: enable it (IOMMU and ACS off), or use GPUs that have it",
        )
    return Finding("ok", name, f"{len(pairs)} pair(s) of GPUs")


def check_memory(
    available: int,
    mode: type[Mode],
    model: Model,
    served_dtype: str,
    kv_cache: int,
    running: bool,
    servers: int = 1,
    tensor_parallel: int = 1,
    tp: int = 1,
) -> Finding:
    """A CPU's memory: that of the trainer's ranks by the memory plan, vLLM's copies and a KV cache of `kv_cache` bytes
    for each of its ranks, the processes themselves.
    """
    placement = Placement(by_ranks=tp if mode.same_devices else 1)
    need = _need(mode, model, served_dtype, 0, tp=tp)
    training = need.verdict(placement).training
    trainer = training.ranks * training.need
    vllm = 0 if running else servers * total(need.serving(placement).items(tensor_parallel * kv_cache))
    vllm += 0 if running else (servers - 1) * VLLM_PROCESSES
    wanted = trainer + vllm + PROCESSES
    shown = f"{_size(available)} available, {_size(wanted)} needed (trainer {_size(trainer)}, vLLM {_size(vllm)})"
    rest = (available - vllm - PROCESSES) // training.ranks
    verdict = fits(training, Room(rest, rest))
    return Finding("ok", "memory", shown) if verdict.fits else Finding("fail", "memory", shown, verdict.advice)


def check_gpu_memory(
    gpus: Sequence[Gpu],
    mode: type[Mode],
    model: Model,
    served_dtype: str,
    tensor_parallel: int,
    running: bool,
    servers: int = 1,
    tp: int = 1,
    staging_on_host: bool = False,
) -> Finding:
    """vLLM on the first GPUs, the trainer's ranks on the others or, single copy, on the same; by the memory plan for
    the GPU that has least free.
    """
    name = "GPU memory"
    names = [str(gpu.index) for gpu in gpus]
    ranks = servers * tensor_parallel
    same = mode.same_devices or len(names) <= ranks
    starts = range(0, ranks, tensor_parallel)
    vllm = tuple(ServerPlace(tuple(names[start : start + tensor_parallel])) for start in starts)
    others = names[ranks:][: max(tp, (len(names) - ranks) // tp * tp)]
    placement = Placement(vllm, tuple(names[:ranks] if same else others))
    least = min(gpus, key=lambda gpu: gpu.free)
    need = _need(mode, model, served_dtype, least.free, servers, tp, staging_on_host)
    if not running and (why := need.serving_refusal(placement)):
        return Finding("fail", name, *(text.replace("--vllm.", "--") for text in why))  # as the doctor has these flags
    verdict = need.verdict(placement)
    if running and placement.is_shared:
        verdict = replace(verdict, room=replace(verdict.room, device=least.free))  # what vLLM takes is not free
    if not verdict.fits:
        where = f"GPU {', '.join(placement.trainer)} ({least.name})"
        return Finding("fail", name, verdict.shortage(where), verdict.advice)
    training, room = verdict.training, verdict.room
    offloaded = f" with --offload {training.offload}" if training.offload != "none" else ""
    shown = f"{_size(training.need)} for each of {training.ranks} trainer rank(s){offloaded}, {_size(room.device)} free"
    if not running:
        rank = need.serving(placement)
        shown += (
            f"; at least {_size(rank.least)} for each rank of vLLM: weights {_size(rank.weights)}, staging"
            f" {_size(rank.staging)}, KV cache {_size(rank.cache_of_one)}"
            + (f"; and {_size(rank.host_staging)} of host memory, page-locked" if rank.host_staging else "")
        )
    return Finding("ok", name, shown)


def _need(
    mode: type[Mode],
    model: Model,
    dtype: str,
    gpu: int,
    servers: int = 1,
    tp: int = 1,
    staging_on_host: bool = False,
) -> Need:
    config = TrainerConfig.model_validate(
        {"model_name": model.source, "tp_size": tp, "bridge": {"kind": mode.model_fields["kind"].default}}
    )
    server = ServerNeed(config.seq_len, dtype, staging_on_host=staging_on_host)
    return Need(config, _size_of(model), gpu, (server,) * servers)


def _size_of(model: Model) -> ModelSize:
    return size_of(model.shapes, heads=model.heads, kv_heads=model.kv_heads, experts_per_token=model.experts_per_token)


def check_disk(free: int, model: Model, mode: type[Mode], folder: str) -> Finding:
    """Two checkpoints of weights and, where all of them are trained, moments; and what the bridge writes for vLLM."""
    need = model.parameters * (2 * (1 if mode.trains_adapter else 12) + 4 * mode.written_copies)
    takers = "two checkpoints and what the bridge writes" if mode.written_copies else "two checkpoints"
    return _enough(
        "disk",
        free,
        need,
        f"{_size(free)} free in {folder}, {takers} take {_size(need)}",
        "free some, or give the trainer another --save-path",
    )


def _enough(check: str, free: int, need: int, shown: str, remedy: str) -> Finding:
    return Finding("ok", check, shown) if free >= need else Finding("fail", check, shown, remedy)


def _size(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.0f} MiB"
