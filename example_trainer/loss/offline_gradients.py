"""The gradient of an update's offline examples, which adds to that of its rollouts: packed, chunked and dealt to the
ranks alike. Nothing of a sampler, a ratio or a start model enters it; what an answer counts is in its advantages.
"""

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from example_trainer.data.packing import MicroBatch
from example_trainer.loss import sft
from example_trainer.loss.metric import Metric, Metrics, added, divided, over_ranks
from example_trainer.model.policy import Policy, accumulate_gradients
from example_trainer.ranks.ranks import ALONE, Ranks


def offline_gradients(
    policy: Policy,
    batches: Sequence[MicroBatch],
    loss_divisor: float,
    *,
    chunk_mb: int = 128,
    ranks: Ranks = ALONE,
    before_pass: Callable[[bool], None] = lambda is_last: None,
) -> Metrics:
    """Add the gradient of the sum of `sft.token_loss` over `loss_divisor` to the parameters' `.grad`; every rank calls
    it with as many batches. Return that number as `loss`.
    """
    measured: list[Metrics] = []  # of each chunk

    def of_chunk(batch: MicroBatch, logprobs: Tensor, entropy: Tensor, chunk: slice) -> Tensor:
        total = sft.token_loss(logprobs, batch.advantages[chunk])
        loss = Metric.sum(total)
        measured.append({"loss": loss if batch.counted else loss.nothing()})
        return total.sum() / loss_divisor if batch.counted else 0 * logprobs.sum()

    for index, batch in enumerate(batches):
        before_pass(index == len(batches) - 1)
        accumulate_gradients(policy, batch, partial(of_chunk, batch), chunk_mb)
    return divided(over_ranks(added(measured), ranks), loss_divisor)
