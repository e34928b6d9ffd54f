"""The agent of docs/agents.md and those of scripts/agents, on their own packages in a virtual environment of their own,
call the endpoint.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from atroposlib.testing.fake_inference_server import FakeInferenceServer
from environments.agent_server import AgentEnv
from tests.integration.conftest import REPOSITORY
from tests.unit.environments.support import running_env, sampled_texts

pytestmark = [pytest.mark.services, pytest.mark.slow, pytest.mark.rotating(together=True), pytest.mark.timeout(900)]

PAGE = (REPOSITORY / "docs/agents.md").read_text()
PROGRAMS = dict(re.findall(r"^`(\w+\.py)` is [^\n]*:\n\n```python\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE))
PROGRAMS |= {path.name: path.read_text() for path in (REPOSITORY / "scripts/agents").glob("*.py")}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 40, "b": 2}}</tool_call>'
COMMAND = "```mswea_bash_command\necho COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo $((6 * 7))\n```"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The interpreter that has the agents' packages."""
    folder = tmp_path_factory.mktemp("agents") / "venv"
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHON")}
    done = subprocess.run(
        [str(REPOSITORY / "scripts/agents_venv.sh"), str(folder)],
        env={**environ, "PYTHON": sys.executable}, capture_output=True, text=True, timeout=800,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return str(folder / "bin/python")


def answer(prompt: str) -> str:
    """What a model says that uses what it is given: the tool, whose result it repeats, or the command."""
    if "mswea_bash_command" in prompt:
        return COMMAND
    return "It is 42." if "42.0" in prompt or "add" not in prompt else CALL


@pytest.mark.parametrize(
    ("program", "sampled"),
    [
        ("my_agent.py", ["It is 42."]),
        ("openai_agent.py", ["It is 42."]),
        ("claude_loop.py", [CALL, "It is 42."]),
        ("mini_swe.py", [COMMAND]),
    ],
)
async def test_an_agent_of_the_page_is_trained_on_what_it_sampled(
    program: str, sampled: list[str], python: str, tmp_path: Path
) -> None:
    (tmp_path / program).write_text(PROGRAMS[program])
    (tmp_path / "tasks.jsonl").write_text('{"task": "What is 40 plus 2?", "answer": 42}\n' * 2)
    command = f"env LITELLM_LOCAL_MODEL_COST_MAP=True {python} {tmp_path / program} {{task}}"
    settings = {"command": command, "tasks_path": str(tmp_path / "tasks.jsonl"), "max_new_tokens": 128}
    async with (
        FakeInferenceServer(answer) as server,
        running_env(AgentEnv, tmp_path, server, group_size=2, **settings) as env,
    ):
        try:
            group, _ = await env.collect_trajectories(await env.training_item(0))
        finally:
            await env.close()
    assert group is not None
    assert group["scores"] == [1.0, 1.0]
    assert sampled_texts(group) == ["".join(f"{text}<|im_end|>" for text in sampled)] * 2
