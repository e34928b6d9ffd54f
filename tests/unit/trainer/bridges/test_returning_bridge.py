"""A bridge whose server dies and is started again: what is sent again, what is not, and what ends training."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from atroposlib.clients.one_request import NoReply
from atroposlib.wire.bridge import ServerStatus, write_policy_version
from example_trainer.bridges.base import BridgeError, SyncReport, WeightBridge
from example_trainer.bridges.returning import ENOUGH, HANGS_S, ReturningBridge
from example_trainer.bridges.vllm_client import NoAnswer, Refused
from example_trainer.loop.learner import Learner
from example_trainer.loop.opening import connected
from example_trainer.settings.bridges import MODES
from example_trainer.weights.written import TrainedModel
from tests.unit.trainer.fakes import RecordingBridge, tiny_model
from tests.unit.trainer.whole_runs import config


class Server:
    """A server as its client sees it: dead until `looks` are over, then fresh, or whatever `status` says."""

    url = "http://vllm:9001"

    def __init__(self, looks: int = 3, error: type[BridgeError] = NoAnswer) -> None:
        self.looks = looks
        self.error = error
        self.session: str | None = None
        self.model, self.version = "m", 0
        self.starts_as = 0  # what its model names

    def status(self) -> ServerStatus:
        self.looks -= 1
        if self.looks >= 0:
            raise self.error("connection refused")
        return ServerStatus(self.model, self.version, session=self.session)

    def die(self, looks: int = 3) -> None:
        self.looks, self.session, self.version = looks, None, self.starts_as


class Inner(WeightBridge):
    """Fails at each act of `fails`, once each; `events` is what was done."""

    served_dtype = "float32"

    def __init__(self, server: Server, *fails: str) -> None:
        self.server = server
        self.fails = list(fails)
        self.events: list[Any] = []
        server.session = "ours"

    def _act(self, name: str) -> None:
        if self.fails and self.fails[0] == name:
            self.fails.pop(0)
            self.server.die()
            raise NoAnswer(f"{name} failed")
        if self.server.session != "ours":
            raise BridgeError("the session with vLLM is lost")

    def sync(self, policy_version: int, update: Callable[[], None]) -> SyncReport:
        self._act("before")
        update()
        self._act("transfer")
        self.server.version = policy_version
        self.events.append(("served", policy_version))
        return SyncReport(policy_version, 0.0, 0.0, 0.0, 1)

    def parity_probe(self) -> float:
        self._act("probe")
        return 0.0

    def check(self) -> None:
        self._act("check")

    def close(self) -> None:
        """Nothing is held."""

    def reconnect(self) -> None:
        if self.fails and self.fails[0] == "reconnect":
            self.fails.pop(0)
            self.server.die()
            raise NoAnswer("died again")
        self.events.append("reconnect")
        self.server.session, self.server.version = "ours", 0


def returning(*fails: str, return_s: float = 60.0, **settings: Any) -> tuple[ReturningBridge, Inner, list[float]]:
    inner = Inner(Server(0), *fails)
    clock: list[float] = [0.0]

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    servers: Any = [inner.server]
    return ReturningBridge(inner, servers, return_s, sleep=sleep, now=lambda: clock[0], **settings), inner, clock


@pytest.mark.parametrize("fails", [("before",), ("transfer",), ("before", "transfer"), ("transfer", "reconnect")])
def test_a_step_is_made_once_and_its_result_reaches_the_server_that_returned(fails: tuple[str, ...]) -> None:
    bridge, inner, _ = returning()
    bridge.sync(6, lambda: None)
    inner.fails += fails
    updates: list[int] = []
    assert bridge.sync(7, lambda: updates.append(1)).policy_version == 7
    assert updates == [1]
    assert inner.server.version == 7
    assert inner.events[-1] == ("served", 7)


@pytest.mark.parametrize("act", ["check", "probe"])
def test_a_loss_while_the_trainer_waits_brings_the_current_policy_back(act: str) -> None:
    bridge, inner, _ = returning()
    bridge.sync(4, lambda: None)
    inner.fails.append(act)
    bridge.check() if act == "check" else bridge.parity_probe()
    assert inner.events == [("served", 4), "reconnect", ("served", 4)]
    bridge.check()
    assert len(inner.events) == 3


def test_several_ranks_wait_for_the_next_sync() -> None:
    bridge, inner, _ = returning("before", sync_in_check=False)
    inner.server.die()
    bridge.check()
    assert inner.events == []
    bridge.sync(1, lambda: None)
    assert inner.events == ["reconnect", ("served", 1)]


def test_an_engine_that_died_is_waited_for_until_its_process_is_another() -> None:
    bridge, inner, _ = returning()
    bridge.sync(1, lambda: None)
    inner.fails.append("check")
    inner.server.error = Refused  # 503 of the API process
    bridge.check()
    assert inner.events[-1] == ("served", 1)


def test_a_server_that_starts_again_from_a_policy_of_a_run_answers_as_its_version(tmp_path: Path) -> None:
    write_policy_version(tmp_path, 8)
    bridge, inner, _ = returning()
    inner.server.model, inner.server.starts_as = str(tmp_path), 8
    bridge.sync(3, lambda: None)
    inner.fails.append("check")
    bridge.check()
    assert inner.events == [("served", 3), "reconnect", ("served", 3)]


def test_a_model_whose_version_cannot_be_read_here_does_not_end_the_wait(tmp_path: Path) -> None:
    """It may be another user's, or have changed since the server read it."""
    (tmp_path / "policy.json").write_text("damaged")
    bridge, inner, _ = returning("before")
    inner.server.model = str(tmp_path)
    bridge.sync(3, lambda: None)
    assert inner.events == ["reconnect", ("served", 3)]
    inner.fails, inner.server.starts_as = ["before"], 8
    with pytest.raises(BridgeError, match="before failed"):
        bridge.sync(4, lambda: None)


