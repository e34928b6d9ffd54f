"""A worker's half of a broadcast: what it stages, what it hands out to be served, and what ends a session.

The workers' own methods over real Gloo groups on loopback; no vLLM around them. The live weights change in
`bridge_apply` alone, and only to the very version of the very session that is asked for.
"""

import queue
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from atroposlib.wire.bridge import GOODBYE, BroadcastOffer, ack_key, go_key
from tests.unit.bridge.test_arena import Fused, expected, manifest, new_weights, shards, wire_image
from vllm_patching import transport
from vllm_patching.engines.updater import WeightUpdater
from vllm_patching.memory.arena import Arena
from vllm_patching.worker import BridgeWorker

TP_SIZE = 2
TIMEOUT_S = 20.0
BUCKET_BYTES = 40  # several buckets

Weights = dict[str, torch.Tensor]


class Rank:
    """One worker of two around a small model, as it is once vLLM has loaded it."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.model = Fused(TP_SIZE)
        self.worker: Any = BridgeWorker.__new__(BridgeWorker)
        self.worker._tp_rank, self.worker._manifest = rank, manifest()
        self.worker._arena = Arena(self.model, manifest(), shards(rank, TP_SIZE))
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

    def __init__(self, session: str, ranks: list[Rank], backend: str = "gloo", timeout_s: float = TIMEOUT_S) -> None:
        self.session = session
        self.store, port = transport.host_store("127.0.0.1", 0, TIMEOUT_S)
        offer = BroadcastOffer(
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
        )
        for rank in ranks:
            assert rank.worker.bridge_open(msgspec.to_builtins(offer)) is not None
        members = (self.store, session, 0, 1 + TP_SIZE, timeout_s)
        control = transport.make_control_group(*members)
        self.groups = transport.Groups(control, transport.make_data_group(control, *members, backend), backend)
        self.groups.barrier()
        self.sequence = 0

    def begin(self, version: int) -> None:
        self.store.set(go_key(self.session, self.sequence), str(version))

    def send_buckets(self, weights: Weights, buckets: slice = slice(None)) -> None:
        image = wire_image(weights)
        for bucket in manifest().buckets(BUCKET_BYTES)[buckets]:
            self.groups.broadcast(image[bucket.start : bucket.end].clone())

    def wait_for_acks(self) -> None:
        keys = [ack_key(self.session, self.sequence, rank) for rank in range(TP_SIZE)]
        self.store.wait(keys, timedelta(seconds=TIMEOUT_S))
        self.sequence += 1

    def send(self, version: int, weights: Weights) -> None:
        self.begin(version)
        self.send_buckets(weights)
        self.wait_for_acks()

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


@pytest.fixture
def ranks() -> list[Rank]:
    return [Rank(rank) for rank in range(TP_SIZE)]


@pytest.fixture
def trainer(ranks: list[Rank]) -> Iterator[Trainer]:
    trainer = Trainer("a", ranks)
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


def test_what_arrives_whole_after_its_session_was_replaced_is_not_staged(ranks: list[Rank], trainer: Trainer) -> None:
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
    ranks: list[Rank], trainer: Trainer
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


def test_a_trainer_that_leaves_makes_room(ranks: list[Rank], trainer: Trainer) -> None:
    trainer.send(1, weights(1))
    assert all(rank.worker.bridge_apply("a", 1) >= 0 for rank in ranks)
    trainer.leave()
    wait_for_state(ranks, "idle")
    assert all(rank.serves(weights(1)) for rank in ranks)


def test_the_thread_works_on_its_ranks_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread begins on GPU 0, whichever the worker's is."""
    chosen: queue.Queue[tuple[str, torch.device]] = queue.Queue()
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: chosen.put((threading.current_thread().name, device)))
    arena: Any = SimpleNamespace(device=torch.device("cuda", 3))
    updater = WeightUpdater(arena, 3)
    assert chosen.get(timeout=TIMEOUT_S) == (updater.thread_name, torch.device("cuda", 3))
