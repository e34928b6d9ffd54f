"""The trainer's side of single copy: what is in vLLM's memory when it is told to serve, and what it is told when an
update fails. A fake of vLLM's HTTP client over real shared memory; no vLLM.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from atroposlib.wire.bridge import Attached, Manifest, Resumed, ServerStatus, SharedRank, SingleCopyOffer, lay_out
from example_trainer.bridges import single_copy
from example_trainer.bridges.base import WeightBridge
from example_trainer.model.loading import meta_model
from example_trainer.settings.config import TrainerConfig
from example_trainer.weights.shared import SharedWeights, bind
from example_trainer.weights.written import TrainedModel
from tests.unit.trainer.arenas import ranks_of
from tests.unit.trainer.fakes import tiny_model
from vllm_patching.memory.shared_buffer import SharedBuffer


class FakeVllm:
    """A server whose ranks hold `model` in shared memory. `told` is what it was asked to do, in order; `served` what
    lay in its memory when it was told to serve a version.
    """

    url = "http://fake"

    def __init__(self, model: PreTrainedModel, tp_size: int) -> None:
        described, contents = ranks_of(model, tp_size)
        self.buffers = [SharedBuffer(content.nbytes) for content in contents]
        for buffer, content in zip(self.buffers, contents, strict=True):
            buffer.tensor.copy_(content)
        self.workers: list[SharedRank] = [
            msgspec.structs.replace(rank, fd=buffer.fd) for rank, buffer in zip(described, self.buffers, strict=True)
        ]
        parts = [(name, [(name, tuple(each.shape), "float32")]) for name, each in model.named_parameters()]
        tensors = tuple(lay_out(parts))
        self._manifest = Manifest("m", tp_size, tensors[-1].offset + tensors[-1].nbytes, tensors)
        self.told: list[tuple[Any, ...]] = []
        self.served: dict[int, list[Tensor]] = {}

    def held(self) -> list[Tensor]:
        """What lies in the memory of its ranks now."""
        return [buffer.tensor.clone() for buffer in self.buffers]

    def wait_until_ready(self, deadline_s: float) -> ServerStatus:
        return ServerStatus("m", 0, enabled=True, tp_size=len(self.buffers))

    def manifest(self) -> Manifest:
        return self._manifest

    def ask(self, kind: type[Attached], method: str, path: str, offer: SingleCopyOffer) -> Attached:
        return kind(0, self.workers)

    def heartbeat(self, session: str, route: str) -> None:
        """It lives."""

    def pause(self, session: str, policy_version: int, deadline_s: float) -> None:
        self.told.append(("pause", policy_version))

    def resume(self, session: str, policy_version: int | None) -> Resumed:
        self.told.append(("resume", policy_version))
        if policy_version is not None:
            self.served[policy_version] = self.held()
        return Resumed(policy_version or 0, 0.002, 0.001, 0.001)

    def close_session(self, session: str, route: str) -> None:
        self.told.append(("close",))


@pytest.fixture(params=[1, 2, 4])  # with two key/value heads, four ranks hold each twice
def vllm(request: pytest.FixtureRequest) -> FakeVllm:
    return FakeVllm(tiny_model("qwen3", seed=5), request.param)


@pytest.fixture
def start(tmp_path: Path) -> PreTrainedModel:
    """The model that the trainer starts from, other than vLLM's, saved in `tmp_path`."""
    model = tiny_model("qwen3", seed=1)
    model.save_pretrained(tmp_path)
    return model


@pytest.fixture
def connected(
    vllm: FakeVllm, start: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[WeightBridge, PreTrainedModel]]:
    """A bridge to `vllm`, and the model in its memory."""
    monkeypatch.setattr(single_copy, "vllm_clients", lambda config: [vllm])
    config = TrainerConfig.model_validate({"model_name": str(tmp_path), "bridge": {"kind": "single_copy"}})
    prepared = single_copy.prepare(config, str(tmp_path), torch.device("cpu"))
    assert isinstance(prepared.storage, SharedWeights)
    model = meta_model(str(tmp_path))
    bind(model, prepared.storage.tensors, gradient_checkpointing=False)
    yield prepared.connect(TrainedModel(model)), model
    prepared.close()


