"""Single copy and LoRA against a fake client of vLLM: what is held before the model is loaded, and what a sync does."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from atroposlib.wire.bridge import (
    AdapterLoaded,
    AdapterOffer,
    Attached,
    Manifest,
    Resumed,
    ServerStatus,
    SingleCopyOffer,
    lay_out,
)
from example_trainer.bridges import BridgeError, WeightBridge, lora, make_bridge, single_copy
from example_trainer.loop.learner import Learner
from example_trainer.loop.opening import connected
from example_trainer.loop.run import keep_weights
from example_trainer.ranks.ranks import ALONE
from example_trainer.settings.config import TrainerConfig
from example_trainer.weights.written import TrainedModel
from tests.unit.trainer.arenas import ranks_of
from tests.unit.trainer.fakes import model_folder

CPU = torch.device("cpu")


class FakeVllm:
    """The client of a server with `tp` ranks that holds the model of `source`."""

    url = "http://vllm"

    def __init__(self, source: str, tp: int = 1) -> None:
        model = AutoModelForCausalLM.from_pretrained(source)
        tensors = tuple(lay_out([(n, [(n, tuple(p.shape), "float32")]) for n, p in model.named_parameters()]))
        self._manifest = Manifest(source, tp, tensors[-1].offset + tensors[-1].nbytes, tensors)
        self._workers, self.arenas = ranks_of(model, tp)
        self.calls: list[Any] = []
        self.beats: list[float] = []  # with a lease of 30 s, none in most tests
        self.needed: list[str] = []  # adapters that requests still use, besides the last

    def wait_until_ready(self, deadline_s: float, *, lora: bool = False) -> ServerStatus:
        return ServerStatus("m", 0, dtype="float32", enabled=not lora, max_lora_rank=16 if lora else None)

    def manifest(self) -> Manifest:
        return self._manifest

    def ask(self, kind: type[Any], method: str, path: str, body: Any) -> Any:
        if isinstance(body, SingleCopyOffer):
            self.calls.append("attach")
            return Attached(policy_version=0, workers=self._workers)
        name, version = body["name"], body["policy_version"]
        self.calls.append(("load", name, version))
        assert Path(body["path"], "adapter_model.safetensors").is_file()
        return AdapterLoaded(policy_version=version, load_s=0.25, needed=[*self.needed, name])

    def open_session(self, offer: AdapterOffer, route: str) -> None:
        self.calls.append(("open", offer.rank, route))

    def heartbeat(self, session: str, route: str) -> None:
        self.beats.append(time.monotonic())

    def close_session(self, session: str, route: str) -> None:
        self.calls.append("close")

    def pause(self, session: str, policy_version: int, deadline_s: float) -> None:
        self.calls.append(("pause", policy_version))

    def resume(self, session: str, policy_version: int | None) -> Resumed:
        self.calls.append(("resume", policy_version))
        return Resumed(policy_version=policy_version or 0, stall_s=0.5, pause_s=0.1, update_s=0.4)


@pytest.fixture
def model(tmp_path: Path) -> str:
    return model_folder(tmp_path / "model", family="qwen2", tie_word_embeddings=True)


@pytest.fixture(params=[1, 2])
def vllm(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeVllm:
    """It serves other weights than `model`'s."""
    fake = FakeVllm(model_folder(tmp_path / "served", family="qwen2", seed=1, tie_word_embeddings=True), request.param)
    monkeypatch.setattr(single_copy, "vllm_clients", lambda config: [fake])
    monkeypatch.setattr(single_copy, "_open", lambda worker: fake.arenas[worker.rank])
    monkeypatch.setattr(lora, "vllm_clients", lambda config: [fake])
    return fake


Pair = tuple[TrainedModel, WeightBridge]


@pytest.fixture
def single(vllm: FakeVllm, model: str) -> Iterator[Pair]:
    config = TrainerConfig.model_validate({"model_name": model, "bridge": {"kind": "single_copy"}})
    learner = Learner(config, CPU, ALONE)
    with connected(learner, make_bridge(config), model) as bridge:
        yield learner.trained, bridge


def images(source: str, tp: int) -> list[Tensor]:
    return ranks_of(AutoModelForCausalLM.from_pretrained(source), tp)[1]


def test_a_single_copy_trains_in_vllms_own_memory(single: Pair, vllm: FakeVllm, model: str) -> None:
    trained, bridge = single
    assert vllm.calls == ["attach"]
    before = [arena.clone() for arena in vllm.arenas]
    assert bridge.sync(3, keep_weights).policy_version == 3
    assert all(map(torch.equal, vllm.arenas, images(model, len(vllm.arenas)))), "the start weights are the source's"
    assert not any(map(torch.equal, vllm.arenas, before))

    @torch.no_grad()
    def halve() -> None:
        for parameter in trained.model.parameters():
            parameter.mul_(0.5)

    report = bridge.sync(4, halve)
    assert (report.stall_s, report.apply_s, report.transfer_s) == (0.5, 0.4, 0.0)
    for arena, start in zip(vllm.arenas, images(model, len(vllm.arenas)), strict=True):
        found, expected = arena.view(torch.float32), start.view(torch.float32)
        trained_part = expected != 7  # padding rows of the vocabulary belong to no tensor
        assert torch.equal(found[trained_part], expected[trained_part] / 2)
    assert vllm.calls == ["attach", ("pause", 3), ("resume", 3), ("pause", 4), ("resume", 4)]
    bridge.close()
    bridge.close()
    assert vllm.calls.count("close") == 1


