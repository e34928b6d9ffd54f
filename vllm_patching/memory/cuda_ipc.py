"""One GPU allocation seen by two processes, by the arena's CUDA IPC handle; no pickle.

Same machine and same physical GPU, matched by its UUID (each process may number them differently). The exporter must
outlive the importer's use. PyTorch keeps a small counter file for it in /dev/shm while the exporter runs.
"""

import msgspec
import torch

from atroposlib.wire.bridge import IpcHandle
from vllm_patching.memory.shared_buffer import SharedBufferError


def refusal(buffer: torch.Tensor) -> str | None:
    """Explain why the allocation of `buffer` cannot be shared; None if it can."""
    if any(
        0 <= buffer.data_ptr() - segment["address"] < segment["total_size"] and segment.get("is_expandable")
        for segment in torch.cuda.memory_snapshot()
    ):
        return (
            "its weights lie in an expandable segment, which CUDA IPC cannot share: start vLLM without "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        )
    return None


def export(buffer: torch.Tensor) -> IpcHandle:
    """The handle of a flat uint8 buffer that is a whole storage."""
    _, handle, size, offset, counter, counter_offset, event, sync = buffer.untyped_storage()._share_cuda_()
    return IpcHandle(gpu_uuid(buffer.device), handle, size, offset, counter, counter_offset, event, sync)


def open_handle(ipc: IpcHandle) -> torch.Tensor:
    """The exporter's buffer, flat uint8, on the number that its GPU has in this process. Raises SharedBufferError."""
    here = {gpu_uuid(torch.device("cuda", index)): index for index in range(torch.cuda.device_count())}
    if ipc.gpu not in here:
        raise SharedBufferError(
            f"vLLM's weights are on GPU {ipc.gpu}, the trainer sees {', '.join(here) or 'none'}: "
            "give both the same GPUs in CUDA_VISIBLE_DEVICES"
        )
    torch.cuda.init()
    _, *handle = msgspec.structs.astuple(ipc)  # in PyTorch's own order
    storage = torch.UntypedStorage._new_shared_cuda(here[ipc.gpu], *handle)
    return torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", here[ipc.gpu])).set_(storage)


def gpu_uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)
