import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.question_env import QuestionEnv, with_reply
from atroposlib.testing.fake_inference_server import FakeInferenceServer
from tests.unit.environments.support import running_env
from tests.waiting import until


class EchoEnv(QuestionEnv):
    """Right is to repeat the number."""

    name = "echo"

    async def setup(self) -> None:
        self.held_out = ["1", "2", "3"]

    async def training_item(self, number: int) -> str:
        return str(number)

    def prompt(self, item: str) -> list[dict[str, Any]]:
        return [{"role": "user", "content": f"Say {item}."}]

    async def score(self, item: str, answer: str) -> float | None:
        return None if answer == "?" else float(item in answer)


async def test_group_in_which_an_answer_has_no_score_is_dropped_and_counted(tmp_path: Path) -> None:
    async with FakeInferenceServer(lambda prompt: ["7", "?"]) as server, running_env(EchoEnv, tmp_path, server) as env:
        await env.handle_env("7")
    assert env._env_run.counts == {"groups_unscored": 1, "items_without_group": 1}
    assert [scored.reward for scored in env.scored] == [1.0, None, 1.0, None]


async def test_group_says_how_it_was_sampled(tmp_path: Path) -> None:
    async with (
        FakeInferenceServer() as server,
        running_env(EchoEnv, tmp_path, server, temperature=0.7, top_p=0.9) as env,
    ):
        group, _ = await env.collect_trajectories("7")
        body = server.requests[0][1]
    assert group is not None
    assert group["generation_params"] == {
        "temperature": body["temperature"],
        "top_p": body["top_p"],
    }
    assert (body["temperature"], body["top_p"]) == (0.7, 0.9)


async def test_thinking_mode_asks_to_think_and_scores_what_comes_after(tmp_path: Path) -> None:
    answers = ["<think>7</think>8", "<think>8</think>7"]
    async with (
        FakeInferenceServer(lambda prompt: answers) as server,
        running_env(EchoEnv, tmp_path, server, thinking_mode=True, custom_thinking_prompt="Ponder.") as env,
    ):
        group, _ = await env.collect_trajectories("7")
    assert group is not None
    assert group["scores"] == [0.0, 1.0, 0.0, 1.0]
    assert group["messages"] is not None
    assert group["messages"][0][0] == {"role": "system", "content": "Ponder."}


async def test_evaluation_leaves_out_what_has_no_score_and_keeps_samples(tmp_path: Path) -> None:
    answer = {"Say 1.": "1", "Say 2.": "no", "Say 3.": "?"}
    async with (
        FakeInferenceServer(lambda prompt: next(text for asked, text in answer.items() if asked in prompt)) as server,
        running_env(EchoEnv, tmp_path, server, data_dir_to_save_evals=str(tmp_path / "evals")) as env,
    ):
        metrics = await env.evaluate()
    assert metrics == {"accuracy": 0.5, "mean_score": 0.5, "correct": 1, "total": 2, "unscored": 1, "temperature": 0.0}
    samples = [json.loads(line) for line in (tmp_path / "evals/samples.jsonl").read_text().splitlines()]
    assert [sample["score"] for sample in samples] == [1.0, 0.0, None]


async def test_an_evaluation_says_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("atroposlib.envs.question_env.EVALUATED_EVERY_S", 0.0)
    async with FakeInferenceServer() as server, running_env(EchoEnv, tmp_path, server) as env:
        with caplog.at_level("INFO"):
            await env.evaluate()
    told = [record.getMessage() for record in caplog.records if record.getMessage().startswith("Evaluated")]
    assert told == [f"Evaluated {done} of 3" for done in (1, 2, 3)]


async def test_no_more_evaluations_run_than_max_eval_workers(tmp_path: Path) -> None:
    async with FakeInferenceServer() as server, running_env(EchoEnv, tmp_path, server, max_eval_workers=2) as env:
        server.delay_s = 0.05
        env.held_out = [str(number) for number in range(8)]
        await env.evaluate()
    assert server.peak_in_flight == 2


async def test_resumed_environment_goes_on_with_the_next_question(tmp_path: Path) -> None:
    async with FakeInferenceServer() as server:
        async with running_env(EchoEnv, tmp_path, server) as env:
            env.checkpoint_dir, env._env_run.registered_name = str(tmp_path), "echo_0"
            taken = [await env.get_next_item() for _ in range(3)]
            env.save_checkpoint(10)
        async with running_env(EchoEnv, tmp_path, server) as env:
            # The API has numbered the restarted environment anew, and the trainer has gone three steps beyond its
            # checkpoint.
            env.checkpoint_dir, env._env_run.registered_name, env.curr_step = str(tmp_path), "echo_1", 13
            env.load_checkpoint()
            assert [*taken, await env.get_next_item()] == ["0", "1", "2", "3"]


def test_reply_continues_a_message_that_was_begun() -> None:
    begun = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "Well,"}]
    assert with_reply(begun, " yes") == [begun[0], {"role": "assistant", "content": "Well, yes"}]
    assert with_reply(begun[:1], "yes") == [begun[0], {"role": "assistant", "content": "yes"}]


async def test_sampling_is_cancelled_whole(tmp_path: Path) -> None:
    async with FakeInferenceServer() as server, running_env(EchoEnv, tmp_path, server) as env:
        server.delay_s = 30
        task = asyncio.create_task(env.collect_trajectories("1"))
        await until(lambda: server.in_flight > 0)
        task.cancel()
        assert isinstance((await asyncio.gather(task, return_exceptions=True))[0], asyncio.CancelledError)
