"""Groups without the sampler's log-probabilities: refused at the author's door, unless the trainer computes the old
log-probabilities itself and nothing else needs the sampler's.
"""

import asyncio
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from atroposlib.envs.authors.author_errors import TooManyFailures
from atroposlib.envs.commands.process import process
from atroposlib.testing.fake_inference_server import FakeInferenceServer
from atroposlib.wire.batching import GroupRequirements
from example_trainer import grpo
from example_trainer.bridges import BridgeError
from example_trainer.data.batching import Batch, Sequence, make_batch
from example_trainer.data.packing import micro_batches, with_old_logprobs
from example_trainer.exact.check import Comparison
from example_trainer.loss.batch_gradients import batch_gradients
from example_trainer.loss.metric import values
from example_trainer.model.policy import Policy
from example_trainer.settings.config import TrainerConfig
from example_trainer.settings.loss import LossSettings
from tests.unit.envs.fakes import CountingEnv, server_config
from tests.unit.envs.fakes import config as env_config
from tests.unit.trainer.fakes import RecordingBridge, as_records, gradient_of, item, tiny_model
from tests.unit.trainer.whole_runs import config, real_api, rows

MODEL = {"vocab_size": 300}
Figures = dict[str, float | None]
OF_SAMPLER = ("logprob_diff_mean", "logprob_diff_max", "sampler_kl")
OPTIONAL = GroupRequirements(trainable_only=True, logprobs_optional=True)
CPU = torch.device("cpu")


def batch_of(*items: dict[str, Any], needs: GroupRequirements = OPTIONAL) -> Batch:
    return make_batch(as_records(items), seq_len=64, policy_version=0, needs=needs)


WITH, WITHOUT = item([1.0, 0.0], seed=1), item([0.0, 1.0], seed=2, inference_logprobs=None)


def recomputed(sequences: list[Sequence]) -> list[Sequence]:
    column = np.full(sum(sequence.trained_tokens for sequence in sequences), -1.5, np.float32)
    return with_old_logprobs(sequences, column, 64)


def gradients(sequences: list[Sequence], budget: int = 64) -> tuple[Figures, list[torch.Tensor], Comparison]:
    model, comparison = tiny_model(), Comparison()
    batches = micro_batches(recomputed(sequences), budget, CPU)
    measured = values(batch_gradients(Policy(model), batches, LossSettings(), comparison=comparison))
    return measured, [gradient_of(parameter) for parameter in model.parameters()], comparison


@pytest.mark.parametrize("absent", [None, []])
def test_sequences_without_the_samplers_log_probabilities_are_whole_otherwise(absent: Any) -> None:
    batch = batch_of(WITH, WITHOUT | {"inference_logprobs": absent})
    assert [sequence.sampler_logprobs is None for sequence in batch.sequences] == [False, False, True, True]
    assert batch.groups == 2
    assert not batch.rejected
    refused = batch_of(WITH, WITHOUT, needs=GroupRequirements(trainable_only=True)).rejected
    assert list(refused) == [1]
    assert refused[1].startswith("inference_logprobs: missing: ")
    assert "--old-logprobs recomputed, without --importance, --off-policy-mask and --batch-invariant" in refused[1]


@pytest.mark.parametrize("budget", [64, 1])
def test_they_train_and_are_left_out_of_the_comparison_with_the_sampler(budget: int) -> None:
    """As the same sequences do whose log-probabilities are known: recomputed, the sampler's are not used."""
    sequences = batch_of(WITH, item([0.0, 1.0], seed=2)).sequences
    unknown = [*sequences[:2], *(replace(sequence, sampler_logprobs=None) for sequence in sequences[2:])]
    all_known, expected, _ = gradients(sequences, budget)
    measured, found, comparison = gradients(unknown, budget)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    assert measured["loss"] == all_known["loss"]
    of_known, _, alone = gradients(sequences[:2], budget)
    for name in OF_SAMPLER:
        assert measured[name] == pytest.approx(of_known[name])
        assert measured[name] != pytest.approx(all_known[name])
    tokens = sum(sequence.trained_tokens for sequence in sequences[:2])
    assert comparison.row()["bit_exact/tokens"] == alone.row()["bit_exact/tokens"] == tokens
    assert comparison.mean_difference() == pytest.approx(alone.mean_difference())
    assert len(comparison.columns()[2]) == sum(sequence.trained_tokens for sequence in sequences)
    assert "nan" not in comparison.table()


