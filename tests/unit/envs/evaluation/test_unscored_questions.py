"""One held-out question that fails costs that question, and never the evaluation."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.commands.evaluation_report import evaluate_once
from atroposlib.envs.errors import EnvError
from atroposlib.envs.evaluation.evaluation import EvaluationFailed, evaluate_version
from atroposlib.envs.failures import RolloutFailed
from atroposlib.envs.question_env import QuestionEnv, QuestionEnvConfig
from atroposlib.envs.server_handling.dispatching.dispatch import RetryPolicy
from atroposlib.testing.fake_answers import CannotAnswer
from atroposlib.testing.fake_inference_server import FakeInferenceServer
from tests.unit.environments.support import running_env
from tests.unit.envs.fakes import Trainer, config, running_api, served, server_config

BAD = "3"  # the question that fails
QUESTIONS = [str(number) for number in range(1, 12)]


class NumberEnv(QuestionEnv):
    """Right is to repeat the number; `bad` is what the score of the bad question does."""

    name = "number"
    bad: Callable[[], Awaitable[float | None]] | None = None
    bad_rollout: Callable[[], Awaitable[None]] | None = None

    async def setup(self) -> None:
        self.held_out = QUESTIONS

    async def training_item(self, number: int) -> str:
        return "7"

    def prompt(self, item: str) -> list[dict[str, Any]]:
        return [{"role": "user", "content": f"Say {item}."}]

    async def rollouts(self, item: str, *args: Any, **named: Any) -> list[Any]:
        if item == BAD and self.bad_rollout is not None:
            await self.bad_rollout()
        return await super().rollouts(item, *args, **named)

    async def score(self, item: str, answer: str) -> float | None:
        if item == BAD and self.bad is not None:
            return await self.bad()
        return float(item == answer)


def answer(prompt: str) -> str:
    """Every question right but for question 5, and none for the bad one if it is marked."""
    said = prompt.rpartition("Say ")[2].partition(".")[0]
    return "no" if said == "5" else said


def too_long(prompt: str) -> str:
    if f"Say {BAD}." in prompt:
        raise CannotAnswer("the prompt has 600 tokens, the limit is 512")
    return answer(prompt)


async def raises(error: Exception) -> Any:
    raise error


FAULTS: dict[str, tuple[str, Any, Any]] = {
    "an exception in score": ("scorer", {"bad": lambda: raises(ZeroDivisionError("of mine"))}, "ZeroDivisionError: of"),
    "a score that hangs": ("scorer", {"bad": lambda: asyncio.sleep(60)}, "it took longer than 1.5 s"),
    "no score": ("scorer", {"bad": lambda: asyncio.sleep(0)}, "it has no score"),
    "a rollout that hangs": ("timeout", {"bad_rollout": lambda: asyncio.sleep(60)}, "it took longer than 1.5 s"),
    "a rollout that gives up": ("infrastructure", {"bad_rollout": lambda: raises(RolloutFailed("gone"))}, "gone"),
    "a rollout that raises": ("environment", {"bad_rollout": lambda: raises(KeyError("x"))}, "KeyError: 'x' at "),
    "a prompt that is too long": ("infrastructure", {}, "the prompt has 600 tokens"),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_the_other_questions_count(tmp_path: Path, fault: str, caplog: pytest.LogCaptureFixture) -> None:
    cause, methods, reason = FAULTS[fault]
    env_class: type[NumberEnv] = type(
        "Faulty", (NumberEnv,), {name: staticmethod(does) for name, does in methods.items()}
    )
    answers = too_long if fault == "a prompt that is too long" else answer
    limits = {"rollout_timeout": 1.5 if "hangs" in fault else 60}
    async with FakeInferenceServer(answers) as server, running_env(env_class, tmp_path, server, **limits) as env:
        evaluation = await evaluate_version(env.evaluate, 2, 2)
        rows = env._env_run.held_out
    assert evaluation.accuracy == 0.9
    assert evaluation.metrics["correct"] == 9
    assert evaluation.metrics["total"] == 10
    assert evaluation.metrics["unscored"] == evaluation.metrics[f"unscored_{cause}"] == 1
    assert f"(9/10; 1 unscored: 1 {cause})" in evaluation.line()
    assert [row["index"] for row in rows if "error" in row] == [QUESTIONS.index(BAD)]
    assert rows[QUESTIONS.index(BAD)]["error"].startswith(f"{cause}: ")
    assert reason in rows[QUESTIONS.index(BAD)]["error"]
    assert rows[QUESTIONS.index(BAD)]["messages"][0]["content"] == f"Say {BAD}."
    assert caplog.text.count("A held-out question has no score") == 1
    assert server.hits["/generate"] == (10 if "bad_rollout" in methods else 11), "each is asked once"


@pytest.mark.parametrize(("hook", "unscored"), [("prompt", 1), ("reference_answer", 0), ("sample_record", 0)])
async def test_a_hook_that_raises_for_one_question_voids_nothing(
    tmp_path: Path, hook: str, unscored: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = getattr(NumberEnv, hook)

    def raises_for_bad(self: NumberEnv, item: str, *more: Any) -> Any:
        if item == BAD:
            raise KeyError("x")
        return whole(self, item, *more)

    monkeypatch.setattr(NumberEnv, hook, raises_for_bad)
    saved = {"data_dir_to_save_evals": str(tmp_path / "evals")}
    async with FakeInferenceServer(answer) as server, running_env(NumberEnv, tmp_path, server, **saved) as env:
        metrics = await env.evaluate()
        rows = env._env_run.held_out
    assert (metrics["total"], metrics["unscored"]) == (11 - unscored, unscored)
    assert metrics.get("unscored_environment", 0) == unscored
    assert len(rows) == 11


async def test_a_question_whose_server_fails_for_good_is_left_out(tmp_path: Path) -> None:
    async with FakeInferenceServer(answer) as server, running_env(NumberEnv, tmp_path, server) as env:
        env.server.retry = RetryPolicy(base_s=0.01)
        env.config.max_eval_workers = 1
        env._eval_slots = asyncio.Semaphore(1)
        server.fail_next(6, 500)
        metrics = await env.evaluate()
    assert (metrics["total"], metrics["unscored"], metrics["unscored_infrastructure"]) == (10, 1, 1)


@pytest.mark.parametrize(("allowed", "fails"), [(0.5, False), (0.2, True), (0.0, True), (1.0, False)])
async def test_more_than_the_allowed_share_without_a_score_fails(tmp_path: Path, allowed: float, fails: bool) -> None:
    class Half(NumberEnv):
        async def score(self, item: str, answer: str) -> float | None:
            return None if int(item) > 7 else 1.0

    async with (
        FakeInferenceServer(answer) as server,
        running_env(Half, tmp_path, server, max_unscored=allowed) as env,
    ):
        if not fails:
            assert (await env.evaluate())["unscored"] == 4
            return
        with pytest.raises(EvaluationFailed, match=r"^4 of 11 held-out questions have no score \(4 scorer; ") as failed:
            await env.evaluate()
    assert failed.value.metrics["unscored"] == 4


async def test_an_evaluation_of_which_every_question_failed_shows_the_authors_line(tmp_path: Path) -> None:
    class Broken(NumberEnv):
        async def score(self, item: str, answer: str) -> float | None:
            raise ZeroDivisionError("of mine")

    async with (
        FakeInferenceServer(answer) as server,
        running_env(Broken, tmp_path, server, max_unscored=1.0) as env,
    ):
        with pytest.raises(EvaluationFailed, match=rf"11 of 11 .*: of mine at {__file__}:\d+ in score"):
            await env.evaluate()


async def test_evaluate_prints_what_there_is_and_ends_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "evals"
    async with (
        FakeInferenceServer(too_long) as server,
        running_env(NumberEnv, tmp_path, server, data_dir_to_save_evals=str(folder)) as env,
    ):
        await evaluate_once(env, env._env_run)
        told = capsys.readouterr().out
        assert "unscored_infrastructure  1" in told
        assert "accuracy                 0.9" in told
        assert (folder / "samples.html").exists()
        lines = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
        assert sum(line["score"] is None for line in lines) == 1
        env.config.max_unscored = 0.0
        with pytest.raises(EnvError, match="the evaluation failed: 1 of 11 held-out questions have no score"):
            await evaluate_once(env, env._env_run)
        assert "unscored_infrastructure  1" in capsys.readouterr().out


async def test_serve_says_once_that_an_evaluation_failed_and_asks_nothing_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(NumberEnv):
        async def score(self, item: str, answer: str) -> float | None:
            if item == "7":  # the one that is trained on
                self.count = getattr(self, "count", 0) + 1
                return float(self.count)
            raise ZeroDivisionError("of mine")

        async def setup(self) -> None:
            self.held_out = ["1", "2", "3"]

    async with FakeInferenceServer(answer) as server, running_api() as api:
        plain = config(tmp_path, api.url).model_dump()
        env = Broken(QuestionEnvConfig(**plain), server_config(server))
        trainer = await served(env, Trainer(api.url, num_steps=2), 2)
        evaluated = [body for _, body in server.requests if body.get("temperature") == 0]
    assert trainer.accuracies[2] is None
    assert len(evaluated) == 3
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == 1
    assert "The evaluation of policy version 2 failed, and has no accuracy: 3 of 3 held-out questions" in errors[0]
    assert env._env_run.counts["evaluations_failed"] == 1
