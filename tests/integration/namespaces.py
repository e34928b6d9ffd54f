"""Two network namespaces joined by a cable (a veth pair), as two hosts; and how a test acts inside one. Needs root on
Linux.
"""

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
CLONE_NEWNET = 0x40000000  # <sched.h>


@dataclass(frozen=True)
class Host:
    """One end of the cable."""

    namespace: str
    device: str
    address: str

    def set_cable(self, state: str) -> None:
        """`state`: up or down; the peer sees its carrier go."""
        _ip("-n", self.namespace, "link", "set", self.device, state)


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Raises PermissionError with ip's own words where namespaces may not be made."""
    pair = tuple(
        Host(f"atropos{os.getpid()}{end}", f"at{os.getpid()}{end}", f"10.77.0.{number}")
        for number, end in ((1, "a"), (2, "b"))
    )
    one, other = pair
    try:
        for host in pair:
            _ip("netns", "add", host.namespace)
        _ip(
            "link",
            "add",
            one.device,
            "netns",
            one.namespace,
            "type",
            "veth",
            "peer",
            "name",
            other.device,
            "netns",
            other.namespace,
        )
        for host in pair:
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", host.device)
            _ip("-n", host.namespace, "link", "set", "lo", "up")
            host.set_cable("up")
        yield one, other
    finally:
        for host in pair:
            subprocess.run(["ip", "netns", "del", host.namespace], capture_output=True)  # takes the cable with it


def tied(command: list[str], signal_name: str = "KILL") -> list[str]:
    """`command` as it is run so that it does not outlive the tests: the kernel signals it when the process that starts
    it dies.
    """
    return ["setpriv", "--pdeathsig", signal_name, "--", *command]


def entering(namespace: str | None, command: list[str]) -> list[str]:
    """`command` as it is run inside the namespace."""
    return ["ip", "netns", "exec", namespace, *command] if namespace else command


def inside(namespace: str | None, act: Callable[[], T]) -> T:
    """What `act` returns in the namespace: in a thread of its own that has entered it, and ends with it."""
    if namespace is None:
        return act()

    def run() -> T:
        with Path("/run/netns", str(namespace)).open() as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), f"cannot enter network namespace {namespace}")
        return act()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        raise PermissionError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
