"""What an environment lacks is said before it waits for its peers: vLLM may take minutes to load."""

from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.commands.serve import serve_once_built
from atroposlib.envs.config import BaseEnvConfig
from atroposlib.envs.errors import DataError
from environments.agent_server import AgentConfig
from environments.coding_server import CodingConfig
from environments.countdown_server import CountdownConfig
from environments.gsm8k_server import GSM8kEnvConfig
from environments.math_server import MathConfig
from environments.self_check_server import SelfCheckConfig


async def never(start: object) -> Any:
    raise AssertionError("it waited for its peers")


@pytest.mark.parametrize(
    ("kind", "fields", "says"),
    [
        (AgentConfig, {}, "there is no agent to start"),
        (AgentConfig, {"command": "pyton agent.py"}, "there is no program 'pyton'"),
        (
            AgentConfig,
            {"command": "python agent.py", "tasks_path": "none.jsonl"},
            "--env.tasks_path none.jsonl: No such",
        ),
        (CodingConfig, {"tasks_path": "none.jsonl"}, "cannot read --env.tasks_path none.jsonl: No such file"),
        (CountdownConfig, {"dataset_path": "none.jsonl"}, "cannot read --env.dataset_path none.jsonl: No such file"),
        (GSM8kEnvConfig, {"dataset_path": "none"}, "cannot read --env.dataset_path none: No such file"),
        (MathConfig, {"dataset_path": "none"}, "cannot read --env.dataset_path none: No such file"),
        (SelfCheckConfig, {"dataset_path": "none"}, "cannot read --env.dataset_path none: No such file"),
    ],
)
async def test_what_is_missing_is_said_at_the_start(
    kind: type[BaseEnvConfig], fields: dict[str, str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=says):
        await serve_once_built(kind(**fields), "env", never)


async def test_input_that_is_there_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text("")
    with pytest.raises(AssertionError, match="it waited"):
        await serve_once_built(CodingConfig(tasks_path=str(tmp_path / "tasks.jsonl")), "env", never)
