"""Rows of a run's JSONL files as typed records: the few numbers by which groups are found, and the whole row.

What a group holds per sequence stays `Raw` until somebody looks at that sequence: a row may have millions of tokens.
"""

import math
import string
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from msgspec import Meta, Raw, Struct

from atroposlib.groups import scores_differ
from atroposlib.wire.batching import CUT

T = TypeVar("T")

Whole = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
Many = Annotated[int, Meta(ge=0, le=2**31 - 1)]

NONE = -1  # a step or a version that is not known
DROPPED, LEFT_OUT, WRONG, UNSCORED = 1, 2, 4, 8  # bits of `flags`
RIGHT = 1.0  # the score from which a held-out answer is right, as in `accuracy` of most environments
MAX_ENVIRONMENTS = 1000
LARGEST = 1e38  # that a mean or a spread is stored as
HEXADECIMAL = frozenset(string.hexdigits)
MOST = 2**32 - 1  # that an entry's counts hold

# One entry per row of samples*.jsonl and held_out*.jsonl; times are Unix seconds, NaN if unknown.
GROUP = np.dtype(
    [
        ("offset", "u8"),
        ("length", "u4"),
        ("group", "u8"),
        ("time", "f8"),
        ("started", "f8"),
        ("step", "i4"),
        ("version", "i4"),
        ("mean", "f4"),
        ("spread", "f4"),  # standard deviation of the scores
        ("tokens", "u4"),
        ("failed", "u4"),
        ("truncated", "u4"),
        ("env", "u2"),
        ("flags", "u1"),
    ]
)
# One entry per row of trained.jsonl.
TRAINED = np.dtype([("offset", "u8"), ("length", "u4"), ("group", "u8"), ("step", "i4"), ("flags", "u1")])


class SampleHead(Struct):
    """Holds what the environment itself writes of a row of samples.jsonl."""

    step: Whole | None = None
    policy_version: Whole | None = None
    started: float | None = None
    time: float | None = None
    env: str | None = None
    group: str | None = None
    dropped: str | None = None


class SampleNumbers(SampleHead):
    """A row for the index. What an author's code gave may be of any kind: malformed groups have rows, too."""

    scores: Raw = Raw()
    completion_tokens: Raw = Raw()
    failed: Raw = Raw()
    finish_reasons: Raw = Raw()
    rollouts: Raw = Raw()


class HeldOutNumbers(Struct):
    """Holds the numbers of a row of held_out.jsonl. What an author's code gave may be of any kind."""

    policy_version: Whole | None = None
    time: float | None = None
    env: str | None = None
    score: object = None
    finish_reason: object = None


class TrainedNumbers(Struct):
    """Holds the numbers of a row of trained.jsonl."""

    step: Whole
    group: str | None = None
    left_out: str | None = None


class FailedRollout(Struct):
    """A rollout that has no score, with what is known of it."""

    cause: str = ""
    error: str = ""
    messages: Raw = Raw()


class SampleLine(SampleNumbers):
    """A whole row of samples.jsonl."""

    tokens: Raw = Raw()
    masks: Raw = Raw()
    inference_logprobs: Raw = Raw()
    messages: Raw = Raw()
    texts: Raw = Raw()
    images: Raw = Raw()
    policy_versions: Raw = Raw()
    version_spans: Raw = Raw()
    rewards: Raw = Raw()
    failures: Raw = Raw()
    prompt: Raw = Raw()
    reference: object = None
    generation_params: object = None


@dataclass(frozen=True)
class Sample:
    """A group. Lists have one entry per sequence, and none where the row has no such list."""

    head: SampleHead
    scores: list[float | None]
    failed: dict[str, int]
    finish_reasons: list[str | None]
    rollouts: list[int]
    tokens: list[Raw]
    masks: list[Raw]
    logprobs: list[Raw]
    messages: list[Raw]
    images: Raw
    policy_versions: list[Raw]
    version_spans: list[Raw]
    rewards: list[Raw]
    failures: list[FailedRollout]
    prompt: Raw
    reference: object
    generation_params: object


class HeldOut(HeldOutNumbers):
    """A row of held_out.jsonl."""

    index: int | None = None
    messages: Raw = Raw()
    reference: object = None
    outcome: object = None
    rewards: Raw = Raw()
    sample: object = None  # what an author gave, if it is none of our kinds


class Trained(TrainedNumbers):
    """A row of trained.jsonl. Lists have one entry per sequence."""

    advantages: list[Raw] | None = None
    logprobs: list[Raw] | None = None


