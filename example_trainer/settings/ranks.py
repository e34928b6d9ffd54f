"""The trainer's flags about its ranks: how many there are, and how they share weights, gradients and moments.

A part of config.py, which imports neither torch nor vLLM.
"""

from typing import Literal

from pydantic import Field, field_validator

from atroposlib.config import Config


class RankSettings(Config):
    """Trainer ranks"""

    trainer_ranks: int | Literal["auto"] = Field(
        "auto",
        description=(
            "processes that share the weights, one per device; auto is one per visible GPU, and on a CPU as many as "
            "--tp-size and --fsdp-size ask for. Under torchrun, torchrun sets it"
        ),
    )
    fsdp_size: int | None = Field(
        None,
        ge=1,
        description=(
            "ranks that shard one copy of the weights, or of a tensor-parallel part of it; other ranks hold replicas."
            " Default: all ranks / --tp-size"
        ),
    )
    tp_size: int = Field(
        1,
        ge=1,
        le=64,
        description=(
            "ranks that split each layer (tensor parallelism) and compute the same micro-batches; must divide the "
            "model's attention heads and feed-forward features, and divide its key-value heads or be a multiple of them"
        ),
    )
    compute_dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description=(
            "dtype in which the layers compute; weights, reductions and moments stay float32. auto is bfloat16 on "
            "CUDA and float32 on CPUs"
        ),
    )
    reshard_after_forward: bool = Field(
        True,
        description="free gathered weights after the forward pass; no keeps them until the backward pass (ZeRO-2)",
    )
    offload: Literal["auto", "none", "moments", "all"] = Field(
        "auto",
        description=(
            "what to keep in host memory: AdamW's moments (moments), or weights, gradients and moments (all). auto "
            "offloads the least that makes the run fit on CUDA, and nothing on CPUs"
        ),
    )
    sync_gradients: Literal["each", "last"] = Field(
        "each",
        description=(
            "when to sum gradients over ranks: after each micro-batch, or once after the last one of a step, which "
            "is faster but keeps a whole float32 gradient on each rank"
        ),
    )
    dist_timeout_s: float = Field(
        600.0, gt=0, le=86400, description="seconds that a trainer rank waits for the others before the run ends"
    )

    @field_validator("trainer_ranks", mode="after")
    @classmethod
    def _ranks_are_positive(cls, value: int | str) -> int | str:
        if isinstance(value, int) and not 1 <= value <= 1024:
            raise ValueError("give 1 to 1024 ranks, or auto")
        return value
