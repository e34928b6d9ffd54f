"""What of a model's files must be there, reaches memory, and is written again."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from example_trainer.model.loading import ModelError, load_model, rebuild_buffers
from example_trainer.weights.written import TrainedModel
from tests.unit.trainer.fakes import ROUTED, model_folder, random_model

CPU = torch.device("cpu")
IDS = torch.arange(1, 20)[None]
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}


@pytest.mark.parametrize(("kind", "changes"), [("glm4_moe", ROUTED), ("deepseek_v3", ROUTED | LATENT)])
def test_a_written_model_has_the_buffers_that_no_code_computes(
    kind: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    start = random_model(kind, **changes)
    biases = {name: buffer.normal_() for name, buffer in start.named_buffers() if "e_score_correction" in name}
    start.save_pretrained(tmp_path / "start")
    trained = TrainedModel(load_model(str(tmp_path / "start"), CPU))
    trained.write(tmp_path / "written")
    again = load_model(str(tmp_path / "written"), CPU)
    buffers = dict(again.named_buffers())
    assert biases
    assert all(torch.equal(buffers[name], bias) for name, bias in biases.items())
    assert torch.equal(again(input_ids=IDS).logits, trained.model(input_ids=IDS).logits)
    assert TrainedModel(again).digest() == trained.digest()


@pytest.mark.parametrize("changed", [None, torch.zeros(32, 47)])
def test_files_that_lack_a_tensor_are_refused_by_its_name(changed: torch.Tensor | None, tmp_path: Path) -> None:
    weights = Path(model_folder(tmp_path)) / "model.safetensors"
    tensors, name = load_file(weights), "model.layers.1.mlp.down_proj.weight"
    del tensors[name]
    save_file(tensors | ({} if changed is None else {name: changed}), weights, metadata={"format": "pt"})
    says = "is missing" if changed is None else r"is \[32, 47\] there, not \[32, 48\]"
    with pytest.raises(ModelError, match=rf"do not hold the model .*: {name} {says}; download"):
        load_model(str(tmp_path), CPU)


@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("mixtral", False), ("qwen3_moe", True)])
def test_tied_heads_stacked_experts_and_computed_buffers_are_not_missed(
    family: str, tied: bool, tmp_path: Path
) -> None:
    load_model(model_folder(tmp_path, family=family, tie_word_embeddings=tied), CPU)


@pytest.mark.parametrize("kind", ["gemma", "gemma3_text", "llama"])
def test_computed_buffers_are_those_of_a_loaded_model_and_weights_stay(kind: str) -> None:
    model = random_model(kind)
    before = {name: value.clone() for name, value in (*model.named_parameters(), *model.named_buffers())}
    rebuild_buffers(model, CPU)
    after = {name: value for name, value in (*model.named_parameters(), *model.named_buffers())}
    assert before.keys() == after.keys()
    assert all(torch.equal(value, before[name]) for name, value in after.items())


@pytest.mark.parametrize("persistent", [False, True])
def test_a_buffer_that_no_code_computes_is_refused(persistent: bool) -> None:
    model = random_model("llama")
    model.model.layers[1].mlp.register_buffer("scale", torch.ones(3), persistent=persistent)
    with pytest.raises(ModelError, match=r"^model\.layers\.1\.mlp is a LlamaMLP with a buffer"):
        rebuild_buffers(model, CPU)


WINDOW: dict[str, Any] = {"sliding_window": 8, "max_position_embeddings": 64}
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}


def expect_transformers_logits(folder: Path, longest: int) -> None:
    ours = load_model(str(folder), CPU, longest=longest)
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    ids = IDS[:, :longest]
    torch.testing.assert_close(ours(input_ids=ids).logits, plain(input_ids=ids).logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("phimoe", {"num_local_experts": 4}),
        ("qwen2_moe", EXPERTS | {"use_sliding_window": True, "layer_types": ["sliding_attention"] * 2}),
    ],
)
def test_a_window_that_a_family_applies_by_a_mask_alone_is_refused_where_it_is_reached(
    kind: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    random_model(kind, **WINDOW | changes).save_pretrained(tmp_path)
    for longest in (None, 9):
        with pytest.raises(ModelError, match=r"packed sequences of more than 8 tokens: .* give --seq-len 8, or less"):
            load_model(str(tmp_path), CPU, longest=longest)
    expect_transformers_logits(tmp_path, 8)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("mistral", {}),
        ("mixtral", {"num_local_experts": 4}),
        ("gemma3_text", {"layer_types": ["sliding_attention", "full_attention"]}),
        ("qwen2_moe", EXPERTS | {"use_sliding_window": True, "max_window_layers": 0}),
        ("llama", {}),  # which knows no window
    ],
)
def test_a_window_that_reaches_the_attention_or_concerns_no_layer_is_taken(
    kind: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    random_model(kind, **WINDOW | changes).save_pretrained(tmp_path)
    expect_transformers_logits(tmp_path, 19)
