"""Who may hand weights to a server, and what a commit does, by real engines and workers over a fake vLLM."""

import time
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import msgspec
import pytest
import torch

from atroposlib.wire.bridge import BroadcastOffer, Offer, SingleCopyOffer
from tests.unit.vllm_patching.engine_with_workers import (
    HERE,
    EngineWithWorkers,
    broadcast_offer,
    make_sessions,
    single_copy_offer,
)
from tests.waiting import until
from vllm_patching.engines.base import WEIGHTS, Receiver, Refused
from vllm_patching.engines.session import ROUTES, Session, Sessions
from vllm_patching.engines.single_copy import ROUTES as SINGLE_COPY_ROUTES
from vllm_patching.engines.single_copy import Pause, Resume

DEAD = HERE | {"pid": 2**22 - 1, "started": 1}


class Filled(Receiver):
    """Receives any version that it is asked for: every byte is that version's number."""

    requested: int | None = None

    def request(self, version: int, request: Any) -> None:
        self.requested = version

    def next_version(self) -> int | None:
        while not self.over and self.requested is None:
            time.sleep(0.001)
        version, self.requested = self.requested, None
        return version

    def fill(self, bucket: Any, buffer: torch.Tensor) -> None:
        buffer.fill_(int(self.fills))

    @property
    def fills(self) -> int:
        return int(self.offer.port)


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Sessions, EngineWithWorkers]:
    from vllm_patching import worker

    monkeypatch.setattr(worker, "RECEIVERS", {BroadcastOffer: Filled})
    return make_sessions(tmp_path, tp=2)


def offer(body: dict[str, Any]) -> Offer:
    return msgspec.convert(body, SingleCopyOffer if "address" not in body else BroadcastOffer)


async def stage(client: EngineWithWorkers, version: int, ranks: int = 2) -> None:
    for worker in client.workers[:ranks]:
        worker.bridge_request("s", version, None)
    await until(lambda: [w.bridge_staged("s", version) for w in client.workers].count(True) == ranks)


async def test_a_version_is_served_once_every_rank_has_staged_it(
    opened: tuple[Sessions, EngineWithWorkers],
) -> None:
    sessions, client = opened
    await sessions.open(offer(broadcast_offer(world_size=3, port=1)))
    await stage(client, 7, ranks=1)
    with pytest.raises(Refused, match="policy version 7 is staged on 1 of 2 workers; send it whole first"):
        await sessions.commit("s", 7)
    assert client.calls.count("pause") == 0
    assert client.weights().eq(0).all()
    await stage(client, 7)
    with pytest.raises(Refused, match="policy version 8 is staged on 0 of 2"):
        await sessions.commit("s", 8)
    committed = await sessions.commit("s", 7)
    assert committed.policy_version == sessions.serving.policy_version == 7
    assert client.label == "7"
    assert client.paused is False
    ones = client.weights().view(torch.uint8)[:4]
    assert ones.eq(1).all()


async def test_an_offer_that_does_not_fit_leaves_the_session_that_is_open(
    opened: tuple[Sessions, EngineWithWorkers], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it take the server's time while the trainer of that session lives."""
    sessions, _ = opened
    await sessions.open(offer(broadcast_offer(world_size=3)))
    with pytest.raises(Refused, match="holds session s for another 30 s: stop it"):
        await sessions.open(offer(broadcast_offer(world_size=2, session="t")))
    monkeypatch.setattr(sessions, "refuse_second_trainer", AsyncMock())  # as if it were gone
    for wrong, message in [
        (broadcast_offer(world_size=2, session="t"), "world_size 2: this server has 2 worker"),
        (broadcast_offer(world_size=3, session="t", manifest_digest="d" * 64), "have different models"),
        (single_copy_offer(process=HERE | {"boot_id": "another"}), "another machine"),
        (single_copy_offer(process=HERE | {"pid_namespace": 1}), "another container"),
    ]:
        with pytest.raises(Refused, match=message):
            await sessions.open(offer(wrong))
    assert (await sessions.heartbeat("s")).lease_s == 30.0


async def post(sessions: Sessions, body: Any) -> Any:
    (route,) = [route for route in (*ROUTES, *SINGLE_COPY_ROUTES) if route.body is type(body)]
    return await route.act(sessions, body)


@pytest.mark.parametrize(
    ("body", "deadline_s", "reason"),
    [
        (single_copy_offer(process=DEAD), 60.0, "trainer h:1 died while it updated the weights to policy version 1"),
        (single_copy_offer(lease_s=0.02), 60.0, "trainer h:1 fell silent while"),
        (single_copy_offer(), 0.02, "trainer h:1 exceeded its deadline while"),
    ],
)
async def test_a_pause_that_is_never_resumed_poisons_the_weights_and_ends_the_session(
    opened: tuple[Sessions, EngineWithWorkers], body: dict[str, Any], deadline_s: float, reason: str
) -> None:
    sessions, client = opened
    await sessions.open(offer(body))
    before = [worker._arena.live for worker in client.workers]
    await post(sessions, Pause("s", 1, deadline_s))
    await until(lambda: sessions.serving.gate.reason(WEIGHTS) is not None)
    assert reason in str(sessions.serving.gate.reason(WEIGHTS))
    with pytest.raises(Refused, match="not the current one"):
        await sessions.heartbeat("s")
    await sessions.open(offer(single_copy_offer(session="t")))
    alive = body["process"] == HERE
    assert [worker._arena.live is not was for worker, was in zip(client.workers, before, strict=True)] == [alive] * 2
    await post(sessions, Pause("t", 9, 60.0))
    await post(sessions, Resume("t", 9))
    assert sessions.serving.gate.reason() is None


async def test_a_trainer_that_may_still_write_and_cannot_be_kept_out_keeps_the_next_one_out(
    opened: tuple[Sessions, EngineWithWorkers], monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions, client = opened
    await sessions.open(offer(single_copy_offer()))
    await post(sessions, Pause("s", 1, 60.0))
    await sessions.close("s")
    assert "left in the middle of policy version 1" in str(sessions.serving.gate.reason())
    monkeypatch.setattr(type(client.workers[0]), "bridge_renew", lambda self: "graphs")
    with pytest.raises(Refused, match=r"process \d+ was in the middle of an update and still runs; .*graphs"):
        await sessions.open(offer(broadcast_offer(world_size=3)))


def test_a_trainer_of_another_place_is_never_known_to_be_gone() -> None:
    there = DEAD | {"boot_id": "another"}
    assert Session(offer(single_copy_offer(process=DEAD)), None, 0.0).gone()  # type: ignore[arg-type]
    assert not Session(offer(single_copy_offer(process=there)), None, 0.0).gone()  # type: ignore[arg-type]
    assert not Session(offer(single_copy_offer()), None, 0.0).gone()  # type: ignore[arg-type]
