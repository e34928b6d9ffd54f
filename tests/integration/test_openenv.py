"""Real OpenEnv servers, of the package in a virtual environment of its own: the game of scripts/openenv_guess.py,
tools, sessions, and what the server does with invalid actions.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.failures import GroupLost
from atroposlib.testing.fake_inference_server import Answer, FakeInferenceServer
from environments.openenv_server import OpenEnv
from tests.integration.conftest import REPOSITORY
from tests.integration.launched import launch
from tests.serving import free_port
from tests.unit.environments.support import running_env

pytestmark = [pytest.mark.slow, pytest.mark.rotating(together=True), pytest.mark.timeout(900)]

GUESS = REPOSITORY / "scripts/openenv_guess.py"  # which docs/other_ecosystems.md starts
TOOLS = '''
from fastmcp import FastMCP
from openenv.core.env_server import Observation, State, create_fastapi_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation


class Shop(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        mcp, self.sold = FastMCP("shop"), 0

        @mcp.tool
        def sell(apples: int) -> str:
            """Sell some apples."""
            self.sold += apples
            return f"{self.sold} sold"

        super().__init__(mcp)

    def reset(self, seed=None, episode_id=None, **others):
        return Observation()

    def _step_impl(self, action, timeout_s=None, **others):
        return Observation()

    @property
    def state(self):
        return State(sold=self.sold)


app = create_fastapi_app(Shop, CallToolAction, CallToolObservation, max_concurrent_envs=2)
'''
# One process for all of them: it takes seconds to import the package.
SERVE_ALL = """
import runpy
import sys
import threading
import uvicorn

for number, (file, port) in enumerate(zip(sys.argv[1::2], sys.argv[2::2])):
    app = runpy.run_path(file, run_name=f"server_{number}")["app"]
    server = uvicorn.Server(uvicorn.Config(app, port=int(port), log_level="warning"))
    threading.Thread(target=server.run, daemon=True).start()
