"""Norms in one kernel compute what transformers computes."""

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from example_trainer.model.fused_norms import fuse_norms

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize("family", [LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config])
def test_logits_and_gradients_stay(family: type[PretrainedConfig]) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(family(**SIZES))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    ids = torch.arange(20)[None]

    def outcome() -> tuple[torch.Tensor, list[torch.Tensor]]:
        logits = model(input_ids=ids).logits
        return logits, list(torch.autograd.grad(logits.square().mean(), list(model.parameters())))

    before = outcome()
    norms = 2 * (4 if family is Qwen3Config else 2) + 1
    assert fuse_norms(model) == norms
    after = outcome()
    torch.testing.assert_close(after[0], before[0], rtol=1e-5, atol=1e-6)
    for one, other in zip(after[1], before[1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)


def test_a_weight_in_float32_gives_float32_as_the_head_wants_it() -> None:
    model = AutoModelForCausalLM.from_config(Qwen3Config(**SIZES))
    fuse_norms(model)
    states = torch.randn(3, 32, dtype=torch.bfloat16)
    assert model.model.norm(states).dtype is torch.float32
    model.bfloat16()
    assert model.model.norm(states).dtype is torch.bfloat16


def test_a_norm_with_an_offset_keeps_its_own_forward() -> None:
    """Gemma's adds 1 to its weight, so its name alone says nothing."""
    config = GemmaConfig(**SIZES, head_dim=8)
    assert fuse_norms(AutoModelForCausalLM.from_config(config)) == 0
