"""Three ways to score: `score` with what it declares, rewards by weight, and the score that a rollout brings."""

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.commands.cli import EnvTree, build
from atroposlib.envs.commands.process import process
from atroposlib.envs.errors import EnvError
from atroposlib.envs.files.html_report import write_html
from atroposlib.envs.question_env import QuestionEnvConfig, Rollout, Scored, Split, reward
from atroposlib.envs.rewards import rewards_of
from atroposlib.envs.server_handling.dispatching.dispatch import gather_or_cancel
from atroposlib.envs.server_handling.server_config import APIServerConfig
from atroposlib.testing.fake_inference_server import FakeInferenceServer
from atroposlib.testing.tiny_tokenizer import save_tiny_tokenizer
from atroposlib.type_definitions import Messages
from tests.unit.environments.support import running_env
from tests.unit.envs.fakes import Asking, server_config

Conversation = list[dict[str, Any]]


class Plain(Asking):
    """Every method of the author's is a plain function."""

    def setup(self) -> None:  # type: ignore[override]
        self.held_out = ["1", "2"]

    def training_item(self, number: int) -> str:  # type: ignore[override]
        return str(number)

    def score(self, item: str, answer: str) -> float | None:
        return None if answer == "?" else float(item in answer)


class Told(Asking):
    """A rollout that leaves a state, and a score that declares it."""

    async def rollouts(self, item: str, n: int, split: Split, temperature: float, top_p: float) -> list[Rollout]:
        found = await super().rollouts(item, n, split, temperature, top_p)
        return [Rollout(each.text, each.messages, each.sequences, state={"length": len(each.text)}) for each in found]

    async def score(self, item: str, answer: str, *, state: Mapping[str, Any], messages: Messages) -> Scored:
        assert [message["role"] for message in messages] == ["user", "assistant"]
        assert messages[-1]["content"] == answer
        return Scored(float(state["length"]))


class Several(Asking):
    """Two rewards, one of them a coroutine, and one that is only watched."""

    @reward
    def right(self, item: str, answer: str) -> float | None:
        return None if answer == "?" else float(item in answer)

    @reward(weight=0.25)
    async def short(self, item: str, answer: str, messages: Messages) -> bool:
        return len(messages[-1]["content"]) == len(answer) < 3

    @reward(weight=0)
    def letters(self, item: str, answer: str, state: Mapping[str, Any]) -> int:
        return len(answer) + len(state)


class Bringing(Asking):
    """The environment of the rollout scores."""

    async def rollouts(self, item: str, n: int, split: Split, temperature: float, top_p: float) -> list[Rollout]:
        (found,) = await super().rollouts(item, 1, split, temperature, top_p)
        own = None if found.text == "?" else float(len(found.text))
        return [Rollout(found.text, found.messages, found.sequences, own_score=own)]


async def test_a_score_gets_the_conversation_and_the_state_that_it_declares(tmp_path: Path) -> None:
    async with FakeInferenceServer(lambda prompt: "7, 7") as server, running_env(Told, tmp_path, server) as env:
        group, _ = await env.collect_trajectories("7")
        metrics = await env.evaluate()
    assert group is not None
    assert group["scores"] == [4.0] * 4
    assert metrics["mean_score"] == 4.0


async def test_plain_functions_do_for_coroutines(tmp_path: Path) -> None:
    path = tmp_path / "groups.jsonl"
    fields: dict[str, Any] = {"tokenizer_name": str(save_tiny_tokenizer(tmp_path / "tokenizer")), "use_wandb": False}
    fields |= {"total_steps": 2, "data_path_to_save_groups": str(path), "ensure_scores_are_not_same": False}
    async with FakeInferenceServer(lambda prompt: ["0", "1"]) as server:
        await process(Plain(QuestionEnvConfig(**fields), server_config(server)))
    assert [json.loads(line)["scores"] for line in path.read_text().splitlines()] == [[1, 0, 1, 0], [0, 1, 0, 1]]


