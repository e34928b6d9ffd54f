"""NCCL groups without a GPU: a process group that does what NCCL's does, over Gloo, and fails where it is told to.

A peer that is gone is an exception at the deadline and never the end of the process that survives it; the group is
aborted, and the next session works.
"""

import os
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

from example_trainer.bridges import BridgeError, broadcast
from example_trainer.model.loading import load_model
from example_trainer.weights.written import TrainedModel
from tests.unit.trainer.bridges.fake_broadcast_server import FakeVllmServer, serving
from tests.unit.trainer.bridges.test_several_servers import config_to
from tests.unit.trainer.fakes import model_folder
from tests.unit.vllm_patching.engines.test_updater import Rank, Trainer, wait_for_state, weights
from vllm_patching import transport

DUPLICATE = """NCCL error in: NCCLUtils.cpp:94, invalid usage (run with NCCL_DEBUG=WARN for details)
ncclInvalidUsage: This usually reflects invalid usage of NCCL library.
Last error:
Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 50000"""
SILENT = "[Rank 1] Work WorkNCCL(SeqNum=3, OpType=BROADCAST, NumelIn=40, Timeout(ms)=1000) timed out in blocking wait."


class Work:
    """A collective under way. Its `wait` fails as `fault` says."""

    def __init__(self, wait: Callable[[], object], fault: str | None) -> None:
        self._wait, self._fault = wait, fault

    def wait(self) -> None:
        if self._fault is not None:
            raise RuntimeError(self._fault)
        self._wait()


class FakeNccl:
    """In place of ProcessGroupNCCL: `fault` is what waits raise on the ranks of `faulty`."""

    class Options:
        _timeout: timedelta

    made: ClassVar[list["FakeNccl"]] = []
    fault: ClassVar[str | None] = None
    faulty: ClassVar[set[int]] = set()
    bucket_s: ClassVar[float] = 0.0  # that a collective takes by this group's own clock, after those before it

    def __init__(self, store: dist.Store, rank: int, size: int, options: Options) -> None:
        self.environment = dict(os.environ)
        self.rank, self.options, self.aborted = rank, options, threading.Event()
        self.calls: list[int] = []
        self.clock = self._wire_is_free = 0.0
        self._members = (store, rank, size)
        self._group: Any = None
        FakeNccl.made.append(self)

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Work:
        self.calls.append(tensors[0].numel())
        faulty = FakeNccl.fault is not None and self.rank in FakeNccl.faulty
        done = self._wire_is_free = max(self._wire_is_free, self.clock) + FakeNccl.bucket_s
        deadline = self.clock + self.options._timeout.total_seconds()  # NCCL's counts from here

        def wait() -> None:
            self.clock = max(self.clock, done)
            if done > deadline:
                raise RuntimeError(SILENT)
            self._over_gloo().broadcast(tensors, options).wait()

        return Work(wait, FakeNccl.fault if faulty else None)

    def _over_gloo(self) -> Any:  # connects at the first collective, as NCCL does
        if self._group is None:
            gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            gloo._timeout = self.options._timeout
            gloo._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
            self._group = dist.ProcessGroupGloo(*self._members, gloo)
        return self._group

    def abort(self) -> None:
        self._group = None
        self.aborted.set()


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FakeNccl]]:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNccl, raising=False)
    FakeNccl.made, FakeNccl.fault, FakeNccl.faulty, FakeNccl.bucket_s = [], None, set(), 0.0
    yield FakeNccl
    for made in FakeNccl.made:
        made.abort()


@pytest.fixture
def ranks() -> list[Rank]:
    return [Rank(0), Rank(1)]


