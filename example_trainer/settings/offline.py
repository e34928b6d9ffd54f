"""The settings of offline data: demonstrations and preference pairs that a run trains on beside what it samples, or
alone.
"""

from typing import Literal

from pydantic import Field, FilePath, model_validator

from atroposlib.config import Config

OfflineObjective = Literal["sft", "dpo"]  # files of loss/


class OfflineSettings(Config):
    """Offline data"""

    offline_data: FilePath | None = Field(
        None,
        description=(
            "file of demonstrations (prefix and completion, or messages) or of preference pairs (pos and neg), one JSON"
            " object per line, as atropos-sft-gen and atropos-dpo-gen write them"
        ),
    )
    offline_share: float = Field(
        0.0,
        ge=0,
        le=1,
        description=(
            "share that offline data has in the examples and in the loss of each update; 1 trains on it alone, without"
            " batching API and vLLM (atropos fine-tune)"
        ),
    )
    offline_objective: Literal["auto", OfflineObjective] = Field(
        "auto",
        description=(
            "loss of offline data: likelihood (sft), or preference over the start model (dpo). auto is dpo for pairs,"
            " and sft for demonstrations; sft on pairs learns the better answers"
        ),
    )
    dpo_beta: float = Field(
        0.1, gt=0, description="how closely dpo holds the policy to the start model: its beta, the weight of that KL"
    )

    @model_validator(mode="after")
    def _data_has_a_share(self) -> "OfflineSettings":
        if self.offline_data is None and self.offline_share > 0:
            raise ValueError(f"--offline-share {self.offline_share:g} is a share of no data: give --offline-data FILE")
        if self.offline_data is not None and self.offline_share == 0:
            raise ValueError(
                f"--offline-data {self.offline_data}: nothing is trained on it; give --offline-share, such as 0.1, or 1"
                " to train on it alone"
            )
        return self

    @property
    def offline_alone(self) -> bool:
        """Return whether nothing is sampled."""
        return self.offline_share == 1
