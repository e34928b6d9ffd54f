"""Host memory in which the weights of a GPU are staged (--bridge-staging host), page-locked so that the GPU copies from
it at the full speed of its link.

It is a `SharedBuffer` that CUDA has registered, as vLLM does for the KV cache that it offloads: PyTorch's own pinned
memory would take the next power of two, 64 GiB for the 36 GB of a rank of a 72B model. Without a GPU nothing is locked.
"""

import resource
import weakref

import torch

from vllm_patching.memory.shared_buffer import SharedBuffer, SharedBufferError


class HostBuffer:
    """`tensor`: flat uint8 [nbytes] of host memory, allocated and, for a GPU, locked now. Raises SharedBufferError."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        try:
            self.tensor = SharedBuffer(nbytes).tensor
        except SharedBufferError as error:
            raise SharedBufferError(f"--bridge-staging host: {error}; {_remedy(nbytes)}") from error
        if device.type == "cuda":
            _lock(self.tensor)
            # not at the end of the process, where CUDA may be gone; the memory goes with it
            weakref.finalize(self, _unlock, self.tensor).atexit = False


def _lock(buffer: torch.Tensor) -> None:
    failed = int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0))
    if failed:
        raise SharedBufferError(
            f"--bridge-staging host: CUDA cannot page-lock {buffer.nbytes / 1e9:.1f} GB (cudaError {failed}; ulimit -l"
            f" is {_lockable()}): {_remedy(buffer.nbytes)}"
        )


def _unlock(buffer: torch.Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())


def _lockable() -> str:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit / 1e9:.3f} GB"


def _remedy(nbytes: int) -> str:
    return (
        f"every rank of vLLM needs {nbytes / 1e9:.1f} GB: set ulimit -l unlimited (docker run --ulimit memlock=-1),"
        " raise the container's memory limit, use more ranks (--tensor-parallel-size), or --bridge-staging device"
    )
