"""The scripts of whole training runs are names for recipes: what they start, and what they refuse; no service is
started.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.services

ROOT = Path(__file__).resolve().parents[3]
LAUNCHERS = sorted(path.name for path in (ROOT / "scripts").glob("run_gsm8k_*.sh"))
MODES = {
    "run_gsm8k_broadcast.sh": "--weight-bridge-mode shared_vllm --use-shared-memory",
    "run_gsm8k_lora.sh": "--weight-bridge-mode lora_only",
    "run_gsm8k_lora_restart.sh": "--weight-bridge-mode lora_restart",
    "run_gsm8k_reload.sh": "--weight-bridge-mode reload",
    "run_gsm8k_restart.sh": "--weight-bridge-mode none",
    "run_gsm8k_single_copy.sh": "--weight-bridge-mode shared_vllm --single-copy",
}


def run(*command: str, python: str | None = sys.executable, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if name != "ATROPOS_PYTHON"}
    return subprocess.run(
        [str(ROOT / command[0]), *command[1:]],
        env=environ | ({"ATROPOS_PYTHON": python} if python else {}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=cwd,
    )


@cache
def helped(script: str, *of: str) -> subprocess.CompletedProcess[str]:
    """A script with --help, or --help all."""
    return run(f"scripts/{script}", "--help", *of)


# none starts a run
SETUPS = (
    *("setup.sh", "verifiers_setup.sh", "openenv_venv.sh", "sglang_venv.sh", "agents_venv.sh"),
    *("vllm_contract.sh", "vllm_started.sh"),
)


def test_every_mode_has_its_script() -> None:
    assert sorted(MODES) == LAUNCHERS


@pytest.mark.parametrize("script", sorted(path.name for path in (ROOT / "scripts").glob("*.sh")))
def test_a_script_that_is_no_set_up_is_one_line(script: str) -> None:
    lines = [line for line in (ROOT / "scripts" / script).read_text().splitlines() if not line.startswith("#")]
    assert len(lines) == 1 or script in SETUPS


@pytest.mark.parametrize("script", sorted(path.name for path in (ROOT / "scripts").glob("*.sh")))
def test_every_script_explains_itself(script: str) -> None:
    done = helped(script)
    assert done.returncode == 0
    assert done.stdout.startswith(
        (
            "usage: atropos ",
            f"Usage: scripts/{script}",
            "usage: bridge_doctor",
            "usage: vllm_contract.sh",
            "usage: vllm_started.sh",
        )
    )


@pytest.mark.parametrize("script", LAUNCHERS)
def test_help_says_what_the_mode_does_and_every_flag(script: str) -> None:
    shown = helped(script).stdout
    assert shown.startswith("usage: atropos train RECIPE|FILE.yaml [MODEL]")
    assert MODES[script] in shown
    assert "GPU" in shown
    for flag in ("--steps", "--dataset", "--dataset-path", "--run-name", "--resume"):
        assert f"\n  {flag}" in shown, flag
    every = helped(script, "all").stdout
    for flag in ("--seed", "--api-port", "--vllm-port"):
        assert f"\n  {flag}" in every, flag


@pytest.mark.parametrize("script", ["quickstart.sh", "run_gsm8k_lora.sh"])
def test_before_the_set_up_help_says_what_it_would_do_and_installs_nothing(script: str, tmp_path: Path) -> None:
    copy = tmp_path / "clone"
    (copy / "scripts").mkdir(parents=True)
    for name in (script, "setup.sh"):
        (copy / "scripts" / name).write_bytes((ROOT / "scripts" / name).read_bytes())
        (copy / "scripts" / name).chmod(0o755)
    for folder in ("recipes", "requirements"):
        (copy / folder).symlink_to(ROOT / folder)
    done = subprocess.run(
        [copy / "scripts" / script, "--help"],
        env={name: value for name, value in os.environ.items() if name != "ATROPOS_PYTHON"},
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    assert "--weight-bridge-mode" in done.stdout
    assert "scripts/setup.sh installs" in done.stdout
    assert not (copy / ".venv").exists()


@pytest.mark.parametrize("script", ["quickstart.sh", "run_gsm8k_broadcast.sh"])
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--stepz", "3"], "unknown flag --stepz; did you mean 'steps'?"),
        (["--dataset", "mmlu"], "--dataset expects arithmetic or gsm8k, got 'mmlu'"),
        (["--model", "/nowhere"], "--model /nowhere has no config.json"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_status_2(script: str, flags: list[str], message: str) -> None:
    done = run(f"scripts/{script}", *flags)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.rotating
@pytest.mark.parametrize("script", LAUNCHERS)
def test_each_script_runs_its_recipe(script: str, tmp_path: Path) -> None:
    done = run(f"scripts/{script}", "--dry-run", "--dataset", "arithmetic", "--steps", "3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    recipe = script.removeprefix("run_").removesuffix(".sh")
    assert f"kind: {recipe.removeprefix('gsm8k_')}" in done.stdout
    assert "steps: 3\n" in done.stdout
    assert f"# All output goes to {ROOT}/runs/{recipe.replace('_', '-')}-" in done.stdout
    assert "# Memory of " in done.stdout


def test_a_python_that_is_not_there_is_named() -> None:
    done = run("scripts/quickstart.sh", "--dry-run", python="/nowhere/python")
    assert done.returncode == 1
    assert done.stderr == "setup.sh: error: /nowhere/python is not there; run scripts/setup.sh\n"


def test_the_page_on_bridges_names_every_launcher_and_its_commands_are_understood() -> None:
    page = (ROOT / "docs/bridges.md").read_text()
    assert all(
        f"`scripts/{script}`" in page and MODES[script].removeprefix("--weight-bridge-mode ") in page
        for script in LAUNCHERS
    )
    commands = re.findall(r"^scripts/run_gsm8k_.*$", page, re.MULTILINE)
    assert commands
    for command in commands:
        done = run(*shlex.split(command, comments=True), "--dry-run", "--gpus", "8x80", "--host-memory", "1000")
        assert done.returncode == 0, command + done.stderr


def test_harbor_without_its_python_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    for each in ("verifiers_setup.sh", "verifiers.lock", "verifiers_harbor.lock"):
        shutil.copy(ROOT / "scripts" / each, tmp_path / "scripts")
    done = subprocess.run(
        [tmp_path / "scripts/verifiers_setup.sh", "harbor"],
        env=os.environ | {"PYTHON": "/nowhere/python"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "verifiers_setup.sh: error: no Python of 3.12 to 3.14 with the venv module found, which harbor needs;"
        " install one or set PYTHON=/path/to/python3.12"
    ]
