"""Which ports a run uses. Two launchers that start at once choose different ones: a process that has chosen a port
holds an abstract Unix socket of that name until it ends. So does a vLLM server that still loads its model.
"""

import errno
import re
import socket
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from atroposlib.errors import WRONG_USE, AtroposError
from atroposlib.logs import escape

LAST_PORT = 65535
SHOWN = 80
CLAIM = re.compile(r"@atropos-(launcher|vllm-.*):(\d+)")  # vLLM's is made in example_trainer/vllm_api_server.py


class PortTaken(AtroposError):
    """A port that was asked for, or every port, is in use."""

    exit_status = WRONG_USE


class Ports:
    """The ports of one run, held until `close` or the end of this process."""

    def __init__(self) -> None:
        self._held: dict[int, socket.socket] = {}
        self.named: frozenset[int] = frozenset()  # that the run's settings give away: nobody gets one by chance

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def require(self, flag: str, port: int) -> int:
        """This port and no other. Raises PortTaken."""
        if not self._take(port):
            raise PortTaken(
                f"{flag} {port} is taken by {holder(port)}; end that process (`atropos stop` ends what a launcher "
                "started) or"
                " choose another port"
            )
        return port

    def first_free(self, port: int) -> int:
        """This port, or the next one above that is free. Raises PortTaken."""
        for candidate in range(port, LAST_PORT + 1):
            if candidate not in self.named and self._take(candidate):
                return candidate
        raise PortTaken(f"no port from {port} to {LAST_PORT} is free")

    def close(self) -> None:
        """Others may choose them again."""
        for claim in self._held.values():
            claim.close()
        self._held.clear()

    def _take(self, port: int) -> bool:
        if port in self._held:
            return False
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0atropos-launcher:{port}")
        except OSError as error:
            claim.close()
            if error.errno != errno.EADDRINUSE:
                raise
            return False
        if _listens(port) or _is_claimed_by_vllm(port):
            claim.close()
            return False
        self._held[port] = claim
        return True


def holder(port: int) -> str:
    """`python run_api.py (pid 123)`: who listens there or has chosen it, as far as this user may see."""
    for connection in psutil.net_connections("all"):
        if connection.pid and _names(connection.laddr, connection.status, port):
            with suppress(psutil.Error):
                command = " ".join(psutil.Process(connection.pid).cmdline())
                return f"{escape(command[:SHOWN])} (pid {connection.pid})"
    return "a process of another user"


def _names(address: object, status: str, port: int) -> bool:
    if isinstance(address, str):
        match = CLAIM.fullmatch(address)
        return match is not None and int(match[2]) == port
    return status == psutil.CONN_LISTEN and getattr(address, "port", None) == port


def _listens(port: int) -> bool:
    """Also where only another address of this machine is listened on, but 0.0.0.0 could not be."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise PortTaken(f"port {port} cannot be used: {error.strerror}") from None
            return True
    return False


def _is_claimed_by_vllm(port: int) -> bool:
    sockets = Path("/proc/net/unix").read_text(encoding="utf-8", errors="replace").splitlines()
    names = (line.split()[-1] for line in sockets if "@atropos-vllm-" in line)
    return any(name.endswith(f":{port}") for name in names)
