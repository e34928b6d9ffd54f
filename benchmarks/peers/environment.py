"""A virtual environment for a peer: exact versions of what it needs, layered on the packages of this one.

    CACHE/NAME-DIGEST/lib/.../site-packages    what pip installed for the peer: comes first
    this environment's site-packages           PyTorch and all else: so both compute with the same builds

Called by `__main__.py` and by `benchmarks/trainer_step_trl.py`. Nothing in this environment changes.
"""

import hashlib
import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "atropos/peers"
PIP = ["-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check", "--no-warn-conflicts"]


def folder_of(name: str, requirements: Sequence[str], cache: Path = CACHE) -> Path:
    """Return where the environment of these requirements, layered on this one, belongs; another version or another
    checkout has another directory.
    """
    named = " ".join([*requirements, sysconfig.get_path("purelib")])
    return cache / f"{name}-{hashlib.sha256(named.encode()).hexdigest()[:8]}"


def layered_python(folder: Path, requirements: Sequence[str]) -> Path:
    """Return the Python of the environment in `folder`, which is made on first use. `requirements` name all that pip
    installs, each with its version; what these packages need beside them is taken from this environment.
    """
    python = folder / "bin/python"
    if not (folder / "ready").exists():
        print(f"Installing {' '.join(requirements)} into {folder}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(python), *PIP, "--no-deps", *requirements], check=True)
        (_site_packages(python) / "layered.pth").write_text(sysconfig.get_path("purelib") + "\n")
        (folder / "ready").touch()
    return python


def _site_packages(python: Path) -> Path:
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    done = subprocess.run([str(python), "-c", ask], check=True, capture_output=True, text=True)
    return Path(done.stdout.strip())
