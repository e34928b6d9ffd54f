"""The flags of the loss: `LossSettings`, without what a teacher adds (distillation.py) and the presets (objectives.py).

A part of config.py, which imports neither torch nor vLLM.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from example_trainer.settings.distillation import DistillationSettings
from example_trainer.settings.objectives import (
    OBJECTIVES,
    PRESETS,
    Advantage,
    Algorithm,
    Importance,
    Kl,
    Level,
    LossMean,
    Ratio,
)


class LossSettings(DistillationSettings):
    """Loss"""

    algorithm: Algorithm = Field(
        "grpo", description="preset for the flags below; each flag overrides the preset. --dry-run shows the result"
    )
    advantage: Advantage = Field(
        "group_std",
        description=(
            "score minus the group's mean, divided by the group's standard deviation + 1e-4 (group_std) or not "
            "divided (group_mean); or score minus the mean of the other answers (rloo)"
        ),
    )
    ratio: Ratio = Field(
        "token",
        description=(
            "probability ratio to the old policy: per token, or per sequence as the geometric mean of its tokens' "
            "ratios (sequence_mean) or as their product (sequence_sum)"
        ),
    )
    objective: str = Field(
        "clip",
        description=(
            f"loss as a function of ratio and advantage: {', '.join(OBJECTIVES)}, or the import path of a function"
        ),
    )
    clip_eps: float = Field(
        0.2, ge=0, le=1, description="probability ratios are clipped to [1 - clip_eps, 1 + clip_eps]"
    )
    clip_eps_high: float | None = Field(None, ge=0, description="upper clip distance where it differs from clip_eps")
    dual_clip: float = Field(
        3.0,
        ge=0,
        description=(
            "the loss of a token with a negative advantage is at most this times the advantage's absolute value; 0 "
            "is no bound"
        ),
    )
    log_ratio_limit: float = Field(
        20.0, gt=0, le=80, description="nats to which log-probability ratios are clamped before exp"
    )
    loss_mean: LossMean = Field(
        "token",
        description=(
            "how the loss is averaged: over all sampled tokens (token); over rollouts, each by the mean of its "
            "tokens (sequence); or as the sum over tokens divided by rollouts x --loss-constant (constant)"
        ),
    )
    loss_constant: int | None = Field(
        None, ge=1, description="tokens by which --loss-mean constant divides each rollout; default --seq-len"
    )
    importance: Importance = Field(
        "none",
        description=(
            "what to do with tokens whose probability differs between sampler and trainer: multiply their loss by "
            "the bounded ratio (truncate), or drop those outside the bounds (mask)"
        ),
    )
    importance_level: Level = Field(
        "token", description="ratio that --importance bounds: each token's, or the product over its sequence"
    )
    importance_bounds: tuple[Annotated[float, Field(ge=0)], Annotated[float, Field(gt=0)]] = Field(
        (0.5, 2.0), description="lowest and highest ratio for --importance"
    )
    off_policy_mask: float = Field(
        0.0,
        ge=0,
        description=(
            "drop sequences with a negative advantage whose tokens have lost more than this many nats on average since"
            " they were sampled; 0 drops none"
        ),
    )
    mask_truncated: bool = Field(
        False, description="drop sequences whose answer was cut at its token limit; they still count in the mean"
    )
    kl_coef: float = Field(
        0.0, ge=0, description="weight of the KL to the start model; above 0 keeps a frozen copy in memory"
    )
    kl: Kl = Field("k3", description="estimator of that KL")
    kl_in: Literal["loss", "reward"] = Field(
        "loss", description="add that KL to the loss (loss), or subtract it from each token's advantage (reward)"
    )
    entropy_coef: float = Field(0.0, ge=0, description="weight of the entropy bonus")

    @model_validator(mode="before")
    @classmethod
    def _algorithm_presets(cls, values: object) -> object:
        if not isinstance(values, Mapping):
            return values
        return {**PRESETS.get(str(values.get("algorithm")), {}), **values}

    @field_validator("objective")
    @classmethod
    def _objective_is_known(cls, value: str) -> str:
        if value not in OBJECTIVES and not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)+", value):
            raise ValueError(f"give {', '.join(OBJECTIVES)}, or an import path such as my_package.my_module.my_loss")
        return value

    @field_validator("dual_clip")
    @classmethod
    def _dual_clip_is_above_the_clip(cls, value: float, info: ValidationInfo) -> float:
        low, high = info.data.get("clip_eps", 0.0), info.data.get("clip_eps_high")
        least = 1 + (low if high is None else high)
        if 0 < value < least and info.data.get("objective") == "clip":
            raise ValueError(f"give at least {least:g}, where the upper clip is, or 0 for no bound")
        if value not in (0, cls.model_fields["dual_clip"].default) and info.data.get("objective") == "cispo":
            raise ValueError("--objective cispo has no such bound; give --objective clip, or drop --dual-clip")
        return value

    @field_validator("loss_constant")
    @classmethod
    def _constant_is_used(cls, value: int | None, info: ValidationInfo) -> int | None:
        mean = info.data.get("loss_mean", "constant")
        if value is not None and mean != "constant":
            raise ValueError(
                f"--loss-mean {mean} does not use a constant; give --loss-mean constant, or drop --loss-constant"
            )
        return value

    @field_validator("importance_bounds")
    @classmethod
    def _bounds_are_in_order(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not value[0] <= 1 <= value[1]:
            raise ValueError("give the lower bound, at most 1, then the upper one, at least 1")
        return value

    @property
    def has_penalties(self) -> bool:
        """Return whether a teacher, a KL or entropy term acts on every sampled token, whatever its advantage."""
        return self.kl_coef > 0 or self.entropy_coef > 0 or self.distill_coef > 0

    @property
    def clip_high(self) -> float:
        """The upper clip distance: the lower one unless given."""
        return self.clip_eps if self.clip_eps_high is None else self.clip_eps_high

    @property
    def needs_whole_sequences(self) -> bool:
        """Return whether a token's loss depends on the log-probabilities of its whole sequence."""
        corrected = self.importance != "none" and self.importance_level == "sequence"
        return self.ratio != "token" or corrected or self.off_policy_mask > 0