threading.Event().wait()
"""


@pytest.fixture(scope="module")
def openenv_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The interpreter that has OpenEnv."""
    folder = tmp_path_factory.mktemp("openenv") / "venv"
    script = str(REPOSITORY / "scripts/openenv_venv.sh")
    done = subprocess.run(
        [script, str(folder)], env={"PYTHON": sys.executable, **_environ()}, capture_output=True, text=True, timeout=800
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"OpenEnv 0.10.0 is in {folder}" in done.stdout
    return str(folder / "bin/python")


def _environ() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHON")}


@contextmanager
def running(command: Sequence[str], folder: Path) -> Iterator[None]:
    with (folder / "openenv.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=_environ(), cwd=folder)
    try:
        yield
    finally:
        process.kill()
        process.wait(30)


def guess_program(*changes: tuple[str, str]) -> str:
    text = GUESS.read_text()
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    return text


@pytest.fixture(scope="module")
def servers(openenv_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The addresses of four servers, which may still be starting."""
    folder = tmp_path_factory.mktemp("openenv_servers")
    validated = (
        "    number: int\n",
        "    number: int\n\n    @field_validator('number')\n    @classmethod\n    def is_small(cls, value):\n"
        "        if value > 99:\n            raise ValueError('too large')\n        return value\n",
    )
    raising = (
        "        self.tries += 1\n",
        "        self.tries += 1\n        if action.number == 66:\n            1 / 0\n",
    )
    importing = ("import uvicorn\n", "import uvicorn\nfrom pydantic import field_validator\n")
    programs = {
        "guess": guess_program(),
        "one_session": guess_program(("max_concurrent_envs=64", "max_concurrent_envs=1")),
        "validating": guess_program(validated, raising, importing),
        "tools": TOOLS,
    }
    command, urls = [openenv_python, "-c", SERVE_ALL], {}
    for name, program in programs.items():
        file, port = folder / f"{name}.py", free_port()
        file.write_text(program)
        command += [str(file), str(port)]
        urls[name] = f"http://127.0.0.1:{port}"
    with running(command, folder):
        yield urls


async def group_of(folder: Path, url: str, answer: Answer, **fields: Any) -> tuple[OpenEnv, Any]:
    async with (
        FakeInferenceServer(answer) as server,
        running_env(OpenEnv, folder, server, url=url, startup_timeout=120.0, session_wait=60.0, **fields) as env,
    ):
        group, _ = await env.collect_trajectories({"seed": 7})
        return env, group


def search(prompt: str) -> str:
    """Halve the range by the hints so far."""
    low, high = 1, 9
    for guess, hint in re.findall(
        r'assistant\n(?:{"number": )?(\d)}?<\|im_end\|>\n<\|im_start\|>user\n(Too \w+)', prompt
    ):
        low, high = (int(guess) + 1, high) if hint == "Too low" else (low, int(guess) - 1)
    return str((low + high) // 2)


async def test_the_game_of_the_page_is_won_in_its_turns(servers: dict[str, str], tmp_path: Path) -> None:
    env, group = await group_of(tmp_path, servers["guess"], search)
    assert group["scores"] == [1.0] * 4
    assert "of your messages is one action, its number: a whole number. Reply" in group["messages"][0][0]["content"]
    assert all(1 <= state["turns"] <= 4 for state in env.played)


async def test_a_server_of_one_session_plays_one_episode_after_another(servers: dict[str, str], tmp_path: Path) -> None:
    _, group = await group_of(tmp_path, servers["one_session"], search)
    assert group["scores"] == [1.0] * 4


@pytest.mark.parametrize(
    ("value", "settings", "score"),
    [
        ('"x"', {"max_turns": 1, "unfinished_score": -1.0}, -1.0),  # refused, and told
        ('"x"', {}, 1.0),
        ("100", {"invalid_score": -2.0}, -2.0),  # a custom validator raises, and OpenEnv ends the session
        ("66", {"step_error": "invalid"}, 1.0),  # the environment raises
    ],
)
async def test_what_the_server_refuses_or_raises(
    servers: dict[str, str], value: str, settings: dict[str, Any], score: float, tmp_path: Path
) -> None:
    def model(prompt: str) -> str:
        return f'{{"number": {search(prompt) if "Invalid action" in prompt else value}}}'

    env, group = await group_of(tmp_path, servers["validating"], model, action_format="json", **settings)
    assert group["scores"] == [score] * 4
    assert [state["invalid"] for state in env.played] == [1] * 4


async def test_an_environment_that_raises_fails_its_rollouts(servers: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(GroupLost, match=r"4 of its 4 rollouts failed \(4 environment\).* raised: division by zero"):
        await group_of(tmp_path, servers["validating"], lambda prompt: "66")


async def test_tools_of_an_mcp_environment_and_a_score_in_its_state(servers: dict[str, str], tmp_path: Path) -> None:
    def model(prompt: str) -> str:
        assert '{"name": "sell", "description": "Sell some apples."' in prompt
        return (
            "Done."
            if "user\n3 sold" in prompt
            else '<tool_call>{"name": "sell", "arguments": {"apples": 3}}</tool_call>'
        )

    fields = {"reward": "state.sold", "task": "Sell 3 apples.", "max_new_tokens": 100}
    env, group = await group_of(tmp_path, servers["tools"], model, **fields)
    assert group["scores"] == [3.0] * 4
    assert {scored.outcome for scored in env.scored} == {"stopped"}


@pytest.mark.nightly
def test_one_flag_trains_on_an_openenv_server(openenv_python: str, tmp_path: Path) -> None:
    run, port, game = tmp_path / "openenv", free_port(), tmp_path / "guess.py"
    game.write_text(guess_program())
    ports = ["--api-port", str(free_port()), "--vllm-port", str(free_port())]
    short = ["--env.max_new_tokens", "8", "--env.steps_per_eval", "0", "--env.eval_at_start", "false"]
    with running([openenv_python, str(game), str(port)], tmp_path):
        words = ["openenv", "--env.url", f"http://localhost:{port}", "--runs", str(tmp_path), "--run-name", run.name]
        done = launch("train", *words, "--steps", "1", *ports, *short, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert "Step 1/1" in done.stdout
    (row,) = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert row["rollouts"] == 64
    assert row["logprob_diff_max"] < 1e-2
    assert row["grad_norm"] > 0
    assert row["reward_mean"] > 0
    groups = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert all("Guess a number from 1 to 9." in json.dumps(group["messages"]) for group in groups)
