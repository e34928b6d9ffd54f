"""The GPUs that a process may use and their memory, found without torch."""

import shutil
import subprocess
from collections.abc import Mapping, Sequence


def visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves of those that the driver lists; none without a driver."""
    if shutil.which("nvidia-smi") is None:
        return []
    if "CUDA_VISIBLE_DEVICES" in environ:
        names = [name.strip() for name in environ["CUDA_VISIBLE_DEVICES"].split(",") if name.strip()]
        return names[: names.index("-1")] if "-1" in names else names
    done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=False)
    return [str(index) for index in range(sum(line.startswith("GPU ") for line in done.stdout.splitlines()))]


def gpu_bytes(names: Sequence[str]) -> int:
    """The memory of the smallest of these GPUs, named by number or UUID; 0 where the driver does not tell."""
    done = subprocess.run(
        ["nvidia-smi", "--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    rows = [line.split(", ") for line in done.stdout.splitlines() if line.count(", ") == 2]
    sizes = [
        int(mib) << 20
        for index, uuid, mib in rows
        if mib.isdecimal() and any(name == index or uuid.startswith(name) for name in names)
    ]
    return min(sizes, default=0)
