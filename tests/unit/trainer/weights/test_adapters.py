"""LoRA: what is trained, what is kept, and that a kept adapter is the trained one for PEFT."""

import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from atroposlib.config import resolve_config
from atroposlib.flags import ConfigError
from example_trainer import grpo
from example_trainer.settings.bridges import Lora
from example_trainer.settings.config import TrainerConfig
from example_trainer.weights.lora import ADAPTER, AdapterError, adapter_tensors, load_adapted_model
from example_trainer.weights.written import CheckpointError, TrainedModel
from tests.unit.trainer.fakes import FakeApi, RecordingBridge, item, model_folder, serve

CPU = torch.device("cpu")
TOKENS = torch.arange(1, 9)[None]


def config(model: str, **changes: object) -> TrainerConfig:
    settings: dict[str, object] = dict(
        model_name=model, weight_bridge_mode="lora_only", lora_r=4, lora_alpha=8, device="cpu"
    )
    return TrainerConfig(**settings | changes)


@pytest.fixture(params=["llama", "qwen2", "qwen3"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return model_folder(tmp_path / "model", family=request.param, tie_word_embeddings=request.param != "llama")


@pytest.fixture
def llama(tmp_path: Path) -> str:
    return model_folder(tmp_path / "model")


@torch.no_grad()
def move(model: PreTrainedModel) -> None:
    """An update of the adapter that no one could mistake for none."""
    torch.manual_seed(1)
    for tensor in adapter_tensors(model).values():
        tensor.add_(torch.randn_like(tensor) * 0.1)


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=TOKENS).logits
    return found


def write_adapter(folder: Path, adapted: PreTrainedModel) -> None:
    TrainedModel(adapted, form=ADAPTER).write(folder)


def test_only_the_adapter_is_trained_and_it_starts_as_the_model_itself(model: str) -> None:
    adapted = load_adapted_model(model, config(model), CPU)
    trained = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
    assert len(trained) == 2 * 7 * 2
    assert all(".lora_A." in name or ".lora_B." in name for name in trained)
    assert torch.equal(logits(adapted), logits(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)))


def test_gradients_reach_the_adapter_and_nothing_else(model: str) -> None:
    adapted = load_adapted_model(model, config(model), CPU)
    move(adapted)
    adapted(input_ids=TOKENS, labels=TOKENS).loss.backward()
    for name, parameter in adapted.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            assert parameter.grad.abs().max() > 0, name
        else:
            assert parameter.grad is None, name


def test_a_written_adapter_loads_in_peft_and_merges_to_the_same_model(model: str, tmp_path: Path) -> None:
    adapted = load_adapted_model(model, config(model), CPU)
    move(adapted)
    write_adapter(tmp_path / "adapter", adapted)
    loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter", dtype=torch.float32)
    assert torch.equal(logits(loaded), logits(adapted))
    loaded.merge_and_unload().save_pretrained(tmp_path / "merged")  # the command of docs/bridges.md
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert torch.allclose(logits(merged), logits(adapted), atol=1e-4)
    assert not torch.allclose(
        logits(merged), logits(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)), atol=1e-2
    )


def test_only_the_chosen_modules_get_an_adapter(llama: str) -> None:
    adapted = load_adapted_model(llama, config(llama, lora_target_modules=("q_proj", "v_proj")), CPU)
    assert {name.split(".")[-3] for name in adapter_tensors(adapted)} == {"q_proj", "v_proj"}


def test_beside_experts_the_attention_gets_an_adapter_and_the_experts_are_refused(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "model", family="qwen3_moe")
    with pytest.raises(
        AdapterError, match="no linear layer named gate_proj, up_proj, down_proj; it has q_proj, k_proj"
    ):
        load_adapted_model(model, config(model), CPU)
    attention = ("q_proj", "k_proj", "v_proj", "o_proj")
    adapted = load_adapted_model(model, config(model, lora_target_modules=attention), CPU)
    assert {name.split(".")[-3] for name in adapter_tensors(adapted)} == set(attention)


def test_an_unknown_module_is_refused_by_naming_those_that_exist(llama: str) -> None:
    with pytest.raises(
        AdapterError, match="no linear layer named qkv_proj, lm_head; it has q_proj, k_proj, v_proj, o_proj, gate"
    ):
        load_adapted_model(llama, config(llama, lora_target_modules=("q_proj", "qkv_proj", "lm_head")), CPU)


