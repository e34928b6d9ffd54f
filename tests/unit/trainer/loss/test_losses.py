"""Loss terms on numbers worked out by hand."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from atroposlib.config import config_yaml, resolve_config
from atroposlib.flags import ConfigError
from example_trainer import grpo
from example_trainer.data.batching import make_batch
from example_trainer.data.packing import micro_batches
from example_trainer.errors import TrainerError
from example_trainer.loss.base import kl_estimate, load_objective
from example_trainer.loss.batch_gradients import batch_gradients
from example_trainer.loss.clip import clipped_surrogate
from example_trainer.loss.metric import Metric, values
from example_trainer.loss.terms import TokenTerms
from example_trainer.model.packed_attention import PACKED_SDPA
from example_trainer.model.policy import Policy, of_tokens, token_logprobs
from example_trainer.settings.config import TrainerConfig
from example_trainer.settings.loss import LossSettings
from example_trainer.settings.objectives import OBJECTIVES
from tests.unit.trainer.fakes import as_records, item, tiny_model


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (0.1, 1.0, -0.1, -1.0),
        (1.0, 1.0, -1.0, -1.0),
        (1.5, 1.0, -1.2, 0.0),
        (3.0, 1.0, -1.2, 0.0),
        (0.1, -1.0, 0.8, 0.0),
        (0.5, -1.0, 0.8, 0.0),
        (1.5, -1.0, 1.5, 1.0),
        (3.0, -1.0, 3.0, 1.0),
    ],
)
def test_surrogate_is_pessimistic_for_both_signs(ratio: float, advantage: float, loss: float, slope: float) -> None:
    ratios = torch.tensor([ratio], requires_grad=True)
    losses, clipped = clipped_surrogate(ratios, torch.tensor([advantage]), 0.2, 0.2)
    losses.sum().backward()
    assert losses.item() == pytest.approx(loss)
    assert ratios.grad is not None
    assert ratios.grad.item() == slope
    assert clipped.item() is (slope == 0.0)


def test_upper_clip_distance_is_its_own() -> None:
    losses, _ = clipped_surrogate(torch.tensor([5.0]), torch.tensor([1.0]), 0.2, 0.28)
    assert losses.item() == pytest.approx(-1.28)


def test_k3_is_zero_for_equal_policies_and_positive_otherwise() -> None:
    logprobs = torch.tensor([-1.0, -1.0, -1.0])
    assert kl_estimate(logprobs, torch.tensor([-1.0, -3.0, -0.2]), "k3", 20).tolist() == pytest.approx(
        [0.0, 0.135335283 + 2 - 1, 2.225540928 - 0.8 - 1]
    )


def test_kl_without_a_reference_is_refused() -> None:
    batch = make_batch(as_records([item([1.0, 0.0])]), seq_len=64, policy_version=0)
    (row,) = micro_batches(batch.sequences, 100, torch.device("cpu"))
    with pytest.raises(ValueError, match="reference"):
        TokenTerms(row, None, load_objective("clip"), LossSettings(kl_coef=0.1))


def test_fused_logprobs_and_entropy_have_the_gradients_of_their_formulas() -> None:
    torch.manual_seed(0)
    logits = 4 * torch.randn(5, 11)
    logits[0, 3] = -1e4  # a probability that underflows to zero
    targets, temperatures = torch.tensor([1, 0, 10, 4, 4]), torch.tensor([1.0, 0.5, 2.0, 1.0, 0.1])
    weights = torch.randn(2, 5)

    ours = logits.clone().requires_grad_()
    logprobs, entropy, _ = of_tokens(ours * 1, targets, temperatures)
    (weights[0] * logprobs + weights[1] * entropy).sum().backward()

    exact = logits.double().requires_grad_()
    all_logprobs = (exact / temperatures[:, None]).log_softmax(-1)
    expected_logprobs = all_logprobs.gather(1, targets[:, None])[:, 0]
    expected_entropy = -(all_logprobs.exp() * all_logprobs).sum(-1)
    (weights[0] * expected_logprobs + weights[1] * expected_entropy).sum().backward()

    torch.testing.assert_close(logprobs.double(), expected_logprobs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=1e-5, atol=1e-5)
    assert ours.grad is not None
    assert exact.grad is not None
    torch.testing.assert_close(ours.grad.double(), exact.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_gives_a_loss_and_its_metrics_per_token(name: str) -> None:
    ones = torch.ones(3)
    loss, metrics = load_objective(name)(-ones, 0 * ones, ones, LossSettings(objective=name))
    own = [value for value in metrics.values() if not isinstance(value, Metric)]
    assert {value.shape for value in (loss, *own)} == {(3,)}


@pytest.mark.parametrize("path", ["upward.token_loss", "upward"])
def test_an_objective_of_an_import_path_brings_its_own_metrics(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As CONTRIBUTING.md tells a stranger to add one."""
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange" / "upward.py").write_text(
        "from example_trainer.loss.metric import Metric\n\n"
        "def token_loss(logprobs, log_ratio, advantages, settings):\n"
        "    own = {'drift': log_ratio, 'drift_max': log_ratio, 'farthest': Metric.max(log_ratio.abs())}\n"
        "    return -2 * advantages * logprobs, own\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    batch = make_batch(as_records([item([1.0, 0.0])]), seq_len=64, policy_version=0)
    model = tiny_model()
    model.set_attn_implementation(PACKED_SDPA)
    batches = micro_batches(batch.sequences, 100, torch.device("cpu"))
    config = ["--model", "m", "--objective", f"strange.{path}"]
    settings, _ = resolve_config(TrainerConfig, config, prog="grpo", env={})
    metrics = values(batch_gradients(Policy(model), batches, settings))
    logprobs = torch.cat([token_logprobs(Policy(model), each, 128) for each in batches])
    advantages, sampler = batches[0].advantages, batches[0].sampler_logprobs
    assert metrics["loss"] == metrics["pg_loss"] == pytest.approx((-2 * advantages * logprobs).mean().item(), rel=1e-5)
    assert metrics["drift"] == pytest.approx((logprobs - sampler).mean().item(), rel=1e-5)
    assert metrics["drift_max"] == pytest.approx((logprobs - sampler).max().item(), rel=1e-5)
    assert metrics["farthest"] == pytest.approx((logprobs - sampler).abs().max().item(), rel=1e-5)
    assert "ratio_mean" not in metrics
    assert metrics["kl"] is None
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_mistyped_objective_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match=rf"objective: give {', '.join(OBJECTIVES)}, or an import path"):
        resolve_config(TrainerConfig, ["--model", "m", "--objective", "clop"], prog="grpo", env={})


