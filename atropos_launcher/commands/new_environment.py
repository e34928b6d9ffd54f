"""`atropos env new NAME`: writes an environment, NAME_server.py, from a template, and its test, test_NAME_server.py."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from atropos_launcher.arguments import Parser
from atropos_launcher.paths import environments
from atroposlib.errors import reading
from atroposlib.flags import ConfigError

LONGEST_NAME = 40
NAME = re.compile(rf"[a-z][a-z0-9_]{{0,{LONGEST_NAME - 1}}}")
TESTS = '''\
"""Tests of {module}.py. A fake inference server gives right and wrong answers, so they need no model."""

from pathlib import Path

from atroposlib.testing.environments import groups
from {module} import {env_class}


def test_a_right_answer_scores_1(tmp_path: Path) -> None:
    (group,) = groups({env_class}, tmp_path, right=1.0)
    assert set(group["scores"]) == {{1.0}}


def test_a_wrong_answer_scores_0(tmp_path: Path) -> None:
    (group,) = groups({env_class}, tmp_path, right=0.0)
    assert set(group["scores"]) == {{0.0}}


def test_process_writes_a_group_of_right_and_wrong_answers(tmp_path: Path) -> None:
    (group,) = groups({env_class}, tmp_path, right=0.5)
    assert set(group["scores"]) == {{0.0, 1.0}}
'''


@dataclass(frozen=True)
class NewEnvironment:
    """The text of an environment and of its test."""

    module: str
    source: str
    tests: str


def parser() -> Parser:
    """For help."""
    command = Parser("env new", "Write an environment, NAME_server.py, and its test, test_NAME_server.py.")
    command.add_argument("name", metavar="NAME", help="its name: lowercase letters, digits and underscores")
    kind = command.add_mutually_exclusive_group()
    kind.add_argument("--turns", choices=("one", "two"), default="one", help="turns of a conversation (default: one)")
    kind.add_argument("--tool", action="store_true", help="an environment in which the model calls a tool")
    command.add_argument(
        "--dir", type=Path, default=Path(), metavar="DIR", help="directory to write to (default: the current one)"
    )
    return command


def main(argv: Sequence[str]) -> int:
    """Write both files. Raises ConfigError for a name that cannot be one, and where one of the files exists."""
    options = parser().parse(argv)
    source = template_file(options.turns, options.tool)
    with reading(f"cannot read {source}", ConfigError):
        made = new_environment(options.name, source.read_text(encoding="utf-8"))
    server, test = options.dir / f"{made.module}.py", options.dir / f"test_{made.module}.py"
    for path in (server, test):
        if path.exists():
            raise ConfigError(f"{path} exists already; choose another NAME, or another directory with --dir")
    with reading(f"cannot write to {options.dir}", ConfigError, remedy="choose another directory with --dir"):
        options.dir.mkdir(parents=True, exist_ok=True)
        for path, text in ((server, made.source), (test, made.tests)):
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
    print(next_steps(server, test))
    return 0


def template_file(turns: str = "one", tool: bool = False) -> Path:
    """The environment to copy."""
    name = "tool_template" if tool else {"one": "template", "two": "two_turn_template"}[turns]
    return environments() / f"{name}_server.py"


def new_environment(name: str, template: str) -> NewEnvironment:
    """`template` with its class, name and configuration called after `name`. Raises ConfigError for a name that is
    none.
    """
    if not NAME.fullmatch(name):
        likely = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_0123456789")[:LONGEST_NAME]
        hint = f"; for example {likely}" if likely else ""
        raise ConfigError(
            f"NAME {name!r}: use lowercase letters, digits and underscores, a letter first, at most {LONGEST_NAME}"
            f" characters{hint}"
        )
    (old,) = re.findall(r"^class (\w+)Env\(", template, re.MULTILINE)
    new = "".join(word.capitalize() for word in name.split("_"))
    if new != old and (taken := re.search(rf"\b{new}(Env|Config|EnvConfig)\b", template)):
        raise ConfigError(f"NAME {name!r}: its class would be called {taken[0]}, as one of Atropos is; choose another")
    renamed = re.sub(rf"\b{old}(Env|Config)\b", rf"{new}\1", template)
    renamed = re.sub(r'^    name = "\w+"$', f'    name = "{name}"', renamed, flags=re.MULTILINE)
    module = f"{name}_server"
    return NewEnvironment(module, renamed, TESTS.format(module=module, env_class=f"{new}Env"))


def next_steps(server: Path, test: Path) -> str:
    """Tell what to type next."""
    env, its_test = shlex.quote(str(server)), shlex.quote(str(test))
    return f"""\
Wrote {server} and {test}. Run its test:

    python -m pytest {its_test}

Look at a few groups of answers. In a shell of its own, and then beside it:

    python -m atroposlib.testing.fake_inference_server --right 0.5
    python {env} process --env.total_steps 2

Then replace the task with yours: docs/write_an_environment.md."""
