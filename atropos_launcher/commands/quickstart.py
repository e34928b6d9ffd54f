"""`atropos quickstart`: the recipe of that name, with output for newcomers."""

from argparse import ArgumentParser
from collections.abc import Sequence

from atropos_launcher.commands import train
from atropos_launcher.plan.command_line import make_parser

PROG = "atropos quickstart"


def parser() -> ArgumentParser:
    """For completion."""
    return make_parser(["quickstart"], PROG)


def main(argv: Sequence[str]) -> int:
    """Train. Returns the exit status. Raises ConfigError."""
    return train.main(["quickstart", *argv], PROG, newcomer=True)
