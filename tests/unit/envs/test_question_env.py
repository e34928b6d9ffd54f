import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from pydantic import ValidationError

from atroposlib.envs.errors import EnvError
from atroposlib.envs.question_env import QuestionEnvConfig, with_reply
from atroposlib.grading.length import soft_overlong_punishment
from atroposlib.testing.fake_inference_server import FakeInferenceServer
from atroposlib.testing.tiny_tokenizer import CHATML
from tests.unit.environments.support import running_env
from tests.unit.envs.fakes import Asking
from tests.waiting import until


class EchoEnv(Asking):
    """Right is to repeat the number."""

    name = "echo"

    async def setup(self) -> None:
        self.held_out = ["1", "2", "3"]

    async def score(self, item: str, answer: str) -> float | None:
        return None if answer == "?" else float(item in answer)


async def test_an_answer_without_a_score_has_failed_and_its_siblings_go_on(tmp_path: Path) -> None:
    answers = ["7", "?", "8", "8"]
    async with FakeInferenceServer(lambda prompt: answers) as server, running_env(EchoEnv, tmp_path, server) as env:
        group, _ = await env.collect_trajectories("7")
    assert group is not None
    assert (group["scores"], group["failed"]) == ([1.0, 0.0, 0.0], {"scorer": 1})
    assert len(group["tokens"]) == 3
    assert [scored.reward for scored in env.scored] == [1.0, None, 0.0, 0.0]


async def test_a_group_of_which_one_answer_has_a_score_is_lost_and_counted(tmp_path: Path) -> None:
    answers = ["7", "?", "?", "?"]
    async with FakeInferenceServer(lambda prompt: answers) as server, running_env(EchoEnv, tmp_path, server) as env:
        await env.handle_env("7")
    counts = {"groups_unscored": 1, "items_without_group": 1, "rollouts_failed_scorer": 3}
    assert env._env_run.counts == counts
    assert env._env_run.outcomes.last_drop.startswith("3 of its 4 answers could not be scored: score has")


@pytest.mark.parametrize("hangs", [True, False])
async def test_a_scorer_that_hangs_or_raises_on_one_answer_costs_that_answer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, hangs: bool
) -> None:
    class Treacherous(EchoEnv):
        async def score(self, item: str, answer: str) -> float | None:
            if answer == "?":
                await asyncio.sleep(60 if hangs else 0)
                raise ZeroDivisionError("of this answer")
            return await super().score(item, answer)

    answers = ["7", "?", "8", "8"]
    async with (
        FakeInferenceServer(lambda prompt: answers) as server,
        running_env(Treacherous, tmp_path, server, rollout_timeout=1.5 if hangs else 60) as env,
    ):
        await env.handle_env("7")
    assert env._env_run.counts["groups_accepted"] == 1
    assert env._env_run.counts["rollouts_failed_scorer"] == 1
    told = "it took longer than 1.5 s (--env.rollout_timeout)" if hangs else "ZeroDivisionError: of this answer at "
    assert f"A rollout of the item '7' failed (scorer); its siblings continue: {told}" in caplog.text
    assert ("Traceback" in caplog.text) is not hangs


async def test_a_scorer_that_always_raises_loses_the_item_by_its_own_error(tmp_path: Path) -> None:
    class Broken(EchoEnv):
        async def score(self, item: str, answer: str) -> float | None:
            raise ZeroDivisionError("of mine")

    async with FakeInferenceServer() as server, running_env(Broken, tmp_path, server) as env:
        with pytest.raises(ZeroDivisionError, match="of mine"):
            await env.handle_env("7")
    assert env._env_run.counts["rollouts_failed_scorer"] == 4


async def test_the_reward_falls_over_the_last_tokens_and_accuracies_do_not(tmp_path: Path) -> None:
    async with (
        FakeInferenceServer(lambda prompt: ["7", "7 7 7", "7 7 7 7"]) as server,
        running_env(EchoEnv, tmp_path, server, max_new_tokens=8, overlong_buffer=4) as env,
    ):
        group, _ = await env.collect_trajectories("7")
    assert group is not None
    lengths = [sum(value != -100 for value in mask) for mask in group["masks"]]
    assert lengths == [2, 6, 8, 2]  # with the end of the turn
    assert group["scores"] == [1.0, 0.5, 0.0, 1.0]
    assert [scored.reward for scored in env.scored] == [1.0] * 4


