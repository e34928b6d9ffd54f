"""Which models are bit-exact. Both processes ask before they load weights, and refuse the others by name."""

from typing import Any

FAMILIES = ("llama", "qwen2", "qwen3")  # Hugging Face model types; Qwen2.5 is qwen2
ROTARY_TYPES = ("default", "linear", "llama3", "yarn")
LARGEST_TP = 2  # a sum of two has one order; of more, vLLM's and the trainer's would have to be shown equal


def why_not_exact(config: Any, *, tp_size: int = 1) -> str | None:
    """The first thing in a Hugging Face configuration that is not covered, or None."""
    if config.model_type not in FAMILIES:
        return f"model type {config.model_type!r}; covered are {', '.join(FAMILIES)}"
    rotary = config.rope_parameters["rope_type"]
    if rotary not in ROTARY_TYPES:
        return f"rotary embedding {rotary!r}; covered are {', '.join(ROTARY_TYPES)}"
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or []):
        return "sliding-window attention"
    if config.hidden_act != "silu":
        return f"activation {config.hidden_act!r}; covered is silu"
    if tp_size > LARGEST_TP:
        return f"tensor parallelism over {tp_size} ranks; covered are 1 and {LARGEST_TP}"
    return None
