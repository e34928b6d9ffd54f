"""Rotary embeddings whose frequencies depend on a length: refused by name where training or vLLM reaches it."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from example_trainer.loop import served as served_weights
from example_trainer.model.loading import ModelError, check_packed_forward, load_model, meta_model, prepare_for_training
from example_trainer.model.packed_attention import PACKED_SDPA
from example_trainer.model.policy import Policy
from example_trainer.model.rotary import length_limit
from example_trainer.settings.config import TrainerConfig
from example_trainer.weights.load import load_trained, sharded_model
from example_trainer.weights.lora import meta_adapted_model
from tests.unit.trainer.fakes import SHAPE, model_folder, tiny_model

CPU = torch.device("cpu")
ORIGINAL, WHOLE = 64, 256
HALF = SHAPE["head_dim"] // 2
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * HALF,
    "long_factor": [1.0 + 3 * place for place in range(HALF)],
    "factor": WHOLE / ORIGINAL,
    "original_max_position_embeddings": ORIGINAL,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}


def of_rotary(rope_parameters: dict[str, Any], whole: int = WHOLE) -> dict[str, Any]:
    return {"rope_parameters": rope_parameters, "max_position_embeddings": whole}


@pytest.fixture
def longrope(tmp_path: Path) -> str:
    return model_folder(tmp_path / "model", **of_rotary(LONGROPE))


LOADS: dict[str, Callable[[str, TrainerConfig], object]] = {
    "plain": lambda name, config: load_trained(config, name, CPU),
    "sharded": lambda name, config: sharded_model(config, name, CPU, None),  # type: ignore[arg-type]
    "over shared memory": lambda name, config: prepare_for_training(
        meta_model(name), gradient_checkpointing=False, longest=config.seq_len
    ),
    "adapter on ranks": lambda name, config: meta_adapted_model(name, config, torch.float32),
}


@pytest.mark.parametrize("how", LOADS)
def test_every_way_to_load_refuses_sequences_beyond_the_original_length(longrope: str, how: str) -> None:
    bridge = {"kind": "lora" if how == "adapter on ranks" else "restart"}
    config = TrainerConfig.model_validate({"model_name": longrope, "seq_len": ORIGINAL + 1, "bridge": bridge})
    says = r"'longrope'.* up to 64 tokens .*--seq-len is 65.*--seq-len 64.*max-model-len 64"
    with pytest.raises(ModelError, match=says):
        LOADS[how](longrope, config)
    within = config.model_copy(update={"seq_len": ORIGINAL})
    if how != "sharded":
        assert LOADS[how](longrope, within) is not None or how == "over shared memory"


def test_dynamic_scaling_is_refused_beyond_the_models_length(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", **of_rotary(DYNAMIC, ORIGINAL))
    load_model(folder, CPU, longest=ORIGINAL)
    with pytest.raises(ModelError, match=r"'dynamic'.* up to 64 tokens .*--seq-len is 100"):
        load_model(folder, CPU, longest=100)


def test_dynamic_scaling_that_vllm_applies_to_every_token_is_always_refused(tmp_path: Path) -> None:
    stretched = DYNAMIC | {"original_max_position_embeddings": ORIGINAL}
    folder = model_folder(tmp_path / "model", **of_rotary(stretched))
    with pytest.raises(ModelError, match="'dynamic', cannot be trained: vLLM stretches"):
        load_model(folder, CPU, longest=16)


def test_rotary_types_of_one_table_have_no_limit() -> None:
    for parameters in (
        {"rope_type": "default", "rope_theta": 1e4},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    ):
        model = tiny_model(**of_rotary(parameters))
        model.set_attn_implementation(PACKED_SDPA)
        assert length_limit(model.config) is None
        check_packed_forward(Policy(model), CPU)  # with a sequence behind the original length


def test_layers_of_several_rotary_types_count_each() -> None:
    class Layered:
        model_type: ClassVar[str] = "layered"
        rope_parameters: ClassVar[dict[str, Any]] = {
            "full_attention": LONGROPE,
            "sliding_attention": {"rope_type": "default"},
        }
        max_position_embeddings = WHOLE

        def get_text_config(self) -> "Layered":
            return self

    assert length_limit(Layered()) == ("longrope", ORIGINAL, "original_max_position_embeddings")


def test_the_load_check_sees_tables_that_change_behind_the_original_length() -> None:
    """Whatever the type is called: here the refusal by name is not asked."""
    model = tiny_model(**of_rotary(LONGROPE))
    model.set_attn_implementation(PACKED_SDPA)
    with pytest.raises(ModelError, match="logits differ"):
        check_packed_forward(Policy(model), CPU)
    check_packed_forward(Policy(model), CPU, longest=ORIGINAL)  # never reaches them


def test_a_server_of_longer_sequences_is_refused(monkeypatch: pytest.MonkeyPatch, longrope: str) -> None:
    config, model = TrainerConfig.model_validate({"model_name": longrope, "seq_len": ORIGINAL}), meta_model(longrope)
    for served, refused in ((ORIGINAL, False), (WHOLE, True), (None, False)):
        client = SimpleNamespace(url="http://gpu01:9001", status=lambda n=served: SimpleNamespace(max_model_len=n))
        monkeypatch.setattr(served_weights, "vllm_clients", lambda _, client=client: [client])
        if refused:
            with pytest.raises(ModelError, match="--max-model-len of the vLLM server at http://gpu01:9001 is 256"):
                served_weights.expect_served_lengths(config, model.config)
        else:
            served_weights.expect_served_lengths(config, model.config)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("starcoder2", {"residual_dropout": 0.3, "embedding_dropout": 0.3, "attention_dropout": 0.3}),
        ("seed_oss", {"residual_dropout": 0.3, "attention_dropout": 0.3}),
        ("opt", {"dropout": 0.3, "attention_dropout": 0.3, "ffn_dim": 48}),
    ],
)
def test_dropout_that_a_family_calls_as_a_function_is_off(tmp_path: Path, kind: str, changes: dict[str, Any]) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    settings = SHAPE | {"initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2} | changes
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings)).save_pretrained(tmp_path)
    model = load_model(str(tmp_path), CPU)  # its check computes in training mode
    ids = torch.arange(8)[None]
    assert model.training
    assert torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)
    assert all(module.p == 0 for module in model.modules() if isinstance(module, nn.Dropout))


def test_a_family_whose_code_fails_on_packed_rows_is_a_model_error(tmp_path: Path) -> None:
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    config = Llama4TextConfig(
        **SHAPE | {"intermediate_size_mlp": 48, "num_local_experts": 2, "num_experts_per_tok": 1, "pad_token_id": 0}
    )
    Llama4ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="Llama4ForCausalLM cannot be trained"):
        load_model(str(tmp_path), CPU)
