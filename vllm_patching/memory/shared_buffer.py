"""Memory that two processes of one user on one machine share, without a name in any file system.

    vLLM worker   SharedBuffer(nbytes)           an anonymous memory file (memfd), mapped
    trainer       open_buffer(process, fd, n)    the same pages, through /proc/PID/fd/FD

A memfd exists as long as a process has it open or mapped, so a killed process leaves nothing behind. The limit of
/dev/shm (64 MB in a container) does not apply to it. Its size is sealed, so that no process can shrink it while another
reads.
"""

import fcntl
import mmap
import os
import weakref

import torch

from atroposlib.errors import reading
from atroposlib.processes.identity import still_runs
from atroposlib.wire.processes import Process
from vllm_patching.free_memory import available_memory


class SharedBufferError(RuntimeError):
    """A buffer that cannot be made or opened; the message says why and what to do."""


class SharedBuffer:
    """`nbytes` of new zeroed shared memory, all of it allocated now. The pages outlive this object as long as a view of
    them exists.
    """

    def __init__(self, nbytes: int) -> None:
        available = available_memory()
        if nbytes > available:
            raise SharedBufferError(
                f"the weights need {nbytes / 1e6:.0f} MB of shared memory, but {available / 1e6:.0f} MB are free"
            )
        self.nbytes = nbytes
        self.fd = os.memfd_create("atropos-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self.fd)
        with reading(f"cannot allocate {nbytes / 1e6:.0f} MB of shared memory", SharedBufferError):
            os.ftruncate(self.fd, nbytes)
            # else a page that is missing later would be a SIGBUS in the middle of a step
            os.posix_fallocate(self.fd, 0, nbytes)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self.tensor = _map(self.fd, nbytes)


def open_buffer(owner: Process, fd: int, nbytes: int) -> torch.Tensor:
    """The buffer behind descriptor `fd` of process `owner`, flat uint8 [nbytes]. Raises SharedBufferError."""
    path = f"/proc/{owner.pid}/fd/{fd}"
    if not still_runs(owner):
        raise SharedBufferError(f"process {owner.pid}, which owns the weights, has ended")
    try:
        mine = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        hint = " (it runs as another user: start both as the same one)" if isinstance(error, PermissionError) else ""
        raise SharedBufferError(f"cannot open {path}: {error.strerror}{hint}") from error
    with open(mine, "r+b", buffering=0) as file:
        if (size := os.fstat(file.fileno()).st_size) != nbytes:
            raise SharedBufferError(f"{path} has {size} bytes, not the {nbytes} that its owner reported")
        return _map(file.fileno(), nbytes)


def _map(fd: int, nbytes: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8)
