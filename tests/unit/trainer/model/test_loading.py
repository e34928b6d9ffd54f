"""What of a model's files must be there, reaches memory, and is written again."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from example_trainer.model.loading import ModelError, load_model
from example_trainer.weights.written import TrainedModel
from tests.unit.trainer.fakes import SHAPE, model_folder

CPU = torch.device("cpu")
IDS = torch.arange(1, 20)[None]
ROUTED: dict[str, Any] = {
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}


def random_model(kind: str, **changes: Any) -> PreTrainedModel:
    """A tiny random model of a Hugging Face model type."""
    torch.manual_seed(0)
    settings = SHAPE | {"initializer_range": 0.3, "pad_token_id": 0} | changes
    model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings))
    return model


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
