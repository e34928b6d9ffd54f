"""One GPU allocation seen by two processes: the arena's CUDA IPC handle as JSON, no pickle.

Same machine and same physical GPU, matched by its UUID (each process may number them differently). The exporter must
outlive the importer's use. PyTorch keeps a small counter file for it in /dev/shm while the exporter runs.
"""

import base64

import torch

from atroposlib.wire.bridge import IpcHandle


class CudaIpcError(RuntimeError):
    """An allocation that cannot be opened; the message says why and what to do."""


def refusal(buffer: torch.Tensor) -> str | None:
    """Why the allocation of `buffer` cannot be shared; None if it can."""
    address = buffer.data_ptr()
    for segment in torch.cuda.memory_snapshot():
        if segment["address"] <= address < segment["address"] + segment["total_size"] and segment.get("is_expandable"):
            return (
                "its weights lie in an expandable segment, which CUDA IPC cannot share: start vLLM without "
                "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
            )
    return None


def export(buffer: torch.Tensor) -> IpcHandle:
    """The handle of a flat uint8 buffer that is a whole storage."""
    _, handle, size, offset, counter, counter_offset, event, sync = buffer.untyped_storage()._share_cuda_()
    return IpcHandle(
        gpu_uuid(buffer.device), _text(handle), size, offset, _text(counter), counter_offset, _text(event), sync
    )


def open_handle(ipc: IpcHandle) -> torch.Tensor:
    """The exporter's buffer, flat uint8, on whatever number its GPU has here. Raises CudaIpcError."""
    here = {gpu_uuid(torch.device("cuda", index)): index for index in range(torch.cuda.device_count())}
    if ipc.gpu not in here:
        raise CudaIpcError(
            f"vLLM's weights are on GPU {ipc.gpu}, the trainer sees {', '.join(here) or 'none'}: "
            "give both the same GPUs in CUDA_VISIBLE_DEVICES"
        )
    device = here[ipc.gpu]
    torch.cuda.init()
    storage = torch.UntypedStorage._new_shared_cuda(
        device,
        _bytes(ipc.handle),
        ipc.size,
        ipc.offset,
        _bytes(ipc.counter_handle),
        ipc.counter_offset,
        _bytes(ipc.event_handle),
        ipc.event_sync,
    )
    return torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", device)).set_(storage)


def gpu_uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)
