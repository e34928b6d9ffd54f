"""`atropos env FILE COMMAND`: an environment's own commands, as `python FILE COMMAND` gives them.

`atropos env new NAME` writes a new environment (`new_environment.py`).
"""

import os
import sys
from argparse import REMAINDER, ArgumentParser
from collections.abc import Sequence

from atropos_launcher.arguments import Parser
from atropos_launcher.commands import new_environment
from atropos_launcher.plan.sections import environment_program, no_program
from atroposlib.flags import ConfigError

NEW = "new"  # in place of a FILE


def parser() -> ArgumentParser:
    """For help and completion."""
    command = Parser(
        "env",
        "Run one environment: serve it, write groups to a file and a page, or evaluate once.",
        epilog="`atropos env new NAME` writes an environment and its test; `atropos env new --help` lists its flags.",
    )
    command.add_argument("file", metavar="FILE", help="its .py file, a module, or one that comes with Atropos: gsm8k")
    command.add_argument(
        "arguments",
        nargs=REMAINDER,
        metavar="COMMAND ...",
        help="serve, process or evaluate, with flags; COMMAND --help lists them",
    )
    return command


def main(argv: Sequence[str]) -> int:
    """Become the environment, or write a new one. Raises ConfigError where there is none."""
    if argv[:1] == [NEW]:
        return new_environment.main(argv[1:])
    options = parser().parse_args(argv)
    program = environment_program(options.file)
    if program is None:
        raise ConfigError(no_program(options.file))
    os.execv(sys.executable, [sys.executable, "-u", *program, *options.arguments])