def test_a_server_that_starts_again_finds_the_memory_that_the_trainer_has_freed() -> None:
    given_back: list[int] = []
    bridge, inner, _ = returning(give_back=lambda: given_back.append(1))
    bridge.sync(1, lambda: None)
    assert not given_back
    inner.fails.append("check")
    inner.server.error = Refused
    bridge.check()
    assert given_back == [1]


def test_every_rank_of_the_trainer_gives_that_memory_back(model: str, tmp_path: Path) -> None:
    asked: list[str] = []
    ranks: Any = SimpleNamespace(size=2, together=lambda method, owner, *given: asked.append(method.__name__))
    settings = {"weight_bridge_mode": "shared_vllm", "use_shared_memory": True, "vllm_return_s": 0.01, "vllm_port": 9}
    learner = Learner(config(model, tmp_path, "http://127.0.0.1:9", **settings), torch.device("cpu"), ranks)
    learner.trained = TrainedModel(tiny_model())

    class Dead(RecordingBridge):
        def sync(self, policy_version: int, update: Callable[[], None]) -> SyncReport:
            raise NoAnswer("it is gone")

    with connected(learner, Dead(), model) as bridge, pytest.raises(BridgeError, match="was not started again"):
        bridge.sync(0, lambda: None)
    assert asked == ["load", "give_back"]


@pytest.mark.parametrize("error", [Refused("503: the engine does not answer"), NoAnswer("silent")])
def test_a_server_that_is_there_and_hangs_ends_training_soon(error: BridgeError) -> None:
    error.__cause__ = NoReply("ReadTimeout", timed_out=True) if isinstance(error, NoAnswer) else None
    bridge, inner, clock = returning("check", return_s=1800)

    def hang() -> ServerStatus:
        raise error

    inner.server.status = hang  # type: ignore[method-assign]
    with pytest.raises(BridgeError, match=r"check failed\. vLLM at http://vllm:9001 .* has not answered for 60 s"):
        bridge.check()
    assert HANGS_S < clock[0] < HANGS_S + 5


def test_a_server_that_does_not_return_ends_training_with_limit_and_cause() -> None:
    bridge, inner, clock = returning("check", return_s=30)
    inner.server.die = lambda looks=0: setattr(inner.server, "looks", 10**9)  # type: ignore[method-assign]
    with pytest.raises(BridgeError, match=r"check failed\. vLLM at http://vllm:9001 was not started again within 30 s"):
        bridge.check()
    assert 30 < clock[0] < 35


@pytest.mark.parametrize(("session", "version"), [("ours", 3), ("another", 3), (None, 3)])
def test_a_server_that_did_not_die_is_not_taken_for_another(session: str | None, version: int) -> None:
    bridge, inner, _ = returning("check")

    def refuse() -> None:
        raise Refused("409")

    inner.check = refuse  # type: ignore[method-assign]
    inner.server.session, inner.server.version = session, version
    with pytest.raises(Refused, match="409"):
        bridge.check()
    assert inner.events == []


def test_a_server_that_always_dies_ends_training() -> None:
    bridge, _, _ = returning(*["transfer"] * (ENOUGH + 1))
    with pytest.raises(NoAnswer, match="transfer failed"):
        bridge.sync(1, lambda: None)


def test_an_error_of_the_update_is_not_the_servers() -> None:
    bridge, inner, _ = returning()

    def update() -> None:
        raise ValueError("not finite")

    with pytest.raises(ValueError, match="not finite"):
        bridge.sync(1, update)
    assert inner.events == []


def test_each_mode_that_the_launcher_restarts_can_reconnect() -> None:
    from example_trainer.bridges import broadcast, lora, reload

    surviving = {"broadcast": broadcast.BroadcastBridge, "lora": lora.LoraBridge, "reload": reload.ReloadBridge}
    assert {kind for kind, mode in MODES.items() if mode.survives_vllm} == surviving.keys()
    assert all("reconnect" in vars(bridge) for bridge in surviving.values())
