"""Makes a process believe that it has H100s, so that vLLM's CUDA release chooses its CUDA platform. No kernel can run.

Used by the programs beside this file, with an unpacked CUDA wheel first on PYTHONPATH, before vLLM does anything:
NVML answers what a machine with these GPUs would, and the compiled extensions are empty modules whose operators exist.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import torch

EXTENSIONS = (
    "vllm._C",
    "vllm._C_stable_libtorch",
    "vllm._moe_C",
    "vllm._moe_C_stable_libtorch",
    "vllm._flashmla_C",
    "vllm._vllm_fa2_C",
    "vllm._vllm_fa3_C",
    "vllm.vllm_flash_attn._vllm_fa2_C",
    "vllm.vllm_flash_attn._vllm_fa3_C",
    "vllm.cumem_allocator",
)
NAMESPACES = ("_C", "_moe_C", "_vllm_fa", "vllm")  # of the operators that those register
CAPABILITY = (9, 0)
MEMORY = types.SimpleNamespace(total=80 << 30, free=79 << 30, used=1 << 30)


class Operator:
    """One that can be looked up; asked whether the GPU supports something, it denies it."""

    def __init__(self, name: str) -> None:
        self.__name__ = name
        self.default = self

    def __call__(self, *arguments: Any, **named: Any) -> bool:
        return False


def install(gpus: int = 1) -> None:
    """Pretend, for the rest of this process."""
    for name in EXTENSIONS:
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        sys.modules[name] = module
    _answer_for_operators()
    torch.version.cuda = "13.0"
    torch.cuda.device_count = lambda: gpus
    torch.cuda.is_available = lambda: True
    sys.meta_path.insert(0, FakeNvml(gpus))


class FakeNvml(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the module through which vLLM asks NVML with other answers. Old releases ask while they are imported."""

    name = "vllm.third_party.pynvml"

    def __init__(self, gpus: int) -> None:
        self._gpus = gpus

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != self.name:
            return None
        return importlib.util.spec_from_file_location(name, f"{next(iter(path))}/pynvml.py", loader=self)

    def exec_module(self, module: types.ModuleType) -> None:
        assert module.__file__ is not None
        exec(compile(Path(module.__file__).read_bytes(), module.__file__, "exec"), module.__dict__)
        module.__dict__.update(
            nvmlInit=lambda *_: None,
            nvmlShutdown=lambda *_: None,
            nvmlDeviceGetCount=lambda: self._gpus,
            nvmlDeviceGetHandleByIndex=lambda index: index,
            nvmlDeviceGetCudaComputeCapability=lambda _: CAPABILITY,
            nvmlDeviceGetName=lambda _: "NVIDIA H100 80GB HBM3",
            nvmlDeviceGetUUID=lambda handle: f"GPU-{handle:04}",
            nvmlDeviceGetMemoryInfo=lambda *_, **__: MEMORY,
            nvmlSystemGetDriverVersion=lambda: "580.00",
            nvmlSystemGetCudaDriverVersion=lambda: 13000,
            nvmlDeviceGetP2PStatus=lambda *_: module.NVML_P2P_STATUS_OK,
        )


def _answer_for_operators() -> None:
    kind = torch._ops._OpNamespace
    stock = kind.__getattr__

    def look_up(self: Any, name: str) -> Any:
        try:
            return stock(self, name)
        except AttributeError:
            if name.startswith("__") or not self.name.startswith(NAMESPACES):
                raise
            return Operator(name)

    kind.__getattr__ = look_up  # type: ignore[method-assign]
    torch.library.register_fake = lambda *_, **__: lambda function: function