async def test_rewards_are_added_up_by_weight_and_each_is_kept_logged_and_shown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    files = {"data_path_to_save_groups": str(tmp_path / "s.jsonl"), "held_out_path": str(tmp_path / "h.jsonl")}
    files |= {"metrics_path": str(tmp_path / "m.jsonl"), "data_dir_to_save_evals": str(tmp_path / "evals")}
    answers = ["7", "seven", "17.0", "8"]
    async with (
        FakeInferenceServer(lambda prompt: answers) as server,
        running_env(Several, tmp_path, server, include_messages=True, **files) as env,
    ):
        group, _ = await env.collect_trajectories("7")
        await env._env_run.take(group, "7", send=False, limit_lengths=False)
        await env.wandb_log()
        metrics = await env.evaluate()
        env._env_run.write_held_out(3)
    assert group is not None
    assert group["scores"] == [1.25, 0.0, 1.0, 0.25]
    rewards = [
        {"right": right, "short": short, "letters": letters}
        for right, short, letters in [(1, 1, 1), (0, 0, 5), (1, 0, 4), (0, 1, 1)]
    ]
    assert group["rewards"] == rewards
    (row,) = (json.loads(line) for line in (tmp_path / "s.jsonl").read_text().splitlines())
    assert (row["scores"], row["rewards"]) == (group["scores"], rewards)
    (logged,) = (json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines())
    means = {key.split("train/")[1]: value for key, value in logged.items() if "train/reward_" in key}
    assert means == {"reward_right": 0.5, "reward_short": 0.5, "reward_letters": 2.75}
    assert "4 answers, 2 right, mean score 0.625, right 0.500, short 0.500, letters 2.750" in caplog.text
    assert {key: metrics[key] for key in means} == {"reward_right": 0, "reward_short": 1, "reward_letters": 1}
    held_out = [json.loads(line) for line in (tmp_path / "h.jsonl").read_text().splitlines()]
    assert [each["rewards"] for each in held_out] == [{"right": 0, "short": 1, "letters": 1}] * 2
    (sample, _) = (json.loads(line) for line in (tmp_path / "evals/samples.jsonl").read_text().splitlines())
    assert sample["rewards"]["letters"] == 1
    write_html(tmp_path / "s.jsonl", tmp_path / "s.html")
    assert "score 1.25 (right 1, short 1, letters 1)<" in (tmp_path / "s.html").read_text()


async def test_a_score_alone_adds_nothing_to_the_rows(tmp_path: Path) -> None:
    async with FakeInferenceServer(lambda prompt: "7") as server, running_env(Plain, tmp_path, server) as env:
        group, _ = await env.collect_trajectories("7")
        metrics = await env.evaluate()
    assert group is not None
    assert "rewards" not in group
    assert not [key for key in metrics if key.startswith("reward")]


async def test_an_answer_of_which_one_reward_is_none_is_not_scored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    answers = ["7", "?", "8", "8"]
    async with FakeInferenceServer(lambda prompt: answers) as server, running_env(Several, tmp_path, server) as env:
        group, _ = await env.collect_trajectories("7")
        await env.wandb_log()
    assert group is not None
    assert (group["scores"], group["failed"]) == ([1.25, 0.25, 0.25], {"scorer": 1})
    assert "An answer could not be scored: the reward right is None" in caplog.text


async def test_a_rollout_brings_its_own_score_or_none(tmp_path: Path) -> None:
    answers = iter(["77", "?", "777", "7"] + ["77"] * 2)
    async with (
        FakeInferenceServer(lambda prompt: next(answers)) as server,
        running_env(Bringing, tmp_path, server) as env,
    ):
        group, _ = await env.collect_trajectories("7")
        metrics = await env.evaluate()
    assert group is not None
    assert (sorted(group["scores"]), group["failed"]) == ([1.0, 2.0, 3.0], {"scorer": 1})
    assert metrics["mean_score"] == 2.0


async def test_an_answer_with_every_reward_is_right_however_weights_and_parts_are_rounded(tmp_path: Path) -> None:
    class Shares(Asking):
        @reward(weight=0.7)
        def right(self, item: str, answer: str) -> float:
            return 1.0

        @reward(weight=0.2)
        def short(self, item: str, answer: str) -> float:
            return 1.0

        @reward(weight=0.1)
        def polite(self, item: str, answer: str) -> float:
            return 1.0

    class ByHand(Asking):
        async def score(self, item: str, answer: str) -> float:
            return 0.7 + 0.2 + 0.1

    for env_cls in (Shares, ByHand):
        async with FakeInferenceServer() as server, running_env(env_cls, tmp_path, server) as env:
            assert (await env.evaluate())["accuracy"] == 1.0


async def test_a_reward_keeps_its_weight_in_a_subclass_that_overrides_it(tmp_path: Path) -> None:
    class Stricter(Several):
        def right(self, item: str, answer: str) -> float:
            return 3.0

        @staticmethod
        @reward(weight=2)
        def letters(item: str, answer: str) -> float:  # type: ignore[override]
            return 1.0

    async with FakeInferenceServer(lambda prompt: "7") as server, running_env(Stricter, tmp_path, server) as env:
        group, _ = await env.collect_trajectories("7")
    assert group is not None
    assert group["scores"] == [3.0 + 0.25 + 2.0] * 4
    assert group["rewards"] is not None
    assert list(group["rewards"][0]) == ["right", "short", "letters"]


