"""`atropos export` makes a Hugging Face directory from a sharded checkpoint; weights/export.py does it, with torch."""

import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Sequence

from atropos_launcher.arguments import Parser


def parser() -> ArgumentParser:
    """For help and completion."""
    command = Parser("export", "Convert a sharded checkpoint to a Hugging Face directory.")
    command.add_argument("checkpoint", metavar="CHECKPOINT", help="a step_N directory with shards/")
    command.add_argument("directory", metavar="NEW_DIRECTORY", help="directory to create")
    return command


def main(argv: Sequence[str]) -> int:
    """Export. Returns the exit status."""
    options = parser().parse_args(argv)
    command = [sys.executable, "-m", "example_trainer.weights.export", options.checkpoint, options.directory]
    return subprocess.run(command, check=False).returncode
