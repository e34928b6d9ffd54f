"""The loss of a micro-batch's tokens, put together from the chosen parts, chunk by chunk of the head."""

import torch
from torch import Tensor

from example_trainer.data.packing import MicroBatch
from example_trainer.loss import forward_kl, reverse_kl
from example_trainer.loss.base import TokenLoss, as_metrics, kl_estimate, with_penalties
from example_trainer.loss.corrections import importance_weights, too_far_off_policy
from example_trainer.loss.metric import Metric
from example_trainer.loss.ratios import Sequences, log_ratios, of_sequences
from example_trainer.model.policy import Named
from example_trainer.settings.loss import LossSettings


class TokenTerms:
    """Computes the loss of each token, and metrics by name, for each chunk of one micro-batch.

    `see` comes before the first chunk where the settings need whole sequences. `reference` [R] are log-probabilities
    under the start model, None where there is no KL term.
    """

    def __init__(
        self, batch: MicroBatch, reference: Tensor | None, token_loss: TokenLoss, settings: LossSettings
    ) -> None:
        if reference is None and settings.kl_coef > 0:
            raise ValueError("kl_coef > 0 needs reference log-probabilities")
        self._batch = batch
        self._old = batch.old_logprobs
        self._recomputed = batch.recomputed
        self._reference = reference
        self._token_loss = token_loss
        self._settings = settings
        self._ratio: tuple[Tensor, Tensor] | None = None  # of sequences: log-ratio and slope, [R] each
        self._importance: Tensor | None = None  # log of the sequences' importance, [R]
        self._lost: Tensor | None = None  # mean of sampler's less current log-probability, [R]

    def see(self, now: Tensor) -> None:
        """All current log-probabilities [R] of the micro-batch, without gradient."""
        settings, batch = self._settings, self._batch
        sequences = Sequences(batch.counts, batch.rows.device)
        if settings.ratio != "token":
            self._ratio = of_sequences(now - self._old, sequences, settings.ratio)
        if settings.importance != "none" and settings.importance_level == "sequence":
            self._importance = sequences.sum((self._old if self._recomputed else now) - batch.sampler_logprobs)
        if settings.off_policy_mask:
            self._lost = sequences.mean(batch.sampler_logprobs - now)

    def __call__(
        self, logprobs: Tensor, entropy: Tensor, chunk: slice, named: Named | None = None
    ) -> tuple[Tensor, Tensor, dict[str, Metric]]:
        """The loss of each token of the chunk, its part that is the policy's, and the metrics."""
        settings = self._settings
        kl = self._kl(logprobs, chunk)
        advantages = self._batch.advantages[chunk]
        if kl is not None and settings.kl_in == "reward":
            advantages = advantages - settings.kl_coef * kl
        to_teacher = self._to_teacher(chunk, named)
        if to_teacher is not None and settings.distill == "reverse_kl":
            advantages = advantages - settings.distill_coef * to_teacher
        of_sequence = None if self._ratio is None else (self._ratio[0][chunk], self._ratio[1][chunk])
        log_ratio = log_ratios(logprobs, self._old[chunk], settings.log_ratio_limit, of_sequence)
        policy, own = self._token_loss(logprobs, log_ratio, advantages, settings)
        policy, corrected = self._corrected(policy, logprobs.detach(), chunk)
        metrics = {
            "kl": Metric("mean", 0.0, weight=0.0),
            "ratio_max": Metric.max(log_ratio.detach().exp()),
            **as_metrics(own),
            **corrected,
        }
        if kl is not None:
            metrics["kl"] = Metric.mean(kl)
        total = with_penalties(policy, kl, entropy, settings)
        if to_teacher is not None:
            metrics["teacher_kl"] = Metric.mean(to_teacher)
            if settings.distill == "forward_kl":
                total = total + settings.distill_coef * to_teacher
        return total, policy, metrics

    def _to_teacher(self, chunk: slice, named: Named | None) -> Tensor | None:
        """The KL to the teacher that --distill asks for, at each token; None without a teacher."""
        settings, batch = self._settings, self._batch
        if settings.distill_coef == 0:
            return None
        if settings.distill == "forward_kl":
            assert named is not None
            assert batch.teacher_named is not None
            return forward_kl.token_loss(*named, batch.teacher_named[1][chunk])
        assert batch.teacher_logprobs is not None
        return reverse_kl.estimate(self._old[chunk], batch.teacher_logprobs[chunk], settings.log_ratio_limit)

    def _kl(self, logprobs: Tensor, chunk: slice) -> Tensor | None:
        """Estimate the KL of the current policy, with gradient; in the reward that of the old one, which earned it."""
        settings = self._settings
        if self._reference is None:
            return None
        measured = logprobs if settings.kl_in == "loss" else self._old[chunk]
        return kl_estimate(measured, self._reference[chunk], settings.kl, settings.log_ratio_limit)

    def _corrected(self, policy: Tensor, now: Tensor, chunk: slice) -> tuple[Tensor, dict[str, Metric]]:
        """The policy loss after --importance and --off-policy-mask. Tokens that are dropped stay in the mean."""
        settings, sampler = self._settings, self._batch.sampler_logprobs[chunk]
        metrics: dict[str, Metric] = {}
        dropped = torch.zeros_like(now, dtype=torch.bool)
        if settings.importance != "none":
            log_weights = (
                (self._old[chunk] if self._recomputed else now) - sampler
                if self._importance is None
                else self._importance[chunk]
            )
            weights, acted = importance_weights(log_weights, not self._recomputed, settings)
            policy = policy * weights
            if settings.importance == "mask":
                dropped = acted
            else:
                metrics["importance_truncated_frac"] = Metric.mean(acted)
        if self._lost is not None:
            far = too_far_off_policy(self._batch.advantages[chunk], self._lost[chunk], settings.off_policy_mask)
            policy, dropped = torch.where(far, 0.0, policy), dropped | far
        if settings.importance == "mask" or self._lost is not None:
            metrics["importance_masked_frac"] = Metric.mean(dropped)
        return policy, metrics