def test_a_buffer_that_no_answer_has_is_refused() -> None:
    with pytest.raises(ValidationError, match="overlong_buffer 9 is above max_new_tokens 8"):
        QuestionEnvConfig(max_new_tokens=8, overlong_buffer=9)
    with pytest.raises(ValidationError, match="greater than or equal to 0"):
        QuestionEnvConfig(overlong_buffer=-1)


@pytest.mark.parametrize(("tokens", "reward"), [(0, 0), (60, 0), (61, -0.025), (80, -0.5), (100, -1), (999, -1)])
def test_soft_overlong_punishment_is_that_of_the_paper(tokens: int, reward: float) -> None:
    assert soft_overlong_punishment(tokens, limit=100, buffer=40) == pytest.approx(reward)


@pytest.mark.parametrize("buffer", [0, -1, 101])
def test_soft_overlong_punishment_needs_a_buffer_within_the_limit(buffer: int) -> None:
    with pytest.raises(ValueError, match=f"a buffer of {buffer} tokens does not fit a limit of 100"):
        soft_overlong_punishment(1, limit=100, buffer=buffer)


async def test_answers_say_why_they_ended(tmp_path: Path) -> None:
    async with (
        FakeInferenceServer(lambda prompt: ["7", "a long one"]) as server,
        running_env(EchoEnv, tmp_path, server, max_new_tokens=4) as env,
    ):
        group, _ = await env.collect_trajectories("7")
    assert group is not None
    assert group["finish_reasons"] == ["stop", "length", "stop", "length"]


async def test_long_answers_are_asked_for_one_by_one_and_one_that_is_late_fails_alone(tmp_path: Path) -> None:
    class FirstIsSlow(FakeInferenceServer):
        taken = 0

        async def _generate(self, request: web.Request) -> web.Response:
            self.taken += 1
            await asyncio.sleep(60 if self.taken == 1 else 0)
            return await super()._generate(request)

    async with (
        FirstIsSlow(lambda prompt: "7") as server,
        running_env(EchoEnv, tmp_path, server, max_new_tokens=2048, rollout_timeout=1.5) as env,
    ):
        group, _ = await env.collect_trajectories("7")
        assert [body["n"] for _, body in server.requests] == [1] * 4
    assert group is not None
    assert (group["scores"], group["failed"]) == ([1.0] * 3, {"timeout": 1})


@pytest.mark.parametrize("name", ["min_p", "repetition_penalty"])
async def test_a_sampling_parameter_that_the_trainer_does_not_replay_is_refused_by_name(
    tmp_path: Path, name: str
) -> None:
    class Biased(EchoEnv):
        async def rollouts(self, item: Any, n: int, split: Any, temperature: float, top_p: float) -> Any:
            async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
                await managed.chat_completion(
                    messages=self.prompt(item), max_tokens=4, split=split, extra_body={name: 0.3}
                )
            return await super().rollouts(item, n, split, temperature, top_p)

    async with FakeInferenceServer(lambda prompt: "7") as server, running_env(Biased, tmp_path, server) as env:
        with pytest.raises(EnvError, match=f"{name} 0.3 changes the distribution that is sampled from"):
            await env.handle_env("7")
        assert not server.requests
        assert (await env.evaluate())["total"] == 3  # evaluations may


def test_a_configuration_with_a_parameter_that_is_not_replayed_is_refused_by_name() -> None:
    class Config(QuestionEnvConfig):
        min_p: float = 0.0

    assert Config().min_p == 0.0
    with pytest.raises(ValidationError, match=r"min_p 0.1 changes the distribution .*: eval_min_p"):
        Config(min_p=0.1)


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
    answers = ["<think>7</think>8", "<think>8</think>7", "<think>so 7", "7"]
    async with (
        FakeInferenceServer(lambda prompt: answers) as server,
        running_env(EchoEnv, tmp_path, server, thinking_mode=True, custom_thinking_prompt="Ponder.") as env,
    ):
        group, _ = await env.collect_trajectories("7")
    assert group is not None
    assert group["scores"] == [0.0, 1.0, 0.0, 1.0], "thoughts that never end answer nothing"
    assert group["messages"] is not None
    assert group["messages"][0][0] == {"role": "system", "content": "Ponder."}


