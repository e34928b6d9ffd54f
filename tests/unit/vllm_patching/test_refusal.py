"""A model that a worker refuses ends the server with one line that says why, not with vLLM's traceback."""

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from example_trainer.vllm_api_server import LaunchError, _naming_refused_model
from tests.unit.vllm_patching.engine_with_workers import make_worker
from vllm_patching import refusal
from vllm_patching.compat import vllm_layers
from vllm_patching.memory.mapping import UnsupportedModel
from vllm_patching.worker import BridgeWorker


def arguments(folder: Path, settings: dict[str, Any] | None = None) -> Any:
    bridge = {"config_path": str(folder / "b.json"), "staging": "device"} if settings is None else settings
    return SimpleNamespace(model="gpt2", additional_config={"atropos_bridge": bridge} if bridge else None)


@pytest.fixture
def refusing_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A worker whose model cannot be mapped."""

    def load_model(self: Any) -> None:
        raise UnsupportedModel("GPT2LMHeadModel: vLLM fuses 3 blocks in h.0.attn.c_attn.weight")

    monkeypatch.setattr(inspect.getmro(BridgeWorker)[1], "load_model", load_model)
    monkeypatch.setattr(vllm_layers, "keep_plain_linears", lambda linear_for: None)
    monkeypatch.setattr(vllm_layers, "watch_processing", lambda watch: None)
    worker: Any = make_worker(0, 1, tmp_path)
    worker.model_config = SimpleNamespace(enforce_eager=True)
    return worker


def test_the_server_ends_with_the_worker_s_reason(refusing_worker: Any, tmp_path: Path) -> None:
    refusal.write(tmp_path / "b.json", "of an earlier start")

    def serve() -> None:
        with pytest.raises(UnsupportedModel):
            refusing_worker.load_model()
        raise RuntimeError("Engine core initialization failed. See root cause above.")

    reason = r"^--model gpt2: GPT2LMHeadModel: vLLM fuses 3 blocks in h.0.attn.c_attn"
    with pytest.raises(LaunchError, match=reason), _naming_refused_model(arguments(tmp_path)):
        serve()
    assert not list(tmp_path.glob("*.refused"))


@pytest.mark.parametrize("settings", [None, {}])
def test_other_failures_stay_what_they_are(tmp_path: Path, settings: dict[str, Any] | None) -> None:
    refusal.write(tmp_path / "b.json", "of an earlier start")
    with pytest.raises(RuntimeError, match="out of memory"), _naming_refused_model(arguments(tmp_path, settings)):
        raise RuntimeError("out of memory")
