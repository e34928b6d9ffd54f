"""How the `evaluate` command samples: flags of `sampled_evaluation.py`, apart from it so that `--help` stays light.
The first line of a docstring is a heading of `--help`.
"""

from pathlib import Path

from pydantic import Field

from atroposlib.config import Config


class SampleFlags(Config):
    """Evaluation"""

    samples: int = Field(
        default=0,
        ge=0,
        le=10_000,
        description="Samples per held-out question, for pass@k and means; 0: the environment's own evaluation.",
    )
    temperature: float = Field(default=1.0, ge=0, description="With --samples: temperature of the samples.")
    top_p: float = Field(default=1.0, gt=0, le=1, description="With --samples: top_p of the samples.")
    concurrency: int = Field(default=16, ge=1, description="With --samples: rollouts in flight, at most.")
    price_in: float = Field(
        default=0.0, ge=0, description="With --samples: price of a million prompt tokens; prices add the cost."
    )
    price_out: float = Field(default=0.0, ge=0, description="With --samples: price of a million answer tokens.")


class SamplingFields(SampleFlags):
    """Evaluation

    With the file, of which each environment has its own.
    """

    output: Path | None = Field(
        default=None,
        description="The JSONL file of answers, which the same command continues; by default one in"
        " --env.data_dir_to_save_evals or evaluations/ (without --samples: for servers of OpenAI's API alone).",
    )
