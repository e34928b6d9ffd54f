"""A mode's launcher from end to end, on a tiny model: the restart mode, whose vLLM is the trainer's and not the
launcher's.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from tests.integration.conftest import REPOSITORY, session_members
from tests.serving import free_port

pytestmark = pytest.mark.timeout(700)


@pytest.mark.rotating
def test_the_restart_script_trains_and_leaves_nothing_behind(llama_folder: Path) -> None:
    run_name = f"test-{uuid.uuid4().hex[:8]}"
    folder = REPOSITORY / "runs" / run_name
    command = [
        str(REPOSITORY / "scripts/run_gsm8k_restart.sh"),
        str(llama_folder),
        "--dataset",
        "arithmetic",
        "--steps",
        "1",
        "--run-name",
        run_name,
    ]
    done = subprocess.run(
        [*command, "--api-port", str(free_port()), "--vllm-port", str(free_port())],
        env={**os.environ, "ATROPOS_PYTHON": sys.executable, "PYTHONPATH": str(REPOSITORY)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    try:
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
        assert "[Bridge] Policy version 1 is served" in done.stdout
        assert "Step 1/1" in done.stdout
        (row,) = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert row["policy_version"] == 1
        assert row["sync_stall_s"] > 0
        assert (folder / "reward.png").exists()
        assert list(folder.glob("checkpoints/final_model/*.safetensors"))
        servers = [int(pid) for pid in re.findall(r"Started vLLM \(pid (\d+)", done.stdout)]
        assert len(servers) == 2
        assert all(session_members(pid) == [] for pid in servers)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
