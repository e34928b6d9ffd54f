"""Harbor's task directories, run from disk: what agents and tests see, and which tasks are refused."""

import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

from atroposlib.agents.harbor import read_harbor_tasks
from atroposlib.child_processes.sandbox import bubblewrap
from atroposlib.envs.errors import DataError
from atroposlib.envs.failures import GroupLost
from atroposlib.testing.fake_inference_server import FakeInferenceServer
from environments.agent_server import AgentEnv
from tests.unit.environments.support import running_env
from tests.unit.environments.test_agent_server import CALLS_ONCE, agent, group_of

EXAMPLE = Path(__file__).with_name("harbor_tasks") / "add_numbers"
pytestmark = [
    pytest.mark.services,
    pytest.mark.skipif(bubblewrap() is None, reason="the machine lets nobody make namespaces"),
]
ADDS = (
    CALLS_ONCE
    + """
total = sum(int(line) for line in open("numbers.txt"))
open("/app/sum.txt", "w").write(str(total))
"""
)


def folders(where: Path, script: str | None = None, settings: str | None = None) -> Path:
    """Two copies of the example, perhaps with other tests or settings."""
    for name in ("first", "second"):
        task = shutil.copytree(EXAMPLE, where / "tasks" / name)
        for path, text in (("tests/test.sh", script), ("task.toml", settings)):
            if text is not None:
                (task / path).write_text(text)
    return where / "tasks"


async def scores_of(folder: Path, source: str, tasks: Path, **fields: Any) -> list[float]:
    programs = folder / "programs"
    programs.mkdir()
    command = agent(programs, source)
    group = await group_of(folder, command, tasks_path=str(tasks), group_size=2, **fields)
    return list(group["scores"])


@pytest.mark.parametrize(
    ("source", "reward"),
    [(ADDS, 1.0), (CALLS_ONCE + "\nopen('sum.txt', 'w').write('9')", 0.25), (CALLS_ONCE, 0.0)],
)
async def test_the_reward_is_what_the_tests_of_the_task_write(tmp_path: Path, source: str, reward: float) -> None:
    assert await scores_of(tmp_path, source, folders(tmp_path)) == [reward] * 2


async def test_an_agent_sees_its_files_and_neither_tests_nor_solutions(tmp_path: Path) -> None:
    tasks = folders(tmp_path)
    source = (
        CALLS_ONCE
        + f"""
seen = [os.path.exists(path) for path in ("/app/numbers.txt", {str(tasks / "first")!r}, "/tests", "/logs/verifier")]
if seen == [True, False, False, False]:
    open("sum.txt", "w").write("10")
"""
    )
    assert await scores_of(tmp_path, source, tasks) == [1.0, 1.0]


