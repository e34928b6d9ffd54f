"""The wheel, built from a copy of the checkout and installed beside nothing: what is in it, and that it runs."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Mapping
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest

from tests.unit.sampler_doctor.faulty_server import FaultySampler, serve
from tests.unit.sampler_doctor.tiny import save_adapter, save_model

pytestmark = [pytest.mark.services, pytest.mark.slow]

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
INSTALLED_AS = {"environments": "atropos_environments", "recipes": "example_trainer/recipes"}
BUILT_FROM = [
    "atropos_launcher",
    "atroposlib",
    "environments",
    "example_trainer",
    "recipes",
    "sampler_doctor",
    "scripts",
    "vllm_patching",
]
MODULES = ["example_trainer.vllm_api_server", "atropos_environments.gsm8k_server"]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]


def run(*command: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy, out = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("wheels")
    for name in BUILT_FROM:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("LICENSE", "README.md", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, copy)
    run(*PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", out, copy, cwd=out)
    (made,) = out.iterdir()
    return made


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What pip installs, without the dependencies; `bin` holds the commands."""
    folder = tmp_path_factory.mktemp("site-packages")
    run(*PIP, "install", "--no-deps", "--no-compile", "--target", folder, wheel, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        return message_from_string(archive.read(f"{PROJECT['name']}-{PROJECT['version']}.dist-info/METADATA").decode())


def test_its_top_level_names_are_the_six_packages(installed: Path) -> None:
    names = {path.name for path in installed.iterdir()}
    assert names - {"bin", f"{PROJECT['name']}-{PROJECT['version']}.dist-info"} == {
        "atropos_environments",
        "atropos_launcher",
        "atroposlib",
        "example_trainer",
        "sampler_doctor",
        "vllm_patching",
    }


def test_it_holds_every_module_recipe_and_batch_script(installed: Path) -> None:
    expected = [
        INSTALLED_AS.get(path.parts[0], path.parts[0]) + str(path)[len(path.parts[0]) :]
        for folder in set(BUILT_FROM) - {"scripts"}
        for path in (found.relative_to(ROOT) for found in (ROOT / folder).rglob("*"))
        if path.suffix in (".py", ".yaml", ".html", ".js", ".css", ".svg") or path.name == "py.typed"
    ]
    slurm = [f"example_trainer/slurm/{path.name}" for path in (ROOT / "scripts/slurm").iterdir()]
    assert [name for name in expected + slurm if not (installed / name).is_file()] == []


def test_its_description_has_no_link_that_leads_nowhere_on_an_index(metadata: Message) -> None:
    text = metadata.get_payload()
    assert isinstance(text, str)
    assert text.lstrip().startswith("# Atropos")
    assert re.findall(r"\]\((?!https?://|#)[^)]*\)", text) == []


def test_its_metadata_says_what_it_is(metadata: Message) -> None:
    assert metadata["Author"]
    assert metadata["Keywords"]
    assert f"version: {metadata['Version']}\n" in (ROOT / "CITATION.cff").read_text()
    core = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert not [line for line in core if re.match(r"(torch|vllm|wandb|tensorboard)\b", line)]
    assert "psutil" in " ".join(core)


def commands(installed: Path) -> Mapping[str, list[str]]:
    scripts = {name: [str(installed / "bin" / name)] for name in PROJECT["scripts"]}
    return {**scripts, **{name: ["-m", name] for name in MODULES}}


@pytest.mark.rotating
@pytest.mark.parametrize("command", [*PROJECT["scripts"], *MODULES])
def test_each_command_runs_from_an_empty_folder(command: str, installed: Path, tmp_path: Path) -> None:
    shown = run(
        sys.executable, *commands(installed)[command], "--version", cwd=tmp_path, PYTHONPATH=str(installed)
    ).stdout
    assert re.fullmatch(rf"\S+.* {re.escape(PROJECT['version'])}\n", shown)


@pytest.mark.parametrize(("command", "flag"), [("train", "--dry-run"), ("doctor", "--sampler")])
def test_help_of_what_was_installed_has_its_flags(command: str, flag: str, installed: Path, tmp_path: Path) -> None:
    shown = run(sys.executable, installed / "bin/atropos", command, "--help", cwd=tmp_path, PYTHONPATH=str(installed))
    assert flag in shown.stdout


def test_the_sampler_doctor_runs_without_vllm_in_an_empty_directory(installed: Path, tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", 0)
    empty, absent = tmp_path / "empty", tmp_path / "absent"
    empty.mkdir()
    absent.mkdir()
    absent.joinpath("vllm.py").write_text("raise ImportError('not installed')\n")
    with serve(FaultySampler(model, save_adapter(tmp_path / "adapter", model))) as server:
        flags = ["--sampler", server.url, "--model", str(model), "--quick"]
        path = os.pathsep.join([str(absent), str(installed)])
        done = run(installed / "bin/atropos", "doctor", *flags, cwd=empty, PYTHONPATH=path)
    assert re.search(r"^12 rows: 1[12] ok, 0 fails", done.stdout, re.MULTILINE), done.stdout
    assert [path.name for path in empty.iterdir()] == ["sampler-receipt.json"]


def test_a_recipe_is_found_by_name(installed: Path, tmp_path: Path) -> None:
    """With its environment, by a dry run that starts nothing."""
    command = [sys.executable, str(installed / "bin/atropos"), "train", "gsm8k_broadcast", "--model", "M/none"]
    shown = run(*command, "--dry-run", cwd=tmp_path, PYTHONPATH=str(installed)).stdout
    assert str(installed / "atropos_environments/gsm8k_server.py") in shown
    assert list(tmp_path.iterdir()) == []


def test_the_launcher_finds_what_was_installed_with_it(installed: Path, tmp_path: Path) -> None:
    program = (
        "from pathlib import Path; from atropos_launcher import paths;"
        "print(paths.recipes());"
        "print(paths.environment_file('environments/gsm8k_server.py', Path()))"
    )
    shown = run(sys.executable, "-c", program, cwd=tmp_path, PYTHONPATH=str(installed)).stdout.splitlines()
    assert shown == [
        str(installed / "example_trainer/recipes"),
        str(installed / "atropos_environments/gsm8k_server.py"),
    ]


@pytest.mark.rotating
@pytest.mark.parametrize("kind", [[], ["--turns", "two"]])
def test_an_environment_is_written_and_its_test_passes_from_an_empty_directory(
    kind: list[str], installed: Path, tmp_path: Path
) -> None:
    command = [sys.executable, str(installed / "bin/atropos-env"), "new", "mine", *kind]
    run(*command, cwd=tmp_path, PYTHONPATH=str(installed))
    passed = run(sys.executable, "-m", "pytest", "-q", "test_mine_server.py", cwd=tmp_path, PYTHONPATH=str(installed))
    assert "3 passed" in passed.stdout
