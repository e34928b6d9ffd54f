"""A worker's half of a broadcast: what it stages, what it hands out to be served, and what ends a session.

The workers' own methods over real Gloo groups on loopback; no vLLM around them. The live weights change in
`bridge_apply` alone, and only to the very version of the very session that is asked for. All of it with staging on the
device and in host memory, and with weights that travel whole and as what has changed in them.
"""

import queue
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from atroposlib.wire.bridge import GOODBYE, Announced, BroadcastOffer, ReloadOffer, ack_key, go_key
from tests.unit.vllm_patching.memory.test_arena import Fused, expected, manifest, new_weights, shards, wire_image
from vllm_patching import delta, transport
from vllm_patching.engines.updater import WeightUpdater
from vllm_patching.memory import arena
from vllm_patching.memory.arena import Arena
from vllm_patching.worker import BridgeWorker

TP_SIZE = 2
TIMEOUT_S = 20.0
BUCKET_BYTES = 40  # several buckets

Weights = dict[str, torch.Tensor]


def offer_of(session: str, port: int, backend: str, timeout_s: float, **changes: Any) -> BroadcastOffer:
    """What a trainer whose store is at `port` offers the workers."""
    return BroadcastOffer(
        session=session,
        trainer="h:1",
        lease_s=60.0,
        address="127.0.0.1",
        port=port,
        world_size=1 + TP_SIZE,
        backend=backend,
        manifest_digest=manifest().digest(),
        bucket_bytes=BUCKET_BYTES,
        timeout_s=timeout_s,
        **changes,
    )


class Rank:
    """One worker of two around a small model, as it is once vLLM has loaded it."""

    def __init__(self, rank: int, staging: str = "device") -> None:
        self.rank = rank
        self.model = Fused(TP_SIZE)
        self.worker: Any = BridgeWorker.__new__(BridgeWorker)
        self.worker._tp_rank, self.worker._manifest = rank, manifest()
        self.worker._arena = Arena(self.model, manifest(), shards(rank, TP_SIZE), staging_on_host=staging == "host")
        self.worker._updater = WeightUpdater(self.worker._arena, rank)

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = msgspec.to_builtins(self.worker.bridge_status())
        return found

    def serves(self, weights: Weights) -> bool:
        live = dict(self.model.named_parameters())
        return all(
            torch.equal(live[name][: len(value)], value)
            for name, value in expected(weights, self.rank, TP_SIZE).items()
        )


class Trainer:
    """The trainer's end of one session; `send` returns when every rank has acknowledged."""

    def __init__(
        self,
        session: str,
        ranks: list[Rank],
        backend: str = "gloo",
        timeout_s: float = TIMEOUT_S,
        only_changes: bool = False,
    ) -> None:
        self.session = session
        self.only_changes = only_changes
        self.sent_last = torch.zeros(manifest().nbytes, dtype=torch.uint8)
        self.base: int | None = None  # its version
        self.store, port = transport.host_store("127.0.0.1", 0, TIMEOUT_S)
        offer = offer_of(session, port, backend, timeout_s, delta=only_changes)
        for rank in ranks:
            assert rank.worker.bridge_open(msgspec.to_builtins(offer)) is not None
        members = (self.store, session, 0, 1 + TP_SIZE, timeout_s)
        control = transport.make_control_group(*members)
        self.groups = transport.Groups(control, transport.make_data_group(control, *members, backend), backend)
        self.groups.barrier()
        self.sequence = 0

    def begin(self, version: int) -> None:
        announced = Announced(version, self.base)
        self.store.set(go_key(self.session, self.sequence), announced.encoded())

    def send_buckets(self, weights: Weights, buckets: slice = slice(None)) -> None:
        image = wire_image(weights)
        for bucket in manifest().buckets(BUCKET_BYTES)[buckets]:
            packed = image[bucket.start : bucket.end].clone()
            if self.only_changes:
                last = self.sent_last[bucket.start : bucket.end]
                delta.send(self.groups, packed, last, whole=self.base is None)
            else:
                self.groups.broadcast(packed)

    def wait_for_acks(self) -> None:
        keys = [ack_key(self.session, self.sequence, rank) for rank in range(TP_SIZE)]
        self.store.wait(keys, timedelta(seconds=TIMEOUT_S))
        self.sequence += 1

    def send(self, version: int, weights: Weights) -> None:
        self.begin(version)
        self.send_buckets(weights)
        self.wait_for_acks()
        if self.only_changes:
            self.base = version

    def leave(self) -> None:
        self.store.set(go_key(self.session, self.sequence), GOODBYE)


