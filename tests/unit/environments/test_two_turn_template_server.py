"""A guess, a hint, and a second guess; both turns are trained on."""

from pathlib import Path

import pytest

from atroposlib.testing.fake_inference_server import FakeInferenceServer
from environments.two_turn_template_server import GuessEnv
from tests.unit.environments.support import running_env, sampled_texts


def model(prompt: str) -> str:
    return "It is 7." if "higher" in prompt else "It is 3."


async def test_a_wrong_guess_gets_a_hint_and_the_second_one_is_scored(tmp_path: Path) -> None:
    async with FakeInferenceServer(model) as server, running_env(GuessEnv, tmp_path, server) as env:
        group, _ = await env.collect_trajectories(7)
        missed, _ = await env.collect_trajectories(8)
    assert group is not None
    assert missed is not None
    assert group["scores"] == [1.0] * 4
    assert missed["scores"] == [0.0] * 4
    assert sampled_texts(group) == ["It is 3.<|im_end|>It is 7.<|im_end|>"] * 4
    messages = group["messages"]
    assert messages is not None
    assert [message["content"] for message in messages[0]][1:3] == ["It is 3.", "It is higher. Which one?"]


async def test_a_right_first_guess_ends_the_conversation(tmp_path: Path) -> None:
    async with FakeInferenceServer(model) as server, running_env(GuessEnv, tmp_path, server) as env:
        group, _ = await env.collect_trajectories(3)
        assert await env.training_item(5) == await env.training_item(5)
        assert 0.0 <= (await env.evaluate())["accuracy"] <= 1.0
    assert group is not None
    assert group["scores"] == [1.0] * 4
    assert sampled_texts(group) == ["It is 3.<|im_end|>"] * 4


@pytest.mark.parametrize("guess", ["9" * 5000, "-1", "0.5", "1,000"])
async def test_any_number_gets_a_hint(guess: str, tmp_path: Path) -> None:
    async with (
        FakeInferenceServer(lambda prompt: guess) as server,
        running_env(GuessEnv, tmp_path, server, max_new_tokens=6000) as env,
    ):
        group, _ = await env.collect_trajectories(3)
    assert group is not None
    assert group["scores"] == [0.0] * 4


async def test_no_number_is_asked_for_again(tmp_path: Path) -> None:
    async with (
        FakeInferenceServer(lambda prompt: "I do not know") as server,
        running_env(GuessEnv, tmp_path, server) as env,
    ):
        group, _ = await env.collect_trajectories(3)
    assert group is not None
    messages = group["messages"]
    assert messages is not None
    assert messages[0][2]["content"] == "Answer with a number."