def failing(change: Callable[[], object]) -> Callable[[], None]:
    def update() -> None:
        with torch.no_grad():
            change()
        raise ZeroDivisionError

    return update


def test_an_update_that_wrote_nothing_lets_vllm_serve_on_and_a_half_written_one_does_not(
    single: Pair, vllm: FakeVllm
) -> None:
    trained, bridge = single
    bridge.sync(0, keep_weights)
    with pytest.raises(ZeroDivisionError):
        bridge.sync(1, failing(lambda: None))
    assert vllm.calls[-2:] == [("pause", 1), ("resume", None)]
    with pytest.raises(ZeroDivisionError):
        bridge.sync(1, failing(lambda: next(trained.model.parameters()).add_(1)))
    assert vllm.calls[-2:] == [("pause", 1), "close"], "vLLM refuses to serve what is half written"


def test_weights_that_cannot_be_shared_end_the_session(
    vllm: FakeVllm, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(worker: Any) -> Tensor:
        raise BridgeError("cannot be shared")

    monkeypatch.setattr(single_copy, "_open", refuse)
    config = TrainerConfig.model_validate({"model_name": model, "bridge": {"kind": "single_copy"}})
    with pytest.raises(BridgeError, match="cannot be shared"):
        make_bridge(config)(model, CPU)
    assert vllm.calls == ["attach", "close"]


def test_an_adapter_is_written_loaded_and_those_before_it_are_removed(
    vllm: FakeVllm, model: str, tmp_path: Path
) -> None:
    config = TrainerConfig.model_validate(
        {"model_name": model, "save_path": tmp_path / "out", "bridge": {"kind": "lora", "r": 4}}
    )
    learner = Learner(config, CPU, ALONE)
    with connected(learner, make_bridge(config), model) as bridge:
        assert vllm.calls == [("open", 4, "/v1/bridge/adapter/session")]
        reports = [bridge.sync(version, keep_weights) for version in range(3)]
    loaded = [call for call in vllm.calls if call[0] == "load"]
    assert [version for _, _, version in loaded] == [0, 1, 2]
    assert len({name for _, name, _ in loaded}) == 3
    assert [path.name for path in (tmp_path / "out" / "adapters").iterdir()] == [loaded[-1][1]]
    assert {(report.stall_s, report.apply_s, report.bytes_moved) for report in reports} == {
        (0.25, 0.25, learner.trained.nbytes)
    }
    assert vllm.calls[-1] == "close"


def test_an_adapter_that_a_request_still_uses_is_kept(vllm: FakeVllm, model: str, tmp_path: Path) -> None:
    config = TrainerConfig.model_validate(
        {"model_name": model, "save_path": tmp_path / "out", "bridge": {"kind": "lora", "r": 4}}
    )
    with connected(Learner(config, CPU, ALONE), make_bridge(config), model) as bridge:
        bridge.sync(0, keep_weights)
        vllm.needed = [vllm.calls[-1][1]]
        bridge.sync(1, keep_weights)
        names = {path.name for path in (tmp_path / "out" / "adapters").iterdir()}
        assert names == {*vllm.needed, vllm.calls[-1][1]}


def test_a_session_is_kept_alive_by_beats_of_which_one_may_be_lost(vllm: FakeVllm, model: str, tmp_path: Path) -> None:
    lease_s = 1.5
    config = TrainerConfig.model_validate(
        {"model_name": model, "save_path": tmp_path / "out", "bridge": {"kind": "lora", "lease_s": lease_s}}
    )
    with connected(Learner(config, CPU, ALONE), make_bridge(config), model) as bridge:
        assert isinstance(bridge, lora.LoraBridge)
        assert bridge._session.heart._interval_s <= lease_s / 2
        deadline = time.monotonic() + 60
        while len(vllm.beats) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_an_adapter_that_cannot_be_written_names_what_is_served(
    vllm: FakeVllm, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = TrainerConfig.model_validate(
        {"model_name": model, "save_path": tmp_path / "out", "bridge": {"kind": "lora"}}
    )
    with connected(Learner(config, CPU, ALONE), make_bridge(config), model) as bridge:
        bridge.sync(0, keep_weights)
        name = vllm.calls[-1][1]
        monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 0})())
        with pytest.raises(
            BridgeError, match=f"cannot write .*policy-v1-.*, 0 MB are free.* vLLM keeps serving {name}"
        ):
            bridge.sync(1, keep_weights)
