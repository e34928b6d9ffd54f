import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from atroposlib.child_processes.evaluated_answers import EVALUATED
from atroposlib.child_processes.pool import ChildFailed
from atroposlib.envs.errors import DataError
from atroposlib.grading.arithmetic import compute
from atroposlib.testing.fake_inference_server import FakeInferenceServer
from environments.reasoning_gym_server import ReasoningGymEnv, Task, weights_by_name
from tests.unit.common.refusals import without
from tests.unit.environments.support import running_env

pytestmark = [pytest.mark.services, pytest.mark.timeout(240)]


def test_weights_are_read_by_name() -> None:
    assert weights_by_name("all") == {}
    assert weights_by_name("chain_sum=3, leg_counting") == {"chain_sum": 3.0, "leg_counting": 1.0}
    for wrong in ("chain_sum=0", "=1", "chain_sum=-1", "chain_sum=many"):
        with pytest.raises(ValueError, match=r"is not a task with a weight above 0|could not convert"):
            weights_by_name(wrong)


async def test_tasks_are_mixed_by_weight_configured_and_scored_by_their_own_rule(tmp_path: Path) -> None:
    options = {"chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}
    fields = {"tasks": "chain_sum=3,leg_counting", "task_options": options, "scorer_processes": 2, "scorer_timeout": 60}
    async with FakeInferenceServer() as server, running_env(ReasoningGymEnv, tmp_path, server, **fields) as env:
        items = [await env.get_next_item() for _ in range(200)]
        shares = Counter(item.name for item in items)
        assert 100 < shares["chain_sum"] < 190
        assert shares.total() == 200
        item = next(item for item in items if item.name == "chain_sum")
        expression = item.question.partition(":")[2].replace("=", "").strip()
        left, operator, right = expression.split()
        total = int(left) + int(right) if operator == "+" else int(left) - int(right)
        server.answer = lambda prompt: [
            f"<answer>{total}</answer>",
            f"<answer>{total + 100}</answer>",
            str(total),
            "<answer></answer>",
        ]
        group, _ = await env.collect_trajectories(item)
        assert group is not None
        assert group["scores"] == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("digits", [1, 2])
async def test_no_question_that_is_held_out_is_trained_on(tmp_path: Path, digits: int) -> None:
    """Of sums of one digit there are about a hundred."""
    options = {"chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": digits, "max_digits": digits}}
    fields = {"tasks": "chain_sum", "task_options": options, "heldout_size": 30, "scorer_timeout": 60}
    async with FakeInferenceServer() as server, running_env(ReasoningGymEnv, tmp_path, server, **fields) as env:
        held_out = {item.question for item in env.held_out}
        trained = [await env.training_item(number) for number in range(100)]
        assert held_out.isdisjoint({item.question for item in trained})
        assert await env.training_item(7) == trained[7]


async def test_unknown_task_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    async with FakeInferenceServer() as server:
        with pytest.raises(DataError, match="no task 'chain_sums'; did you mean 'chain_sum'"):
            async with running_env(ReasoningGymEnv, tmp_path, server, tasks="chain_sums"):
                pass


@pytest.mark.rotating
async def test_every_task_can_be_asked_by_name(tmp_path: Path) -> None:
    async with (
        FakeInferenceServer() as server,
        running_env(ReasoningGymEnv, tmp_path, server, heldout_size=1, scorer_timeout=60) as env,
    ):
        assert len(env.weights) > 100
        for name in env.weights:
            assert (await env.pool.ask(env._entry(name, 3)))["question"]


# --- answers that are code ----------------------------------------------------------------------------------------

CODE = [
    "__import__('os').system('env | grep ATROPOS > {file}')",
    "[c for c in object.__subclasses__() if 'wrap' in str(c)][0].__init__.__globals__['system']('id > {file}')",
    "().__class__.__base__.__subclasses__()",
    "open('{file}', 'w').write('x')",
    "(lambda: open('{file}', 'w'))()",
    "ｅｖａｌ(\"open('{file}', 'w')\")",
    "diff(\"open('{file}', 'w')\", x)",
    "sqrt(\"open('{file}', 'w')\")",
    "(x := open('{file}', 'w'))",
    "f\"{{open('{file}', 'w')}}\"",
    "entry['answer'].split()",
]
# Code to some scorers, and no expression or a list of variables to the others.
HALF_CODE = ["5! + open('{file}', 'w').write('x')", "[oracle_answer, 1]"]
PUZZLES_OF_NUMBERS = ("countdown", "puzzle24")