def weights(seed: int) -> Weights:
    return {name: value + seed for name, value in new_weights().items()}


def wait_for_state(ranks: list[Rank], state: str) -> None:
    """Return when all ranks are in it."""
    end = time.monotonic() + TIMEOUT_S
    while any(rank.status()["state"] != state for rank in ranks):
        assert time.monotonic() < end, [rank.status() for rank in ranks]
        time.sleep(0.01)


def wait_for_end_of_replaced_threads(before: int) -> None:
    """Return when no more updater threads run than `before`, one for each rank that there is."""
    end = time.monotonic() + TIMEOUT_S
    while updater_threads() > before:
        assert time.monotonic() < end, threading.enumerate()
        time.sleep(0.01)


def updater_threads() -> int:
    return sum(thread.name.startswith("WeightUpdater") for thread in threading.enumerate())


@pytest.fixture(params=["device", "host"])
def ranks(request: pytest.FixtureRequest) -> list[Rank]:
    return [Rank(rank, request.param) for rank in range(TP_SIZE)]


@pytest.fixture(params=[False, True], ids=["whole", "delta"])
def trainer(request: pytest.FixtureRequest, ranks: list[Rank]) -> Iterator[Trainer]:
    trainer = Trainer("a", ranks, only_changes=request.param)
    yield trainer
    trainer.leave()


def test_a_version_is_handed_out_under_its_own_session_and_number_alone(ranks: list[Rank], trainer: Trainer) -> None:
    trainer.send(4, weights(4))
    for rank in ranks:
        before = {name: parameter.clone() for name, parameter in rank.model.named_parameters()}
        asked = [("a", 4), ("a", 3), ("a", 5), ("b", 4), ("", 4), ("a", 0)]
        assert [rank.worker.bridge_staged(*each) for each in asked] == [True, False, False, False, False, False]
        for session, version in asked[1:]:
            says = f"policy version {version} of session {session} is not staged on rank {rank.rank}"
            assert rank.worker.bridge_apply(session, version) == {"failed": f"RuntimeError: {says}"}
        assert all(torch.equal(before[name], parameter) for name, parameter in rank.model.named_parameters())
        assert rank.worker.bridge_apply("a", 4) >= 0
        assert rank.serves(weights(4))
        assert rank.worker.bridge_staged("a", 4) is False
        assert "failed" in rank.worker.bridge_apply("a", 4)  # once only


def test_versions_follow_one_another_and_the_status_names_what_is_staged(ranks: list[Rank], trainer: Trainer) -> None:
    for version in (1, 2, 3):
        trainer.send(version, weights(version))
        wait_for_state(ranks, "staged")
        for rank in ranks:
            found = rank.status()
            assert (found["rank"], found["session"], found["staged_version"]) == (rank.rank, "a", version)
            assert rank.worker.bridge_apply("a", version) >= 0
            assert rank.serves(weights(version))
            assert rank.status()["state"] == "joined"