class Environments:
    """A number for each environment's name."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {"": 0}
        self.names: list[str] = [""]

    def number(self, name: str | None) -> int:
        """0 for no name, and for every name after the first thousand."""
        found = self._numbers.get(name or "")
        if found is not None:
            return found
        if name is None or len(self.names) >= MAX_ENVIRONMENTS:
            return 0
        self.names.append(name)
        self._numbers[name] = len(self.names) - 1
        return len(self.names) - 1

    def known(self, name: str) -> int | None:
        """The number of a name that was seen."""
        return self._numbers.get(name)


_SAMPLE_NUMBERS = msgspec.json.Decoder(SampleNumbers)
_SAMPLE_LINE = msgspec.json.Decoder(SampleLine)
_HELD_OUT_NUMBERS = msgspec.json.Decoder(HeldOutNumbers)
_TRAINED_NUMBERS = msgspec.json.Decoder(TrainedNumbers)
HELD_OUT = msgspec.json.Decoder(HeldOut)
TRAINED_ROW = msgspec.json.Decoder(Trained)


def decoded(raw: Raw | None, kind: Any) -> Any:
    """The value; None for null, for nothing, and for what is of another kind."""
    if not raw:
        return None
    try:
        return msgspec.json.decode(raw, type=kind | None)
    except (ValueError, RecursionError):
        return None


def read_sample(line: bytes) -> Sample:
    """A row of samples.jsonl. Raises ValueError, RecursionError."""
    row = _SAMPLE_LINE.decode(line)
    group_number(row.group)  # without one the index leaves it out, too
    return Sample(
        head=row,
        scores=decoded(row.scores, list[float | None]) or [],
        failed=decoded(row.failed, dict[str, Many]) or {},
        finish_reasons=decoded(row.finish_reasons, list[str | None]) or [],
        rollouts=decoded(row.rollouts, list[int]) or [],
        tokens=_each(row.tokens),
        masks=_each(row.masks),
        logprobs=_each(row.inference_logprobs),
        messages=_each(row.messages) or _each(row.texts),
        images=row.images,
        policy_versions=_each(row.policy_versions),
        version_spans=_each(row.version_spans),
        rewards=_each(row.rewards),
        failures=decoded(row.failures, list[FailedRollout]) or [],
        prompt=row.prompt,
        reference=row.reference,
        generation_params=row.generation_params,
    )


def sample_numbers(line: memoryview, environments: Environments) -> tuple[object, ...]:
    """The fields of GROUP after offset and length. Raises ValueError."""
    row = _SAMPLE_NUMBERS.decode(line)
    scores = decoded(row.scores, list[float | None]) or []
    tokens = decoded(row.completion_tokens, list[Many]) or []
    failed = decoded(row.failed, dict[str, Many]) or {}
    finish_reasons = decoded(row.finish_reasons, list[str | None]) or []
    rollouts = decoded(row.rollouts, list[int]) or []
    return (
        group_number(row.group),
        _time(row.time),
        _time(row.started),
        NONE if row.step is None else row.step,
        NONE if row.policy_version is None else row.policy_version,
        *mean_and_spread(of_rollouts(scores, rollouts)),
        min(MOST, sum(tokens)),
        min(MOST, sum(failed.values())),
        finish_reasons.count(CUT),
        environments.number(row.env),
        DROPPED if row.dropped is not None else 0,
    )


def held_out_numbers(line: memoryview, environments: Environments) -> tuple[object, ...]:
    """The fields of GROUP after offset and length. Raises ValueError."""
    row = _HELD_OUT_NUMBERS.decode(line)
    version = NONE if row.policy_version is None else row.policy_version
    score = finite(row.score)
    cut = int(row.finish_reason == CUT)
    env = environments.number(row.env)
    flags = UNSCORED if score is None else WRONG if score < RIGHT else 0
    return 0, _time(row.time), math.nan, NONE, version, _time(score), 0.0, 0, 0, cut, env, flags


def trained_numbers(line: memoryview) -> tuple[object, ...]:
    """The fields of TRAINED after offset and length. Raises ValueError."""
    row = _TRAINED_NUMBERS.decode(line)
    return group_number(row.group), row.step, LEFT_OUT if row.left_out is not None else 0


def group_number(group: str | None) -> int:
    """The 16 hexadecimal digits as a number, 0 without any. Raises ValueError."""
    if not group:
        return 0
    if len(group) != 16 or not HEXADECIMAL.issuperset(group):  # int() takes a sign, too
        raise ValueError("a group's id is 16 hexadecimal digits")
    return int(group, 16)


def of_rollouts(values: list[T], rollouts: list[int]) -> list[T]:
    """One value per rollout, that of its last sequence, out of one per sequence."""
    if len(rollouts) != len(values):
        return values
    return list(dict(zip(rollouts, values, strict=True)).values())


def mean_and_spread(scores: list[float | None]) -> tuple[float, float]:
    """Mean and standard deviation of those that are known; NaN and 0 if none is."""
    known = [score for score in scores if score is not None and math.isfinite(score)]
    if not known:
        return math.nan, 0.0
    mean = sum(known) / len(known)
    spread = math.hypot(*(score - mean for score in known)) / math.sqrt(len(known)) if scores_differ(known) else 0.0
    return min(max(mean, -LARGEST), LARGEST), min(spread, LARGEST)


def finite(value: object) -> float | None:
    """A finite number; None for anything else, and for an integer that is larger than every float."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        with suppress(OverflowError):
            return number if math.isfinite(number := float(value)) else None
    return None


def _time(seconds: float | None) -> float:
    return math.nan if seconds is None else seconds


def _each(raw: Raw) -> list[Raw]:
    return decoded(raw, list[Raw]) or []
