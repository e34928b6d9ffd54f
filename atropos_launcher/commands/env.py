"""`atropos env FILE COMMAND`: an environment's own commands, as `python FILE COMMAND` gives them.

`atropos env new NAME` writes a new environment (`new_environment.py`).
"""

import ast
import os
import sys
from argparse import REMAINDER, ArgumentParser
from collections.abc import Iterator, Sequence
from pathlib import Path
from warnings import catch_warnings

from atropos_launcher.arguments import Parser
from atropos_launcher.commands import new_environment
from atropos_launcher.plan.sections import END_IT, environment_program, no_program
from atroposlib.flags import ConfigError

NEW = "new"  # in place of a FILE
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
STARTS = ("cli", "main", "run")  # functions whose result a program may keep
PREPARES = ("print(", "logging.", "warnings.", "random.", "os.environ.", "sys.path.", "load_dotenv(")


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
    if len(program) == 1 and defines_alone(Path(program[0])):
        raise ConfigError(f"{options.file} runs no environment: {END_IT}")
    os.execv(sys.executable, [sys.executable, "-u", *program, *options.arguments])


def defines_alone(file: Path) -> bool:
    """Return whether a program defines classes or nothing, and runs none: Python would call that a success."""
    try:
        with catch_warnings(action="ignore"):  # Python's to tell, too
            tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    statements = [*_statements(tree.body)]
    has_class = any(isinstance(each, ast.ClassDef) for each in statements)
    may_run_another = any(isinstance(each, (ast.Import, ast.ImportFrom)) for each in statements)
    return (has_class or not may_run_another) and not any(map(_does_something, statements))


def _statements(body: Sequence[ast.AST]) -> Iterator[ast.stmt]:
    """Yield what runs when a file does, with the statements inside of others."""
    for node in body:
        if isinstance(node, ast.stmt):
            yield node
        if isinstance(node, (ast.stmt, ast.ExceptHandler, ast.match_case)) and not isinstance(node, DEFINITIONS):
            yield from _statements([*ast.iter_child_nodes(node)])


def _does_something(statement: ast.stmt) -> bool:
    """Return whether a statement may run an environment: it calls a function for its effect, or one that starts."""
    if isinstance(statement, DEFINITIONS):
        return False
    called = [node.func for node in ast.walk(statement) if isinstance(node, ast.Call)]
    if isinstance(statement, (ast.Expr, ast.Raise)) and not ast.unparse(statement).startswith(PREPARES):
        return bool(called)
    return any(getattr(each, "attr", getattr(each, "id", "")) in STARTS for each in called)
