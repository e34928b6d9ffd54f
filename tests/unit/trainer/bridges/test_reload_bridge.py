"""The trainer's side of mode reload against the server's own routes, engine and worker; only vLLM is not there."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi import FastAPI
from transformers import PreTrainedModel

from atroposlib.wire.bridge import Manifest, Shard, lay_out
from example_trainer.bridges import BridgeError, reload
from example_trainer.bridges.base import WeightBridge
from example_trainer.model.loading import load_model
from example_trainer.settings.config import TrainerConfig
from example_trainer.weights.written import TrainedModel
from tests.serving import threaded_app
from tests.unit.trainer.fakes import model_folder
from tests.unit.vllm_patching.engine_with_workers import EngineWithWorkers, make_sessions
from vllm_patching.engines.updater import WeightUpdater
from vllm_patching.http.routes import add_routes
from vllm_patching.memory.arena import Arena

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    return model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def served(source: str) -> PreTrainedModel:
    model = load_model(source, CPU)
    for parameter in model.parameters():
        parameter.data.zero_()
    return model


@pytest.fixture
def server(served: PreTrainedModel, tmp_path: Path) -> Iterator[FastAPI]:
    app = FastAPI()
    app.state.sessions, app.state.engine = make_sessions(tmp_path)
    add_routes(app)
    serve_model(app.state.engine, served)
    with threaded_app(app) as app.state.port:
        yield app


def serve_model(engine: EngineWithWorkers, model: PreTrainedModel) -> None:
    """Let the one worker hold `model`, its parameters as they are in Hugging Face's."""
    parameters = dict(model.named_parameters())
    tensors = tuple(lay_out([(name, [(name, tuple(p.shape), "float32")]) for name, p in parameters.items()]))
    manifest = Manifest("m", 1, tensors[-1].offset + tensors[-1].nbytes, tensors)
    shards = [Shard(name, name, 0, 0, len(p), 0, tuple(p.shape)) for name, p in parameters.items()]
    worker: Any = engine.workers[0]
    worker._manifest, worker._arena = manifest, Arena(model, manifest, shards)
    worker._updater = WeightUpdater(worker._arena, 0)


def connect(server: FastAPI, source: str, save_path: Path, **settings: Any) -> tuple[WeightBridge, PreTrainedModel]:
    given: dict[str, Any] = dict(
        model_name=source,
        weight_bridge_mode="reload",
        vllm_port=server.state.port,
        save_path=save_path,
        bridge_timeout_s=60,
        bridge_lease_s=30,
    )
    config = TrainerConfig(**given | settings)
    model = load_model(source, CPU)
    return reload.prepare(config, source, CPU).connect(TrainedModel(model)), model


def change(model: PreTrainedModel) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))


def same(one: PreTrainedModel, other: PreTrainedModel) -> bool:
    theirs = dict(other.named_parameters())
    return all(torch.equal(parameter, theirs[name]) for name, parameter in one.named_parameters())


def test_each_version_is_served_bit_for_bit_and_one_directory_stays(
    server: FastAPI, served: PreTrainedModel, source: str, tmp_path: Path
) -> None:
    bridge, model = connect(server, source, tmp_path / "out")
    assert bridge.served_dtype == "float32"
    for version in range(3):
        report = bridge.sync(version, lambda: change(model))
        assert report.policy_version == server.state.sessions.serving.policy_version == version
        assert report.bytes_moved == sum(parameter.nbytes for parameter in model.parameters())
        assert min(report.transfer_s, report.stall_s, report.apply_s) >= 0
        assert same(served, model)
        (folder,) = (tmp_path / "out" / "reload").iterdir()
        assert folder.name.startswith(f"policy-v{version}-")
    bridge.close()
    assert server.state.sessions._session is None


def test_what_cannot_be_written_or_read_leaves_the_last_version_served(
    server: FastAPI, served: PreTrainedModel, source: str, tmp_path: Path
) -> None:
    bridge, model = connect(server, source, tmp_path / "out")
    bridge.sync(0, lambda: None)
    (tmp_path / "out" / "reload").rename(tmp_path / "out" / "away")
    (tmp_path / "out" / "reload").write_text("in the way")
    with pytest.raises(BridgeError, match=r"cannot write .*reload.*\. vLLM keeps serving the version before"):
        bridge.sync(1, lambda: change(model))
    (tmp_path / "out" / "reload").unlink()
    with pytest.raises(BridgeError, match="policy version 5 does not follow 0: it must rise by one"):
        bridge.sync(5, lambda: None)
    assert not same(served, model)
    assert server.state.sessions.serving.policy_version == 0
    bridge.close()


def test_a_former_version_that_cannot_be_removed_is_named(server: FastAPI, source: str, tmp_path: Path) -> None:
    bridge, _ = connect(server, source, tmp_path / "out")
    bridge.sync(0, lambda: None)
    (tmp_path / "out" / "reload" / "policy-v0-of-another-run").write_text("no directory")
    with pytest.raises(
        BridgeError, match=r"cannot remove .*policy-v0-of-another-run: Not a directory; policy version 1"
    ):
        bridge.sync(1, lambda: None)
    assert server.state.sessions.serving.policy_version == 1
    bridge.close()


def test_another_model_and_a_second_trainer_are_refused(server: FastAPI, source: str, tmp_path: Path) -> None:
    other = model_folder(tmp_path / "other", vocab_size=50)
    with pytest.raises(BridgeError, match="do not have the same model"):
        connect(server, other, tmp_path / "out")
    bridge, _ = connect(server, source, tmp_path / "out")
    with pytest.raises(BridgeError, match=r"trainer .* holds session"):
        connect(server, source, tmp_path / "out2")
    bridge.close()
