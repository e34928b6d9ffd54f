"""A trainer's session with one vLLM server: kept by heartbeats, lost without them, ended once; and who closes it."""

import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from atroposlib.processes.identity import this_process
from atroposlib.wire.bridge import AdapterOffer, Manifest, Offer, WireTensor
from example_trainer.bridges import BridgeError, Prepared
from example_trainer.bridges.session import Session, matching_manifest, offered_by_us
from example_trainer.loop.learner import Learner
from example_trainer.loop.opening import connected
from example_trainer.model.loading import ModelError
from example_trainer.ranks.ranks import ALONE
from example_trainer.settings.config import TrainerConfig
from example_trainer.weights.written import TrainedModel
from tests.unit.trainer.fakes import RecordingBridge, model_folder

CPU = torch.device("cpu")


class FakeVllm:
    """A server's client; `fail` makes every call fail."""

    url = "http://vllm"

    def __init__(self) -> None:
        self.calls: list[tuple[str, ...]] = []
        self.fail = False
        self.beaten = threading.Event()

    def heartbeat(self, session: str, route: str) -> None:
        self.beaten.set()
        self._note("heartbeat", session, route)

    def close_session(self, session: str, route: str) -> None:
        self._note("close", session, route)

    def fence(self, session: str, reason: str) -> None:
        self._note("fence", session, reason)

    def manifest(self) -> Manifest:
        return Manifest("theirs", 1, 28, (WireTensor("a", (7,), "float32", "a", 0),))

    def _note(self, *call: str) -> None:
        self.calls.append(call)
        if self.fail:
            raise BridgeError("it is gone")


def adapter_offer(lease_s: float) -> AdapterOffer:
    return AdapterOffer(**offered_by_us(lease_s), model="m", rank=8, process=this_process())


def session(vllm: FakeVllm, lease_s: float = 300) -> Session:
    return Session(vllm, adapter_offer(lease_s), "/route")  # type: ignore[arg-type]


def test_every_offer_is_of_a_fresh_session_of_this_process() -> None:
    one, other = (adapter_offer(30) for _ in range(2))
    assert isinstance(one, Offer)
    assert one.session != other.session
    assert len(one.session) == 32
    assert one.trainer == other.trainer
    assert one.trainer.endswith(f":{this_process().pid}")


def test_a_heartbeat_that_fails_is_a_lost_session_until_one_succeeds() -> None:
    vllm = FakeVllm()
    held = session(vllm, lease_s=0.03)
    assert vllm.beaten.wait(20)
    held.check()
    vllm.fail = True
    wait_for_beats(vllm)
    with pytest.raises(BridgeError, match="the session with vLLM is lost: it is gone"):
        held.check()
    vllm.fail = False
    wait_for_beats(vllm)
    held.check()
    held.close()


def wait_for_beats(vllm: FakeVllm, count: int = 3) -> None:
    for _ in range(count):
        vllm.beaten.clear()
        assert vllm.beaten.wait(20)


def test_a_session_is_ended_once_whoever_closes_it(caplog: pytest.LogCaptureFixture) -> None:
    vllm = FakeVllm()
    held = session(vllm)
    held.close()
    held.close()
    held.fence("too late")
    assert vllm.calls == [("close", held.id, "/route")]
    silent = FakeVllm()
    silent.fail = True
    with caplog.at_level(logging.WARNING):
        session(silent).close()
        session(silent).fence("left out")
    assert "but could not notify vLLM: it is gone" in caplog.text
    assert "http://vllm could not be fenced off and may continue to serve an older version: it is gone" in caplog.text


def test_another_model_is_refused_with_the_server_and_the_first_difference() -> None:
    vllm: Any = FakeVllm()
    assert matching_manifest(vllm, {"a": (7,)}).nbytes == 28
    with pytest.raises(
        BridgeError,
        match=r"the vLLM server at http://vllm do not have the same model: a: vLLM holds \[7\], the trainer",
    ):
        matching_manifest(vllm, {"a": (8,)})


def learner_of(model: str) -> Learner:
    return Learner(TrainerConfig.model_validate({"model_name": model}), CPU, ALONE)


def test_what_was_prepared_is_closed_when_the_model_cannot_be_loaded_or_connected(tmp_path: Path) -> None:
    bridge = RecordingBridge()
    with (
        pytest.raises(ModelError, match=r"cannot load --model-name '\./no/such'"),
        connected(learner_of("./no/such"), bridge, "./no/such"),
    ):
        pytest.fail("there is no model")
    assert bridge.closed

    closed: list[bool] = []

    def refuse(trained: TrainedModel) -> RecordingBridge:
        raise BridgeError("not the same model")

    model = model_folder(tmp_path / "model")
    with (
        pytest.raises(BridgeError, match="not the same model"),
        connected(learner_of(model), lambda *_: Prepared(refuse, lambda: closed.append(True)), model),
    ):
        pytest.fail("it is not connected")
    assert closed == [True]
