"""One evaluation of the served policy: run it, read its accuracy, log it in one line, write it to a file."""

import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from atroposlib.envs.failures import Failure
from atroposlib.envs.payloads import Item
from atroposlib.envs.rollouts import Rollout, Scored
from atroposlib.logs import get_logger
from atroposlib.row_files.json_text import encode
from atroposlib.wire.batching import CAUSES, Cause
from atroposlib.wire.held_out import FINAL

log = get_logger(__name__)

UNSCORED = "unscored"  # the metric that counts held-out questions without a score; with "_CAUSE" after it, by cause
# Where the environments of the ancestor put their accuracy.
ACCURACY_KEYS = ("accuracy", "eval/accuracy", "percent_correct", "eval/percent_correct")


class EvaluationFailed(Exception):
    """An evaluation has no accuracy, since too many of its questions have no score; `metrics` count them. To ask all of
    them again would change nothing: each was tried again by itself.
    """

    def __init__(self, reason: str, metrics: Mapping[str, object]) -> None:
        super().__init__(reason)
        self.metrics = metrics


@dataclass(frozen=True, slots=True)
class Answered:
    """A held-out question with its answer, and with `failure` where that has no score. The rollout is empty where
    nothing was sampled.
    """

    item: Item
    rollout: Rollout
    scored: Scored
    failure: Failure | None = None
    kept: Mapping[str, Any] | None = None  # its line in the file that an evaluation continues; without sequences then

    @property
    def error(self) -> str:
        """Cause and reason of the failure."""
        return "" if self.failure is None else f"{self.failure.cause}: {self.failure}"


@dataclass(frozen=True, slots=True)
class Unanswered:
    """The held-out questions without a score, of `total`."""

    total: int
    failures: Sequence[Failure]

    @classmethod
    def of(cls, results: Sequence[Failure | None]) -> "Unanswered":
        """Collect one evaluation's unanswered questions from a result for each question, None for one with a score."""
        return cls(len(results), [failure for failure in results if failure is not None])

    @property
    def metrics(self) -> dict[str, int]:
        """Their counts by cause; nothing where all questions have a score."""
        return {f"{UNSCORED}_{cause}": count for cause, count in self._by_cause.items()}

    @property
    def _by_cause(self) -> Counter[Cause]:
        return Counter(failure.cause for failure in self.failures)

    def check(self, allowed: float, metrics: Mapping[str, object]) -> None:
        """Raise EvaluationFailed for more than the share `allowed`, or where none has a score."""
        count = len(self.failures)
        if not self.total or (count < self.total and count <= allowed * self.total):
            return
        causes = ", ".join(f"{number} {cause}" for cause, number in self._by_cause.most_common())
        # an error of the environment's own code is what its author can correct
        shown = next((failure for failure in self.failures if not failure.is_expected), self.failures[0])
        raise EvaluationFailed(
            f"{count} of {self.total} held-out questions have no score ({causes}; --env.max_unscored {allowed:g}), one"
            f" because of {shown}{'' if shown.is_expected else '. Correct that line'}",
            metrics,
        )


@dataclass(frozen=True)
class Evaluation:
    """`policy_version` is the one that was due; `served_version` the one that was served when it began."""

    policy_version: int
    served_version: int
    accuracy: float | None
    metrics: dict[str, float]
    seconds: float

    def line(self) -> str:
        """`Held-out accuracy 75.0 % (48/64) at policy version 5 (greedy, 3.4 s)`, with as much of it as is known."""
        count = (
            f" ({self.metrics['correct']:.0f}/{self.metrics['total']:.0f}{self._left_out})"
            if {"correct", "total"} <= self.metrics.keys()
            else ""
        )
        result = "Evaluated" if self.accuracy is None else f"Held-out accuracy {100 * self.accuracy:.1f} %{count}"
        late = "" if self.served_version == self.policy_version else f" (with version {self.served_version} served)"
        right, asked = (self.metrics.get(f"{FINAL}{name}") for name in ("correct", "total"))
        more = (
            "" if right is None or not asked else f"; {100 * right / asked:.1f} % ({right:.0f}/{asked:.0f}) with more"
        )
        decoding = "greedy, " if self.metrics.get("temperature") == 0 else ""
        return f"{result} at policy version {self.policy_version}{late} ({decoding}{self.seconds:.1f} s){more}"

    @property
    def _left_out(self) -> str:
        """`; 2 unscored: 1 infrastructure, 1 timeout`; empty where every question has a score."""
        unscored = self.metrics.get(UNSCORED, 0)
        if not unscored:
            return ""
        counts = {cause: self.metrics.get(f"{UNSCORED}_{cause}", 0) for cause in CAUSES}
        causes = ", ".join(f"{count:.0f} {cause}" for cause, count in counts.items() if count)
        return f"; {unscored:.0f} unscored{f': {causes}' if causes else ''}"

    def record(self, env_name: str, weights_of: int | None = None) -> dict[str, object]:
        """Return the evaluation's line in evaluations.jsonl. Where version `weights_of` is served again, it stands
        under that one, without the accuracy that its first line has.
        """
        return {
            "time": time.time(),
            "env": env_name,
            "policy_version": self.policy_version if weights_of is None else weights_of,
            "served_version": self.served_version,
            "accuracy": self.accuracy if weights_of is None else None,
            "seconds": round(self.seconds, 3),
            "metrics": self.metrics,
        }


async def evaluate_version(
    evaluate: Callable[[], Awaitable[Mapping[str, object]]], policy_version: int, served_version: int
) -> Evaluation:
    """Run `evaluate`, which gives its metrics, and read the accuracy (0..1) among them."""
    start = time.monotonic()
    given = await evaluate()
    metrics = finite_numbers(given)
    accuracy = next((metrics[key] for key in ACCURACY_KEYS if key in metrics), None)
    for key in (key for key in ACCURACY_KEYS if key in given and not 0 <= metrics.get(key, -1) <= 1):
        log.warning("evaluate gave %s %r: give a number from 0 to 1, the share of right answers", key, given[key])
    return Evaluation(policy_version, served_version, accuracy, metrics, time.monotonic() - start)


def finite_numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The entries that are finite numbers; numpy's scalars count."""
    numbers: dict[str, float] = {}
    for key, value in metrics.items():
        if isinstance(value, str) or (not isinstance(value, (int, float)) and getattr(value, "ndim", None) != 0):
            continue
        with suppress(OverflowError, TypeError, ValueError):  # an integer above every float, an array of an object
            if math.isfinite(float(value)):
                numbers[str(key)] = float(value)
    return numbers


def held_out_row(index: int, sample: object) -> dict[str, object]:
    """A row of held_out.jsonl for a sample that an author passed to `evaluate_log`: with what it names as we do, and
    beside that the sample itself.
    """
    sample = msgspec.json.decode(encode(sample, default=str, any_keys=True))
    known = sample if isinstance(sample, dict) else {}
    names = ("messages", "reference", "score", "outcome", "finish_reason")
    return {"index": index, **{name: known.get(name) for name in names}, "sample": sample}


def evaluations_file(evaluations_path: str | None, data_dir: str | None) -> Path | None:
    """Return the file to which evaluations are appended, if there is one."""
    if evaluations_path is not None:
        return Path(evaluations_path)
    return Path(data_dir) / "evaluations.jsonl" if data_dir is not None else None