@pytest.mark.parametrize("returned", ["1", [1], {"a": 1}, "x" * 999])
@pytest.mark.parametrize("name", ["score", "right"])
async def test_what_is_no_reward_is_an_error_that_names_method_and_value(
    tmp_path: Path, name: str, returned: Any
) -> None:
    def method(self: Any, item: str, answer: str) -> Any:
        return returned

    method.__name__ = name
    env_cls: Any = type("Wrong", (Asking,), {name: method if name == "score" else reward(method)})
    async with FakeInferenceServer() as server, running_env(env_cls, tmp_path, server) as env:
        with pytest.raises(TypeError) as caught:
            await env.collect_trajectories("7")
    assert str(caught.value).startswith(f"{name} returned {type(returned).__name__} {repr(returned)[:60]}")
    assert "instead of a number" in str(caught.value)


def refused(tmp_path: Path, **members: Any) -> str:
    """What an environment with these members is told when it is built."""
    env_cls: Any = type("Wrong", (Asking,), members)
    config = QuestionEnvConfig(tokenizer_name=str(save_tiny_tokenizer(tmp_path / "tokenizer")))
    with pytest.raises(EnvError) as caught:
        build(env_cls, EnvTree(env=config, openai=[APIServerConfig(base_url="http://127.0.0.1:9/v1")]))
    return str(caught.value)


def test_an_environment_has_one_way_to_score(tmp_path: Path) -> None:
    assert refused(tmp_path) == (
        "cannot build Wrong: Wrong scores nothing: write score(self, item, answer), methods with @reward, or rollouts"
        " with an own_score"
    )
    assert refused(tmp_path, score=Plain.score, short=Several.short, right=Several.right) == (
        "cannot build Wrong: Wrong has both score and methods with @reward (short, right): keep one way to score"
    )


def test_a_method_that_could_not_be_called_is_refused_when_the_environment_is_built(tmp_path: Path) -> None:
    def without_answer(self: Any, item: str, messages: Messages) -> float:
        return 0.0

    def with_more(self: Any, item: str, answer: str, task: str) -> float:
        return 0.0

    told = refused(tmp_path, score=without_answer)
    assert "Wrong.score(item: str, messages: " in told
    assert "is called with the item and the answer, and by name with messages and state if it declares them: " in told
    assert refused(tmp_path, more=reward(with_more)).endswith("missing a required argument: 'task'")


async def test_the_rewards_of_a_group_stay_with_their_rollouts_of_several_sequences(tmp_path: Path) -> None:
    class Twice(Several):
        """Each rollout has two sequences."""

        async def rollouts(self, item: str, n: int, split: Split, temperature: float, top_p: float) -> list[Rollout]:
            async def one() -> Rollout:
                first, second = await gather_or_cancel(
                    [super(Twice, self).rollouts(item, 1, split, temperature, top_p) for _ in range(2)]
                )
                return Rollout(second[0].text, second[0].messages, [*first[0].sequences, *second[0].sequences])

            return [await one()]

    async with FakeInferenceServer(lambda prompt: "7") as server, running_env(Twice, tmp_path, server) as env:
        group, _ = await env.collect_trajectories("7")
    assert group is not None
    assert group["rollouts"] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert group["rewards"] is not None
    assert len(group["rewards"]) == 8


@pytest.mark.parametrize("weight", ["half", math.nan, None])
def test_a_weight_that_is_no_finite_number_is_refused_where_it_stands(weight: Any) -> None:
    with pytest.raises(ValueError, match=rf"@reward\(weight={weight!r}\): a weight is a finite number"):
        reward(weight=weight)


def test_a_weight_without_its_name_is_told_how_to_write_it() -> None:
    with pytest.raises(ValueError, match=re.escape("@reward(0.5): write @reward(weight=0.5)")):
        reward(0.5)  # type: ignore[call-overload]


@pytest.mark.parametrize("decorate", [lambda f: reward(staticmethod(f)), lambda f: staticmethod(reward(f))])
def test_a_static_method_is_a_reward_in_either_order(decorate: Callable[[Any], Any]) -> None:
    class Static(Asking):
        good = decorate(lambda item, answer: 1.0)

    assert [each.name for each in rewards_of(Static.__new__(Static), Asking, brings_its_own=False).named] == ["good"]
