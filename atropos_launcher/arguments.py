"""Command lines of `atropos`: a wrong one prints one line and exits with status 2."""

import argparse
import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from atropos_launcher.runs import RUNS
from atroposlib.logs import print_error


class Parser(argparse.ArgumentParser):
    """Parses the arguments of one command. An unknown flag is answered with the nearest known one."""

    def __init__(self, command: str, about: str, **options: Any) -> None:
        super().__init__(prog=f"atropos {command}".rstrip(), description=about, allow_abbrev=False, **options)

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """The arguments of one command. Exits 0 after `--help`, 2 on a wrong one."""
        options, rest = self.parse_known_args(argv)
        if rest and rest[0].startswith("-"):
            flag = rest[0].partition("=")[0]
            self.error(f"unknown flag {flag}{nearest(flag, self._option_string_actions)}")
        if rest:
            self.error(f"unexpected argument {rest[0]!r}")
        return options

    def error(self, message: str) -> NoReturn:
        print_error(self.prog, f"{message} (--help lists all)")
        raise SystemExit(2)


def nearest(word: str, known: Sequence[str] | Any) -> str:
    """`; did you mean X?`, or nothing."""
    matches = difflib.get_close_matches(word, [*known], n=1, cutoff=0.5)
    return f"; did you mean {matches[0]}?" if matches else ""


def add_runs(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--runs",
        type=Path,
        default=RUNS,
        metavar="DIR",
        help="directory that contains the runs (default: ./%(default)s)",
    )


def whole_number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expects a whole number, got {text!r}")
    return int(text)