@torch.no_grad()
def double(model: PreTrainedModel, parameters: int | None = None) -> None:
    """An update of the first so many parameters, or of all."""
    for parameter in list(model.parameters())[:parameters]:
        parameter.mul_(2)


def as_ranks_hold(model: PreTrainedModel, vllm: FakeVllm) -> list[Tensor]:
    return ranks_of(model, len(vllm.buffers))[1]


def test_every_rank_holds_every_version_whole_when_it_is_told_to_serve_it(
    connected: tuple[WeightBridge, PreTrainedModel], vllm: FakeVllm, start: PreTrainedModel
) -> None:
    """Also what several ranks hold alike: norms, and key/value heads that two of them share."""
    bridge, model = connected
    bridge.sync(0, lambda: None)
    reports = [bridge.sync(version, lambda: double(model)) for version in (1, 2)]
    assert vllm.told == [(act, version) for version in (0, 1, 2) for act in ("pause", "resume")]
    for version in (0, 1, 2):
        assert all(map(torch.equal, vllm.served[version], as_ranks_hold(start, vllm))), version
        double(start)
    assert (reports[0].bytes_moved > 0) == (len(vllm.buffers) > 1)
    assert [report.policy_version for report in reports] == [1, 2]


def test_an_update_that_fails_half_way_is_never_served(
    connected: tuple[WeightBridge, PreTrainedModel], vllm: FakeVllm
) -> None:
    """To leave while vLLM is paused has it refuse to generate: the weights are half of one version, half of another."""
    bridge, model = connected
    bridge.sync(0, lambda: None)

    def fail() -> None:
        double(model, parameters=3)
        raise ZeroDivisionError("half way")

    with pytest.raises(ZeroDivisionError, match="half way"):
        bridge.sync(1, fail)
    assert vllm.told[2:] == [("pause", 1), ("close",)]
    assert vllm.served.keys() == {0}


def test_an_update_that_fails_before_it_writes_leaves_vllm_serving_as_before(
    connected: tuple[WeightBridge, PreTrainedModel], vllm: FakeVllm, start: PreTrainedModel
) -> None:
    bridge, model = connected
    bridge.sync(0, lambda: None)

    def fail() -> None:
        raise ZeroDivisionError("at once")

    with pytest.raises(ZeroDivisionError, match="at once"):
        bridge.sync(1, fail)
    assert vllm.told[2:] == [("pause", 1), ("resume", None)]
    assert all(
        torch.equal(buffer.tensor, held) for buffer, held in zip(vllm.buffers, as_ranks_hold(start, vllm), strict=True)
    )
    bridge.sync(1, lambda: double(model))
    assert vllm.told[-1] == ("resume", 1)


def test_start_weights_that_were_written_without_an_end_are_never_served(
    connected: tuple[WeightBridge, PreTrainedModel], vllm: FakeVllm
) -> None:
    def fail() -> None:
        raise ZeroDivisionError("after the start weights")

    with pytest.raises(ZeroDivisionError):
        connected[0].sync(0, fail)
    assert vllm.told == [("pause", 0), ("close",)]


def test_a_copy_to_the_other_ranks_that_fails_is_never_served(
    connected: tuple[WeightBridge, PreTrainedModel], vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    bridge, model = connected
    bridge.sync(0, lambda: None)

    def broken(tensors: object) -> int:
        raise RuntimeError("the copy failed")

    monkeypatch.setattr(single_copy, "copy_replicas", broken)
    with pytest.raises(RuntimeError, match="the copy failed"):
        bridge.sync(1, lambda: double(model))
    assert vllm.told[2:] == [("pause", 1), ("close",)]


def test_a_bridge_is_left_once(connected: tuple[WeightBridge, PreTrainedModel], vllm: FakeVllm) -> None:
    bridge, _ = connected
    bridge.sync(0, lambda: None)
    bridge.close()
    bridge.close()
    assert vllm.told[2:] == [("close",)]
