import asyncio
import os
import signal
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest

from atroposlib.envs.errors import DataError
from atroposlib.envs.failures import RolloutFailed
from atroposlib.envs.payloads import defect, rejection
from atroposlib.testing.fake_inference_server import FakeInferenceServer, fake_logprob
from atroposlib.testing.tiny_tokenizer import THINK_DROPPING_CHATML, save_tiny_tokenizer
from atroposlib.wire.batching import GroupRequirements
from environments.calculator_tool_server import CalculatorEnv, Question, tool_result
from tests.unit.environments.support import running_env, sampled_texts

pytestmark = pytest.mark.services

QUESTION = Question("17 * 23", Fraction(391))
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "17 * 23"}}</tool_call>'


def conversation(*turns: str) -> Callable[[str], str]:
    """A model that says `turns` one after the other, counted by the assistant turns that its prompt opens."""
    return lambda prompt: turns[min(prompt.count("<|im_start|>assistant"), len(turns)) - 1]


@pytest.mark.parametrize(
    ("text", "result"),
    [
        (CALL, "391"),
        ('<tool_call>{"name": "calculator", "arguments": {"expression": "1 / 3"}}</tool_call>', "1/3 = 0.333333"),
        (
            '<tool_call>{"name": "calculator", "arguments": {"expression": "1 / 0"}}</tool_call>',
            "Error: division by zero",
        ),
        ('<tool_call>{"name": "shell", "arguments": {}}</tool_call>', 'Error: expected {"name": "calculator"'),
        ("<tool_call>", "Error: expected"),
        ("391", None),
        (CALL.replace("17 * 23", f"1{'0' * 320}/3"), f"1{'0' * 320}/3 = 3.33333e+319"),
        (CALL.replace("17 * 23", f"1/3{'0' * 400}"), f"1/3{'0' * 400} = 3.33333e-401"),
    ],
)
def test_calculator_replies_to_a_call_or_says_what_is_wrong_with_it(text: str, result: str | None) -> None:
    said = tool_result(text)
    assert said is None if result is None else said is not None and said.startswith(result)


async def test_what_the_model_said_is_trained_over_all_turns_and_the_tool_is_not(tmp_path: Path) -> None:
    model = conversation(f"Let me see. {CALL}", "<answer>391</answer>")
    async with (
        FakeInferenceServer(model, policy_version=2) as server,
        running_env(CalculatorEnv, tmp_path, server, max_new_tokens=200) as env,
    ):
        group, _ = await env.collect_trajectories(QUESTION)
        assert group is not None
        assert group["inference_logprobs"] is not None
        text = env.tokenizer.decode(group["tokens"][0])
    assert "<|im_start|>tool\n391<|im_end|>" in text
    assert text.count("17 * 23") == 2
    assert sampled_texts(group) == [f"Let me see. {CALL}<|im_end|><answer>391</answer><|im_end|>"] * 4
    for tokens, mask, logprobs in zip(group["tokens"], group["masks"], group["inference_logprobs"], strict=True):
        assert len(tokens) == len(mask) == len(logprobs)
        assert [logprob == 1.0 for logprob in logprobs] == [token == -100 for token in mask]
    assert group["scores"] == [1.0] * 4
    assert group["policy_versions"] == [[2, 2]] * 4
    roles = [message["role"] for message in group["messages"][0]]  # type: ignore[index]
    assert roles == ["system", "user", "assistant", "tool", "assistant"]


