"""What a command says when the extra that it needs is not installed."""

import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import get_args

import pytest

from atroposlib.extras import Extra, MissingExtra, install, need

ROOT = Path(__file__).parents[3]


def test_what_is_missing_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "peft", None)
    monkeypatch.setattr("importlib.metadata.distributions", lambda name: [name])
    line = r"^the trainer needs torch and peft, which are not installed; pip install 'atroposlib\[trainer\]'$"
    with pytest.raises(MissingExtra, match=line):
        need("trainer", "the trainer", "torch", "peft", "safetensors")


def test_a_checkout_that_is_not_installed_is_named_by_its_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """By name, pip would fetch the ancestor."""
    monkeypatch.setattr("importlib.metadata.distributions", lambda name: [])
    assert install("wandb") == f"pip install -e '{ROOT}[wandb]'"


def test_what_is_installed_is_not_imported() -> None:
    sys.modules.pop("this", None)
    need("trainer", "the trainer", "this")
    assert "this" not in sys.modules


def test_each_extra_is_one_of_the_package() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {*get_args(Extra), "dev", "docs"} == set(extras)
    assert "scripts/setup.sh" in install("gpu")


TRAINER = "from example_trainer.commands import grpo; grpo()"
SERVER = "from example_trainer.vllm_api_server import main; main()"
MODEL = "from example_trainer.quickstart_model import main; main()"
DOCTOR = "from sampler_doctor.__main__ import main; main()"
REASONING = "from environments.reasoning_gym_server import ReasoningGymEnv; ReasoningGymEnv.cli()"


@pytest.mark.services
@pytest.mark.parametrize(
    ("missing", "extra", "program", "flags"),
    [
        ("torch", "trainer", TRAINER, "--model-name M"),
        ("tensorboard", "tensorboard", TRAINER, "--model-name M --tensorboard"),
        ("wandb", "wandb", TRAINER, "--model-name M --use-wandb"),
        ("vllm", "gpu", SERVER, "--model M"),
        ("torch", "doctor", DOCTOR, "--sampler http://127.0.0.1:9 --model M"),
        ("gguf", "trainer", MODEL, "--out model"),
        ("reasoning_gym", "environments", REASONING, "process --env.tokenizer_name T"),
    ],
)
def test_without_its_extra_a_command_ends_with_one_line_and_status_2(
    missing: str, extra: Extra, program: str, flags: str, tmp_path: Path
) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; {program}"
    with tempfile.TemporaryDirectory() as empty:  # where no killed vLLM server has left sockets to tell of
        done = subprocess.run(
            [sys.executable, "-c", code, *flags.split()],
            cwd=tmp_path,
            env={"PYTHONPATH": str(ROOT), "TMPDIR": empty},
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith(f" needs {missing}, which is not installed; {install(extra)}\n")
    assert ": error: " in done.stderr
    assert len(done.stderr.splitlines()) == 1