async def test_the_tests_see_no_network_no_home_and_no_key_and_write_nothing_else(tmp_path: Path) -> None:
    outside = tmp_path / "outside.txt"
    outside.write_text("a secret")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        script = f"""
reward=1
[ -e {outside} ] && reward=0.1
(exec 3<>/dev/tcp/127.0.0.1/{port}) 2>/dev/null && reward=0.2
[ -n "$OPENAI_API_KEY" ] && reward=0.3
(echo x > /tests/test.sh) 2>/dev/null && reward=0.4
(echo x > /usr/x) 2>/dev/null && reward=0.5
[ "$(pwd)" = /app ] || reward=0.6
python -c 'import json; print(json.dumps({{"reward": '$reward', "other": 0}}))' > /logs/verifier/reward.json
"""
        assert await scores_of(tmp_path, ADDS, folders(tmp_path, script)) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo no luck; exit 1", "wrote no reward: .*1"),
        ("echo many > /logs/verifier/reward.txt", "wrote no reward"),
        ("echo nan > /logs/verifier/reward.txt", "wrote no reward"),
        ("printf '{\"reward\": 1%0400d}' 0 > /logs/verifier/reward.json", "wrote no reward"),
        ("echo 1 > /logs/verifier/reward.txt; sleep 60", "longer than 2 s"),
        ("mkfifo /logs/verifier/reward.json", "wrote no reward"),
        ("mkdir /logs/verifier/reward.txt", "wrote no reward"),
        ("mkfifo /logs/verifier/reward.txt; echo '{\"reward\": 1}' > /logs/verifier/reward.json", "wrote no reward"),
        ("ln -s /dev/zero /logs/verifier/reward.txt", "wrote no reward"),
        ("ln -s /dev/zero /logs/verifier/reward.json", "wrote no reward"),
        ("cd /logs/verifier; echo 1 > one; ln -s one reward.txt", "wrote no reward"),
        ("truncate -s 100M /logs/verifier/reward.json", "wrote no reward"),
        ("printf '1%070000d' 0 | sed 's/^1/1./' > /logs/verifier/reward.txt", "wrote no reward"),
    ],
)
async def test_tests_without_a_reward_are_a_failed_rollout_and_not_0(tmp_path: Path, script: str, words: str) -> None:
    limit = "[verifier]\ntimeout_sec = 2.0\n"
    with pytest.raises(GroupLost, match=words):
        await scores_of(tmp_path, ADDS, folders(tmp_path, script, limit))


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("environment/Dockerfile", "FROM python:3.12", "needs the image of environment/Dockerfile"),
        ("task.toml", '[environment]\ndocker_image = "org/tools:1"', "needs the image org/tools:1"),
        ("task.toml", "[agent", "expected task.toml"),
        ("task.toml", "agent = 3", "agent is 3"),
        ("task.toml", '[agent]\ntimeout_sec = "long"', "long"),
        ("tests/test.sh", None, "has no tests/test.sh"),
        ("instruction.md", None, "expected task.toml and instruction.md"),
    ],
)
def test_a_task_that_cannot_run_is_refused_by_name(tmp_path: Path, name: str, text: str | None, words: str) -> None:
    tasks = folders(tmp_path)
    path = tasks / "second" / name
    path.write_text(text) if text is not None else path.unlink()
    with pytest.raises(DataError, match=f"second.*{words}"):
        read_harbor_tasks(tasks)


async def test_copies_of_held_out_tasks_are_not_trained_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Those with the same text whose files differ are other tasks."""
    for number in range(8):
        task = shutil.copytree(EXAMPLE, tmp_path / f"tasks/{number}")
        (task / "environment/numbers.txt").write_text(f"{number // 2}\n")
    async with (
        FakeInferenceServer(lambda prompt: "4") as server,
        running_env(
            AgentEnv, tmp_path, server, command="true", tasks_path=str(tmp_path / "tasks"), heldout_size=2
        ) as env,
    ):
        held_out, trained = (
            {(task.harbor.folder / "environment/numbers.txt").read_text() for task in tasks if task.harbor is not None}
            for tasks in (env.held_out, env.tasks)
        )
        await env.close()
    assert len(held_out | trained) == 4
    assert not held_out & trained
    assert "copies of held-out tasks" in caplog.text


def test_a_folder_is_one_task_or_has_some(tmp_path: Path) -> None:
    (only,) = read_harbor_tasks(EXAMPLE)
    assert only.instruction.startswith("Add up the numbers")
    assert (only.agent_s, only.tests_s, only.variables) == (60.0, 30.0, {"EXPECTED": "10"})
    with pytest.raises(DataError, match="has no task"):
        read_harbor_tasks(tmp_path)


@pytest.mark.parametrize("fields", [{"score_command": "true"}, {"agent_sandbox": "none"}])
async def test_a_setting_that_harbors_tasks_do_not_follow_is_refused(tmp_path: Path, fields: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=f"drop --env.{next(iter(fields))}"):
        await scores_of(tmp_path, ADDS, folders(tmp_path), **fields)