@pytest.mark.parametrize(
    ("path", "reason"),
    [("no_such_package.loss", "No module named"), ("json.loss", "no attribute 'loss'"), ("sys.maxsize", "of type int")],
)
def test_an_objective_that_is_not_there_is_one_line(path: str, reason: str) -> None:
    with pytest.raises(TrainerError, match=reason):
        load_objective(path)


def test_a_run_with_an_objective_that_is_not_there_ends_before_it_loads_anything(tmp_path: Path) -> None:
    config = TrainerConfig.model_validate({"model_name": str(tmp_path / "none"), "objective": "no_such_package.loss"})
    with pytest.raises(TrainerError, match=r"--objective no_such_package\.loss: No module named"):
        grpo.run(config)


def settings_of(*flags: str, content: dict[str, Any] | None = None) -> TrainerConfig:
    return resolve_config(TrainerConfig, ["--model", "m", *flags], prog="grpo", env={}, content=content or {})[0]


def test_a_flag_overrides_its_preset_wherever_the_two_are_given() -> None:
    gspo = settings_of("--algorithm", "gspo")
    assert (gspo.ratio, gspo.loss_mean, gspo.clip_eps, gspo.clip_high) == ("sequence_mean", "sequence", 3e-4, 4e-4)
    changed = [
        settings_of("--algorithm", "gspo", "--clip-eps", "0.1", "--ratio", "sequence_sum"),
        settings_of("--algorithm", "gspo", content={"clip_eps": 0.1, "ratio": "sequence_sum"}),
        settings_of("--clip-eps", "0.1", content={"algorithm": "gspo", "ratio": "sequence_sum"}),
    ]
    assert all(each == changed[0] for each in changed)
    assert (changed[0].ratio, changed[0].loss_mean, changed[0].clip_eps) == ("sequence_sum", "sequence", 0.1)
    shown = yaml.safe_load(config_yaml(changed[0]))
    assert settings_of(content=shown).model_dump() == changed[0].model_dump()


def test_the_default_algorithm_is_grpo_without_any_preset() -> None:
    assert settings_of("--algorithm", "grpo") == settings_of()
    assert (settings_of().dual_clip, settings_of().log_ratio_limit, settings_of().importance) == (3.0, 20.0, "none")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--algorithm ppo", "algorithm: .*'grpo'"),
        ("--dual-clip 1.1", "dual_clip: give at least 1.2, where the upper clip is, or 0"),
        ("--clip-eps-high 3", "dual_clip: give at least 4"),
        ("--importance-bounds 2,0.5", "importance_bounds: give the lower bound, at most 1, then the upper one"),
        ("--log-ratio-limit 100", "log_ratio_limit: .*80"),
        ("--loss-constant 100", "loss_constant: --loss-mean token does not use a constant"),
        ("--algorithm cispo --dual-clip 7", "dual_clip: --objective cispo has no such bound"),
        ("--importance truncate --importance-level sequence", "objective clip has per token. Give"),
        ("--importance truncate --ratio sequence_sum", "objective clip has per sequence_sum. Give"),
        ("--importance truncate --importance-level sequence --algorithm gspo", "clip has per sequence_mean. Give"),
        ("--importance truncate --algorithm cispo", "objective cispo has per token. Give"),
    ],
)
def test_settings_that_contradict_themselves_are_one_line(flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings_of(*flags.split())


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--importance-level sequence --ratio sequence_sum",
        "--importance-level sequence --old-logprobs recomputed",
        "--algorithm gspo --epochs 2",
        "--algorithm cispo --old-logprobs recomputed",
    ],
)
def test_truncate_is_accepted_where_it_bounds_the_ratio_in_the_loss_or_one_beside_it(flags: str) -> None:
    assert settings_of("--importance", "truncate", *flags.split()).importance == "truncate"
