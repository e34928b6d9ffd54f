"""`atropos completion SHELL`: prints what the shell sources, as in `source <(atropos completion bash)`.

Commands, flags, recipes, runs of ./runs, and the words that a flag takes. `train` has the trainer's and the batching
API's flags too, as --trainer.X and --api.X.
"""

from argparse import Action, ArgumentParser
from collections.abc import Sequence
from importlib import import_module

from atropos_launcher import paths
from atropos_launcher.arguments import Parser
from atropos_launcher.cli import COMMANDS
from atropos_launcher.commands.env import NEW
from atropos_launcher.run_file.run_file import recipe_files
from atropos_launcher.runs import RUNS
from atroposlib.errors import AtroposError, loading
from atroposlib.flags import keys_of
from example_trainer.settings.bridges import LAUNCHED

SHELLS = ("bash", "zsh", "tcsh")
RUN_FILE = {"bash": "_atropos_run_file", "zsh": "_atropos_run_file", "tcsh": "f:*.yaml"}
ENVIRONMENT = {"bash": "_atropos_environment", "zsh": "_atropos_environment", "tcsh": "f:*.py"}
RUN = {"bash": "_atropos_run", "zsh": "_atropos_run", "tcsh": "d"}
# shtab's script registers itself under `eval` alone; any way but autoload should, `source` too.
REGISTERED_IN_ZSH = ("$zsh_eval_context[-1] == eval", "$zsh_eval_context[-1] != loadautofunc")
PREAMBLES = {
    "bash": """\
_atropos_run_file() {{ compgen -W "{recipes}" -- "$1"; compgen -f -X '!*.y*ml' -- "$1"; _atropos_folder "$1"; }}
_atropos_environment() {{ compgen -W "{environments}" -- "$1"; compgen -f -X '!*.py' -- "$1"; _atropos_folder "$1"; }}
_atropos_run() {{ (cd {runs} 2>/dev/null && compgen -d -- "$1"); _atropos_folder "$1"; }}
_atropos_folder() {{ [[ -z $1 ]] || compgen -d -- "$1"; }}""",
    "zsh": """\
_atropos_run_file() {{ _alternative 'recipes:recipe:({recipes})' 'files:file:_files -g "*.y(|a)ml"' }}
_atropos_environment() {{ _alternative 'environments:environment:({environments})' 'files:file:_files -g "*.py"' }}
_atropos_run() {{ _alternative 'runs:run:_files -W "({runs})" -/' 'directories:directory:_files -/' }}""",
    "tcsh": "",
}


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
    words = {
        "recipes": " ".join(path.stem for path in recipe_files()),
        "environments": " ".join([NEW, *paths.environment_names()]),
        "runs": RUNS,
    }
    preamble = PREAMBLES[options.shell].format(**words)
    text = shtab.complete(whole_parser(), shell=options.shell, preamble=preamble)
    print(text.replace(*REGISTERED_IN_ZSH) if options.shell == "zsh" else text)
    return 0


def whole_parser() -> ArgumentParser:
    """Build the parser of every command, with all its flags, and with what completes their values."""
    whole = ArgumentParser(prog="atropos")
    commands = whole.add_subparsers()
    for name, command in COMMANDS.items():
        known: ArgumentParser = import_module(command.module).parser()
        _add_what_is_parsed_elsewhere(name, known)
        for action in known._actions:
            _say_what_completes(action)
        commands.add_parser(name, help=command.about, description=known.description, parents=[known], add_help=False)
    return whole


def _add_what_is_parsed_elsewhere(name: str, known: ArgumentParser) -> None:
    """Add the arguments that command_line.py reads without argparse."""
    if name in ("train", "evaluate"):
        known.add_argument("run_file", metavar="RECIPE|FILE.yaml")
    if name in ("train", "evaluate", "quickstart"):
        known.add_argument("model_or_folder", metavar="MODEL", nargs="?")
    if name == "train":
        from atroposlib.api.settings import RunApiConfig
        from example_trainer.settings.config import TrainerConfig

        for section, tree in (("trainer", TrainerConfig), ("api", RunApiConfig)):
            for key in keys_of(tree):
                flags = [f"--{section}.{flag.removeprefix('--')}" for flag in key.flags]
                known.add_argument(*flags, metavar="V", help=(key.field.description or "").replace("%", "%%"))


def _say_what_completes(action: Action) -> None:
    """By the action's name, or its placeholder."""
    by_name = {"run_file": RUN_FILE, "run": RUN, "names": RUN, "resume": RUN}
    by_placeholder = {"FILE": "file", "PATH": "file", "DIR": "directory", "MODEL": "directory"}
    metavar = action.metavar if isinstance(action.metavar, str) else ""
    if action.dest == "bridge":
        action.choices = list(LAUNCHED)
    elif metavar.startswith("{"):
        action.choices = metavar.strip("{}").split(",")
    elif action.dest == "file":
        action.complete = ENVIRONMENT  # type: ignore[attr-defined]  # shtab's
    elif action.dest in by_name:
        action.complete = by_name[action.dest]  # type: ignore[attr-defined]
    elif metavar in by_placeholder:
        from shtab import CHOICE_FUNCTIONS

        action.complete = CHOICE_FUNCTIONS[by_placeholder[metavar]]  # type: ignore[attr-defined]
