"""`--help` and `--version` of every command: what they show, and what they do not load."""

import json
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.services

ROOT = Path(__file__).parents[3]
HEAVY = ["torch", "vllm", "transformers", "datasets", "openai", "pandas", "scipy", "matplotlib"]
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
del SCRIPTS["atropos"]  # whose help is a list of commands
del SCRIPTS["atropos-env"]  # one of them
ENVIRONMENTS = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("environments/*_server.py"))
PROGRAMS = ["example_trainer/grpo.py", "example_trainer/vllm_api_server.py", *ENVIRONMENTS]
MODULES = ["atroposlib.cli.run_api", "example_trainer.quickstart_model"]
LAUNCHED = ["train", "quickstart", "evaluate", "doctor"]  # of `atropos`
COMMANDS = {
    **{
        name: f"import pkgutil; pkgutil.resolve_name({entry!r})()"
        for name, entry in SCRIPTS.items()
        if name != "atropos"
    },
    **{path: f"import runpy; runpy.run_path({path!r}, run_name='__main__')" for path in PROGRAMS},
    **{f"atropos {name}": "from atropos_launcher import cli; cli.main()" for name in LAUNCHED},
    **{name: f"import runpy; runpy.run_module({name!r}, run_name='__main__', alter_sys=True)" for name in MODULES},
}
FLAGS = ("--version", "--help", "--help all")
# both in one process, which prints an object for each: the second loads what the first has not
ASK = f"""
import contextlib, io, json, sys
def asked(flag):
    sys.argv = ["command", *sys.argv[1:], *flag.split()]
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        try:
            run()
            status = 0
        except SystemExit as ended:
            status = ended.code or 0
    del sys.argv[-len(flag.split()):]
    loaded = [name for name in {HEAVY!r} if name in sys.modules]
    return dict(status=status, shown=shown.getvalue(), loaded=loaded, modules=len(sys.modules))
print(json.dumps({{flag: asked(flag) for flag in {FLAGS!r}}}))
"""


@cache
def answers(command: str) -> dict[str, dict[str, Any]]:
    """Of each flag exit status, stdout, and what was loaded."""
    program = f"def run():\n    {COMMANDS[command]}\n{ASK}"
    command_line = [sys.executable, "-c", program, *command.split()[1:]]
    done = subprocess.run(command_line, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-1000:]
    found: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def answer(command: str, flag: str) -> tuple[int, str, dict[str, Any]]:
    """Exit status, stdout, and what was loaded."""
    found = answers(command)[flag]
    return found["status"], found["shown"], found


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_complete_and_loads_nothing_heavy(command: str) -> None:
    status, shown, found = answer(command, "--help")
    assert status == 0
    assert "--help" in shown
    assert "--version" in shown
    if command != "example_trainer/vllm_api_server.py":  # vLLM's parser has its own --config
        assert "--config FILE" in shown
        assert "--dry-run" in shown
    assert found["loaded"] == []
    assert found["modules"] < 1300, "a second of CPU is about what this many modules take"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_describes_the_program(command: str) -> None:
    shown = answer(command, "--help")[1]
    description = shown.partition("\n\n")[2].partition(":\n")[0].partition("\n\n")[0]
    assert len(description.split()) > 4, description
    assert "\n " not in description, "a docstring of several lines"


@pytest.mark.parametrize("command", COMMANDS)
def test_version_is_one_line(command: str) -> None:
    status, shown, found = answer(command, "--version")
    assert status == 0
    assert len(shown.splitlines()) == 1
    assert shown.split()[-1][0].isdigit()
    assert found["loaded"] == []


def test_flags_are_grouped_and_switches_show_how_they_are_negated() -> None:
    shown = answer("example_trainer/grpo.py", "--help all")[1]
    for text in ("\nOptimization:\n", "\nvLLM servers:\n", "--no-tensorboard", "--use-shared-memory", "--lora-r"):
        assert text in shown


@pytest.mark.parametrize("command", ENVIRONMENTS)
def test_an_environment_s_help_names_its_commands(command: str) -> None:
    shown = answer(command, "--help")[1]
    for name in ("serve", "process", "evaluate"):
        assert f"  {name} " in shown
    assert "--env.no-use-wandb" in answer(command, "--help all")[1]


@pytest.mark.parametrize("command", ["example_trainer/grpo.py", *ENVIRONMENTS])
def test_help_begins_with_the_flags_that_a_newcomer_needs(command: str) -> None:
    shown, everything = (answer(command, flag)[1] for flag in ("--help", "--help all"))
    first = shown.partition("\nTo begin with:\n")[2].partition("\n\n")[0]
    assert 7 <= f"\n{first}".count("\n  --") <= 9
    assert "`--help all` lists them" in shown
    assert len(everything.splitlines()) > 3 * len(shown.splitlines())


def test_help_of_a_run_names_the_trainers_flags_to_begin_with() -> None:
    shown = answer("atropos train", "--help")[1]
    for name in ("lr", "batch_size", "gradient_accumulation_steps", "seq_len", "algorithm", "kl_coef"):
        assert f"\n  --trainer.{name} V" in shown


@pytest.mark.rotating
@pytest.mark.slow
@pytest.mark.parametrize(
    "benchmark",
    [
        *sorted(path.stem for path in ROOT.glob("benchmarks/*.py") if path.stem != "__init__"),
        *(f"gpu.{name}" for name in ("environment", "kernels", "random_model", "stages", "trainer_speed")),
    ],
)
def test_a_benchmark_says_what_it_measures(benchmark: str) -> None:
    """Each imports torch or a server first, so this is all that is tried of it here."""
    command = [sys.executable, "-m", f"benchmarks.{benchmark}", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-1000:]
    assert done.stdout.startswith("usage: ")
