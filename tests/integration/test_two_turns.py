"""A conversation of two turns whose template strips thoughts, trained through every service on real vLLM."""

import json
import shutil
import uuid
from pathlib import Path
from statistics import mean

import pytest

from atroposlib.testing.tiny_tokenizer import THINK_DROPPING_CHATML
from example_trainer.quickstart_model import cached_model
from tests.integration.conftest import REPOSITORY
from tests.integration.launched import launch
from tests.serving import free_port

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

STEPS = 8


def thought_stripping_tokenizer(folder: Path) -> Path:
    """The quickstart model's tokenizer, with a template that strips the thoughts of earlier turns."""
    from transformers import AutoTokenizer

    model = cached_model()
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = THINK_DROPPING_CHATML
    tokenizer.save_pretrained(folder)
    return folder


def test_all_turns_are_trained_and_the_reward_rises(tmp_path: Path) -> None:
    run = tmp_path / f"turns-{uuid.uuid4().hex[:8]}"
    ports = ["--api-port", str(free_port()), "--vllm-port", str(free_port())]
    where = ["--runs", str(tmp_path), "--run-name", run.name]
    environment = ["--env.file", str(REPOSITORY / "environments/self_check_server.py")]
    environment += ["--env.tokenizer_name", str(thought_stripping_tokenizer(tmp_path / "tokenizer"))]
    environment += ["--env.max_new_tokens", "24", "--env.steps_per_eval", "0", "--env.eval_at_start", "false"]
    environment += ["--env.ensure_scores_are_not_same", "false"]  # so that the mean reward is the policy's
    rate = ["--trainer.lr", "2e-5", "--trainer.lr_by_signal", "false"]  # it goes on closing thoughts for some steps
    done = launch(
        "train", "arithmetic", "--steps", str(STEPS), *environment, *rate, *ports, *where, cwd=tmp_path, timeout_s=1500
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    # two sequences of a rollout, or one where the model did not close its thoughts, which it unlearns
    assert rows[0]["sequences"] > 1.2 * rows[0]["rollouts"]
    for row in rows:
        assert row["rollouts"] == 64
        assert 64 <= row["sequences"] <= 128
        if row["zero_variance_groups"] < row["groups"]:  # else nothing was computed
            assert row["logprob_diff_max"] < 1e-2  # the trainer reads the tokens that were sampled
    groups = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    for group in groups:
        sampled = [any(mask != -100 for mask in masks) for masks in group["masks"]]
        assert all(sampled)
        assert len(set(group.get("rollouts") or range(8))) == 8
    rewards = [row["reward_mean"] for row in rows]
    assert mean(rewards[-4:]) > mean(rewards[:4]) + 0.15, rewards
    shutil.rmtree(run)
