"""Children of tests that need a trainer or vLLM: forked off a process that has loaded it, in milliseconds.

    test ──module, words, variables, three ends of pipes──▶ server ──fork──▶ child
         ◀──its pid, and later how it ended────────────────

Loading either takes each child of its own three to six seconds of processor time. The server computes nothing and has
one thread, so a child is like one that was started by its command. It is killed when the server ends, and that ends
with the tests.
"""

import atexit
import functools
import importlib
import json
import os
import runpy
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from atroposlib.processes.exec_child import die_with
from atroposlib.processes.imports import without_garbage_collection

ROOT = Path(__file__).parents[1]
TRAINER = (
    *(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "qwen2")),
    *(f"tests.integration.{child}" for child in ("bridge_child", "single_child", "reload_child")),
)
VLLM = tuple(f"vllm_patching.compat.vllm_{name}" for name in ("layers", "requests", "server"))
MOST_BYTES = 1 << 17  # of a request
STATUS = struct.Struct("=i")


class Forked(subprocess.Popen[str]):
    """`python -m MODULE WORDS` in the root of the project, with pipes; started by the server of this process that has
    loaded `loads`.
    """

    def __init__(
        self, module: str, words: Sequence[str], environment: Mapping[str, str], loads: tuple[str, ...] = TRAINER
    ) -> None:
        self._module, self._loads = module, loads
        pipe = subprocess.PIPE
        super().__init__([*words], stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment)

    def _execute_child(  # the private method's own arguments, in their order
        self,
        args: Sequence[str],
        executable: object,
        preexec_fn: object,
        close_fds: object,
        pass_fds: object,
        cwd: object,
        env: Mapping[str, str],
        startupinfo: object,
        creationflags: object,
        shell: object,
        p2cread: int,
        p2cwrite: int,
        c2pread: int,
        c2pwrite: int,
        errread: int,
        errwrite: int,
        *others: object,
    ) -> None:
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._server.connect(_server(self._loads))
        request = {"module": self._module, "words": [*args], "environment": dict(env)}
        ends = [p2cread, c2pwrite, errwrite]
        socket.send_fds(self._server, [json.dumps(request).encode()], ends)
        (self.pid,) = STATUS.unpack(self._server.recv(STATUS.size))
        self._child_created = True
        for end in ends:
            os.close(end)

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        """As os.waitpid gives it."""
        if wait_flags & os.WNOHANG and not select.select([self._server], [], [], 0)[0]:
            return 0, 0  # it runs
        status = self._server.recv(STATUS.size)
        self._server.close()
        return self.pid, STATUS.unpack(status)[0] if status else signal.SIGKILL  # it has died with its server

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None:
            pid, status = self._try_wait(os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return cast("int | None", self.returncode)


@functools.cache
def _server(loads: tuple[str, ...]) -> str:
    """The address of this process's server with `loads`, which is started."""
    name = f"atropos-tests-{os.getpid()}-{loads[0]}"
    process = subprocess.Popen([sys.executable, "-m", "tests.forked", name, *loads], cwd=ROOT, stdin=subprocess.PIPE)
    assert process.stdin is not None
    atexit.register(process.wait)
    atexit.register(process.stdin.close)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        while probe.connect_ex(f"\0{name}"):  # it loads
            assert process.poll() is None
            select.select([], [], [], 0.05)
    return f"\0{name}"


# --- the server -----------------------------------------------------------------------------------------------------


def serve(listener: socket.socket) -> dict[str, Any] | None:
    """Fork children until stdin ends, and tell how they end. In a child, returns what it is to run."""
    awake, wakes = socket.socketpair()
    awake.setblocking(False)
    wakes.setblocking(False)
    signal.set_wakeup_fd(wakes.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    running: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as selector:
        for source in (listener, awake, sys.stdin):
            selector.register(source, selectors.EVENT_READ)
        while True:
            ready = [key.fileobj for key, _ in selector.select()]
            if sys.stdin in ready:
                return None
            if awake in ready:
                awake.recv(4096)
                _tell_ends(running)
            if listener in ready:
                test, _ = listener.accept()
                data, ends, _, _ = socket.recv_fds(test, MOST_BYTES, 3)
                if not data:  # somebody looked whether this serves
                    test.close()
                    continue
                if not (pid := os.fork()):
                    signal.set_wakeup_fd(-1)
                    for other in (listener, test, awake, wakes, *running.values()):
                        other.close()
                    return _become_child(json.loads(data), ends)
                running[pid] = test
                test.send(STATUS.pack(pid))
                for end in ends:
                    os.close(end)


def _tell_ends(running: dict[int, socket.socket]) -> None:
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        with running.pop(pid) as test:
            test.send(STATUS.pack(status), socket.MSG_NOSIGNAL)


def _become_child(request: dict[str, Any], ends: Sequence[int]) -> dict[str, Any]:
    die_with(os.getppid(), signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for target, end in enumerate(ends):
        os.dup2(end, target)
        os.close(end)
    os.environ.clear()
    os.environ.update(request["environment"])
    return request


def main() -> None:
    """Listen at the abstract address that the command line names first; load the modules that it names then."""
    with without_garbage_collection():
        for name in sys.argv[2:]:
            importlib.import_module(name)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{sys.argv[1]}")
        listener.listen(64)
        request = serve(listener)
    if request is not None:
        sys.modules.pop(request["module"], None)  # it runs as the main module, loaded or not
        sys.argv = [request["module"], *request["words"]]
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
