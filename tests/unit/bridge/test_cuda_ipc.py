"""What can be said of CUDA IPC without one."""

import pytest

from atroposlib.wire.bridge import IpcHandle
from vllm_patching.memory.cuda_ipc import CudaIpcError, open_handle


def test_weights_on_a_gpu_that_the_trainer_does_not_see_are_refused_by_name() -> None:
    handle = IpcHandle("GPU-1234", "", 8, 0, "", 0, "", False)
    with pytest.raises(CudaIpcError, match=r"on GPU GPU-1234, the trainer sees .*: give both the same GPUs"):
        open_handle(handle)
