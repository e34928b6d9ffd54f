"""How the `evaluate` command samples: flags of `sampled_evaluation.py`, apart from it so that `--help` stays light."""

from pathlib import Path

from pydantic import Field

from atroposlib.config import Config


class SamplingFields(Config):
    """How the `evaluate` command samples."""

    samples: int = Field(
        default=0,
        ge=0,
        le=10_000,
        description="Samples per held-out question, for pass@k and means; 0: the environment's own evaluation.",
    )
    temperature: float = Field(default=1.0, ge=0, description="With --samples: temperature of the samples.")
    top_p: float = Field(default=1.0, gt=0, le=1, description="With --samples: top_p of the samples.")
    concurrency: int = Field(default=16, ge=1, description="With --samples: rollouts in flight, at most.")
    output: Path | None = Field(
        default=None,
        description="With --samples: the JSONL file, which an interrupted evaluation continues; by default"
        " evaluations/ENVIRONMENT-MODEL.jsonl.",
    )
