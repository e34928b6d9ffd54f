"""What a run takes in memory, by arithmetic and before anything is loaded: one table for each device of the layout."""

from collections.abc import Iterator, Mapping

from atroposlib.wire.bridge import DTYPE_BYTES
from example_trainer.config import TrainerConfig
from example_trainer.launcher.layout import Placement
from example_trainer.launcher.model_size import ModelSize
from example_trainer.memory import MemoryItem, available_memory, needs
from example_trainer.modes import MODES, Adapter

GB = 10**9
GIB = 1 << 30
PROCESSES = 3 * GIB  # vLLM, trainer, environment and API without weights and KV cache


def memory_plan(
    model: str,
    size: ModelSize | None,
    trainer: TrainerConfig,
    server: Mapping[str, object],
    variables: Mapping[str, str],
    placement: Placement,
) -> str:
    """Every device with what is put there. `server` and `variables` are vLLM's flags and the services' variables."""
    if size is None:
        return f"Memory: not known, as neither config.json nor the name of {model} tells its size"
    dtype = str(server["dtype"])
    served = serving(size, trainer, dtype, max(1, len(placement.vllm)), packed=not placement.on_gpus)
    trained = training(size, trainer, dtype, max(1, len(placement.trainer)))
    lines = [f"Memory of {model}, {size.count / 1e6:.0f} M weights ({size.source}), activations on top:"]
    if not placement.on_gpus:
        cache = MemoryItem("vLLM: KV cache", int(variables["VLLM_CPU_KVCACHE_SPACE"]) * GIB)
        own = MemoryItem("the processes themselves, about", PROCESSES)
        lines += table("this machine", [*served, cache, *_named(trained), own])
        free = available_memory()
        lines.append(f"    {'free now':<44} {free / GB:>9.2f} GB")
        return "\n".join(lines)
    for gpu in dict.fromkeys([*placement.vllm, *placement.trainer]):
        items = [*(served if gpu in placement.vllm else []), *(_named(trained) if gpu in placement.trainer else [])]
        lines += table(f"GPU {gpu}", items)
        if gpu in placement.vllm:
            share = float(str(server.get("gpu_memory_utilization", 0.92)))
            lines.append(f"    vLLM takes {share:.0%} of the GPU: its KV cache is what that leaves beside its weights")
    return "\n".join(lines)


def training(size: ModelSize, trainer: TrainerConfig, dtype: str, ranks: int) -> list[MemoryItem]:
    """What the trainer holds on one device."""
    bridge = trainer.bridge
    if bridge.same_devices:
        count = size.count // ranks
        return needs(trainer, count, count, halves=count if DTYPE_BYTES[dtype] < 4 else 0, shared=True)
    if not isinstance(bridge, Adapter):
        return needs(trainer, size.count, size.count)
    adapter = adapter_size(bridge, size)
    return needs(trainer, size.count + adapter, adapter)


def adapter_size(bridge: Adapter, size: ModelSize) -> int:
    """Weights of two matrices, [r, in] and [out, r], beside each [out, in] that is adapted; a guess by rank where the
    shapes are not known.
    """
    if size.shapes is None:
        return size.count * bridge.r // 1600
    adapted = tuple(f".{module}.weight" for module in bridge.target_modules)
    return sum(bridge.r * sum(shape) for name, shape in size.shapes.items() if name.endswith(adapted))


def serving(size: ModelSize, trainer: TrainerConfig, dtype: str, ranks: int, packed: bool) -> list[MemoryItem]:
    """What vLLM holds on one device, but for its KV cache."""
    mode = MODES[trainer.bridge.kind]
    once = size.count * DTYPE_BYTES[dtype] // ranks
    items = [MemoryItem(f"vLLM: weights in {dtype}", once)]
    if mode.vllm_copies > 1:
        items.append(MemoryItem("vLLM: staging buffer for new weights", once * (mode.vllm_copies - 1)))
    if packed and mode.packed_copies:
        items.append(MemoryItem("vLLM: packed copy that it multiplies by", once * mode.packed_copies))
    return items


def table(device: str, items: list[MemoryItem]) -> Iterator[str]:
    """A line for each item, and their sum; what is shared counts once."""
    yield f"  {device}"
    for item in items:
        note = "  (vLLM's, counted there)" if item.shared else ""
        yield f"    {item.what:<44} {item.nbytes / GB:>9.2f} GB{note}"
    yield f"    {'in all':<44} {sum(item.nbytes for item in items if not item.shared) / GB:>9.2f} GB"


def _named(items: list[MemoryItem]) -> list[MemoryItem]:
    return [MemoryItem(f"trainer: {item.what}", item.nbytes, item.shared) for item in items]