async def test_every_turn_is_trained_where_the_template_strips_thoughts(tmp_path: Path) -> None:
    tokenizer = save_tiny_tokenizer(tmp_path / "strips", chat_template=THINK_DROPPING_CHATML)
    thoughts = ["<think>17 * 23 is too much.</think>", "<think>Now I know.</think>"]
    model = conversation(f"{thoughts[0]}{CALL}", f"{thoughts[1]}<answer>391</answer>")
    async with (
        FakeInferenceServer(model, policy_version=2) as server,
        running_env(CalculatorEnv, tmp_path, server, max_new_tokens=200, tokenizer_name=str(tokenizer)) as env,
    ):
        group, _ = await env.collect_trajectories(QUESTION)
        assert group is not None
        first, second = (env.tokenizer.decode(tokens) for tokens in group["tokens"][:2])
    assert (
        sampled_texts(group) == [f"{thoughts[0]}{CALL}<|im_end|>", f"{thoughts[1]}<answer>391</answer><|im_end|>"] * 4
    )
    assert "<think>17" in first
    assert "<think>17" not in second
    assert f"{CALL}<|im_end|>\n<|im_start|>tool\n391<|im_end|>\n<|im_start|>assistant\n{thoughts[1]}" in second
    assert group["rollouts"] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert group["scores"] == [1.0] * 8
    assert group["policy_versions"] == [[2, 2]] * 8
    for mask, logprobs in zip(group["masks"], group["inference_logprobs"] or [], strict=True):
        sampled = [token for token in mask if token != -100]
        assert [value for value in logprobs if value != 1.0] == [
            fake_logprob(token, place) for place, token in enumerate(sampled)
        ]
        assert [value == 1.0 for value in logprobs] == [token == -100 for token in mask]
    assert defect(group, GroupRequirements(trainable_only=True)) is None
    assert rejection(group, group_size=4, max_token_len=-1, scores_must_differ=False) is None


async def test_calls_cost_and_turns_are_bounded(tmp_path: Path) -> None:
    async with (
        FakeInferenceServer(conversation(CALL, CALL, "<answer>391</answer>", CALL)) as server,
        running_env(CalculatorEnv, tmp_path, server, max_new_tokens=200, tool_cost=0.1) as env,
    ):
        rollout = (await env.rollouts(QUESTION, 1, "train", 1.0, 1.0))[0]
        assert await env.score(QUESTION, rollout.text) == pytest.approx(0.8)
        server.answer = lambda prompt: CALL
        rollout = (await env.rollouts(QUESTION, 1, "train", 1.0, 1.0))[0]
        assert rollout.text.count("<tool_call>") == 4
        assert await env.score(QUESTION, rollout.text) == 0.0


async def test_questions_that_are_all_held_out_are_refused(tmp_path: Path) -> None:
    few = {"terms": 2, "largest_number": 2, "heldout_size": 300}
    async with FakeInferenceServer() as server, running_env(CalculatorEnv, tmp_path, server, **few) as env:
        with pytest.raises(DataError, match="among the 300 that are held out"):
            await env.get_next_item()


async def test_evaluation_counts_a_right_answer_that_cost_something_as_right(tmp_path: Path) -> None:
    async with (
        FakeInferenceServer() as server,
        running_env(CalculatorEnv, tmp_path, server, max_new_tokens=200, tool_cost=0.1) as env,
    ):
        env.held_out = [QUESTION]
        server.answer = conversation(CALL, "<answer>391</answer>")
        assert await env.evaluate() == {
            "accuracy": 1.0,
            "mean_score": 0.9,
            "correct": 1,
            "total": 1,
            "unscored": 0,
            "temperature": 0.0,
        }


async def test_the_tool_runs_in_a_sandbox_and_a_killed_one_costs_its_rollout_and_no_reward(tmp_path: Path) -> None:
    async with (
        FakeInferenceServer(conversation(CALL, "<answer>391</answer>")) as server,
        running_env(CalculatorEnv, tmp_path, server, max_new_tokens=200) as env,
    ):
        rollout = (await env.rollouts(QUESTION, 1, "train", 1.0, 1.0))[0]
        assert [message["content"] for message in rollout.messages if message["role"] == "tool"] == ["391"]
        process = env.pool._children[0]._process
        assert process is not None
        assert "seccomp" in (await env.pool.sandbox_report()).means
        os.killpg(process.pid, signal.SIGSTOP)
        asking = asyncio.create_task(env.rollouts(QUESTION, 1, "train", 1.0, 1.0))
        await asyncio.sleep(0.2)
        os.killpg(process.pid, signal.SIGKILL)
        with pytest.raises(RolloutFailed, match="the calculator failed on "):
            await asking
        rollout = (await env.rollouts(QUESTION, 1, "train", 1.0, 1.0))[0]
        assert [message["content"] for message in rollout.messages if message["role"] == "tool"] == ["391"]