def test_flags_are_read_and_bounded() -> None:
    base = ["--model-name", "m", "--weight-bridge-mode", "lora_only"]
    found, _ = resolve_config(
        TrainerConfig, [*base, "--lora-target-modules", "q_proj,v_proj", "--lora-alpha", "32"], prog="grpo", env={}
    )
    assert found.bridge == Lora(target_modules=("q_proj", "v_proj"), alpha=32, r=16)
    assert found.bridge.trains_adapter
    for flag, value, says in [
        ("r", "0", "greater than or equal to 1"),
        ("dropout", "1", "less than 1"),
        ("alpha", "0", "or equal to 1"),
    ]:
        with pytest.raises(ConfigError, match=f"lora_{flag}: .*{says}"):
            resolve_config(TrainerConfig, [*base, f"--lora-{flag}", value], prog="grpo", env={})


def test_an_adapter_that_does_not_fit_on_the_disk_leaves_the_one_before(llama: str, tmp_path: Path) -> None:
    adapted = load_adapted_model(llama, config(llama), CPU)
    folder = tmp_path / "adapters" / "policy-v1"
    write_adapter(folder, adapted)
    before = {path: path.read_bytes() for path in (tmp_path / "adapters").rglob("*") if path.is_file()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, hard))  # less than the weights need: the write fails half-way
    try:
        with pytest.raises(CheckpointError, match=r"cannot write .*policy-v2"):
            write_adapter(folder.with_name("policy-v2"), adapted)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {path: path.read_bytes() for path in (tmp_path / "adapters").rglob("*") if path.is_file()} == before


@pytest.fixture
def api_url() -> Iterator[Callable[[int], str]]:
    """A function of the first step that serves the batches from there on."""
    contexts = []

    def start(first_step: int) -> str:
        api = FakeApi(lambda delivered: [item([1.0, 0.0, 0.0, 0.0], seed=first_step + delivered)])
        contexts.append(serve(api))
        return contexts[-1].__enter__()

    yield start
    for context in contexts:
        context.__exit__(None, None, None)


def train(model: str, folder: Path, url: str, fail_at: int | None = None, **changes: object) -> None:
    settings = config(
        model,
        atropos_url=url,
        batch_size=4,
        gradient_accumulation_steps=1,
        training_steps=4,
        lr=1e-2,
        checkpoint_interval=2,
        save_path=folder / "checkpoints",
        log_dir=folder / "logs",
        api_timeout=5,
        fetch_timeout=5,
        **changes,
    )
    grpo.run(settings, RecordingBridge(fail_at=fail_at))


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_run_keeps_adapters_and_resumes_to_the_same_bits(
    llama: str, tmp_path: Path, api_url: Callable[[int], str], dropout: float
) -> None:
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    train(llama, straight, api_url(0), lora_dropout=dropout)
    with pytest.raises(KeyboardInterrupt):
        train(llama, resumed, api_url(0), fail_at=4, lora_dropout=dropout)
    train(llama, resumed, api_url(2), resume="auto", lora_dropout=dropout)
    names = sorted(path.name for path in (resumed / "checkpoints").iterdir())
    assert names == [".ended", "adapter_step_2", "adapter_step_4", "final_adapter", "latest"]
    for name in ("adapter_step_4", "final_adapter"):
        expected, found = (
            load_file(run / "checkpoints" / name / "adapter_model.safetensors") for run in (straight, resumed)
        )
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[key], found[key]) for key in expected)
    assert any(tensor.abs().max() > 0 for key, tensor in found.items() if ".lora_B." in key)


def test_resuming_with_another_adapter_or_from_a_whole_model_is_refused(
    llama: str, tmp_path: Path, api_url: Callable[[int], str]
) -> None:
    train(llama, tmp_path, api_url(0))
    checkpoint = str(tmp_path / "checkpoints" / "adapter_step_4")
    with pytest.raises(
        AdapterError, match="was trained with --lora-r 4, this run has 8: give the same, or start afresh"
    ):
        load_adapted_model(checkpoint, config(llama, lora_r=8), CPU)
    other = model_folder(tmp_path / "other", hidden_size=16)
    with pytest.raises(AdapterError, match="was trained with --model-name"):
        load_adapted_model(checkpoint, config(other), CPU)
    with pytest.raises(AdapterError, match="contains no adapter"):
        load_adapted_model(other, config(llama), CPU)


@pytest.mark.parametrize("content", ["", "{}", '{"r": "four"}', "[" * 100_000])
def test_a_damaged_adapter_config_is_one_line(llama: str, tmp_path: Path, content: str) -> None:
    write_adapter(tmp_path / "adapter", load_adapted_model(llama, config(llama), CPU))
    (tmp_path / "adapter" / "adapter_config.json").write_text(content)
    with pytest.raises(AdapterError, match=r"adapter_config.json cannot be read: .*; give another directory"):
        load_adapted_model(str(tmp_path / "adapter"), config(llama), CPU)