def printed_by(script: str, *arguments: str, stdin: str = "") -> Any:
    """The last line that `script`, which uses reasoning-gym as it is, prints."""
    command = [sys.executable, str(Path(__file__).with_name(script)), *arguments]
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    done = subprocess.run(command, input=stdin, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-500:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("sandboxed", [True, False], ids=["sandbox", "no sandbox"])
def test_code_in_an_answer_does_not_run_and_scores_0_and_is_counted(
    sandboxed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATROPOS_API_TOKEN", "a-token-of-the-user")
    answers = [f"<answer>{code.format(file=tmp_path / 'ran')}</answer>" for code in CODE + HALF_CODE]

    async def attack() -> dict[tuple[str, str], float | None]:
        fields = {"tasks": "all", "scorer_timeout": 60, "allow_unsandboxed_scorers": not sandboxed, "heldout_size": 1}
        async with FakeInferenceServer() as server, running_env(ReasoningGymEnv, tmp_path, server, **fields) as env:
            pairs = [(task, answer) for task in EVALUATED for answer in answers]
            scores = {(task, answer): await env.score(Task(task, 3, ""), answer) for task, answer in pairs}
            assert len(EVALUATED) * len(CODE) < env._env_run.counts["answers_rejected"] <= len(scores)
            before = env._env_run.counts["answers_rejected"]
            assert await env.score(Task("chain_sum", 3, ""), answers[0]) == 0.0  # its scorer compares text
            assert env._env_run.counts["answers_rejected"] == before
        return scores

    scores = without(() if sandboxed else ("landlock", "namespaces", "seccomp"), attack)
    assert len(scores) == 9 * len(answers)
    assert set(scores.values()) == {0.0}
    assert not (tmp_path / "ran").exists()


@pytest.mark.rotating
async def test_known_answers_and_words_score_what_the_scorer_alone_gives(tmp_path: Path) -> None:
    words = ["the answer is 5", "unsolvable", "I think import os is evil", "red or blue", "(one of", "eval", "3, 4"]
    unguarded = printed_by("unguarded_scores.py", *EVALUATED, stdin=json.dumps(words))
    fields = {"heldout_size": 1, "scorer_timeout": 60}
    async with FakeInferenceServer() as server, running_env(ReasoningGymEnv, tmp_path, server, **fields) as env:
        for task, alone in unguarded.items():
            for index, known in enumerate(alone["known"]):
                assert await env.score(Task(task, index, ""), f"<answer>{known}</answer>") == 1.0, (task, index)
            for text in words:
                score = await env.score(Task(task, 0, ""), f"<answer>{text}</answer>")
                assert score == alone["scores"][text], (task, text)
        for task, form in [("polynomial_multiplication", "1*({})"), ("simple_integration", "sqrt(4) + log(2) + {}")]:
            answer = form.format(unguarded[task]["known"][0])
            assert await env.score(Task(task, 0, ""), f"<answer>{answer}</answer>") == 1.0
        assert env._env_run.counts["answers_rejected"] == 0


@pytest.mark.rotating
async def test_puzzles_of_numbers_are_solved_by_their_own_numbers_alone(tmp_path: Path) -> None:
    unguarded = printed_by("unguarded_scores.py", *PUZZLES_OF_NUMBERS, stdin="[]")
    fields = {"heldout_size": 1, "scorer_timeout": 60}
    async with FakeInferenceServer() as server, running_env(ReasoningGymEnv, tmp_path, server, **fields) as env:
        for task, alone in unguarded.items():
            solution = alone["known"][0]
            value = int(compute(solution).value)
            numbers = ", ".join(str(number) for number in compute(solution).numbers)
            hidden = "_".join(str(value))
            deceptions = [
                f"({numbers}) and {hidden}",
                f"{hidden} if ({numbers}) else 0x0",
                f"{hex(value)} # {numbers}",
                f"{hex(value)} + 0x0*({numbers.replace(', ', ' + ')})",
                "4*3*2*1",
            ]
            for answer in deceptions:
                assert (await env.score(Task(task, 0, ""), f"<answer>{answer}</answer>") or 0) <= 0.05, (task, answer)
            for answer in (solution, f"({solution})"):
                assert await env.score(Task(task, 0, ""), f"<answer>{answer}</answer>") == 1.0, (task, answer)
        assert env._env_run.counts["answers_rejected"] >= 2 * (len(deceptions) - 1)


@pytest.mark.rotating
async def test_an_entry_that_is_late_is_made_again_and_one_that_never_comes_names_the_limit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fields = {"tasks": "countdown", "heldout_size": 1}
    async with FakeInferenceServer() as server, running_env(ReasoningGymEnv, tmp_path, server, **fields) as env:
        ask, failures = env.pool.ask, 2

        async def busy(request: Mapping[str, object]) -> Any:
            nonlocal failures
            failures -= 1
            if failures >= 0:
                raise ChildFailed("no reply within 10 s")
            return await ask(request)

        env.pool.ask = busy  # type: ignore[method-assign]
        assert (await env.training_item(5)).name == "countdown"
        assert "did not make entry 6 of 'countdown' (2 of 3 tries): no reply within 10 s" in caplog.text
        failures = 3
        with pytest.raises(DataError, match=r"'countdown': no reply within 10 s; raise --env.scorer_timeout"):
            await env.training_item(5)


@pytest.mark.rotating
async def test_an_answer_that_takes_too_long_to_evaluate_is_unscored_and_the_next_is_scored(tmp_path: Path) -> None:
    fields = {"tasks": "countdown", "scorer_timeout": 2, "heldout_size": 1}
    async with FakeInferenceServer() as server, running_env(ReasoningGymEnv, tmp_path, server, **fields) as env:
        assert await env.score(Task("countdown", 0, ""), "<answer>9**9**9**9</answer>") is None
        assert await env.score(Task("countdown", 0, ""), "<answer>1 + 1</answer>") == 0.05


@pytest.mark.rotating
def test_tasks_that_evaluate_answers_need_a_sandbox_or_the_users_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def weights(**fields: Any) -> dict[str, float]:
        fields["heldout_size"] = 1
        async with FakeInferenceServer() as server, running_env(ReasoningGymEnv, tmp_path, server, **fields) as env:
            return env.weights

    missing = ("landlock", "namespaces")
    left = without(missing, weights)
    assert len(left) > 90
    assert not left.keys() & EVALUATED.keys()
    line = next(record.message for record in caplog.records if record.message.startswith("Left out 9 tasks"))
    assert all(word in line for word in [*EVALUATED, "--env.allow_unsandboxed_scorers", "read a file outside"])
    with pytest.raises(DataError, match=r"need a sandbox.*: countdown, n_queens; .*--env.allow_unsandboxed_scorers"):
        without(missing, lambda: weights(tasks="n_queens,countdown,chain_sum"))
    assert without(missing, lambda: weights(tasks="chain_sum")) == {"chain_sum": 1.0}
    assert without(missing, lambda: weights(tasks="n_queens", allow_unsandboxed_scorers=True)) == {"n_queens": 1.0}
    assert without(("landlock",), lambda: weights(tasks="n_queens")) == {"n_queens": 1.0}


@pytest.mark.rotating
def test_the_tasks_that_evaluate_answers_are_all_known() -> None:
    assert printed_by("evaluating_tasks.py") == sorted(EVALUATED)


HOSTILE = [
    *("9" * 5000, "1e999", "nan", "-inf", "٣", "\x00", "\ud800", "1/0", "9**9**9**9"),
    *("[" * 5000, "{" * 5000, "a" * 100_000, "\n" * 20_000),
]


async def ask_hostile(env: ReasoningGymEnv, names: Sequence[str]) -> None:
    for name in names:
        for answer in HOSTILE:
            score = await env.score(Task(name, 3, ""), f"<answer>{answer}</answer>")
            assert score is None or 0.0 <= score <= 1.0, (name, answer[:30], score)


@pytest.mark.rotating
async def test_hostile_answers_raise_nothing_and_score_from_0_to_1(tmp_path: Path) -> None:
    fields = {"tasks": "countdown,chain_sum,polynomial_multiplication", "heldout_size": 1, "scorer_timeout": 2}
    async with FakeInferenceServer() as server, running_env(ReasoningGymEnv, tmp_path, server, **fields) as env:
        await ask_hostile(env, list(env.weights))


@pytest.mark.nightly
@pytest.mark.timeout(3600)
async def test_hostile_answers_to_every_task_raise_nothing_and_score_from_0_to_1(tmp_path: Path) -> None:
    fields = {"heldout_size": 1, "scorer_timeout": 5}
    async with FakeInferenceServer() as server, running_env(ReasoningGymEnv, tmp_path, server, **fields) as env:
        await ask_hostile(env, list(env.weights))


@pytest.mark.parametrize("score", [float("nan"), float("inf"), 1.5, -0.1])
async def test_a_score_outside_of_0_to_1_is_no_score(score: float) -> None:
    async def ask(request: Any) -> dict[str, Any]:
        return {"score": score, "rejected": False}

    env = ReasoningGymEnv.__new__(ReasoningGymEnv)
    env.config, env.pool = ReasoningGymEnv.env_config_cls(), SimpleNamespace(ask=ask)  # type: ignore[assignment]
    assert await env.score(Task("chain_sum", 3, ""), "<answer>1</answer>") is None