@pytest.mark.parametrize("before", [None, "0"])
def test_a_group_is_made_so_that_a_lost_peer_is_an_exception(
    nccl: type[FakeNccl], monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    monkeypatch.delenv(transport.BLOCKING_WAIT, raising=False)
    if before is not None:
        monkeypatch.setenv(transport.BLOCKING_WAIT, before)
    group = transport.make_data_group(None, dist.HashStore(), "s", 0, 1, 7.0, "nccl")
    assert group.environment["TORCH_NCCL_BLOCKING_WAIT"] == "1"
    assert group.options._timeout == timedelta(seconds=7)
    assert os.environ.get(transport.BLOCKING_WAIT) == before


def test_every_bucket_is_one_collective_with_a_deadline_of_its_own(nccl: type[FakeNccl], ranks: list[Rank]) -> None:
    trainer = Trainer("a", ranks, "nccl")
    trainer.send(1, weights(1))
    buckets = [bucket.end - bucket.start for bucket in ranks[0].worker._manifest.buckets(40)]
    assert len(buckets) > 1
    assert [made.calls for made in nccl.made] == [buckets] * 3
    for rank in ranks:
        assert rank.worker.bridge_apply("a", 1) >= 0
        assert rank.serves(weights(1))
    trainer.leave()
    wait_for_state(ranks, "idle")
    assert [made.aborted.wait(10) for made in nccl.made if made.rank] == [True, True]


def test_what_has_changed_travels_over_nccl_and_its_headers_over_gloo(nccl: type[FakeNccl], ranks: list[Rank]) -> None:
    trainer = Trainer("a", ranks, "nccl", only_changes=True)
    sent = weights(1)
    for version in (1, 2):
        trainer.send(version, sent)
        for rank in ranks:
            assert rank.worker.bridge_apply("a", version) >= 0
            assert rank.serves(sent)
        for made in nccl.made:
            made.calls.clear()
    trainer.send(3, sent | {"q": sent["q"].clone().index_fill_(0, torch.tensor([1]), 0.5)})
    # a row of 4 float32 in 8 words, and a bit for each of 32
    assert [made.calls for made in nccl.made] == [[16, 4]] * 3
    trainer.leave()


def test_a_transfer_may_take_longer_than_the_deadline_of_its_buckets(nccl: type[FakeNccl], ranks: list[Rank]) -> None:
    """70 billion weights over 10 GbE take 112 s, near the whole default of 120 s."""
    trainer = Trainer("a", ranks, "nccl", timeout_s=5)
    nccl.bucket_s = 4.0
    trainer.send(1, weights(1))
    took = {made.clock for made in nccl.made}
    assert took == {4.0 * len(nccl.made[0].calls)}
    assert took.pop() > 5
    assert all(rank.worker.bridge_apply("a", 1) >= 0 for rank in ranks)
    late = nccl.made[0]
    works = [late.broadcast([torch.zeros(1)], None) for _ in range(2)]  # both at once, as before
    with pytest.raises(RuntimeError, match="timed out"):
        works[1].wait()
    trainer.leave()


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (DUPLICATE, "NCCL: Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 50000"),
        (SILENT, "peer silent for 1 s, its deadline"),
    ],
)
def test_a_worker_survives_a_trainer_that_is_gone(
    nccl: type[FakeNccl], ranks: list[Rank], fault: str, told: str
) -> None:
    trainer = Trainer("a", ranks, "nccl", timeout_s=5)
    trainer.send(1, weights(1))
    assert all(rank.worker.bridge_apply("a", 1) >= 0 for rank in ranks)
    nccl.fault, nccl.faulty = fault, {1, 2}
    trainer.begin(2)
    wait_for_state(ranks, "failed")
    for rank in ranks:
        assert rank.status()["error"] == told
        assert rank.serves(weights(1))
    assert [made.aborted.wait(10) for made in nccl.made if made.rank] == [True, True]
    nccl.fault = None
    another = Trainer("b", ranks, "nccl")
    another.send(2, weights(7))
    for rank in ranks:
        assert rank.worker.bridge_apply("b", 2) >= 0
        assert rank.serves(weights(7))
    another.leave()


def test_a_fault_that_nobody_expected_is_seen_at_once(ranks: list[Rank], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="vllm")
    assert not hasattr(dist, "ProcessGroupNCCL")  # PyTorch for CPUs has none, which is an AttributeError
    with pytest.raises(AttributeError):
        Trainer("a", ranks, "nccl", timeout_s=5)
    wait_for_state(ranks, "failed")
    assert "ProcessGroupNCCL" in ranks[0].status()["error"]
    assert "Traceback" in caplog.text
    another = Trainer("b", ranks)
    another.send(1, weights(3))
    another.leave()


def test_a_trainer_survives_a_worker_that_is_gone(nccl: type[FakeNccl], tmp_path: Any) -> None:
    model, cpu = model_folder(tmp_path / "model"), torch.device("cpu")
    server = FakeVllmServer(model, tp_size=1)
    with serving(server):
        config = config_to(model, server.port, bridge_backend="nccl", bridge_timeout_s=5)
        bridge = broadcast.prepare(config, model, cpu).connect(TrainedModel(load_model(model, cpu)))
        nccl.fault, nccl.faulty = SILENT, {0}
        with pytest.raises(BridgeError, match=r"did not reach every worker .* peer silent for 1 s, its deadline"):
            bridge.sync(1, lambda: None)
        bridge.close()
    assert [made.aborted.is_set() for made in nccl.made if made.rank == 0] == [True]


def test_a_server_with_its_own_nccl_settings_is_fed_over_gloo(nccl: type[FakeNccl], tmp_path: Any) -> None:
    model, cpu = model_folder(tmp_path / "model"), torch.device("cpu")
    server = FakeVllmServer(model, tp_size=1)
    server.batch_invariant = True
    with serving(server):
        prepared = broadcast.prepare(config_to(model, server.port, bridge_backend="nccl"), model, cpu)
        with pytest.raises(BridgeError, match=r"--bridge-backend nccl: .* --batch-invariant, .* use gloo or auto"):
            prepared.connect(TrainedModel(load_model(model, cpu)))
        prepared.close()
        prepared = broadcast.prepare(config_to(model, server.port), model, cpu)
        bridge = prepared.connect(TrainedModel(load_model(model, cpu)))
        assert isinstance(bridge, broadcast.BroadcastBridge)
        assert bridge._chosen_backend(torch.device("cuda")) == "gloo"
        server.batch_invariant = False
        assert bridge._chosen_backend(torch.device("cuda")) == "nccl"
        bridge.close()