def test_a_batch_of_them_alone_compares_nothing() -> None:
    measured, _, comparison = gradients(batch_of(WITHOUT).sequences)
    assert [measured[name] for name in OF_SAMPLER] == [None] * 3
    assert all(value is None or math.isfinite(value) for value in measured.values())
    assert comparison.row() == {"bit_exact/differing_tokens": 0, "bit_exact/tokens": 0}
    assert comparison.mean_difference() == 0.0


@pytest.mark.parametrize(
    ("flags", "needed"),
    [
        ({}, True),
        ({"old_logprobs": "recomputed"}, False),
        ({"epochs": 2}, False),
        ({"epochs": 2, "old_logprobs": "sampler"}, True),
        ({"old_logprobs": "recomputed", "importance": "mask"}, True),
        ({"old_logprobs": "recomputed", "off_policy_mask": 1.0}, True),
        ({"old_logprobs": "recomputed", "batch_invariant": True}, True),
    ],
)
def test_a_trainer_needs_them_for_ratios_corrections_and_exactness(flags: dict[str, Any], needed: bool) -> None:
    assert TrainerConfig.model_validate({"model_name": "m"} | flags).needs_sampler_logprobs is needed


class WithoutLogprobs(CountingEnv):
    """As an author writes one who knows nothing of log-probabilities."""

    async def collect_trajectory(self, item: int) -> Any:
        sample, later = await super().collect_trajectory(item)
        return {key: value for key, value in sample.items() if key != "inference_logprobs"}, later  # type: ignore[union-attr]


def trainer_config(model: str, folder: Path, url: str, **changes: Any) -> TrainerConfig:
    settings: dict[str, Any] = dict(training_steps=2, batch_size=4, warmup_steps=0, lr=1e-5, micro_batch_tokens=None)
    return config(model, folder, url, **settings | dict(fetch_timeout=60, api_timeout=120, eval_deadline=0) | changes)


async def test_an_environment_without_them_trains_where_the_trainer_recomputes(model: str, tmp_path: Path) -> None:
    with real_api() as url:
        async with FakeInferenceServer() as server:
            env = WithoutLogprobs(env_config(tmp_path, url, steps_per_eval=0), server_config(server))
            config = trainer_config(model, tmp_path, url, old_logprobs="recomputed")
            await asyncio.gather(env.env_manager(), asyncio.to_thread(grpo.run, config, RecordingBridge()))
    first, second = rows(tmp_path)
    for row in (first, second):
        assert row["trained_tokens"] > 0
        assert math.isfinite(row["loss"])
        assert row["grad_norm"] > 0
        assert row["logprob_diff_mean"] is None
        assert row["bit_exact/tokens"] == 0


async def test_it_is_refused_by_file_and_method_where_the_trainer_uses_the_samplers(model: str, tmp_path: Path) -> None:
    with real_api() as url:
        async with FakeInferenceServer() as server:
            env = WithoutLogprobs(env_config(tmp_path, url, max_failed_items=2), server_config(server))
            bridge = RecordingBridge()
            training = asyncio.create_task(asyncio.to_thread(grpo.run, trainer_config(model, tmp_path, url), bridge))
            refusal = r"inference_logprobs: missing: .*recomputed, .* --batch-invariant at .*{}:\d+ in collect_tra"
            with pytest.raises(TooManyFailures, match=refusal.format("test_optional_logprobs.py")):
                await asyncio.wait_for(env.env_manager(), 60)
            bridge.lost = True
            with pytest.raises(BridgeError):
                await training
    assert env._env_run.outcomes.posted == 0


async def test_process_keeps_its_groups(tmp_path: Path) -> None:
    groups = tmp_path / "groups.jsonl"
    async with FakeInferenceServer() as server:
        settings = env_config(tmp_path, "", data_path_to_save_groups=str(groups), total_steps=2)
        await process(WithoutLogprobs(settings, server_config(server)))
    assert groups.read_text().count("\n") == 2
