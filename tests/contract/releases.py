"""One release of vLLM proven on a machine without a GPU, each proof by itself. A failure names both sides.

    symbols        our source against the CUDA wheel's source                        uses.py, outside_python.py
    configuration  launcher to engine configuration on vLLM's CUDA platform          engine_config.py, a process each
    bits           the exact trainer against vLLM's CUDA model classes               exact_bits.py, one process

Called by the tests beside this file for the oldest and the newest release, and by `python -m tests.contract` for those
that it names.
"""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from tests.contract import outside_python
from tests.contract.uses import ROOT, Contract
from tests.contract.wheels import CACHE, Unpacked, unpacked

TRITON = "3.9.0"  # a release that this Python can load; vLLM's kernels run in its interpreter
DEADLINE_S = 280.0
Models = tuple[tuple[str, str], ...]  # of families and dtypes
MODELS: Models = tuple((family, dtype) for family in ("llama", "qwen2", "qwen3") for dtype in ("float32", "bfloat16"))
EXPECTED: dict[str, Any] = {
    "platform": "NvmlCudaPlatform",
    "worker": "BridgeWorker",
    "extends_gpu_worker": True,
    "bridge": True,
    "endpoints": True,
    "tp": 1,
    "lora_rank": None,
    "dtype": "torch.bfloat16",
}
MODES: dict[str, tuple[list[str], dict[str, Any]]] = {  # our launcher's flags, and what else is expected of vLLM
    "plain": ([], {}),
    "exact": (
        ["--batch-invariant"],
        {"compile_mode": 0, "attention": "FLASH_ATTN", "block_size": 32, "v2_runner": False, "why_not_exact": None},
    ),
    "lora": (["--enable-lora", "--max-lora-rank", "16"], {"worker": "AdapterWorker", "bridge": False, "lora_rank": 16}),
    "tp2": (["--tensor-parallel-size", "2"], {"tp": 2}),
}


class NotProven(AssertionError):
    """A release and we do not fit; the message says where."""


def vllm(version: str) -> Unpacked:
    """The Python files of a release's CUDA wheel. Raises NoWheel."""
    return unpacked("vllm", version, lambda path: path.startswith("vllm/") and path.endswith(".py"))


def triton() -> Unpacked:
    """Triton without the tools that compile for GPUs. Raises NoWheel."""
    return unpacked("triton", TRITON, lambda path: path.endswith((".py", "/libtriton.so")))


def check_symbols(version: str, ours: Path = ROOT) -> int:
    """How many uses of vLLM our source has, all of which the release serves. Raises NotProven, NoWheel."""
    contract = Contract(vllm(version).path, version, ours)
    contract.check()
    outside_python.check(contract)
    if contract.breaks:
        breaks = "\n".join(map(str, contract.breaks))
        raise NotProven(f"vLLM {version} does not have what we use:\n{breaks}")
    return len(contract.uses)


def check_configuration(version: str, mode: str) -> dict[str, Any]:
    """What vLLM makes of the launcher's arguments in `mode`, which is what we expect. Raises NotProven, NoWheel."""
    (found,) = _run(version, "tests.contract.engine_config", mode)
    expected = {**EXPECTED, **MODES[mode][1], "vllm": version}
    wrong = {name: (found[name], value) for name, value in expected.items() if found[name] != value}
    if wrong:
        told = ", ".join(f"{name} is {got!r}, not {value!r}" for name, (got, value) in wrong.items())
        raise NotProven(f"vLLM {version}, {mode}: {told}")
    return found


def check_bits(version: str, family: str, dtype: str, at_once: Models | None = None) -> None:
    """The exact trainer computes the bits of vLLM's CUDA model class, and one rounding too many would be seen. Models
    that are compared `at_once` share their imports. Raises NotProven, NoWheel.
    """
    answer = _bits(version, at_once or ((family, dtype),))[f"{family}:{dtype}"]
    if "error" in answer:
        raise NotProven(f"vLLM {version}, {family} in {dtype}: {answer['error']}")
    if differ := [name for name in ("hidden", "logits", "logprobs") if not answer[name]]:
        raise NotProven(
            f"vLLM {version}, {family} in {dtype}: {', '.join(differ)} differ, by up to"
            f" {answer['largest_difference']:g} nats: compare example_trainer/exact/cuda.py with"
            f" vllm/model_executor/models/{family}.py"
        )
    if answer["planted_is_found"] is False:
        raise NotProven(f"vLLM {version}, {family} in {dtype}: a rounding that was planted in the trainer is not seen")


@cache
def _bits(version: str, models: Models) -> dict[str, dict[str, Any]]:
    """What exact_bits.py answers for each of `models`, as FAMILY:DTYPE."""
    answers = _run(version, "tests.contract.exact_bits", *map(":".join, models))
    return {answer["model"]: answer for answer in answers}


def _run(version: str, program: str, *arguments: str) -> list[dict[str, Any]]:
    """The JSON objects that a program prints, each on a line, with the CUDA release and Triton first on its path."""
    path = os.pathsep.join(map(str, (vllm(version).path, triton().path, ROOT)))
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "ATROPOS_"))}
    environment |= {
        "PYTHONPATH": path,  # of the processes, too, in which vLLM looks at model classes
        "VLLM_CACHE_ROOT": str(CACHE / f"of-vllm-{version}"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", program, *arguments]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise NotProven(f"vLLM {version}: {program} {' '.join(arguments)} took over {DEADLINE_S:.0f} s") from error
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        output = "\n".join((done.stdout + done.stderr).splitlines()[-40:])
        raise NotProven(f"vLLM {version}: {program} {' '.join(arguments)} ended with {done.returncode}:\n{output}")
    return [json.loads(line) for line in lines]
