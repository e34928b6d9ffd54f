"""Repeat the comparison of a step that `--bit-exact strict` stopped at.

    python -m example_trainer.replay logs/bit_exact_step_7/batch.pt

Computes the kept sequences with the kept weights as the run did, prints the summary and the differing tokens, and
exits 0 if none differ, 1 if some do: then the difference is reproducible here, without vLLM, and the table says
where it is.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from pydantic import Field

from atroposlib.config import Config, load_config
from example_trainer.data.packing import micro_batches
from example_trainer.exact.check import Comparison, sequence_from, summary
from example_trainer.exact.model import make_exact
from example_trainer.model.loading import load_model
from example_trainer.model.policy import Policy, token_logprobs


class ReplayConfig(Config):
    """Repeat the comparison of a step that `--bit-exact strict` stopped at."""

    file: Path = Field(description="batch.pt that a strict run kept")
    threads: int = Field(0, ge=0, le=1024, description="CPU threads; 0 leaves PyTorch's choice")


def replay(file: Path) -> Comparison:
    """The comparison of the kept step, computed again."""
    state: dict[str, Any] = torch.load(file, weights_only=True)
    device = torch.device(state["device"])
    model = load_model(str(file.parent / "model"), device)
    make_exact(model, getattr(torch, state["served"]["dtype"]), state["served"]["tp_size"])
    policy, comparison = Policy(model), Comparison()
    sequences = [sequence_from(fields) for fields in state["sequences"]]
    for batch in micro_batches(sequences, state["micro_batch_tokens"], device, share=state["share_prefixes"]):
        comparison.add(batch.targets, batch.sampler_logprobs, token_logprobs(policy, batch, state["logits_chunk_mb"]))
    return comparison


def main(argv: list[str] | None = None) -> int:
    """The command line; a file given without a flag is `--file`."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and not argv[0].startswith("-"):
        argv = ["--file", *argv]
    config = load_config(ReplayConfig, argv, prog="python -m example_trainer.replay")
    if not config.file.is_file():
        print(
            f"replay: error: {config.file} does not exist; give the batch.pt that a strict run named", file=sys.stderr
        )
        return 2
    if config.threads:
        torch.set_num_threads(config.threads)
    comparison = replay(config.file)
    row = comparison.row()
    print(summary(row))
    if row["bit_exact/differing_tokens"]:
        print(comparison.table())
    return int(row["bit_exact/differing_tokens"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
