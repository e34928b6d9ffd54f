"""The GPUs that a process may use, found without torch."""

import shutil
import subprocess
from collections.abc import Mapping


def visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves of those that the driver lists; none without a driver."""
    if shutil.which("nvidia-smi") is None:
        return []
    if "CUDA_VISIBLE_DEVICES" in environ:
        names = [name.strip() for name in environ["CUDA_VISIBLE_DEVICES"].split(",") if name.strip()]
        return names[: names.index("-1")] if "-1" in names else names
    done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=False)
    return [str(index) for index in range(sum(line.startswith("GPU ") for line in done.stdout.splitlines()))]
