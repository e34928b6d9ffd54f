"""The refusal with numbers before anything is loaded, the same on every rank, and the line when memory runs out."""

from pathlib import Path
from typing import Any

import pytest
import torch

from atroposlib.wire.bridge import Manifest, WireTensor
from example_trainer import grpo
from example_trainer.bridges import Prepared, single_copy
from example_trainer.errors import TrainerError
from example_trainer.memory.fits import Room
from example_trainer.memory.model_size import model_size
from example_trainer.memory.plan import Training, total
from example_trainer.memory.plan import single_copy as of_single_copy
from example_trainer.model import memory_check
from example_trainer.model.memory_check import one_line_when_out_of_memory, settled_config
from example_trainer.ranks.ranks import ALONE
from example_trainer.settings.bridges import LAUNCHED, SingleCopy
from example_trainer.settings.config import TrainerConfig
from tests.unit.trainer.fakes import model_folder
from vllm_patching import free_memory

CPU = torch.device("cpu")
MILLION = 1_000_000


def config(**flags: Any) -> TrainerConfig:
    return TrainerConfig.model_validate({"model_name": "m", "logits_chunk_mb": 1} | flags)


def test_bytes_a_weight_beside_vllms_own() -> None:
    def private(is_half: bool = False, **flags: Any) -> int:
        return total(of_single_copy(config(**{"bridge": SingleCopy()} | flags), MILLION, is_half)) // MILLION

    assert private() == 4 + 8
    assert private(is_half=True) == 4 + 4 + 8
    assert private(is_half=True, bridge=SingleCopy(bf16_update="stochastic")) == 2 + 8
    assert private(optimizer="adafactor") == 4
    assert private(kl_coef=0.1) == 4 + 8 + 4
    assert private(ema_decay=0.9) == 4 + 8 + 4


def test_a_containers_limit_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(free_memory, "CGROUP", tmp_path)
    unlimited = free_memory.available_memory()
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory.available_memory() > unlimited / 2
    limit_memory(tmp_path, 5 * MILLION, 3 * MILLION)
    assert free_memory.available_memory() == 2 * MILLION


def limit_memory(group: Path, limit: int, used: int, inactive_file: int = 0) -> None:
    group.mkdir(parents=True, exist_ok=True)
    (group / "memory.max").write_text(f"{limit}\n")
    (group / "memory.current").write_text(f"{used}\n")
    (group / "memory.stat").write_text(f"anon {used - inactive_file}\ninactive_file {inactive_file}\nslab 7\n")


