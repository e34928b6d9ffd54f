"""What a shell offers after TAB, asked of a real bash that has sourced the completion."""

import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from atropos_launcher.cli import COMMANDS
from atropos_launcher.run_file.run_file import recipe_files
from example_trainer.settings.bridges import LAUNCHED
from tests.unit.launcher.processes import PYTHON_PATH

pytest.importorskip("shtab")
pytestmark = pytest.mark.services

ASK = """\
source <(cat) || exit 1
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMP_LINE="$*" COMP_POINT=${#COMP_LINE}
complete -p atropos | grep -q -- ' -F _shtab_atropos atropos' || exit 2
_shtab_atropos && printf '%s\\n' "${COMPREPLY[@]}"
"""


@cache
def script(shell: str) -> str:
    """What `atropos completion SHELL` prints."""
    command = [sys.executable, "-m", "atropos_launcher", "completion", shell]
    return subprocess.run(command, env=PYTHON_PATH, capture_output=True, text=True, timeout=60, check=True).stdout


def offered(*words: str, cwd: Path) -> set[str]:
    """What TAB offers for the last of the words of a command line."""
    done = subprocess.run(
        ["bash", "-c", ASK, "bash", "atropos", *words],
        input=script("bash"),
        cwd=cwd,
        env=PYTHON_PATH,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {line for line in done.stdout.splitlines() if line}


def test_commands_and_their_flags(tmp_path: Path) -> None:
    assert offered("", cwd=tmp_path) == set(COMMANDS)
    assert offered("st", cwd=tmp_path) == {"status", "stop"}
    assert {"--follow", "--lines", "--runs"} <= offered("logs", "--", cwd=tmp_path)
    assert offered("completion", "", cwd=tmp_path) == {"bash", "zsh", "tcsh"}
    assert offered("quickstart", "--st", cwd=tmp_path) == {"--steps"}


def test_recipes_and_run_files(tmp_path: Path) -> None:
    recipes = {path.stem for path in recipe_files()}
    (tmp_path / "my_run.yaml").touch()
    (tmp_path / "notes.txt").touch()
    for command in ("train", "evaluate"):
        assert offered(command, "", cwd=tmp_path) == {*recipes, "my_run.yaml"}
    assert offered("train", "gsm8k_lora", cwd=tmp_path) == {"gsm8k_lora", "gsm8k_lora_restart"}


def test_what_a_flag_takes(tmp_path: Path) -> None:
    assert offered("train", "gsm8k", "--bridge", "", cwd=tmp_path) == set(LAUNCHED)
    assert offered("doctor", "--mode", "", cwd=tmp_path) == set(LAUNCHED)
    assert offered("train", "gsm8k", "--dtype", "", cwd=tmp_path) == {"auto", "float32", "bfloat16"}
    (tmp_path / "problems.jsonl").touch()
    assert offered("train", "gsm8k", "--dataset-path", "pro", cwd=tmp_path) == {"problems.jsonl"}


def test_flags_of_the_programs(tmp_path: Path) -> None:
    rates = {"--trainer.lr", "--trainer.lr-by-signal", "--trainer.lr-decay-steps"}
    assert offered("train", "gsm8k", "--trainer.lr", cwd=tmp_path) == rates
    assert "--api.journal" in offered("train", "gsm8k", "--api.j", cwd=tmp_path)


@pytest.mark.parametrize("words", [["stop"], ["status"], ["plot"], ["logs"], ["push"], ["train", "--resume"]])
def test_runs(words: list[str], tmp_path: Path) -> None:
    for name in ("night", "noon"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    assert offered(*words, "n", cwd=tmp_path) == {"night", "noon"}


def test_environments(tmp_path: Path) -> None:
    (tmp_path / "my_server.py").touch()
    assert {"new", "gsm8k", "template", "my_server.py"} <= offered("env", "", cwd=tmp_path)


@pytest.mark.parametrize("shell", ["zsh", "tcsh"])
def test_other_shells_get_theirs(shell: str, tmp_path: Path) -> None:
    text = script(shell)
    assert "gsm8k_lora" in text or shell == "tcsh"
    assert "--trainer.lr" in text or shell == "tcsh"
    if found := shutil.which(shell):
        (tmp_path / "script").write_text(text)
        subprocess.run([found, "-n", str(tmp_path / "script")], timeout=60, check=True)


def test_zsh_registers_what_it_sources(tmp_path: Path) -> None:
    text = script("zsh")
    assert "if [[ $zsh_eval_context[-1] != loadautofunc ]]" in text
    assert '_files -W "(runs)" -/' in text  # a word without parentheses is the name of an array
    if zsh := shutil.which("zsh"):
        (tmp_path / "script").write_text(text)
        ask = 'autoload -Uz compinit && compinit -u -D && source "$1" && print $_comps[atropos]'
        done = subprocess.run(
            [zsh, "-f", "-c", ask, "zsh", str(tmp_path / "script")], capture_output=True, text=True, timeout=60
        )
        assert done.stdout == "_shtab_atropos\n", done.stderr
