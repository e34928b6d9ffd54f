import asyncio
import contextlib
import json
import shlex
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from atroposlib.agents.client import EndpointClient
from atroposlib.agents.program import Ran
from atroposlib.child_processes.sandbox import bubblewrap
from atroposlib.envs.authors.author_errors import shown
from atroposlib.envs.commands.serve import serve_once_built
from atroposlib.envs.errors import DataError
from atroposlib.envs.failures import GroupLost, attempt
from atroposlib.testing.fake_inference_server import FakeInferenceServer
from environments.agent_server import AgentConfig, AgentEnv, AgentTask, read_tasks, reward_of
from tests.unit.agents.support import Running, running
from tests.unit.environments.support import running_env, sampled_texts

pytestmark = pytest.mark.services

OPENAI = """
import sys, openai
client = openai.OpenAI()
messages = [{"role": "user", "content": sys.argv[1]}]
for _ in range(2):
    reply = client.chat.completions.create(model="gpt-x", messages=messages)
    messages.append({"role": "assistant", "content": reply.choices[0].message.content})
    messages.append({"role": "user", "content": "sure?"})
print(reply.choices[0].message.content)
"""
ANTHROPIC = """
import os, anthropic
reply = anthropic.Anthropic().messages.create(
    model="claude-x", max_tokens=32, messages=[{"role": "user", "content": os.environ["AGENT_TASK"]}])
open("answer.txt", "w").write(reply.content[0].text)
"""
CALLS_ONCE = """
import os, json, urllib.request
body = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, key)).read()
"""


def agent(folder: Path, source: str, *arguments: str) -> str:
    """The command line of an agent of this source."""
    path = folder / "agent.py"
    path.write_text(source)
    return shlex.join([sys.executable, str(path), *arguments])


def tasks(folder: Path, *rows: dict[str, Any]) -> str:
    path = folder / "tasks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


async def group_of(folder: Path, command: str, answer: Any = lambda prompt: "It is 4.", **fields: Any) -> Any:
    async with FakeInferenceServer(answer) as server:
        async with running_env(AgentEnv, folder, server, command=command, **fields) as env:
            try:
                group, _ = await env.collect_trajectories(await env.training_item(0))
            finally:
                await env.close()
        return group


@pytest.mark.slow
async def test_an_openai_agent_is_trained_on_all_of_its_turns_and_scored_by_what_it_prints(tmp_path: Path) -> None:
    answers = iter(["Well.", "It is 4."] * 2 + ["Well.", "It is 5."] * 2)
    rows = [{"task": "2 + 2?", "answer": 4}, {"task": "2 + 2?", "answer": 4}]
    group = await group_of(
        tmp_path,
        agent(tmp_path, OPENAI, "{task}"),
        lambda prompt: next(answers),
        tasks_path=tasks(tmp_path, *rows),
        agents_at_once=1,
    )
    assert len(group["scores"]) == 4
    for text, score in zip(sampled_texts(group), group["scores"], strict=True):
        assert text.count("<|im_end|>") == 2
        assert score == float("It is 4." in text.rpartition("<|im_end|>")[0].rpartition("<|im_end|>")[2])
    assert group["policy_versions"] is not None


@pytest.mark.slow
async def test_an_anthropic_agent_is_scored_by_a_command_in_its_directory(tmp_path: Path) -> None:
    scorer = "import json; print(json.dumps({'reward': 0.5 * ('4' in open('answer.txt').read())}))"
    group = await group_of(
        tmp_path, agent(tmp_path, ANTHROPIC), score_command=shlex.join([sys.executable, "-c", scorer]), group_size=2
    )
    assert group["scores"] == [0.5, 0.5]