async def test_thoughts_that_the_template_opened_and_that_never_end_answer_nothing(tmp_path: Path) -> None:
    template = tmp_path / "thinks.jinja"
    template.write_text(CHATML.replace("assistant\n", "assistant\n<think>\n"))
    async with (
        FakeInferenceServer(lambda prompt: ["so 7", "7</think>8", "so</think>7", "<think>7"]) as server,
        running_env(EchoEnv, tmp_path, server, thinking_mode=True, chat_template=str(template)) as env,
    ):
        group, _ = await env.collect_trajectories("7")
    assert group is not None
    assert group["scores"] == [0.0, 0.0, 1.0, 0.0]


async def test_evaluation_leaves_out_what_has_no_score_and_keeps_samples(tmp_path: Path) -> None:
    answer = {"Say 1.": "1", "Say 2.": "no", "Say 3.": "?"}
    async with (
        FakeInferenceServer(lambda prompt: next(text for asked, text in answer.items() if asked in prompt)) as server,
        running_env(EchoEnv, tmp_path, server, data_dir_to_save_evals=str(tmp_path / "evals")) as env,
    ):
        metrics = await env.evaluate()
    counts = {"correct": 1, "total": 2, "unscored": 1, "unscored_scorer": 1}
    assert metrics == {"accuracy": 0.5, "mean_score": 0.5, "temperature": 0.0} | counts
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
            # The API has numbered the restarted environment again, and the trainer has gone three steps beyond its
            # checkpoint.
            env.checkpoint_dir, env._env_run.registered_name, env.curr_step = str(tmp_path), "echo_1", 13
            env.load_checkpoint()
            assert [*taken, await env.get_next_item()] == ["0", "1", "2", "3"]


async def test_the_last_policy_is_asked_further_questions(tmp_path: Path) -> None:
    class Many(EchoEnv):
        async def setup(self) -> None:
            self.held_out = [str(number) for number in range(self.config.held_out_limit)]

    few = {"heldout_size": 4, "final_heldout_size": 10}
    async with FakeInferenceServer(lambda prompt: "2 3 9") as server:
        async with running_env(Many, tmp_path, server, **few) as env:
            usual = await env.evaluate()
            env._env_run.is_last = True
            last = await env.evaluate()
        async with running_env(Many, tmp_path, server, **few | {"final_heldout_size": 0}) as env:
            env._env_run.is_last = True
            only = await env.evaluate()
    assert usual == only
    assert (usual["accuracy"], usual["total"]) == (0.5, 4)
    assert last == {**usual, "final_accuracy": 0.3, "final_correct": 3, "final_total": 10}


async def test_a_half_solved_question_is_asked_again_also_after_a_resume(tmp_path: Path) -> None:
    async def ask(env: EchoEnv) -> str:
        item = await env.get_next_item()
        await env.collect_trajectories(item)
        return str(item)

    half = ["1", "1", "?", "no"]  # right for question 1 alone, in two of the three answers that have a score
    async with FakeInferenceServer(lambda prompt: half) as server:
        async with running_env(EchoEnv, tmp_path, server, repeat_share=0.5) as env:
            env.checkpoint_dir, env._env_run.registered_name = str(tmp_path), "echo_0"
            assert [await ask(env) for _ in range(5)] == ["0", "1", "1", "2", "1"]
            env.save_checkpoint(10)
        async with running_env(EchoEnv, tmp_path, server, repeat_share=0.5) as env:
            env.checkpoint_dir, env._env_run.registered_name, env.curr_step = str(tmp_path), "echo_0", 10
            env.load_checkpoint()
            assert [await ask(env) for _ in range(3)] == ["3", "1", "4"]


async def test_an_author_whose_groups_are_not_seen_cannot_have_questions_repeated(tmp_path: Path) -> None:
    class Own(EchoEnv):
        async def collect_trajectories(self, item: str) -> Any:
            return None, []

    async with FakeInferenceServer() as server:
        with pytest.raises(ValueError, match="repeat_share needs the scores"):
            async with running_env(Own, tmp_path, server, repeat_share=0.5):
                pass


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
