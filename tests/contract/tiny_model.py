"""A random model of a few kilobytes that vLLM can serve, of each family that exactness is proven for."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from atroposlib.testing.tiny_tokenizer import make_tiny_tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 128,
    "intermediate_size": 264,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
CONFIGS: dict[str, Any] = {
    "llama": lambda: LlamaConfig(**SIZES, tie_word_embeddings=False, rope_parameters=LLAMA3),
    "qwen2": lambda: Qwen2Config(**SIZES, tie_word_embeddings=False),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True, rope_parameters=YARN),
}


def write_model(family: str, directory: Path) -> PreTrainedModel:
    """Make one whose norms and biases are random too, save it with a tokenizer, and return it in float32. Its numbers
    are representable in bfloat16.
    """
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(CONFIGS[family](), attn_implementation="sdpa")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif name.endswith("bias"):
                parameter.copy_(torch.randn_like(parameter) * 0.1)
    module: torch.nn.Module = model
    module.to(torch.bfloat16).float()
    model.save_pretrained(directory)
    make_tiny_tokenizer().save_pretrained(directory)
    return model
