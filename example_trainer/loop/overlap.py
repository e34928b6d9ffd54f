"""Gradients of groups that wait for their batch: --overlap computes them while vLLM still samples the others.

    arrive 1, 2 ──▶ gradient ──┐                          one policy version from end to end:
    arrive 3, 4 ──▶ gradient ──┼─▶ sum ──/ divisor──▶ step    nothing is off-policy
    the batch: 1 2 3 4 5 ──5───┘

Gradients accumulate undivided, because what the batch divides by is known only when it is whole. A batch that does
not hold a group that was computed early, because the queue has changed, or holds another one by its id, because an API
without a journal has started again, is computed from the start.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from atroposlib.logs import get_logger
from example_trainer.data.batching import Batch
from example_trainer.data.batching import Sequence as Sampled
from example_trainer.data.packing import fed_length
from example_trainer.exact.check import Comparison
from example_trainer.loop.learner import Learner
from example_trainer.loss.metric import Metric, Metrics, added, divided

log = get_logger(__name__)


@dataclass(frozen=True)
class Part:
    """Sequences whose gradient was computed together, over a divisor of 1, and what was measured of them."""

    sequences: list[Sampled]
    measured: Metrics
    comparison: Comparison


class EarlyGradients:
    """The groups of one batch that were computed before it was whole."""

    def __init__(self, learner: Learner, least_tokens: int, least_sequences: int) -> None:
        self._learner = learner
        self._least_tokens = least_tokens  # of a part: they fill a micro-batch of every rank
        self._least_sequences = least_sequences  # or as many, of a batch that is small
        self._waiting: dict[int, list[Sampled]] = {}
        self._computed: dict[int, list[Sampled]] = {}
        self.parts: list[Part] = []

    def add(self, groups: Mapping[int, list[Sampled]]) -> None:
        """Compute on these groups, by their ids, and those that wait, if they are enough."""
        self._waiting |= groups
        sequences = [*chain(*self._waiting.values())]
        if len(sequences) < self._least_sequences and sum(map(fed_length, sequences)) < self._least_tokens:
            return
        self.parts.append(Part(sequences, self._learner.gradients(sequences, 1.0), self._learner.comparison))
        self._computed |= self._waiting
        self._waiting = {}

    def of(self, batch: Batch, ids: Sequence[int]) -> Batch:
        """The batch, whose items have these ids, with the very sequences that were computed early. Where some of these
        are not in it, it is as it was, and nothing counts as computed.
        """
        sequences = list(batch.sequences)
        others = [identity for place, identity in enumerate(ids) if place not in batch.rejected]
        records = batch.records[len(batch.rejected) :]  # those of the rejected items come first
        places = {
            identity: [place for place in record.places if place is not None]
            for identity, record in zip(others, records, strict=bool(ids))
        }
        absent = [
            identity
            for identity, computed in self._computed.items()
            if not _are_the_same(computed, [sequences[place] for place in places.get(identity, ())])
        ]
        if absent:
            log.info("%d groups computed early are not in the batch: computing it from the start", len(absent))
            self._computed, self.parts = {}, []
            self._learner.discard()
        for identity, computed in self._computed.items():
            for place, sequence in zip(places.get(identity, ()), computed, strict=True):
                sequences[place] = sequence
        return replace(batch, sequences=sequences)

    def left(self, sequences: Sequence[Sampled]) -> list[Sampled]:
        """Return the sequences that were not computed early."""
        computed = {sequence.identity for part in self.parts for sequence in part.sequences}
        return [sequence for sequence in sequences if sequence.identity not in computed]


def _are_the_same(computed: Sequence[Sampled], sequences: Sequence[Sampled]) -> bool:
    return len(computed) == len(sequences) and all(
        np.array_equal(one.tokens, other.tokens)
        and np.array_equal(one.trained, other.trained)
        and np.array_equal(one.advantages, other.advantages)
        for one, other in zip(computed, sequences, strict=True)
    )


def together(parts: Sequence[Part], loss_divisor: float) -> dict[str, Metric]:
    """Add up what was measured of the parts, as `batch_gradients` would have measured it of all at once."""
    return divided(added(part.measured for part in parts), loss_divisor)
