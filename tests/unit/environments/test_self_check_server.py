"""Two turns, of which the second is scored and both are trained on."""

from pathlib import Path

import pytest

from atroposlib.envs.data.problems import Problem
from atroposlib.envs.payloads import defect
from atroposlib.testing.fake_inference_server import FakeInferenceServer
from atroposlib.testing.tiny_tokenizer import CHATML, THINK_DROPPING_CHATML, save_tiny_tokenizer
from atroposlib.wire.batching import GroupRequirements
from environments.self_check_server import EXAMPLE, SelfCheckEnv
from tests.unit.environments.support import running_env, sampled_texts

PROBLEM = Problem("What is 7 * 8?", "#### 56")
DRAFT, FINAL = "7 * 8 = 54</think> 54", "7 * 8 = 56</think> 56"


def model(prompt: str) -> str:
    return FINAL if "Check that." in prompt else DRAFT


@pytest.mark.parametrize("template", [CHATML, THINK_DROPPING_CHATML], ids=["keeps thoughts", "strips thoughts"])
async def test_both_turns_are_trained_whatever_the_template_does_with_thoughts(template: str, tmp_path: Path) -> None:
    tokenizer = str(save_tiny_tokenizer(tmp_path / "tokenizer", chat_template=template))
    async with (
        FakeInferenceServer(model) as server,
        running_env(SelfCheckEnv, tmp_path / "env", server, tokenizer_name=tokenizer) as env,
    ):
        group, _ = await env.collect_trajectories(PROBLEM)
        assert group is not None
        texts = [env.tokenizer.decode(tokens) for tokens in group["tokens"]]
    asked = f"<|im_start|>user\n{EXAMPLE}What is 7 * 8?<|im_end|>\n<|im_start|>assistant\n"
    checked = "<|im_end|>\n<|im_start|>user\nCheck that. What is 7 * 8?<|im_end|>\n<|im_start|>assistant\n<think>"
    if template == CHATML:
        assert texts == [f"{asked}<think>{DRAFT}{checked}{FINAL}<|im_end|>"] * 4
        assert sampled_texts(group) == [f"{DRAFT}<|im_end|>{FINAL}<|im_end|>"] * 4
        assert "rollouts" not in group
    else:
        assert texts == [f"{asked}<think>{DRAFT}<|im_end|>", f"{asked} 54{checked}{FINAL}<|im_end|>"] * 4
        assert sampled_texts(group) == [f"{DRAFT}<|im_end|>", f"{FINAL}<|im_end|>"] * 4
        assert group["rollouts"] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert set(group["scores"]) == {1.0}
    assert defect(group, GroupRequirements(trainable_only=True)) is None


async def test_the_second_answer_counts_and_problems_may_come_from_a_file(tmp_path: Path) -> None:
    lines = [f'{{"question": "What is 7 * {number}?", "answer": "#### {7 * number}"}}\n' for number in range(8, 13)]
    (tmp_path / "problems.jsonl").write_text("".join(lines))
    async with (
        FakeInferenceServer(lambda prompt: DRAFT if "Check that." in prompt else FINAL) as server,
        running_env(
            SelfCheckEnv, tmp_path, server, dataset_path=str(tmp_path / "problems.jsonl"), show_thinking=False
        ) as env,
    ):
        (message,) = env.prompt(await env.get_next_item())
        assert message["content"] in {f"What is 7 * {number}?" for number in range(8, 13)}
        assert (await env.evaluate())["accuracy"] == 0.0