def test_pages_of_files_that_were_read_are_free(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A container that had just read a model of 7 GB had no room for its weights."""
    monkeypatch.setattr(free_memory, "CGROUP", tmp_path)
    limit_memory(tmp_path, 16 * MILLION, 14 * MILLION, inactive_file=7 * MILLION)
    assert free_memory.available_memory() == 9 * MILLION
    limit_memory(tmp_path, 5 * MILLION, 6 * MILLION)  # the limit was lowered meanwhile
    assert free_memory.available_memory() == 0


def test_the_narrowest_of_nested_limits_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(free_memory, "CGROUP", tmp_path)
    own = tmp_path / "self"
    own.write_text("1:name=systemd:/other\n0::/job/step\n")
    monkeypatch.setattr(free_memory, "OWN_GROUP", own)
    limit_memory(tmp_path / "job/step", 9 * MILLION, 2 * MILLION)
    limit_memory(tmp_path / "job", 8 * MILLION, 5 * MILLION, inactive_file=MILLION)
    assert free_memory.available_memory() == 4 * MILLION
    assert free_memory.total_memory() == 8 * MILLION
    own.write_text("0::/\n")
    assert free_memory.total_memory() > 9 * MILLION


MODES: dict[str, dict[str, Any]] = {
    "restart": {"weight_bridge_mode": "none"},
    "broadcast": {"weight_bridge_mode": "shared_vllm", "use_shared_memory": True},
    "reload": {"weight_bridge_mode": "reload"},
    "lora": {"weight_bridge_mode": "lora_only", "lora_r": 8},
    "lora_restart": {"weight_bridge_mode": "lora_restart", "lora_r": 8},
}


def test_every_mode_with_memory_of_its_own_is_tried() -> None:
    assert set(MODES) == {kind for kind, mode in LAUNCHED.items() if not mode.same_devices}


@pytest.mark.parametrize("mode", MODES)
def test_a_model_that_does_not_fit_is_refused_before_anything_is_loaded_or_reached(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_folder(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()  # config.json is enough for the arithmetic
    settings = config(model_name=model, save_path=tmp_path / "out", **MODES[mode])
    free = 1_000_000
    monkeypatch.setattr(memory_check, "available_memory", lambda: free)

    def reached(source: str, device: torch.device) -> Prepared:
        raise AssertionError("the bridge was prepared")

    with pytest.raises(
        TrainerError,
        match=r"needs \d+ MB on cpu, and 1 MB are free \(\d+ MB too little; weights, gradients and moments",
    ):
        grpo.run(settings, reached)
    monkeypatch.setattr(memory_check, "available_memory", lambda: 10**9)
    assert settled_config(settings, CPU, ALONE, 1).offload == "none"


def test_a_gpu_run_takes_the_cheapest_offload_that_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the least that any rank has free."""
    settings = config(model_name=model_folder(tmp_path / "model"), micro_batch_tokens=64, use_shared_memory=True,
        weight_bridge_mode="shared_vllm", bridge_bucket_mb=1, device="cuda")  # fmt: skip
    plan = memory_check.planned(settings, torch.device("cuda"), ALONE)
    needs = {offload: plan.having(offload=offload) for offload in ("none", "moments", "all")}
    for offload, each in needs.items():
        monkeypatch.setattr(memory_check, "free_room", lambda device, local_ranks, each=each: Room(each.need, 10**9))
        assert settled_config(settings, torch.device("cuda"), ALONE, 1).offload == offload
    monkeypatch.setattr(memory_check, "free_room", lambda device, local_ranks: Room(needs["all"].need, 0))
    with pytest.raises(TrainerError, match="too little"):
        settled_config(settings, torch.device("cuda"), ALONE, 1)


@pytest.mark.parametrize(("family", "tp_size"), [("qwen3_moe", 1), ("llama", 4)])
def test_a_run_counts_what_its_dry_run_counts(family: str, tp_size: int, tmp_path: Path) -> None:
    """The experts that a token takes, and key-value heads that several ranks hold."""
    model = model_folder(tmp_path / "model", family=family)
    settings = config(model_name=model, weight_bridge_mode="reload", tp_size=tp_size)
    size = model_size(model)
    assert size is not None
    dry, run = Training(settings, size, on_gpu=False), memory_check.planned(settings, CPU, ALONE)
    assert (run.states, run.phases) == (dry.states, dry.phases)


@pytest.mark.parametrize(("tp_size", "too_little"), [(1, 6), (2, 6)])
def test_a_single_copy_counts_what_it_adds_beside_vllms_own(
    tp_size: int, too_little: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks are on one CPU: together they hold the weights once."""
    manifest = Manifest("m", tp_size, 4 * MILLION, (WireTensor("a", (MILLION,), "float32", "a", 0),))
    buffers = [torch.empty(0)] * tp_size
    monkeypatch.setattr(memory_check, "available_memory", lambda: 10_000_000)
    with pytest.raises(
        TrainerError, match=rf"beside the shared weights, 10 MB are free \({too_little} MB too little\)"
    ):
        single_copy._check_memory(config(bridge=SingleCopy()), buffers, manifest)
    monkeypatch.setattr(memory_check, "available_memory", lambda: 10_000_000 + too_little * 1_000_000)
    single_copy._check_memory(config(bridge=SingleCopy()), buffers, manifest)


@pytest.mark.parametrize(("device", "too_little"), [("cpu", 9), ("cuda", 1)])
def test_a_single_copy_by_ranks_counts_all_ranks_of_a_cpu_and_one_of_a_gpu(
    device: str, too_little: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = Manifest("m", 2, 4 * MILLION, (WireTensor("a", (MILLION,), "float32", "a", 0),))
    free = 10_000_000 if device == "cpu" else 9_000_000
    monkeypatch.setattr(memory_check, "free_room", lambda device, local_ranks: Room(free, free))
    settings = config(bridge=SingleCopy(), tp_size=2)
    with pytest.raises(TrainerError, match=rf"are free \({too_little} MB too little\)") as refused:
        single_copy._check_ranks_memory(settings, 2, manifest, torch.device(device))
    assert "adafactor" not in str(refused.value)  # several ranks take neither
    assert "bfloat16" not in str(refused.value)
    free += too_little * 1_000_000
    single_copy._check_ranks_memory(settings, 2, manifest, torch.device(device))


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
    for flag in ("--logits-chunk-mb (1)", "--gradient-checkpointing", "--offload", "--kl-coef"):
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


def test_the_dry_run_of_a_single_copy_by_ranks_counts_a_rank_s_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_check, "available_memory", lambda: 64 * 10**9)
    model = {"model_name": "Qwen/Qwen2.5-1.5B-Instruct", "bridge": SingleCopy(), "device": "cpu"}
    gradients = {}
    for tp in (1, 2):
        lines = memory_check.plan_of_run(config(**model, tp_size=tp))
        assert any("float32 masters" in line for line in lines) is (tp == 1)  # by ranks, vLLM serves float32
        (line,) = [line for line in lines if line.strip().startswith("gradients")]
        gradients[tp] = float(line.split()[-2])
    assert gradients[2] == pytest.approx(gradients[1] / 2, rel=1e-3)


def test_a_dry_run_prints_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_check, "visible_gpus", lambda environ: ["0"])
    monkeypatch.setattr(memory_check, "gpu_bytes", lambda names: 80 * 10**9)
    monkeypatch.setattr(memory_check, "available_memory", lambda: 64 * 10**9)
    lines = memory_check.plan_of_run(config(model_name="Qwen/Qwen2.5-14B-Instruct", weight_bridge_mode="reload"))
    assert any("of 80.000 GB free" in line for line in lines)
    assert "--trainer-ranks 4 (4 GPUs for the trainer) --gradient-checkpointing" in lines[-1]
    assert memory_check.plan_of_run(config())[0].startswith("Memory: unknown")
