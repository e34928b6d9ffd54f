"""Ray on this machine, or on two nodes that are network namespaces; and launchers whose services it starts."""

import contextlib
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.integration.conftest import REPOSITORY
from tests.integration.namespaces import Host, entering, tied

SILENCE_S = 6
START_S = 90.0
PORT = 6379
RAY = str(Path(sys.executable).with_name("ray"))
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "PYTHONPATH": str(REPOSITORY),
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": uuid.uuid4().hex * 2,
}


@dataclass
class Launched:
    """A launcher that runs, and how to find what it has started."""

    process: subprocess.Popen[bytes]
    output: Path
    run: Path
    processes: Callable[[], list[psutil.Process]]

    @property
    def said(self) -> str:
        return self.output.read_text(errors="replace")

    def says(self, text: str, file: Path | None = None, times: int = 1, within_s: float = START_S) -> None:
        deadline = time.monotonic() + within_s
        source = file or self.output
        while (said := source.read_text(errors="replace") if source.exists() else "").count(text) < times:
            assert self.process.poll() is None, self.said[-6000:]
            assert time.monotonic() < deadline, said[-4000:] + self.said[-4000:]
            time.sleep(0.1)

    def ends(self, status: int, within_s: float = START_S) -> None:
        try:
            assert self.process.wait(within_s) == status, self.said[-6000:]
        except subprocess.TimeoutExpired:
            pytest.fail(f"it still runs after {within_s} s:\n{self.said[-6000:]}")

    def expect_all_gone(self, within_s: float) -> None:
        deadline = time.monotonic() + within_s
        while left := self.processes():
            assert time.monotonic() < deadline, [each.cmdline() for each in left]
            time.sleep(0.2)


def found(is_one: Callable[[psutil.Process], bool]) -> list[psutil.Process]:
    """The processes of which it is true; one that ends meanwhile is none."""
    held = []
    for each in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if each.status() != psutil.STATUS_ZOMBIE and is_one(each):
                held.append(each)
    return held


@contextmanager
def started(
    words: list[str], folder: Path, run: Path, processes: Callable[[], list[psutil.Process]], host: Host | None = None
) -> Iterator[Launched]:
    """A launcher, on one of the two hosts or outside of them. It and what it started are gone behind the block."""
    output = folder / f"output-{time.monotonic_ns()}.txt"
    with output.open("wb") as log:
        process = subprocess.Popen(
            entering(host.namespace if host else None, tied([sys.executable, *words], "TERM")),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **ENVIRONMENT},
            cwd=folder,
            start_new_session=True,
        )
    try:
        yield Launched(process, output, run, processes)
    finally:
        process.kill()
        process.wait()
        end(processes())


@contextmanager
def node(host: Host, *flags: str, first: tuple[str, ...] = ()) -> Iterator[subprocess.Popen[bytes]]:
    """Ray on one of the two hosts, for as long as the block runs; `first` is a command that starts it."""
    words = [RAY, "start", "--block", f"--node-ip-address={host.address}", "--num-cpus=4", "--num-gpus=0", *flags]
    words += ["--object-store-memory=80000000"]
    process = subprocess.Popen(
        entering(host.namespace, [*first, *tied(words, "TERM")]),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **ENVIRONMENT},
        start_new_session=True,
    )
    tree = psutil.Process(process.pid)
    try:
        yield process
    finally:
        end([*tree.children(recursive=True), tree] if tree.is_running() else [])
        process.wait()


def raylet_of(started: "subprocess.Popen[bytes]") -> psutil.Process:
    (raylet,) = (each for each in psutil.Process(started.pid).children(recursive=True) if each.name() == "raylet")
    return raylet


def end(processes: list[psutil.Process]) -> None:
    for each in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()


@pytest.fixture  # a new one each: a cluster believes for a while that a killed node lives
def head(hosts: tuple[Host, Host]) -> Iterator[Host]:
    with node(hosts[0], "--head", f"--port={PORT}", "--include-dashboard=false"):
        deadline = time.monotonic() + START_S
        probe = entering(hosts[0].namespace, [RAY, "health-check", f"--address={address_of(hosts[0])}"])
        while subprocess.run(probe, capture_output=True, env={**os.environ, **ENVIRONMENT}).returncode != 0:
            assert time.monotonic() < deadline
        yield hosts[0]


@pytest.fixture
def far(hosts: tuple[Host, Host]) -> Iterator[Host]:
    yield hosts[1]
    hosts[1].set_cable("up")


def address_of(head: Host) -> str:
    return f"{head.address}:{PORT}"
