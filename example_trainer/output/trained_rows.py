"""Rows of trained.jsonl: the outcome of each group of a step's batch.

    Batch.records ──▶ group, advantages ─┐
    Updates.logprobs ────────────────────┴─▶ row, found again in samples.jsonl by its group

Log-probabilities are the trainer's before the step's first update, as exact as float32 is, so that a reader may compare
them with the sampler's bit for bit.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atroposlib.groups import group_id
from atroposlib.wire.batching import NOT_TRAINED
from example_trainer.data.batching import GroupRecord

Logprobs = Sequence[NDArray[np.float32] | None]


def trained_rows(
    records: Sequence[GroupRecord], logprobs: Logprobs, *, step: int, policy_version: int, left_out: str | None
) -> Iterator[dict[str, Any]]:
    """A row for each group. `logprobs` are those of the trained tokens of each of the batch's sequences, empty if
    an error came before. `left_out` is why the whole batch was not trained on.
    """
    for record in records:
        yield {
            "step": step,
            "policy_version": policy_version,
            "group": _name(record),
            "left_out": record.left_out or left_out,
            "advantages": None if record.advantages is None else [_advantage(row) for row in record.advantages],
            "logprobs": [
                None if place is None or not logprobs else _with_first(record.masks[index], logprobs[place])
                for index, place in enumerate(record.places)
            ],
        }


def _name(record: GroupRecord) -> str | None:
    """The group's id; None for what could not be read."""
    with suppress(OverflowError, TypeError, ValueError):
        return group_id(record.tokens) if record.tokens else None
    return None


def _advantage(row: NDArray[np.float32]) -> float | list[float]:
    return float(row[0]) if len(row) == 1 else [float(value) for value in row]


def _with_first(mask: Sequence[int], values: NDArray[np.float32] | None) -> object:
    """Values of the tokens that the mask marks: a marked first token has none, since nothing predicts it."""
    if values is None:
        return None
    exact = values.astype(np.float64)  # the shortest digits of a float32 are another float64
    return [None, *exact.tolist()] if len(mask) and mask[0] != NOT_TRAINED else exact
