"""What a command says when the extra that it needs is not installed."""

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import get_args

import pytest

from atroposlib.extras import Extra, MissingExtra, install, need

ROOT = Path(__file__).parents[3]


def test_what_is_missing_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "peft", None)
    line = r"^the trainer needs torch and peft, which are not installed; pip install 'atropos\[trainer\]'$"
    with pytest.raises(MissingExtra, match=line):
        need("trainer", "the trainer", "torch", "peft", "safetensors")


def test_what_is_installed_is_not_imported() -> None:
    sys.modules.pop("this", None)
    need("trainer", "the trainer", "this")
    assert "this" not in sys.modules


def test_each_extra_is_one_of_the_package() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {*get_args(Extra), "dev"} == set(extras)
    assert "scripts/setup.sh" in install("gpu")


@pytest.mark.services
@pytest.mark.parametrize(
    ("missing", "command", "line"),
    [
        (
            "torch",
            "sys.argv = ['atropos-grpo', '--model-name', 'M']; from example_trainer.commands import grpo; grpo()",
            "grpo: error: the trainer needs torch, which is not installed; pip install 'atropos[trainer]'",
        ),
    ],
)
def test_without_its_extra_a_command_ends_with_one_line_and_status_2(
    missing: str, command: str, line: str, tmp_path: Path
) -> None:
    program = f"import sys; sys.modules[{missing!r}] = None; {command}"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"{line}\n")
