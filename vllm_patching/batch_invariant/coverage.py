"""Which models are bit-exact. Both processes check this before they load weights, and refuse other models by name."""

from typing import Any

DENSE = ("llama", "qwen2", "qwen3")  # Hugging Face model types; Qwen2.5 is qwen2
FAMILIES = {"cpu": (*DENSE, "qwen3_moe"), "cuda": DENSE}
ROTARY_TYPES = ("default", "linear", "llama3", "yarn")
# a sum of two terms has one order; for more ranks, the orders of vLLM and the trainer would have to be proven equal. On
# CUDA, a product's tiles depend on its width
LARGEST_TP = {"cpu": 2, "cuda": 1}


def why_not_exact(config: Any, *, tp_size: int = 1, device: str = "cpu") -> str | None:
    """The first thing in a Hugging Face configuration that is not covered on this type of device, or None."""
    families = FAMILIES.get(device, DENSE)
    if config.model_type not in families:
        return f"model type {config.model_type!r}; covered on {device} are {', '.join(families)}"
    rotary = config.rope_parameters["rope_type"]
    if rotary not in ROTARY_TYPES:
        return f"rotary embedding {rotary!r}; covered are {', '.join(ROTARY_TYPES)}"
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or []):
        return "sliding-window attention"
    if config.hidden_act != "silu":
        return f"activation {config.hidden_act!r}; covered is silu"
    if device not in LARGEST_TP:
        return f"training on {device}; covered are {' and '.join(LARGEST_TP)}"
    if tp_size > LARGEST_TP[device]:
        return f"tensor parallelism over {tp_size} ranks; on {device} at most {LARGEST_TP[device]} is covered"
    return None
