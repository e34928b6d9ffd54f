"""The parts of every objective. Pure functions: values in, values out; tensors are [tokens] and float32."""

import importlib
import pkgutil
from collections.abc import Mapping
from types import ModuleType
from typing import Protocol, cast

from torch import Tensor

from example_trainer.errors import TrainerError
from example_trainer.loss.metric import Metric
from example_trainer.settings.loss import LossSettings
from example_trainer.settings.objectives import OBJECTIVES, Kl

OwnMetrics = Mapping[str, Tensor | Metric]  # of an objective, by their names in metrics.jsonl


class TokenLoss(Protocol):
    """A loss per token, of which a step differentiates the weighted sum over the batch's sampled tokens."""

    def __call__(
        self, logprobs: Tensor, log_ratio: Tensor, advantages: Tensor, settings: LossSettings, /
    ) -> tuple[Tensor, OwnMetrics]:
        """Return the loss of each token under the current policy's `logprobs`, and the objective's own metrics by their
        names in metrics.jsonl, as `as_metrics` reads them: a value of each token, or a Metric.

        `log_ratio` is the log of the current policy's probability over the old one's, as --ratio defines it, within
        ± log_ratio_limit; gradients pass through it as through `logprobs`.
        """


def load_objective(name: str) -> TokenLoss:
    """The objective of that name (loss/NAME.py), or of that import path: a function, or a module with a function
    `token_loss`. Raises TrainerError.
    """
    if name in OBJECTIVES:
        return cast(TokenLoss, importlib.import_module(f"example_trainer.loss.{name}").token_loss)
    try:
        objective = pkgutil.resolve_name(name)
        if isinstance(objective, ModuleType):
            objective = objective.token_loss
    except (ImportError, AttributeError) as error:
        raise TrainerError(
            f"--objective {name}: {error}. Give the import path of a function, or of a module with a function"
            " token_loss; PYTHONPATH says where to look"
        ) from error
    if not callable(objective):
        raise TrainerError(f"--objective {name} is not a function but of type {type(objective).__name__}")
    return cast(TokenLoss, objective)


def as_metrics(own: OwnMetrics) -> dict[str, Metric]:
    """Read an objective's own metrics: a tensor is averaged over the tokens, or has its largest value reported where
    the name ends in `_max`. A Metric has a reducer of its own.
    """

    def read(name: str, given: Tensor | Metric) -> Metric:
        if isinstance(given, Metric):
            return given
        return Metric.max(given) if name.endswith("_max") else Metric.mean(given)

    return {name: read(name, given) for name, given in own.items()}


def kl_estimate(logprobs: Tensor, reference: Tensor, kind: Kl, limit: float) -> Tensor:
    """An estimate of KL(policy || reference) on tokens that the policy sampled. `limit` bounds the log-ratio.

    Schulman 2020, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html. k1 is unbiased and may be
    negative, k2 is biased and never negative, k3 is unbiased and never negative.
    """
    log_ratio = (reference - logprobs).clamp(-limit, limit)
    if kind == "k1":
        return -log_ratio
    return log_ratio.square() / 2 if kind == "k2" else log_ratio.exp() - log_ratio - 1


def with_penalties(policy: Tensor, kl: Tensor | None, entropy: Tensor, settings: LossSettings) -> Tensor:
    """The loss plus `kl_coef` times the KL to the start model, if it is in the loss, minus `entropy_coef` times the
    entropy.
    """
    total = policy
    if settings.kl_coef > 0 and settings.kl_in == "loss":
        assert kl is not None
        total = total + settings.kl_coef * kl
    if settings.entropy_coef > 0:
        total = total - settings.entropy_coef * entropy
    return total
