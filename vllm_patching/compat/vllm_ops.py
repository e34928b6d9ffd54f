"""vLLM's C++ kernels alone, without its layers and its engine: what a bit-exact trainer on a CPU loads of it."""

from types import ModuleType


def cpu_kernels() -> ModuleType:
    """vLLM's wrappers of its C++ kernels for CPUs."""
    from vllm import _custom_ops

    return _custom_ops
