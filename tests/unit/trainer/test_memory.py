"""The memory table: what is shared, what is private, and the refusal with figures, before anything is loaded."""

from pathlib import Path
from typing import Any

import pytest
import torch

from atroposlib.wire.bridge import Manifest, WireTensor
from example_trainer import grpo, memory
from example_trainer.bridges import Prepared, single_copy
from example_trainer.config import TrainerConfig
from example_trainer.errors import TrainerError
from example_trainer.memory import check_memory, check_model, memory_table, needs, one_line_when_out_of_memory
from example_trainer.modes import SingleCopy
from tests.unit.trainer.fakes import model_folder

CPU = torch.device("cpu")
MILLION = 1_000_000


def config(**flags: Any) -> TrainerConfig:
    return TrainerConfig.model_validate({"model_name": "m", "logits_chunk_mb": 1} | flags)


def private_bytes(*, trained: int = MILLION, halves: int = 0, shared: bool = False, **flags: Any) -> int:
    """Of a million weights, per weight, logits apart."""
    lines = needs(config(**flags), MILLION, trained, halves=halves, shared=shared)
    return sum(line.nbytes for line in lines if not line.shared and not line.what.startswith("logits")) // MILLION


def test_bytes_a_weight_beside_vllms_own() -> None:
    stochastic = SingleCopy.model_validate({"bf16_update": "stochastic"})
    assert private_bytes(shared=True) == 4 + 8
    assert private_bytes(halves=MILLION, shared=True) == 4 + 4 + 8
    assert private_bytes(halves=MILLION, shared=True, bridge=stochastic) == 2 + 8
    assert private_bytes(shared=True, optimizer="adafactor") == 4
    assert private_bytes(shared=True, kl_coef=0.1) == 4 + 8 + 4


def test_bytes_a_weight_of_the_trainers_own() -> None:
    assert private_bytes() == 4 + 4 + 8
    assert private_bytes(trained=0) == 4
    assert private_bytes(trained=MILLION // 2) == 4 + 12 // 2


def test_table_tells_shared_from_private_and_what_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = needs(config(), MILLION, MILLION, shared=True)
    table = memory_table(lines, CPU, 20_000_000)
    assert "vLLM's own" in table
    assert "4.0 MB  shared" in table
    assert "of 20 MB free" in table
    monkeypatch.setattr(memory, "available_memory", lambda: 20_000_000)
    check_memory(lines, config(), CPU)
    monkeypatch.setattr(memory, "available_memory", lambda: 10_000_000)
    with pytest.raises(TrainerError, match=r"needs 15 MB on cpu .* 10 MB are free \(6 MB too little\)"):
        check_memory(lines, config(), CPU)


def test_a_containers_limit_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    unlimited = memory.available_memory()
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.available_memory() > unlimited / 2
    (tmp_path / "memory.max").write_text("5000000\n")
    (tmp_path / "memory.current").write_text("3000000\n")
    assert memory.available_memory() == 2_000_000


MODES: dict[str, dict[str, Any]] = {
    "restart": {"weight_bridge_mode": "none"},
    "broadcast": {"weight_bridge_mode": "shared_vllm", "use_shared_memory": True},
    "reload": {"weight_bridge_mode": "reload"},
    "lora": {"weight_bridge_mode": "lora_only", "lora_r": 8},
    "lora_restart": {"weight_bridge_mode": "lora_restart", "lora_r": 8},
}


@pytest.mark.parametrize("mode", MODES)
def test_a_model_that_does_not_fit_is_refused_before_anything_is_loaded_or_reached(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_folder(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()  # config.json is enough for the arithmetic
    settings = config(model_name=model, save_path=tmp_path / "out", **MODES[mode])
    free = 3 * (1 << 20)  # what the logits take
    monkeypatch.setattr(memory, "available_memory", lambda: free)

    def reached(source: str, device: torch.device) -> Prepared:
        raise AssertionError("the bridge was prepared")

    with pytest.raises(TrainerError, match=r"needs \d+ MB on cpu, 3 MB are free \(1 MB too little\): .*smaller model"):
        grpo.run(settings, reached)
    monkeypatch.setattr(memory, "available_memory", lambda: free + (1 << 20))
    check_model(settings, CPU)


@pytest.mark.parametrize(("tp_size", "too_little"), [(1, 6), (2, 6)])
def test_a_single_copy_counts_what_it_adds_beside_vllms_own(
    tp_size: int, too_little: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks are on one CPU: together they hold the weights once."""
    manifest = Manifest("m", tp_size, 4 * MILLION, (WireTensor("a", (MILLION,), "float32", "a", 0),))
    buffers = [torch.empty(0)] * tp_size
    monkeypatch.setattr(memory, "available_memory", lambda: 10_000_000)
    with pytest.raises(
        TrainerError, match=rf"beside the shared weights, 10 MB are free \({too_little} MB too little\)"
    ):
        single_copy._check_memory(config(bridge=SingleCopy.model_validate({})), buffers, manifest)
    monkeypatch.setattr(memory, "available_memory", lambda: 10_000_000 + too_little * 1_000_000)
    single_copy._check_memory(config(bridge=SingleCopy.model_validate({})), buffers, manifest)


def test_an_adapter_costs_its_own_gradients_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_folder(tmp_path / "model")
    found: list[int] = []
    monkeypatch.setattr(
        memory, "check_memory", lambda lines, config, device: found.append(sum(x.nbytes for x in lines))
    )
    check_model(
        config(model_name=model, weight_bridge_mode="lora_only", lora_r=8, lora_target_modules=("q_proj",)), CPU
    )
    check_model(config(model_name=model), CPU)
    base = sum(parameter.numel() for parameter in memory_model(model).parameters())
    adapter = 2 * 8 * (32 + 32)  # in both layers, A and B of a 32 x 32 projection
    logits = 3 << 20
    assert found == [4 * base + 16 * adapter + logits, 16 * base + logits]


def memory_model(model: str) -> torch.nn.Module:
    from example_trainer.model import meta_model

    return meta_model(model)


def test_memory_that_is_not_given_is_one_line_with_the_flags_to_change() -> None:
    with (
        pytest.raises(
            TrainerError, match=r"^out of memory: .*allocate.*; lower --micro-batch-tokens \(2048\)"
        ) as error,
        one_line_when_out_of_memory(config(kl_coef=0.1)),
    ):
        torch.empty(1 << 60, dtype=torch.uint8)
    line = str(error.value)
    assert line.isprintable()
    for flag in ("--logits-chunk-mb (1)", "--gradient-checkpointing", "--optimizer adafactor", "--kl-coef"):
        assert flag in line
    with pytest.raises(TrainerError, match="out of memory: CUDA out of memory"), one_line_when_out_of_memory(config()):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def test_other_errors_stay_as_they_are() -> None:
    for error in (
        RuntimeError("shapes differ"),
        TrainerError("vLLM ended: CUDA out of memory"),
        KeyError("out of memory"),
    ):
        with pytest.raises(type(error)) as raised, one_line_when_out_of_memory(config()):
            raise error
        assert raised.value is error
