"""A child that vLLM forks: vLLM loads no plugin there, so our server has it register, and OpenMP is loaded already."""

import gc
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest
import torch

from vllm_patching import plugin
from vllm_patching.compat import vllm_engine, vllm_server
from vllm_patching.kv_cache import SALTED

STAYS_S = 300  # longer than any wait of these tests
FORK = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def _as_registered() -> Iterator[None]:
    """For forks of the tests here alone, which free nothing of this process: Gloo's groups of earlier tests wait for
    threads that a fork lacks.
    """
    gc.collect()
    gc.freeze()
    registry = multiprocessing.util._afterfork_registry  # type: ignore[attr-defined]
    others = {*registry}
    plugin.register_in_forks.__wrapped__()
    yield
    for ours in {*registry} - others:
        del registry[ours]
    gc.unfreeze()


def _tell_its_wakeup(end: Connection) -> None:
    end.send(signal.set_wakeup_fd(-1))


def _tell_who_adds_requests(end: Connection) -> None:
    from vllm.v1.engine.core import EngineCore

    end.send(EngineCore.add_request.__module__)


def _stay(end: Connection) -> None:
    end.send(os.getpid())
    time.sleep(STAYS_S)


def _start_one_that_stays(end: Connection) -> None:
    FORK.Process(target=_stay, args=(end,)).start()
    time.sleep(STAYS_S)


@pytest.mark.services
def test_it_has_what_was_asked_for_after_its_parent_had_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher decides on salts when vLLM has read its flags, and so has loaded its plugins."""
    monkeypatch.setenv(SALTED, "1")
    reader, writer = FORK.Pipe(duplex=False)
    child = FORK.Process(target=_tell_who_adds_requests, args=(writer,))
    child.start()
    assert reader.poll(60)
    assert reader.recv() == vllm_engine.__name__
    child.join(30)


@pytest.mark.services
def test_its_signals_are_not_those_of_its_parents_event_loop() -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    before = signal.set_wakeup_fd(ours.fileno())
    try:
        reader, writer = FORK.Pipe(duplex=False)
        child = FORK.Process(target=_tell_its_wakeup, args=(writer,))
        child.start()
        assert reader.poll(30)
        assert reader.recv() == -1
        child.join(30)
    finally:
        signal.set_wakeup_fd(before)
        ours.close()
        theirs.close()


@pytest.mark.services
def test_it_holds_no_port_of_its_parent_and_keeps_what_connects_them() -> None:
    reader, writer = FORK.Pipe(duplex=False)
    with socket.create_server(("127.0.0.1", 0)) as served:
        port = served.getsockname()[1]
        child = FORK.Process(target=_stay, args=(writer,))
        child.start()
        assert reader.poll(30)  # over what it has inherited
    try:
        with socket.create_server(("127.0.0.1", port)):
            pass
    finally:
        child.kill()
        child.join(30)


@pytest.mark.services
def test_it_ends_when_its_parent_is_killed() -> None:
    reader, writer = FORK.Pipe(duplex=False)
    parent = FORK.Process(target=_start_one_that_stays, args=(writer,))
    parent.start()
    assert reader.poll(30)
    reader.recv()
    parent.kill()
    assert parent.pid is not None
    os.waitpid(parent.pid, 0)  # its sentinel is held by its child, too
    writer.close()
    assert reader.poll(30), "the child of a killed process lives on"
    with pytest.raises(EOFError):  # nobody holds the other end
        reader.recv()


def _tell_its_threads(end: Connection) -> None:
    end.send((torch.get_num_threads(), os.sched_getaffinity(0)))


@pytest.mark.services
@pytest.mark.parametrize("bound", [True, False], ids=["bound by vLLM", "not bound"])
def test_a_worker_has_the_threads_and_cores_that_vllm_names_for_it(
    monkeypatch: pytest.MonkeyPatch, bound: bool
) -> None:
    mine = sorted(os.sched_getaffinity(0))
    monkeypatch.setenv("OMP_PLACES", f"{{{mine[0]}}}" if bound else "cores(1)")  # a user's own
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if bound:
        monkeypatch.setenv("OMP_NUM_THREADS", "3")
    reader, writer = FORK.Pipe(duplex=False)
    worker = FORK.Process(target=vllm_server.with_own_threads(_tell_its_threads, threads=2), args=(writer,))
    worker.start()
    assert reader.poll(60)
    assert reader.recv() == ((3, {mine[0]}) if bound else (2, {*mine}))
    worker.join(30)
