"""What can be said of CUDA IPC without one."""

from dataclasses import asdict

import pytest

from vllm_patching.cuda_ipc import CudaIpcError, IpcHandle, open_handle


def test_weights_on_a_gpu_that_the_trainer_does_not_see_are_refused_by_name() -> None:
    handle = asdict(IpcHandle("GPU-1234", "", 8, 0, "", 0, "", False))
    with pytest.raises(CudaIpcError, match=r"on GPU GPU-1234, the trainer sees .*: give both the same GPUs"):
        open_handle(handle)