WITH_HELPER = """
import os, openai
client = openai.OpenAI()
asked = [{"role": "user", "content": os.environ["AGENT_TASK"]}]
client.chat.completions.create(model="any", messages=asked)
helper = {"X-Session-Id": "helper", "X-Parent-Session-Id": os.environ["AGENT_SESSION_ID"]}
for question in ("first", "second"):
    said = [{"role": "user", "content": question}]
    reply = client.chat.completions.create(model="any", messages=said, extra_headers=helper)
print(reply.choices[0].message.content)
"""


@pytest.mark.slow
async def test_a_sub_agents_turns_are_sequences_of_the_rollout_with_its_score(tmp_path: Path) -> None:
    rows = [{"task": "2 + 2?", "answer": 4}] * 2
    group = await group_of(
        tmp_path, agent(tmp_path, WITH_HELPER), tasks_path=tasks(tmp_path, *rows), group_size=2, max_turns=3
    )
    assert group["rollouts"] == [0, 0, 0, 1, 1, 1]
    assert group["scores"] == [1.0] * 6


ECHOES = CALLS_ONCE.replace("urllib.request.urlopen(", "reply = urllib.request.urlopen(") + (
    "print(json.loads(reply)['choices'][0]['message']['content'])"
)


class Link:
    """Takes groups as the batching API does."""

    env_id = 0

    def __init__(self) -> None:
        self.posts: list[list[Any]] = []

    async def post_groups(self, bodies: list[Any]) -> None:
        self.posts.append(bodies)


@contextlib.asynccontextmanager
async def serving(
    folder: Path, started: Running, **fields: Any
) -> AsyncIterator[tuple[AgentEnv, Link, EndpointClient]]:
    """The environment as under `serve`, before an endpoint of its own process, with its client."""
    rows = tasks(folder, *[{"task": "2 + 2?", "answer": 4}] * 8)
    fields = {"group_size": 2, "max_batches_offpolicy": 1, "agents_at_once": 1, "agent_sandbox": "none"} | fields
    command = agent(folder, ECHOES)
    async with running_env(
        AgentEnv, folder, started.server, command=command, tasks_path=rows, agent_endpoint=started.url, **fields
    ) as env:
        env.status_dict = {"unallocated_fraction": 1.0}
        env._env_run.link = link = Link()  # type: ignore[assignment]
        yield env, link, EndpointClient(started.url)


async def test_a_group_that_is_held_when_the_environment_is_killed_costs_retries_only(tmp_path: Path) -> None:
    of_batches = {"batch_size": 4, "max_items_per_batch": 2}
    async with running(lambda prompt: "4", tmp_path / "turns.journal", models=("*",)) as started:
        async with serving(tmp_path, started, **of_batches) as (env, link, endpoint):
            await env.handle_env(await env.get_next_item())
            held = await endpoint.unended("agent~train~")
            assert (len(held), link.posts, started.server.hits["/generate"]) == (2, [], 2)
        async with serving(tmp_path, started, **of_batches) as (env, link, endpoint):
            again = await env.get_next_item()
            await env.handle_env(again)
            assert (again.number, link.posts, started.server.hits["/generate"]) == (0, [], 2)
            assert await endpoint.unended("agent~train~") == held
            await env.handle_env(await env.get_next_item())
            assert started.server.hits["/generate"] == 4
            assert [len(post) for post in link.posts] == [1, 1]
            assert len({post[0].idempotency_key for post in link.posts}) == 2
            assert await endpoint.unended("agent~train~") == []


async def test_the_sessions_of_a_group_that_is_thrown_away_end(tmp_path: Path) -> None:
    answers = iter(["4", "4", "4", "5", "5", "5"])
    async with running(lambda prompt: next(answers), models=("*",)) as started:
        more = {"batch_size": 2, "max_items_per_batch": 3}
        async with serving(tmp_path, started, **more) as (env, link, endpoint):
            await env.handle_env(await env.get_next_item())
            assert len(await endpoint.unended("agent~train~")) == 2
            await env.handle_env(await env.get_next_item())
            assert len(link.posts) == 1
            assert await endpoint.unended("agent~train~") == []