def test_what_was_staged_is_gone_once_the_next_version_overwrites_it(ranks: list[Rank], trainer: Trainer) -> None:
    trainer.send(1, weights(1))
    trainer.base = None  # version 1 is never live
    trainer.begin(2)
    trainer.send_buckets(weights(2), slice(0, 1))
    wait_for_state(ranks, "receiving")
    assert [rank.worker.bridge_staged("a", version) for rank in ranks for version in (1, 2)] == [False] * 4
    trainer.send_buckets(weights(2), slice(1, None))
    trainer.wait_for_acks()
    for rank in ranks:
        assert [rank.worker.bridge_staged("a", version) for version in (1, 2)] == [False, True]
        assert rank.worker.bridge_apply("a", 2) >= 0
        assert rank.serves(weights(2))


def test_a_new_session_drops_what_the_one_before_had_staged(ranks: list[Rank], trainer: Trainer) -> None:
    trainer.send(1, weights(1))
    another = Trainer("b", ranks)
    assert [rank.worker.bridge_staged("a", 1) for rank in ranks] == [False, False]
    assert ["failed" in rank.worker.bridge_apply("a", 1) for rank in ranks] == [True, True]
    another.send(1, weights(7))
    for rank in ranks:
        assert rank.worker.bridge_staged("a", 1) is False
        assert rank.worker.bridge_apply("b", 1) >= 0
        assert rank.serves(weights(7))
    another.leave()


def test_what_arrives_whole_after_its_session_was_replaced_is_not_staged(
    ranks: list[Rank], trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena, "HANDOVER_S", 0.2)  # the first session keeps its host memory: it is in a transfer
    threads = updater_threads()
    trainer.begin(1)
    trainer.send_buckets(weights(1), slice(0, 1))
    wait_for_state(ranks, "receiving")
    another = Trainer("b", ranks)
    trainer.send_buckets(weights(1), slice(1, None))
    wait_for_end_of_replaced_threads(threads)
    for rank in ranks:
        assert (rank.status()["session"], rank.worker.bridge_staged("a", 1)) == ("b", False)
    another.send(1, weights(7))
    for rank in ranks:
        assert rank.worker.bridge_apply("b", 1) >= 0
        assert rank.serves(weights(7))
    another.leave()


