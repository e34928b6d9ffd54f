"""The settings of on-policy distillation: what a teacher's log-probabilities of the sampled tokens do to the loss."""

from typing import Literal

from pydantic import Field, model_validator

from atroposlib.config import Config

Distill = Literal["reverse_kl", "forward_kl"]  # files of loss/
MOST_NAMED = 1000  # tokens that a teacher may be asked for at each position


class DistillationSettings(Config):
    """Distillation"""

    distill_coef: float = Field(
        0.0,
        ge=0,
        description=(
            "weight of the KL to the teacher whose log-probabilities groups bring; above 0 groups without them are"
            " refused, at 0 groups with them"
        ),
    )
    distill: Distill = Field(
        "reverse_kl",
        description=(
            "that KL: KL(policy || teacher) of each sampled token, subtracted from its advantage (reverse_kl), or"
            " KL(teacher || policy) over the teacher's likeliest tokens, added to the loss (forward_kl)"
        ),
    )
    distill_top_k: int = Field(
        20,
        ge=1,
        le=MOST_NAMED,
        description="likeliest tokens at each position that environments ask the teacher for, with forward_kl",
    )
    reward_coef: float = Field(
        1.0, ge=0, description="weight of the advantages; 0 trains on the teacher alone, whatever the rewards are"
    )

    @model_validator(mode="after")
    def _something_teaches(self) -> "DistillationSettings":
        if self.reward_coef == 0 and self.distill_coef == 0:
            raise ValueError(
                "--reward-coef 0 leaves nothing to train on: give --distill-coef, the weight of a teacher, or drop it"
            )
        return self

    @property
    def teacher_top_k(self) -> int | None:
        """Return how many of its likeliest tokens the teacher must name beside the sampled one; None without one."""
        if self.distill_coef == 0:
            return None
        return self.distill_top_k if self.distill == "forward_kl" else 0
