"""`atropos completion SHELL`: prints what the shell sources, as in `source <(atropos completion bash)`."""

from argparse import ArgumentParser
from collections.abc import Sequence
from importlib import import_module

from atroposlib.errors import AtroposError, loading
from example_trainer.launcher.arguments import Parser
from example_trainer.launcher.cli import COMMANDS

SHELLS = ("bash", "zsh", "tcsh")


class NoCompletion(AtroposError):
    """shtab writes it, and is not installed."""


def parser() -> Parser:
    command = Parser("completion", "Print the completion of `atropos` for a shell: source <(atropos completion bash)")
    command.add_argument("shell", choices=SHELLS)
    return command


def main(argv: Sequence[str]) -> int:
    options = parser().parse(argv)
    with loading("shtab", NoCompletion, remedy="pip install shtab"):
        import shtab
    print(shtab.complete(whole_parser(), shell=options.shell))
    return 0


def whole_parser() -> ArgumentParser:
    """Of every command, with all its flags."""
    whole = ArgumentParser(prog="atropos")
    commands = whole.add_subparsers()
    for name, command in COMMANDS.items():
        known: ArgumentParser = import_module(command.module).parser()
        commands.add_parser(name, help=command.about, description=known.description, parents=[known], add_help=False)
    return whole
