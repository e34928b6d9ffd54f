"""The four commands of docs/trainer.md by hand, started in its order, with a local model: the lines people are told to
look for must come.

The programs and flags are read out of the page; only the model, the GPUs and the size of the run are replaced.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration.conftest import REPOSITORY
from tests.integration.namespaces import tied

pytestmark = pytest.mark.timeout(600)

EXPECTED = {
    "vllm": [
        "[vLLM Patch] ✓ Shared memory setup complete!",
        "[vLLM Patch] ✓ Weight updater thread started (name: WeightUpdater_TP0)",
        "[vLLM Patch] ✓ Exported 272 params",
        "Uvicorn running on http://127.0.0.1:9001",
    ],
    "trainer": [
        "[Bridge] Mapped 272/272 params from vLLM to trainer",
        "[Bridge] ✓ Gloo group created",
        "[Bridge] ✓ NCCL group created",
        "[Bridge] ✓ All ranks synchronized and ready",
        "Step 1/1",
    ],
}


def documented_commands() -> dict[str, list[str]]:
    """The words of each program's command on the page, by service."""
    blocks = re.findall(r"```bash\n(.*?)```", (REPOSITORY / "docs/trainer.md").read_text(), re.DOTALL)
    (block,) = (block for block in blocks if "grpo.py" in block)
    commands = [shlex.split(line) for line in block.replace("\\\n", " ").splitlines() if line.strip()]
    return dict(zip(("api", "env", "vllm", "trainer"), commands, strict=True))


def replaced(words: list[str], model: str) -> list[str]:
    words = [
        model if word.startswith("Qwen/") else word for word in words if not word.startswith("CUDA_VISIBLE_DEVICES")
    ]
    for flag, value in (("--tensor-parallel-size", "1"), ("--training-steps", "1"), ("--dtype", "float32")):
        if flag in words:
            words[words.index(flag) + 1] = value
    if "--gpu-memory-utilization" in words:  # on a CPU it would be a share of the machine's memory
        at = words.index("--gpu-memory-utilization")
        del words[at : at + 2]
    return words


@pytest.mark.rotating
def test_the_commands_of_the_page_train_by_hand(tmp_path: Path) -> None:
    model = subprocess.run(
        [sys.executable, "-m", "example_trainer.quickstart_model"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout.strip()
    extra = {
        "trainer": [
            "--gradient-accumulation-steps",
            "2",
            "--save-path",
            str(tmp_path / "checkpoints"),
            "--log-dir",
            str(tmp_path),
        ],
        "vllm": ["--max-model-len", "512"],
    }
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "LOGDIR": str(tmp_path),
        "HF_HUB_OFFLINE": "1",
    }
    services: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name, words in documented_commands().items():
            with (tmp_path / f"{name}.log").open("wb") as log:
                command = ["env", *replaced(words, model), *extra.get(name, [])]
                services[name] = subprocess.Popen(
                    tied(command, "TERM"),
                    cwd=REPOSITORY,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        deadline = time.monotonic() + 500
        while services["trainer"].poll() is None:
            dead = [name for name in ("api", "vllm") if services[name].poll() is not None]
            assert not dead, (
                dead,
                (tmp_path / f"{(dead or ['trainer'])[0]}.log").read_text()[-3000:],
            )
            assert time.monotonic() < deadline, (
                dead,
                (tmp_path / f"{(dead or ['trainer'])[0]}.log").read_text()[-3000:],
            )
            time.sleep(1)
        logs = {name: (tmp_path / f"{name}.log").read_text() for name in services}
        assert services["trainer"].returncode == 0, logs["trainer"][-3000:]
        for name, lines in EXPECTED.items():
            for line in lines:
                assert line in logs[name], (name, line)
        assert "built-in arithmetic problems instead of GSM8K" in logs["env"]
    finally:
        for process in services.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
        for process in services.values():
            process.wait(20)
