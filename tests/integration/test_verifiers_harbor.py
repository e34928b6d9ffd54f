"""verifiers' own taskset of harbor's tasks, from a registry on disk: an agent with a shell, scored by its script.

It needs Python 3.12 or newer, and makes `.venv-verifiers` anew with it. A server that answers by a script stands in for
the model. harbor's tasks write to /tests and /logs of this machine.
"""

import json
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import REPOSITORY
from tests.integration.test_verifiers import playing, tool_tokenizer

__all__ = ["tool_tokenizer"]

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(3000),
    pytest.mark.skipif(
        os.geteuid() != 0, reason="harbor's tasks write to /tests and /logs: run it as root in a container"
    ),
]

AUTHOR = ["-c", "user.name=author", "-c", "user.email=author@localhost"]
SCRIPT = """#!/bin/bash
if [ "$(cat sum.txt)" = "$EXPECTED" ]; then echo 1; else echo 0.25; fi > /logs/verifier/reward.txt
"""


@pytest.fixture(scope="session", autouse=True)
def harbor_is_installed() -> None:
    done = subprocess.run(
        [REPOSITORY / "scripts/verifiers_setup.sh", "harbor"],
        timeout=1800,
        stdin=subprocess.DEVNULL,
        capture_output=True,
    )
    if b"which harbor needs" in done.stderr:
        pytest.skip("this machine has no Python 3.12: set PYTHON=/path/to/python3.12")
    assert done.returncode == 0, done.stderr


def registry(folder: Path, sums: Sequence[tuple[int, int]]) -> Path:
    """Write tasks in harbor's form into a repository, and the registry that lists them."""
    tasks = []
    for a, b in sums:
        task = folder / f"sum-{a}-{b}"
        (task / "tests").mkdir(parents=True)
        (task / "environment").mkdir()
        (task / "instruction.md").write_text(f"Add {a} and {b}. Write the sum to sum.txt.")
        (task / "tests/test.sh").write_text(SCRIPT)
        (task / "task.toml").write_text(f'version = "1.0"\n[verifier]\nenv = {{ EXPECTED = "{a + b}" }}\n')
        tasks.append({"name": task.name, "git_url": str(folder), "path": task.name})
    for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message", "Tasks"]):
        subprocess.run(["git", *AUTHOR, *words], check=True, cwd=folder)
    path = folder / "registry.json"
    path.write_text(json.dumps([{"name": "sums", "version": "1.0", "description": "Sums.", "tasks": tasks}]))
    return path


async def test_harbors_tasks_are_played_and_scored(tool_tokenizer: Any, tmp_path: Path) -> None:
    call = '<tool_call>\n{"name": "bash", "arguments": {"command": "echo %d > sum.txt"}}\n</tool_call><|im_end|>'
    asked: list[str] = []

    def answer(ids: Sequence[int]) -> list[int]:
        prompt = tool_tokenizer.decode(ids)
        asked.append(prompt)
        ((a, b),) = re.findall(r"Add (\d+) and (\d+)", prompt)
        is_second_rollout = len(asked) > 2
        text = "Done.<|im_end|>" if "<tool_response>" in prompt else call % (int(a) + int(b) + is_second_rollout)
        return list(tool_tokenizer.encode(text, add_special_tokens=False))

    path = registry(tmp_path, [(n, n + 1) for n in range(1, 5)])
    fields = {
        "taskset": "harbor",
        "taskset_arguments": {"dataset": "sums@1.0", "registry_path": str(path)},
        "harness": "bash",
        "allow_host_execution": True,
        "rollouts_at_once": 1,
    }
    async with playing(tool_tokenizer, answer, **fields) as (env, _):
        group, _ = await env.collect_trajectories(await env.get_next_item())
    assert isinstance(group, dict)
    assert group["scores"] == [1.0, 0.25]
    assert "failed" not in group
    assert len(asked) == 4
    for tokens, masks in zip(group["tokens"], group["masks"], strict=True):
        trained = tool_tokenizer.decode([mask for mask in masks if mask != -100])
        assert trained.count("<tool_call>") == 1
        assert trained.endswith("Done.<|im_end|>")
        assert "<tool_response>" in tool_tokenizer.decode(tokens)
