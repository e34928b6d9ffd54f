"""`atropos env FILE COMMAND`: an environment's own commands, as `python FILE COMMAND` gives them."""

import os
import sys
from argparse import REMAINDER, ArgumentParser
from collections.abc import Sequence

from atroposlib.flags import ConfigError
from example_trainer.launcher.arguments import Parser
from example_trainer.launcher.sections import environment_program, no_program


def parser() -> ArgumentParser:
    """For help and completion."""
    command = Parser("env", "Run one environment: serve it, write groups to a file and a page, or evaluate once.")
    command.add_argument("file", metavar="FILE", help="its .py file, a module, or one that comes with Atropos: gsm8k")
    command.add_argument(
        "arguments", nargs=REMAINDER, metavar="COMMAND ...", help="serve, process or evaluate, and flags: --help lists"
    )
    return command


def main(argv: Sequence[str]) -> int:
    """Become the environment. Raises ConfigError where there is none."""
    options = parser().parse_args(argv)
    program = environment_program(options.file)
    if program is None:
        raise ConfigError(no_program(options.file))
    os.execv(sys.executable, [sys.executable, "-u", *program, *options.arguments])
