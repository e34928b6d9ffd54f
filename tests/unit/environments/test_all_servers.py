"""What holds for every server in `environments/`."""

import asyncio
import json
import sys
from pathlib import Path

import pytest

from atroposlib.envs.commands.cli import load_tree
from atroposlib.testing.fake_inference_server import FakeInferenceServer
from atroposlib.testing.tiny_tokenizer import save_tiny_tokenizer
from tests.unit.environments.support import env_class

FOLDER = Path(__file__).parents[3] / "environments"
SERVERS = sorted(path.stem for path in FOLDER.glob("*_server.py"))


@pytest.mark.parametrize("module", SERVERS)
@pytest.mark.parametrize("command", ["serve", "process", "evaluate"])
def test_server_takes_the_guides_flags(module: str, command: str) -> None:
    flags = ["--env.group_size", "8", "--openai.base_url", "http://127.0.0.1:9009/v1", "--env.max_new_tokens", "32"]
    tree = load_tree(env_class(module), command, flags, module)
    assert tree.env.group_size == 8
    assert tree.openai[0].base_url == "http://127.0.0.1:9009/v1"
    assert tree.env.max_new_tokens == 32


@pytest.mark.services
@pytest.mark.parametrize("module", ["countdown_server", "calculator_tool_server", "letter_counting_server"])
async def test_server_runs_offline_as_a_script(tmp_path: Path, module: str) -> None:
    tokenizer = save_tiny_tokenizer(tmp_path / "tokenizer")
    flags = [
        "--env.tokenizer_name",
        str(tokenizer),
        "--env.total_steps",
        "1",
        "--env.group_size",
        "2",
        "--env.heldout_size",
        "2",
    ]
    async with FakeInferenceServer(lambda prompt: ["<answer>1</answer>", "no"]) as server:
        command = [
            sys.executable,
            str(FOLDER / f"{module}.py"),
            "process",
            *flags,
            "--openai.base_url",
            server.base_url,
        ]
        pipe, out = asyncio.subprocess.PIPE, asyncio.subprocess.STDOUT
        process = await asyncio.create_subprocess_exec(*command, cwd=tmp_path, stdout=pipe, stderr=out)
        printed, _ = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 0, printed.decode()
    written = next((tmp_path / "data").glob("*.jsonl"))
    assert len(json.loads(written.read_text())["tokens"]) == 2
    assert written.with_suffix(".html").exists()
