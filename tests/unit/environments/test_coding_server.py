"""The coding environment: programs run in a sandbox, and none can have a score that its results do not earn."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from atroposlib.envs.errors import DataError
from atroposlib.testing.fake_inference_server import FakeInferenceServer
from environments import coding_server
from environments.coding_server import CodingEnv, Task, program_of, read_tasks, same
from tests.unit.environments.support import running_env
from tests.waiting import until

pytestmark = pytest.mark.services

ADD = Task("Write solve(a, b) that adds.", "solve", [([1, 2], 3)], [([4, 5], 9), ([7, 7], 14)])
RIGHT, WRONG = "def solve(a, b):\n    return a + b\n", "def solve(a, b):\n    return a - b\n"
# A program writes replies of its own, wherever it finds the pipe, and ends.
FORGED = """
import gc, json, io, os
for each in gc.get_objects():
    if isinstance(each, io.TextIOWrapper):
        for _ in range(3):
            try:
                each.write(json.dumps({"outcomes": [{"value": 1}] * 2, "error": "", "passed": 2}) + "\\n")
                each.flush()
            except BaseException:
                pass
def solve(a, b):
    return {"__eq__": True}
"""


def block(program: str) -> str:
    return f"Here it is:\n```python\n{program}```\nDone."


def conversation(*turns: str) -> Callable[[str], str]:
    return lambda prompt: turns[min(prompt.count("<|im_start|>assistant"), len(turns)) - 1]


async def scores(folder: Path, *programs: str, **settings: object) -> list[float | None]:
    async with FakeInferenceServer() as server, running_env(CodingEnv, folder, server, **settings) as env:
        return [await env.score(ADD, block(program)) for program in programs]


async def test_a_program_scores_the_share_of_tests_that_it_passes(tmp_path: Path) -> None:
    half = "def solve(a, b):\n    return 9\n"
    found = await scores(tmp_path, RIGHT, WRONG, half, "def other(): pass", "def solve(:", "raise SystemExit(0)")
    assert found == [1.0, 0.0, 0.5, 0.0, 0.0, 0.0]


async def test_no_program_has_a_score_that_it_does_not_earn(tmp_path: Path) -> None:
    equal = "class A(int):\n    __eq__ = lambda s, o: True\ndef solve(a, b):\n    return A(0)\n"
    patched = "import json\njson.dumps = lambda *a, **b: '9'\ndef solve(a, b):\n    return 0\n"
    found = await scores(tmp_path, FORGED, equal, patched, RIGHT)
    assert found[:3] == [0.0, 0.0, 0.0]
    assert found[3] == 1.0, "what one program broke, the next one does not see"


ESCAPES = {
    "endless": "def solve(a, b):\n    while True:\n        pass\n",
    "ends": "import os\ndef solve(a, b):\n    os._exit(0)\n",
    "ends at once": "import os\nos._exit(0)\n",
    "late": "import time\ndef solve(a, b):\n    time.sleep(60)\n",
    "unshown": "class E(Exception):\n    def __str__(self):\n        raise self\ndef solve(a, b):\n    raise E\n",
    "closes": "import os\ndef solve(a, b):\n    os.closerange(0, 99)\n",
    "long": "def solve(a, b):\n    while True:\n        print('x' * 9999)\n",
    "files": "def solve(a, b):\n    for n in range(9999):\n        open(str(n), 'w').close()\n    return a + b\n",
}


@pytest.mark.parametrize("program", ESCAPES.values(), ids=ESCAPES)
async def test_no_way_to_end_is_better_than_a_wrong_result(program: str, tmp_path: Path) -> None:
    assert await scores(tmp_path, program, cpu_limit_s=0.3, program_limit_s=2.0) == [0.0]


async def test_a_program_that_ended_its_process_is_told_so_and_may_be_corrected(tmp_path: Path) -> None:
    async with (
        FakeInferenceServer(conversation(block(ESCAPES["ends"]), block(RIGHT))) as server,
        running_env(CodingEnv, tmp_path, server, max_new_tokens=200, group_size=2) as env,
    ):
        group, _ = await env.collect_trajectories(ADD)
        assert group is not None
        assert "The program failed: the process ended" in env.tokenizer.decode(group["tokens"][0])
    assert list(group["scores"]) == [1.0, 1.0]


async def test_an_error_that_no_tokenizer_takes_is_told_and_may_be_corrected(tmp_path: Path) -> None:
    hostile = "def solve(a, b):\n    raise ValueError('half of a pair: \\ud800')\n"
    async with (
        FakeInferenceServer(conversation(block(hostile), block(RIGHT))) as server,
        running_env(CodingEnv, tmp_path, server, max_new_tokens=200, group_size=2) as env,
    ):
        group, _ = await env.collect_trajectories(ADD)
        assert group is not None
        assert "ValueError: half of a pair: ?" in env.tokenizer.decode(group["tokens"][0])
    assert list(group["scores"]) == [1.0, 1.0]


@pytest.mark.parametrize("victim", [0, -1], ids=["sandbox", "program"])
async def test_a_program_that_the_machine_kills_has_no_score(victim: int, tmp_path: Path) -> None:
    async with (
        FakeInferenceServer() as server,
        running_env(CodingEnv, tmp_path, server, programs_at_once=1) as env,
    ):
        pool = env._pools.get_nowait()
        await pool.sandbox_report()
        assert pool._children[0]._process is not None
        first = psutil.Process(pool._children[0]._process.pid)
        processes = [first, *first.children(recursive=True)]
        env._pools.put_nowait(pool)
        scoring = asyncio.create_task(env.score(ADD, block(ESCAPES["late"])))
        await until(lambda: processes[-1].status() != psutil.STATUS_STOPPED)  # it has the program
        processes[victim].kill()
        assert await scoring is None


async def test_a_sandbox_that_does_not_start_is_no_zero(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coding_server, "CHILD", "tests.unit.common.no_such_child")
    assert await scores(tmp_path, RIGHT) == [None]


async def test_a_wrong_program_is_told_what_it_gave_and_may_be_corrected(tmp_path: Path) -> None:
    async with (
        FakeInferenceServer(conversation(block(WRONG), block(RIGHT))) as server,
        running_env(CodingEnv, tmp_path, server, max_new_tokens=200, group_size=2) as env,
    ):
        group, _ = await env.collect_trajectories(ADD)
        assert group is not None
        text = env.tokenizer.decode(group["tokens"][0])
    assert "solve(1, 2) gave -1, expected 3" in text
    assert list(group["scores"]) == [1.0, 1.0]
    assert "14" not in text, "hidden tests stay hidden"


async def test_generated_tasks_are_held_out_and_their_tests_are_not_shown(tmp_path: Path) -> None:
    async with FakeInferenceServer() as server, running_env(CodingEnv, tmp_path, server, heldout_size=16) as env:
        await env.setup()
        assert len(env.held_out) == 16
        task = await env.training_item(0)
        assert task == await env.training_item(0)
        trained = {(await env.training_item(number)).question for number in range(200)}
        assert trained.isdisjoint({held_out.question for held_out in env.held_out})
        assert len(task.tests) >= 4
        assert task.question in str(env.prompt(task)[0]["content"])


@pytest.mark.parametrize(
    ("found", "expected", "is_same"),
    [
        (1, 1.0, True),
        (True, 1, False),
        (0.1 + 0.2, 0.3, True),
        (0.1 + 0.2 - 0.3, 0.0, True),
        (1e-9, 0.0, False),
        (0.0, 1e-13, False),
        (1e308, 1e308, True),
        (float("inf"), float("inf"), True),
        (10**400, 1.5, False),
        (1.5, 10**400, False),
        (10**400, 10**400, True),
        (float("nan"), 10**400, False),
        (1.5, float("nan"), False),
        (1.5, float("inf"), False),
        ([1, [2]], [1, [2]], True),
        ([1], [1, 2], False),
        ({"a": 1}, {"a": 1}, True),
        ({"a": 1, "b": 2}, {"a": 1}, False),
        ("1", 1, False),
        (None, 0, False),
        (None, None, True),
        (float("nan"), 1.0, False),
        (float("inf"), 1.0, False),
    ],
)
def test_results_are_the_same_up_to_rounding(found: object, expected: object, is_same: bool) -> None:
    assert same(found, expected) is is_same


def test_the_last_block_after_the_thoughts_is_the_program() -> None:
    assert program_of(f"<think>{block('a')}</think>{block('b')}{block('c')}") == "c"
    assert program_of("def solve(): pass") == "def solve(): pass"
    assert program_of("```python\nx = 1") == "x = 1", "cut off"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "tasks.jsonl:2 is no task"),
        (
            json.dumps({"question": "?", "function": "f", "examples": []}),
            "tasks.jsonl:2 is no task (KeyError: 'tests')",
        ),
        (json.dumps({"question": "?", "function": "f", "examples": [], "tests": []}), "tasks.jsonl:2 has no tests"),
    ],
)
def test_a_task_that_is_none_is_named(line: str, said: str, tmp_path: Path) -> None:
    good = json.dumps({"question": "?", "function": "f", "examples": [], "tests": [[[1], 1]]})
    path = tmp_path / "tasks.jsonl"
    path.write_text(f"{good}\n{good}\n")
    assert len(read_tasks(path)) == 2
    path.write_text(f"{good}\n{line}\n")
    with pytest.raises(DataError) as raised:
        read_tasks(path)
    assert said in str(raised.value)


def test_a_line_of_tasks_ends_at_its_newline_alone(tmp_path: Path) -> None:
    path, question = tmp_path / "tasks.jsonl", "a\u2028b\u0085c"
    row = {"question": question, "function": "f", "examples": [], "tests": [[[1], 1]]}
    path.write_text("\ufeff" + f"{json.dumps(row, ensure_ascii=False)}\r\n" * 2, encoding="utf-8", newline="")
    assert [task.question for task in read_tasks(path)] == [question] * 2


def test_a_file_of_tasks_that_is_missing_is_named_by_its_flag(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read --env.tasks_path .*none.jsonl: No such file"):
        read_tasks(tmp_path / "none.jsonl")
