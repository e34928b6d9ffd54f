"""`atropos fine-tune` trains a model on demonstrations or preference pairs: the trainer alone, without API and vLLM."""

import os
import sys
from argparse import ArgumentParser
from collections.abc import Sequence

from atropos_launcher.arguments import Parser


def parser() -> ArgumentParser:
    """For help and completion."""
    command = Parser(
        "fine-tune",
        "Train a model on demonstrations or preference pairs, without API and vLLM. Every other flag is the trainer's:"
        " atropos-grpo --help.",
    )
    command.add_argument("data", metavar="FILE", help="one JSON object per line, as docs/distillation.md has them")
    command.add_argument("--model", required=True, metavar="MODEL", help="Hugging Face id or local directory")
    command.add_argument("--out", required=True, metavar="DIR", help="directory of final_model/, checkpoints, metrics")
    return command


def main(argv: Sequence[str]) -> int:
    """Become the trainer, so that signals reach it. Does not return."""
    os.execv(sys.executable, [sys.executable, "-m", "example_trainer.grpo", *trainer_flags(argv)])


def trainer_flags(argv: Sequence[str]) -> list[str]:
    """Return the flags of the trainer that a command line means."""
    options, others = parser().parse_known_args(argv)
    settings = ["--model", options.model, "--offline-data", options.data, "--offline-share", "1"]
    return [*settings, "--save-path", options.out, "--log-dir", options.out, *others]
