"""The agent endpoint of a run: who gets one, what it is told, and who may open it."""

import os
from pathlib import Path

import pytest
import yaml

from atropos_launcher.commands.train import described
from atropos_launcher.paths import environments
from atropos_launcher.plan.command_line import read_command_line
from atropos_launcher.plan.sections import ask_environment
from atropos_launcher.service import AGENTS
from atroposlib.agents.flags import TOKEN
from atroposlib.flags import ConfigError
from tests.unit.launcher.plans import no_processes, plan

__all__ = ["no_processes"]
pytestmark = pytest.mark.usefixtures("no_processes")
ASKS = ("agent", "--env.command", "python agent.py {task}", "--model", "org/model-1.5B")


def test_an_environment_with_agents_gets_an_endpoint_that_is_started_again_and_keeps_its_turns() -> None:
    made = plan(*ASKS)
    services = {service.name: service for service in made.services}
    endpoint = services[AGENTS]
    assert endpoint.health == "http://127.0.0.1:9200/health"
    assert endpoint.restarts
    words = endpoint.command
    assert words[words.index("--journal") + 1] == "/run/agents.journal"
    assert words[words.index("--server") + 1] == "http://127.0.0.1:9001/v1"
    assert words[words.index("--model") + 1] == "org/model-1.5B"
    assert words[words.index("--api") + 1] == "http://127.0.0.1:8000"
    assert made.environments["env"].resolved["env"]["agent_endpoint"] == "http://127.0.0.1:9200"
    token = endpoint.environment[TOKEN]
    assert token
    assert [name for name, each in services.items() if each.environment.get(TOKEN) == token] == [AGENTS, "env"]
    assert not [name for name, text in made.files.items() if token in text]
    assert not [word for each in services.values() for word in each.command if token in word]


def test_a_dry_run_shows_no_token() -> None:
    asked = read_command_line([*ASKS, "--dry-run"])
    made = plan(*ASKS)
    shown = described(made, asked)
    assert f"{TOKEN}=... " in shown
    assert not [each for service in made.services if (each := service.environment.get(TOKEN)) and each in shown]


@pytest.mark.services
def test_the_environments_file_does_not_hide_the_variable_with_the_token() -> None:
    program = (str(environments() / "agent_server.py"),)
    resolved, lacks = ask_environment("agent", program, {}, [], {"PATH": os.environ["PATH"]})
    assert lacks == ['there is no agent to start: give --env.command "python my_agent.py {task}"']
    assert "agent_limit_s" in resolved["env"]
    assert "agent_endpoint_token" not in resolved["env"]


def test_no_endpoint_is_started_for_others_nor_for_one_that_names_its_own() -> None:
    assert AGENTS not in [service.name for service in plan("arithmetic").services]
    made = plan(*ASKS, "--env.agent_endpoint", "http://127.0.0.1:9300")
    assert AGENTS not in [service.name for service in made.services]
    assert made.environments["env"].resolved["env"]["agent_endpoint"] == "http://127.0.0.1:9300"


def test_an_environment_of_another_model_is_told_to_start_its_own_endpoint(tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"
    section = {"file": "agent", "command": "true", "openai": {"base_url": "http://127.0.0.1:7777/v1"}}
    run.write_text(yaml.safe_dump({"model": "org/model-1.5B", "environments": {"agent": section}}))
    with pytest.raises(ConfigError, match=r"agent_endpoint"):
        plan(str(run))