@pytest.mark.parametrize(
    ("output", "status", "reward"),
    [
        ("0.5\n", 0, 0.5),
        ("so:\n1\n", 0, 1.0),
        ('{"reward": -2}', 0, -2.0),
        ("fine", 0, 1.0),
        ("fine", 1, 0.0),
        ("[" * 100_000, 1, 0.0),
        ("true", 0, 1.0),
        ("0.5", 1, None),
        ("fine", 2, None),
        ("NaN", 0, None),
        ("nan", 0, None),
        ("-inf", 0, None),
        ("-Infinity", 0, None),
        ("1e999", 0, None),
        ("1" + "0" * 400, 0, None),
        ("9" * 5000, 0, None),
        ('{"reward": NaN}', 0, None),
        ('{"reward": 1' + "0" * 400 + "}", 0, None),
    ],
)
def test_a_scorers_reward_is_a_finite_number_or_its_exit_status(output: str, status: int, reward: float | None) -> None:
    assert reward_of(Ran(status, output, "", None)) == reward


FILLS = "[open(f'f{n}', 'wb').write(bytes(2**19)) for n in range(9)]"
FORKS = "import subprocess; [subprocess.Popen(['sleep', '60']) for _ in range(30)]"
FORKS_AWAY = (
    "import subprocess, sys\nrests = [sys.executable, '-c', 'import time; time.sleep(60)', __file__]\n"
    "[subprocess.Popen(rests, start_new_session=True) for _ in range(14)]"
)
DEEP = "for _ in range(1500): os.mkdir('a'); os.chdir('a')"
TOO_DEEP = "for _ in range(25): os.mkdir('a' * 200); os.chdir('a' * 200)"
WAITS = "import time; time.sleep(60)"


@pytest.mark.parametrize(
    ("does", "words"),
    [
        (f"{CALLS_ONCE}\nraise SystemExit('no more milk')", "no more milk"),
        ("print(4)", "called no model: does it read OPENAI_BASE_URL or ANTHROPIC_BASE_URL"),
        ("raise SystemExit('no key')", "failed before it called OPENAI_BASE_URL or ANTHROPIC_BASE_URL: .*no key"),
        (f"{CALLS_ONCE}\n{WAITS}", "longer than"),
        (f"{CALLS_ONCE}\n{FILLS}; {WAITS}", "MB"),
        (f"{CALLS_ONCE}\n{FORKS}; {WAITS}", "processes"),
        (f"{CALLS_ONCE}\n{FORKS_AWAY}; {WAITS}", "processes"),
        (f"{CALLS_ONCE}\n{DEEP}\n{WAITS}", "MB"),
        (f"{CALLS_ONCE}\n{TOO_DEEP}\n{WAITS}", "cannot be counted"),
        (f"{CALLS_ONCE}\nbytearray(2**31)", "MemoryError"),
    ],
)
async def test_an_agent_that_fails_is_a_failed_rollout_with_its_cause_and_leaves_nothing(
    tmp_path: Path, does: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folders := tmp_path / "folders").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folders))
    with pytest.raises(GroupLost, match=words):
        await group_of(
            tmp_path, agent(tmp_path, does), group_size=2, agent_limit_s=4.0, agent_folder_mb=1,
            agent_processes=12, agent_memory_mb=1024, agent_sandbox="none",
        )  # fmt: skip
    assert not [process for process in psutil.process_iter(["cmdline"]) if _is_of(process, tmp_path)]
    assert not list(folders.glob("atropos-agent-*"))


def _is_of(process: psutil.Process, folder: Path) -> bool:
    return str(folder / "agent.py") in (process.info["cmdline"] or [])


