"""Facts about this machine: processor, GPUs, packages, and who listens on its ports. Nothing is changed, and neither
torch nor vLLM is loaded.
"""

import csv
import platform
import re
import shutil
import subprocess
import sysconfig
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

import psutil

from atroposlib.addresses import resolved

MIB = 1 << 20
COMMAND_LIMIT_S = 20
BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})  # features of a processor, by Linux's names


@dataclass(frozen=True)
class Gpu:
    """One line of nvidia-smi."""

    index: int
    name: str
    free: int


@dataclass(frozen=True)
class Listener:
    """Who listens on a port, as far as this user may see."""

    pid: int | None
    command: str


def declared_by(plugin: str) -> list[str]:
    """The distributions that declare the entry point `plugin`, whichever its group."""
    return [entry.dist.name for entry in metadata.entry_points(name=plugin) if entry.dist is not None]


def torch_cuda() -> str | None:
    """The CUDA release PyTorch was built for, out of its version file: importing it takes seconds."""
    spec = util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    built = re.search(
        r"^cuda\b[^=]*=\s*'([\d.]+)'", (Path(spec.origin).parent / "version.py").read_text(), re.MULTILINE
    )
    return built[1] if built else None


def processor() -> str:
    """Return the processor's model, as Linux tells."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def multiplies_bfloat16() -> bool:
    """Return whether the processor has instructions that multiply bfloat16, as Linux tells: AVX-512's, AMX or Arm's."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, features = line.partition(":")
            if name.strip() in ("flags", "Features"):
                return not BFLOAT16.isdisjoint(features.split())
    return False


def gpu_names() -> list[str]:
    """Each GPU's name and driver: `NVIDIA H200, 580.65.06`."""
    listed = printed_by("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    return listed.splitlines() if listed else []


def find_gpus(visible: str | None) -> tuple[list[Gpu], str | None]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, by index or UUID, and the CUDA release that the driver knows."""
    listed = printed_by("nvidia-smi", "--query-gpu=index,uuid,name,memory.free", "--format=csv,noheader,nounits")
    if listed is None:
        return [], None
    # no notes of the driver
    rows = [row for row in csv.reader(listed.splitlines(), skipinitialspace=True) if len(row) == 4]
    names = None if visible is None else [name.strip() for name in visible.split(",")]
    gpus = [
        Gpu(int(row[0]), row[2], int(row[3]) * MIB)
        for row in rows
        if names is None or row[0] in names or any(name and row[1].startswith(name) for name in names)
    ]
    release = re.search(r"CUDA[A-Za-z ]*Version:\s*([\d.]+)", printed_by("nvidia-smi") or "")
    return gpus, release[1] if release else None


def peer_access(printed: str | None) -> dict[tuple[int, int], str]:
    """Read whether one GPU can read another's memory, by their indices, as `nvidia-smi topo -p2p r` prints it: OK,
    or why not. Empty where the driver does not tell.

             GPU0    GPU1
     GPU0    X       CNS
     GPU1    CNS     X
    """
    access: dict[tuple[int, int], str] = {}
    for line in (printed or "").splitlines():
        words = line.split()
        if len(words) > 2 and (row := re.fullmatch(r"GPU(\d+)", words[0])) and not words[1].startswith("GPU"):
            pairs = ((int(row[1]), column, state) for column, state in enumerate(words[1:]))
            access |= {(one, other): state for one, other, state in pairs if one != other}
    return access


def find_compiler(named: str | None) -> str | None:
    """The C compiler that Triton would call: of CC, or gcc, or clang (triton/runtime/build.py)."""
    return next((path for name in ([named] if named else ["gcc", "clang"]) if (path := shutil.which(name))), None)


def python_header() -> Path:
    """Return where Python.h is, if it is installed."""
    return Path(sysconfig.get_paths()["include"]) / "Python.h"


def find_listeners() -> dict[int, Listener]:
    """Who listens on each port of this machine."""
    return {
        connection.laddr.port: Listener(connection.pid, command_of(connection.pid))
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }


def command_of(pid: int | None) -> str:
    with suppress(psutil.Error):
        if pid:
            return " ".join(psutil.Process(pid).cmdline())
    return "another user's process"


def resolve(host: str) -> str | None:
    with suppress(OSError):
        return resolved(host)
    return None


def printed_by(*command: str) -> str | None:
    """Return what a command prints; None where there is no such command, or it fails or takes too long."""
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_LIMIT_S, check=False)
        return done.stdout.strip() if done.returncode == 0 else None
    return None