def test_a_trainer_that_dies_in_the_middle_fails_the_session_and_leaves_the_weights(
    ranks: list[Rank], trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    trainer.send(1, weights(1))
    assert all(rank.worker.bridge_apply("a", 1) >= 0 for rank in ranks)
    trainer.begin(2)
    trainer.send_buckets(weights(2), slice(0, 1))
    del trainer.groups  # its connections close, as when its process ends
    wait_for_state(ranks, "failed")
    for rank in ranks:
        assert rank.status()["error"]
        assert rank.worker.bridge_staged("a", 2) is False
        assert rank.serves(weights(1))
    assert caplog.text.count("; receiving policy version 2); serving continues") == len(ranks)


def test_a_trainer_that_leaves_makes_room(ranks: list[Rank], trainer: Trainer) -> None:
    trainer.send(1, weights(1))
    assert all(rank.worker.bridge_apply("a", 1) >= 0 for rank in ranks)
    trainer.leave()
    wait_for_state(ranks, "idle")
    assert all(rank.serves(weights(1)) for rank in ranks)


def test_sessions_that_follow_one_another_leave_no_buffer_behind() -> None:
    rank = Rank(0)
    threads, held = updater_threads(), shared_buffers()
    for session in ("a", "b", "c"):
        offer = ReloadOffer(
            session=session, trainer="h:1", lease_s=60.0, manifest_digest=manifest().digest(), timeout_s=TIMEOUT_S
        )
        assert rank.worker.bridge_open(msgspec.to_builtins(offer)) is not None
        wait_for_state([rank], "joined")
        assert shared_buffers() > held
    assert rank.worker.bridge_leave() is None
    wait_for_end_of_replaced_threads(threads)
    assert shared_buffers() == held


def shared_buffers() -> int:
    return sum("atropos-weights" in line for line in Path("/proc/self/maps").read_text().splitlines())


def little_changed(before: Weights, name: str) -> Weights:
    return before | {name: before[name].clone().index_fill_(0, torch.tensor([1]), 0.5)}


def test_what_has_changed_is_put_on_top_of_the_live_words(ranks: list[Rank]) -> None:
    """Two versions back is what the staging buffer holds where a commit exchanges buffers."""
    trainer = Trainer("a", ranks, only_changes=True)
    sent = weights(1)
    for version, name in enumerate(["q", "out", "embed", "norm"], start=1):
        sent = little_changed(sent, name)
        trainer.send(version, sent)
        for rank in ranks:
            assert rank.worker.bridge_apply("a", version) >= 0
            assert rank.serves(sent)
    trainer.leave()


@pytest.mark.parametrize("lost", ["staged but not committed", "another base"])
def test_what_has_changed_since_another_version_than_the_live_one_fails_the_session(
    ranks: list[Rank], lost: str
) -> None:
    trainer = Trainer("a", ranks, only_changes=True)
    trainer.send(1, weights(1))
    assert all(rank.worker.bridge_apply("a", 1) >= 0 for rank in ranks)
    if lost == "another base":
        trainer.base = 0
    else:
        trainer.send(2, weights(2))
    trainer.begin(3)
    wait_for_state(ranks, "failed")
    for rank in ranks:
        says = f"was sent as changes since {trainer.base}, which rank {rank.rank} does not serve"
        assert says in rank.status()["error"]
        assert rank.serves(weights(1))
    again = Trainer("b", ranks, only_changes=True)
    for version in (3, 4):
        again.send(version, weights(version))
        assert all(rank.worker.bridge_apply("b", version) >= 0 for rank in ranks)
    assert all(rank.serves(weights(4)) for rank in ranks)
    again.leave()


def test_another_trainers_version_of_the_same_number_is_no_base(ranks: list[Rank]) -> None:
    first = Trainer("a", ranks, only_changes=True)
    first.send(1, weights(1))
    assert all(rank.worker.bridge_apply("a", 1) >= 0 for rank in ranks)
    second = Trainer("b", ranks, only_changes=True)
    second.base = 1  # as if it had sent it
    second.begin(2)
    wait_for_state(ranks, "failed")
    assert all(rank.serves(weights(1)) for rank in ranks)


def test_host_memory_goes_from_session_to_session(caplog: pytest.LogCaptureFixture) -> None:
    """There is one buffer: a session that comes while another one still holds it waits for it a while."""
    rank = Rank(0, "host")
    first, second = (rank.worker._arena.make_staging for _ in range(2))
    staging = first()
    place = staging.buffer.data_ptr()
    held = [staging]
    del staging
    threading.Timer(0.3, held.clear).start()
    with caplog.at_level("INFO", logger="vllm.atropos_bridge"):
        assert second().buffer.data_ptr() == place
    assert "Waiting for a former session to release the staging buffer, at most 6 s" in caplog.text


def test_a_session_that_does_not_let_go_of_host_memory_keeps_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "HANDOVER_S", 0.1)
    arena_of_one = Rank(0, "host").worker._arena
    first, second = arena_of_one.make_staging(), arena_of_one.make_staging()
    places = {first.buffer.data_ptr(), second.buffer.data_ptr()}
    assert len(places) == 2
    del first, second
    assert arena_of_one._unused.qsize() == 1, "the other one is given back to the system"
    assert arena_of_one.make_staging().buffer.data_ptr() in places


def test_the_thread_works_on_its_ranks_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread begins on GPU 0, whichever the worker's is."""
    chosen: queue.Queue[tuple[str, torch.device]] = queue.Queue()
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: chosen.put((threading.current_thread().name, device)))
    on_gpu: Any = SimpleNamespace(device=torch.device("cuda", 3))
    of_gpu = WeightUpdater(on_gpu, 3)
    assert chosen.get(timeout=TIMEOUT_S) == (of_gpu.thread_name, torch.device("cuda", 3))