def test_a_log_shows_a_task_without_its_files() -> None:
    assert shown(AgentTask("2 + 2?", "4", {"data.csv": "a,b"})) == "AgentTask(task='2 + 2?', answer='4')"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"command": ""}, "there is no agent to start: give --env.command"),
        ({"command": "pyton agent.py"}, "there is no program 'pyton' to run: correct --env.command"),
        ({"command": f"{__file__} {{task}}"}, "is not executable: write what runs it in --env.command"),
        ({"command": "python", "score_command": "./grade"}, "no program './grade' to run: correct --env.score_command"),
    ],
)
async def test_a_program_that_is_not_there_ends_the_environment_at_its_start(
    tmp_path: Path, fields: dict[str, str], words: str
) -> None:
    with pytest.raises(DataError, match=words):
        await group_of(tmp_path, **fields)


@pytest.mark.parametrize("fields", [{}, {"command": "python", "tasks_path": "none.jsonl"}])
async def test_what_is_not_there_is_told_before_peers_are_waited_for(fields: dict[str, str]) -> None:
    async def built(start: object) -> Any:
        raise AssertionError("it waited for its peers")

    with pytest.raises(DataError, match=r"there is no agent|env.tasks_path: none.jsonl does not exist"):
        await serve_once_built(AgentConfig.model_validate(fields), "agent", built)


@pytest.mark.skipif(bubblewrap() is None, reason="the machine lets nobody make namespaces")
async def test_an_agent_writes_nothing_outside_of_its_directory(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    source = CALLS_ONCE + f"\ntry:\n    open({str(outside)!r}, 'w')\nexcept OSError:\n    print(7)"
    rows = [{"task": "?", "answer": 7, "files": {"a/b.txt": "x"}}] * 2
    group = await group_of(tmp_path, agent(tmp_path, source), tasks_path=tasks(tmp_path, *rows), group_size=2)
    assert group["scores"] == [1.0, 1.0]
    assert not outside.exists()


KEYLESS = (
    CALLS_ONCE
    + """
import urllib.error
try:
    urllib.request.urlopen(os.environ["ANTHROPIC_BASE_URL"] + "/sessions")
except urllib.error.HTTPError as error:
    print(error.code)
"""
)


async def test_an_agent_that_leaves_its_key_out_opens_no_session(tmp_path: Path) -> None:
    rows = tasks(tmp_path, *[{"task": "?", "answer": 401}] * 2)
    group = await group_of(tmp_path, agent(tmp_path, KEYLESS), tasks_path=rows, group_size=2)
    assert group["scores"] == [1.0, 1.0]


async def test_an_agent_that_waits_for_its_turn_is_not_late(tmp_path: Path) -> None:
    async with (
        FakeInferenceServer(lambda prompt: "4") as server,
        running_env(AgentEnv, tmp_path, server, command=agent(tmp_path, CALLS_ONCE), agents_at_once=1) as env,
    ):
        await env._slots.acquire()
        item = await env.training_item(0)
        waits = asyncio.create_task(attempt(env.rollouts(item, 1, "train", 1.0, 1.0), 0.05))
        assert await asyncio.wait([waits], timeout=0.5) == (set(), {waits})
        waits.cancel()
        await asyncio.wait([waits])
        await env.close()


def test_tasks_are_read_or_refused_with_their_line(tmp_path: Path) -> None:
    for row in ({}, {"task": "?", "files": {"../up": ""}}, {"task": "?", "files": {"/etc/x": ""}}):
        with pytest.raises(DataError, match=r"tasks.jsonl:1"):
            read_tasks(Path(tasks(tmp_path, row)))


def test_a_line_of_tasks_ends_at_its_newline_alone(tmp_path: Path) -> None:
    path, task = tmp_path / "tasks.jsonl", "a\u2028b\u0085c"
    path.write_text(
        "\ufeff" + f"{json.dumps({'task': task}, ensure_ascii=False)}\r\n" * 2, encoding="utf-8", newline=""
    )
    assert [each.task for each in read_tasks(path)] == [task] * 2


def test_a_file_of_tasks_that_is_missing_is_named_by_its_flag(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read --env.tasks_path .*none.jsonl: No such file"):
        read_tasks(tmp_path / "none.jsonl")
