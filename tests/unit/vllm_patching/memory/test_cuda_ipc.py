"""What can be said of CUDA IPC without one."""

import json

import msgspec
import pytest

from atroposlib.wire.bridge import IpcHandle
from vllm_patching.memory.cuda_ipc import open_handle
from vllm_patching.memory.shared_buffer import SharedBufferError


def test_weights_on_a_gpu_that_the_trainer_does_not_see_are_refused_by_name() -> None:
    handle = IpcHandle("GPU-1234", b"", 8, 0, b"", 0, b"", False)
    with pytest.raises(SharedBufferError, match=r"on GPU GPU-1234, the trainer sees .*: give both the same GPUs"):
        open_handle(handle)


def test_a_handle_arrives_as_it_was_through_plain_types_and_json() -> None:
    handle = IpcHandle("GPU-1234", bytes(range(64)), 8, 512, b"counter", 1, b"event", True)
    plain = msgspec.to_builtins(handle)  # as a worker replies
    assert msgspec.convert(json.loads(json.dumps(plain)), IpcHandle) == handle
