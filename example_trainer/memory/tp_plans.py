"""How tensor parallelism splits a model, as data: by family, which linear layers of a decoder layer are split by their
outputs (columns), which by their inputs (rows), and what else a rank computes of its own heads alone.

    whole hidden states ──▶ columns: own heads, own feed-forward features ──▶ rows ──sum over ranks──▶ whole again

(Shoeybi et al. 2019, Megatron-LM, arXiv 1909.08053, section 3.) Importing this module loads no torch.
tensor_parallel.py carries the plans out, the memory plan counts by them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class TpPlan:
    """Modules of one decoder layer, by their names in it."""

    enter: tuple[str, ...] = ("self_attn", "mlp")  # they read whole hidden states, and split what follows
    columns: tuple[str, ...] = (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
    )
    rows: tuple[str, ...] = ("self_attn.o_proj", "mlp.down_proj")
    key_values: tuple[str, ...] = ("self_attn.k_proj", "self_attn.v_proj")  # the columns that have key-value heads
    norms: tuple[str, ...] = ()  # whole on every rank, and applied to its own heads: their gradients are parts of a sum


PLANS: dict[str, TpPlan] = {  # by Hugging Face's model_type
    "llama": TpPlan(),
    "mistral": TpPlan(),
    "qwen2": TpPlan(),
    "qwen3": TpPlan(norms=("self_attn.q_norm", "self_attn.k_norm")),
}
NAMES = " and ".join(", ".join(map(str.capitalize, PLANS)).rsplit(", ", 1))
HEADS, KEY_VALUES = "attention heads", "key-value heads"
MOST = 64  # ranks, the limit of --tp-size


def family_refusal(model_type: str, model: str) -> str | None:
    """Explain why a family cannot be split; None if it can."""
    if model_type in PLANS:
        return None
    return (
        f"--tp-size splits models of the families {NAMES}, and {model} is a {model_type}: give --tp-size 1, and share"
        " its weights by --fsdp-size"
    )


def size_refusal(
    sizes: Mapping[str, int], tp: int, model: str, flag: str = "--tp-size", limit: int = MOST
) -> str | None:
    """Explain why `tp` ranks, which `flag` asks for, cannot split a model of these `sizes`, by what they count; None if
    they can. It names other numbers up to `limit`. Of fewer key-value heads than ranks, each is held by as many ranks.
    """

    def can_split(what: str, tp: int) -> bool:
        return sizes[what] % tp == 0 or (what == KEY_VALUES and tp % sizes[what] == 0)

    for what, size in sizes.items():
        if not can_split(what, tp):
            most = min(sizes[HEADS], limit)
            ways = [str(each) for each in range(1, most + 1) if all(can_split(name, each) for name in sizes)]
            return f"{flag} {tp} does not divide the {size} {what} of {model}: give one of {', '.join(ways)}"
    return None


def sizes(heads: int, kv_heads: int, inner: int) -> dict[str, int]:
    """Name the sizes that tensor parallelism must divide, for `size_refusal`."""
    return {HEADS: heads, KEY_VALUES: kv_heads, "feed-forward features": inner}


def split_dim(name: str, shape: tuple[int, ...], tp: int) -> int | None:
    """Along which dimension `tp` ranks split the parameter `name` of a plain decoder; None if each has it whole.

    An embedding or a head is split by its vocabulary where `tp` divides that.
    """
    module, _, leaf = name.rpartition(".")
    plan = TpPlan()
    if module.endswith(plan.columns):
        return 0
    if module.endswith(plan.rows) and leaf == "weight":
        return 1
    if module.endswith(("embed_tokens", "lm_head")) and shape[0] % tp == 0:
        return 0
    return None


def split_shapes(shapes: Shapes, tp: int, kv_heads: int) -> dict[str, tuple[int, ...]]:
    """The shapes that one of `tp` ranks holds."""

    def own(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        dim = split_dim(name, shape, tp)
        parts = min(tp, kv_heads) if name.rpartition(".")[0].endswith(TpPlan().key_values) else tp
        return tuple(-(-size // parts) if index == dim else size for index, size in enumerate(shape))

    return {name: own(name, shape) for name, shape in shapes.items()}
