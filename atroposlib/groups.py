"""Checks that a policy-gradient trainer can use a group. The same check runs wherever a group is handed over.

    environment, before it posts ─┐
    API, at its door ─────────────┼──▶ check(group, needs) ──▶ nothing, or Untrainable: place, value and rule
    API, at delivery ─────────────┤
    trainer, before a step ───────┘

The registered trainer states what it needs. Clients of the archived ancestor also post groups for other trainers:
answers without log-probabilities to imitate, masks of zeros and ones, advantages of another length. So nothing here is
a rule for everyone; what no trainer can use is refused by `atroposlib/api/groups/group_checks.py`. A trainer that
registers `vocab_size` gets ids below it. One that registers `trainable_only`, as ours does, gets only groups that pass
the whole check. With `logprobs_optional`, which ours registers where it computes the old log-probabilities itself,
groups without the sampler's pass it.

Pure: numpy, the standard library and the wire. A group is a record, or a mapping of lists, as from JSON, or of numpy
arrays. The check reads each list once.
"""

import hashlib
import numbers
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, NamedTuple

import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from atroposlib.routing import unpack_for
from atroposlib.wire.batching import CAUSES, NOT_TRAINED, GroupRequirements, ScoredData

MAX_LOGPROB = 1e-3  # 0, but for rounding; 1.0 marks tokens that were not sampled
MIN_LOGPROB = -1e4  # vLLM writes -9999 for an impossible token
MAX_MAGNITUDE = 1e9  # of a score or an advantage; squares and sums of them are still finite in float32
ROUNDING = 1e-12  # of the larger of 1 and the largest score: what sums of the same rewards may differ by
MOST_MASS = 1.01  # of a teacher's probabilities at a position, whose sum is at most 1, but for rounding
SHOWN = 80  # characters of a wrong value that are repeated

CHECKED_FIELDS = (
    "tokens",
    "masks",
    "scores",
    "inference_logprobs",
    "ref_logprobs",
    "advantages",
    "generation_params",
    "group_overrides",
    "overrides",
    "policy_versions",
    "version_spans",
    "rollouts",
    "finish_reasons",
    "failed",
    "routed_experts",
    "distill_token_ids",
    "distill_logprobs",
    "images",
)
_NO_TEACHER = (
    "which this trainer does not train on; give the trainer --distill-coef, sample without the teacher (drop"
    " --env.teacher_enabled), or post to a trainer that distils"
)
OF_TEACHER = {
    "distill_token_ids": f"a teacher's tokens, {_NO_TEACHER}",
    "distill_logprobs": f"a teacher's log-probabilities, {_NO_TEACHER}",
}
# What is carried for other trainers and would be lost here without a word: what it is, and what to do. A trainer that
# distils takes what is of a teacher.
NOT_TRAINED_ON = OF_TEACHER | {
    "images": "images, and this trainer reads text alone; post groups without images, or to a trainer that reads them",
}
Location = tuple[str | int, ...]


class Untrainable(ValueError):
    """A group that the trainer cannot use; the message names place (`inference_logprobs[1][7]`), value and rule."""

    def __init__(self, message: str, *where: str | int) -> None:
        place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in where).lstrip(".")
        super().__init__(f"{place}: {message}" if place else message)
        self.message = message
        self.where: Location = where


def check(group: ScoredData | Mapping[str, object], needs: GroupRequirements) -> None:
    """Raise Untrainable if the trainer cannot use this group."""
    if isinstance(group, ScoredData):
        group = {name: None if (value := getattr(group, name)) is UNSET else value for name in CHECKED_FIELDS}
    if not isinstance(group, Mapping):
        raise Untrainable(f"{shown(group)} is not an object")
    if needs.trainable_only:
        _check_trainable(group, needs)
    elif needs.vocab_size is not None:
        _check_ids(_rows("tokens", _required(group, "tokens"), "q"), needs.vocab_size)
    if group.get("rollouts") is not None:
        _check_rollouts(group)
    _check_failed(group)


def rollouts_of(group: ScoredData | Mapping[str, Any]) -> Sequence[int]:
    """The number of the rollout that each sequence belongs to, for a group that passed the check."""
    if isinstance(group, ScoredData):
        rollouts, tokens = group.rollouts, group.tokens
    else:
        rollouts, tokens = group.get("rollouts"), group["tokens"]
    return range(len(tokens)) if rollouts is None or rollouts is UNSET else rollouts


def size_of(group: ScoredData | Mapping[str, object]) -> int:
    """Count the rollouts that a group was sampled with, those that failed too: what `group_size` and `batch_size`
    count. The group has passed the check.
    """
    return max(rollouts_of(group), default=-1) + 1 + failed_rollouts(group)


def failed_rollouts(group: ScoredData | Mapping[str, object]) -> int:
    """Count a group's failed rollouts."""
    failed = group.failed if isinstance(group, ScoredData) else group.get("failed")
    return sum(failed.values()) if isinstance(failed, Mapping) else 0


def scores_differ(scores: Sequence[float]) -> bool:
    """Return whether scores differ, by more than rounding: 0.1 + 0.2 is 0.3."""
    lowest, highest = min(scores), max(scores)
    return bool(highest - lowest > ROUNDING * max(1.0, highest, -lowest))


def group_id(tokens: Sequence[Sequence[int]]) -> str:
    """Compute the name by which a run's files call a group: 16 hex digits over its token ids. Environment and trainer
    compute it, each from the tokens that it has, so nothing is added to what they exchange. Raises OverflowError,
    TypeError or ValueError for what are not ids.
    """
    digest = hashlib.blake2b(digest_size=8)
    for row in tokens:
        ids = np.asarray(row, dtype="<i8")
        digest.update(len(ids).to_bytes(8, "little"))
        digest.update(ids.tobytes())
    return digest.hexdigest()


def check_ids(name: str, token_ids: list[int]) -> None:
    """Raise Untrainable unless some vocabulary can have these ids."""
    _check_ids(_rows(name, [token_ids], "q"), None)


def check_sampled(
    token_ids: list[int],
    logprobs: list[float],
    policy_versions: tuple[int, int] | None = None,
    version_spans: list[tuple[int, int]] | None = None,
) -> None:
    """Raise Untrainable unless a model can have sampled these tokens with these log-probabilities, in these versions
    as far as they are told.
    """
    check_ids("token_ids", token_ids)
    rows = _rows("logprobs", [logprobs], "d")
    _check_logprobs(rows, np.ones(len(rows.values), dtype=bool))
    for version in policy_versions or ():  # which fall where a trainer resumes at an earlier step
        if not _is_count(version):
            raise Untrainable(f"{shown(version)} is not a policy version", "policy_versions")
    if version_spans is not None:
        _check_spans({"version_spans": [version_spans]}, rows)


def _check_trainable(group: Mapping[str, object], needs: GroupRequirements) -> None:
    tokens = _rows("tokens", _required(group, "tokens"), "q")
    if not len(tokens.lengths):
        raise Untrainable("a group needs at least one sequence", "tokens")
    _check_ids(tokens, needs.vocab_size)
    masks = _rows("masks", _required(group, "masks"), "q")
    _expect_one_per_token(masks, tokens)
    sampled = masks.values != NOT_TRAINED
    sampled[(tokens.lengths.cumsum() - tokens.lengths)[tokens.lengths > 0]] = False  # nothing predicts a first token
    masks.expect((masks.values == tokens.values) | ~sampled, f"is neither {NOT_TRAINED} nor the token")
    scores = _rows("scores", [_required(group, "scores")], "d")
    expect_count("scores", len(scores.values), len(tokens.lengths))
    scores.expect(
        np.abs(scores.values) <= MAX_MAGNITUDE, f"is not a number from -{MAX_MAGNITUDE:g} to {MAX_MAGNITUDE:g}"
    )
    if not needs.logprobs_optional and _given(group, "inference_logprobs") is None:
        raise Untrainable(
            "missing: the loss needs the sampler's log-probabilities; send those that ManagedServer collects from "
            "vLLM's /generate, or start the trainer with --old-logprobs recomputed, without --importance, "
            "--off-policy-mask and --batch-invariant",
            "inference_logprobs",
        )
    for name in ("inference_logprobs", "ref_logprobs"):
        if (given := _given(group, name)) is not None:
            logprobs = _rows(name, given, "d")
            _expect_one_per_token(logprobs, tokens)
            _check_logprobs(logprobs, sampled)
    _check_advantages(group, tokens)
    _check_settings(group, tokens)
    _refuse_what_is_not_trained_on(group, needs)
    if needs.teacher_top_k is not None:
        _check_teacher(group, tokens, sampled, needs)
    _check_versions(group, tokens)
    _check_spans(group, tokens)
    _check_finish_reasons(group, tokens)
    _check_routing(group, tokens, needs)


class _Rows(NamedTuple):
    """The lists of one field, one per sequence, laid end to end."""

    name: str
    values: NDArray[Any]
    lengths: NDArray[np.int64]

    def expect(self, good: NDArray[np.bool_], rule: str) -> None:
        if not good.all():
            at = int(good.argmin())
            ends = self.lengths.cumsum()
            sequence = int(np.searchsorted(ends, at, side="right"))
            position = at - int(ends[sequence] - self.lengths[sequence])
            where = (sequence, position) if self.name != "scores" else (position,)
            raise Untrainable(f"{self.values[at]} {rule}", self.name, *where)


def _rows(name: str, lists: Sequence[object], kind: Literal["q", "d"]) -> _Rows:
    """Typed by the way into an array: "q" takes integers of 64 bits alone, "d" real numbers."""
    column = array(kind)
    lengths = []
    for index, entry in enumerate(lists):
        row = _list(entry, name, index)
        lengths.append(len(row))
        try:
            column.fromlist(row)
        except (TypeError, OverflowError):
            fitting = array(kind)
            with suppress(TypeError, OverflowError):
                fitting.extend(row)
            position, number = len(fitting), "a number" if kind == "d" else "an integer of 64 bits"
            raise Untrainable(f"{shown(row[position])} is not {number}", name, index, position) from None
    return _Rows(name, np.asarray(column), np.asarray(lengths, dtype=np.int64))


def _list(value: object, *where: str | int) -> list[Any]:
    if isinstance(value, list):
        return value
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, np.ndarray) and value.ndim:
        return list(value.tolist())
    raise Untrainable(f"{shown(value)} is not a list", *where)


def _required(group: Mapping[str, object], name: str) -> list[object]:
    if group.get(name) is None:
        raise Untrainable("missing", name)
    return _list(group[name], name)


def _given(group: Mapping[str, object], name: str) -> list[Any] | None:
    """An optional list; None where it is absent, null or empty: environments send [] for "none"."""
    return None if group.get(name) is None else _list(group[name], name) or None


def expect_count(name: str, count: int, sequences: int) -> None:
    """Raise Untrainable unless a field has one entry for each sequence."""
    if count != sequences:
        raise Untrainable(f"{count} entries for {sequences} sequences in tokens", name)


def expect_lengths(name: str, lengths: Sequence[int], of_tokens: Sequence[int]) -> None:
    """Raise Untrainable unless a field has one value for each token."""
    for index, (length, tokens) in enumerate(zip(lengths, of_tokens, strict=True)):
        if length != tokens:
            raise Untrainable(f"{length} entries for the {tokens} tokens of this sequence", name, index)


def _expect_one_per_token(rows: _Rows, tokens: _Rows) -> None:
    expect_count(rows.name, len(rows.lengths), len(tokens.lengths))
    expect_lengths(rows.name, rows.lengths.tolist(), tokens.lengths.tolist())


def _check_ids(tokens: _Rows, vocab_size: int | None) -> None:
    limit = np.iinfo(np.int64).max if vocab_size is None else vocab_size
    if len(tokens.values) and not (0 <= tokens.values.min() and tokens.values.max() < limit):
        size = "any vocabulary" if vocab_size is None else f"the vocabulary of {vocab_size}"
        tokens.expect((tokens.values >= 0) & (tokens.values < limit), f"is not an id of {size}")


def _check_logprobs(rows: _Rows, sampled: NDArray[np.bool_]) -> None:
    values, of_sampled = rows.values, rows.values[sampled]
    lowest, highest = of_sampled.min(initial=0.0), of_sampled.max(initial=MIN_LOGPROB)
    if not (MIN_LOGPROB <= lowest and highest <= MAX_LOGPROB):
        good = (values >= MIN_LOGPROB) & (values <= MAX_LOGPROB)
        rows.expect(
            ~sampled | good, f"is not the log-probability of a sampled token, which is from {MIN_LOGPROB:g} to 0"
        )
    if not -MIN_LOGPROB >= max(values.max(initial=0.0), -values.min(initial=0.0)):
        rows.expect(
            np.abs(values) <= -MIN_LOGPROB,
            "is neither a log-probability nor 1.0, which marks a token that was not sampled",
        )


def _check_advantages(group: Mapping[str, object], tokens: _Rows) -> None:
    if (given := _given(group, "advantages")) is None:
        return
    rows = _rows("advantages", given, "d")
    expect_count(rows.name, len(rows.lengths), len(tokens.lengths))
    for index in np.flatnonzero((rows.lengths != tokens.lengths) & (rows.lengths != 1))[:1].tolist():
        raise Untrainable(
            f"{rows.lengths[index]} entries for the {tokens.lengths[index]} tokens of this sequence; "
            "give one for the sequence, or one per token",
            rows.name,
            index,
        )
    rows.expect(np.abs(rows.values) <= MAX_MAGNITUDE, f"is not a number from -{MAX_MAGNITUDE:g} to {MAX_MAGNITUDE:g}")


# --- settings of the sampler -----------------------------------------------------------------------------

# name -> whether a number will do, and in words
SETTINGS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "temperature": (
        lambda value: value == 0 or 0.01 <= value <= 1e3,
        "0, or a number from 0.01, to which vLLM raises smaller ones, up to 1000",
    ),
    "top_p": (lambda value: 0 < value <= 1, "a number above 0 and at most 1"),
    "top_k": (lambda value: -1 <= value < 2**31 and value == int(value), "an integer from -1 to 2147483647"),
    "staleness_weight": (lambda value: 0 <= value <= 1, "a number from 0 to 1"),
    "staleness_limit": (lambda value: 0 <= value < 2**53, "a number of policy versions"),
}


# What else changes the distribution that is sampled from, in the words of vLLM, SGLang and transformers, and the
# number that leaves it as it is. The trainer does not replay these: its log-probabilities would be those of another
# distribution.
_UNCHANGED_BY_0 = """min_p presence_penalty frequency_penalty min_tokens min_new_tokens top_a dry_multiplier mirostat
    no_repeat_ngram_size xtc_probability"""
_UNCHANGED_BY_1 = "repetition_penalty typical_p"
_UNCHANGED_WITHOUT = """logit_bias bad_words bad_words_ids allowed_token_ids logits_processors custom_logit_processor
    structured_outputs guided_decoding guided_json guided_regex guided_choice guided_grammar response_format json_schema
    ebnf structural_tag thinking_token_budget use_beam_search"""
NEUTRAL: dict[str, int | None] = {
    **dict.fromkeys(_UNCHANGED_BY_0.split(), 0),
    **dict.fromkeys(_UNCHANGED_BY_1.split(), 1),
    **dict.fromkeys(_UNCHANGED_WITHOUT.split(), None),
}
NOT_REPLAYED = (
    "changes the distribution that is sampled from, and the trainer does not replay it as it does temperature, top_p "
    "and top_k; sample for training without it"
)


def not_replayed(settings: Mapping[str, object]) -> list[str]:
    """Names of sampling parameters in `settings` that the trainer does not replay, unless they change nothing."""
    return [
        name
        for name, neutral in NEUTRAL.items()
        if (value := settings.get(name)) is not None and not _is_empty(value) and value != neutral
    ]


def _is_empty(value: object) -> bool:
    return value is False or (isinstance(value, (str, list, tuple, Mapping)) and not value)


def _check_settings(group: Mapping[str, object], tokens: _Rows) -> None:
    for name in ("generation_params", "group_overrides"):
        _check_object(group.get(name), name)
    overrides = _given(group, "overrides")
    if overrides is not None:
        expect_count("overrides", len(overrides), len(tokens.lengths))
        for index, override in enumerate(overrides):
            _check_object(override, "overrides", index)


def _refuse_what_is_not_trained_on(group: Mapping[str, object], needs: GroupRequirements) -> None:
    for name, what in NOT_TRAINED_ON.items():
        if name in OF_TEACHER and needs.teacher_top_k is not None:
            continue
        value = group.get(name)
        entries = value if isinstance(value, (list, tuple)) else [value]  # environments send [] for "none"
        if any(entry is not None and not (isinstance(entry, list) and not entry) for entry in entries):
            raise Untrainable(what, name)


def _check_teacher(
    group: Mapping[str, object], tokens: _Rows, sampled: NDArray[np.bool_], needs: GroupRequirements
) -> None:
    """Check a teacher's tokens at each position, the position's own first, and their log-probabilities."""
    fields = {name: _given(group, name) for name in OF_TEACHER}
    for name, given in fields.items():
        if given is None:
            raise Untrainable(
                "missing: the trainer distils (--distill-coef); sample with a teacher (`teacher:` in the run file, or "
                "--env.teacher_enabled and --teacher.base_url), or start the trainer without --distill-coef",
                name,
            )
        expect_count(name, len(given), len(tokens.lengths))
    starts = tokens.lengths.cumsum() - tokens.lengths
    for index, (start, length) in enumerate(zip(starts.tolist(), tokens.lengths.tolist(), strict=True)):
        places = slice(start, start + length)
        said = {name: _list(given[index], name, index) for name, given in fields.items() if given is not None}
        try:
            _check_said(said, tokens.values[places], sampled[places], needs)
        except Untrainable as error:
            name = str(error.where[0])
            raise Untrainable(error.message, name, index, *error.where[1:]) from None


def _check_said(
    said: Mapping[str, list[Any]], own: NDArray[Any], sampled: NDArray[np.bool_], needs: GroupRequirements
) -> None:
    """Check what a teacher said of one sequence, whose tokens are `own`."""
    for name, positions in said.items():
        if len(positions) != len(own):
            raise Untrainable(f"{len(positions)} entries for the {len(own)} tokens of this sequence", name)
    of_ids, of_logprobs = said
    named_rows, rows = _rows(of_ids, said[of_ids], "q"), _rows(of_logprobs, said[of_logprobs], "d")
    for position in np.flatnonzero(named_rows.lengths != rows.lengths)[:1].tolist():
        raise Untrainable(
            f"{rows.lengths[position]} log-probabilities of {named_rows.lengths[position]} tokens",
            of_logprobs,
            position,
        )
    least = max(1, min(needs.teacher_top_k or 0, needs.vocab_size or sys.maxsize))
    for position in np.flatnonzero(sampled & (rows.lengths < least))[:1].tolist():
        raise Untrainable(
            f"{rows.lengths[position]} tokens, and where one was sampled the trainer needs {least} of the teacher's"
            " likeliest (--distill-top-k)",
            of_ids,
            position,
        )
    _check_ids(named_rows, needs.vocab_size)
    rows.expect(
        (rows.values >= MIN_LOGPROB) & (rows.values <= MAX_LOGPROB),
        f"is not a teacher's log-probability, which is from {MIN_LOGPROB:g} to 0",
    )
    at = np.repeat(np.arange(len(own)), rows.lengths)
    total = np.bincount(at, weights=np.exp(rows.values), minlength=len(own))
    for position in np.flatnonzero(total > MOST_MASS)[:1].tolist():
        raise Untrainable(f"probabilities that add up to {total[position]:.4g}, above 1", of_logprobs, position)
    there = np.flatnonzero(rows.lengths)
    first = named_rows.values[(rows.lengths.cumsum() - rows.lengths)[there]]
    for place in np.flatnonzero(first != own[there])[:1].tolist():
        position = int(there[place])
        raise Untrainable(
            f"{first[place]} is not the token of this position, {own[position]}, which comes first", of_ids, position, 0
        )
    pairs = np.stack([at, named_rows.values])[:, np.lexsort((named_rows.values, at))]
    for place in np.flatnonzero((pairs[:, 1:] == pairs[:, :-1]).all(0))[:1].tolist():
        raise Untrainable(f"{pairs[1, place]} is named twice", of_ids, int(pairs[0, place]))


def _check_object(settings: object, *where: str | int) -> None:
    if settings is None:
        return
    if not isinstance(settings, Mapping):
        raise Untrainable(f"{shown(settings)} is not an object", *where)
    for name in not_replayed(settings):
        raise Untrainable(f"{shown(settings[name])}: {NOT_REPLAYED}", *where, name)
    for name, (will_do, rule) in SETTINGS.items():
        value = settings.get(name)
        if value is not None and not (
            isinstance(value, numbers.Real) and not isinstance(value, bool) and will_do(value)
        ):
            raise Untrainable(f"{shown(value)} is not {rule}", *where, name)


def _check_rollouts(group: Mapping[str, object]) -> None:
    rollouts, scores = _list(group["rollouts"], "rollouts"), _required(group, "scores")
    sequences = len(_required(group, "tokens"))
    for name, values in (("rollouts", rollouts), ("scores", scores)):
        expect_count(name, len(values), sequences)
    before = 0
    for index, (rollout, score) in enumerate(zip(rollouts, scores, strict=True)):
        allowed = (before, before + 1) if index else (0,)
        if isinstance(rollout, bool) or not isinstance(rollout, numbers.Integral) or rollout not in allowed:
            raise Untrainable(
                f"{shown(rollout)} is not {' or '.join(map(str, allowed))}; rollouts are counted from 0 in order: a "
                "sequence has the same number as the one before it, or the next",
                "rollouts",
                index,
            )
        if index and rollout == before and score != scores[index - 1]:
            raise Untrainable(
                f"{shown(score)} is not the {shown(scores[index - 1])} of the sequence before it, which belongs to the "
                f"same rollout ({rollout}); give every sequence of a rollout the rollout's score",
                "scores",
                index,
            )
        before = int(rollout)


def _check_versions(group: Mapping[str, object], tokens: _Rows) -> None:
    if (given := _given(group, "policy_versions")) is None:
        return
    rows = _rows("policy_versions", given, "q")
    expect_count(rows.name, len(rows.lengths), len(tokens.lengths))
    for index in np.flatnonzero(rows.lengths != 2)[:1].tolist():
        raise Untrainable(f"{rows.lengths[index]} entries instead of the first and the last version", rows.name, index)
    first, last = rows.values.reshape(-1, 2).T
    for index in np.flatnonzero((first < 0) | (first > last))[:1].tolist():
        raise Untrainable(
            f"{first[index]} to {last[index]} are not a first and a last policy version", rows.name, index
        )


def _check_spans(group: Mapping[str, object], tokens: _Rows) -> None:
    if (given := _given(group, "version_spans")) is None:
        return
    expect_count("version_spans", len(given), len(tokens.lengths))
    for index, spans in enumerate(given):
        pairs = _list(spans, "version_spans", index)
        if not pairs:
            raise Untrainable("no version; give null for the field where they are not known", "version_spans", index)
        before = -1
        for place, pair in enumerate(pairs):
            if not (isinstance(pair, (list, tuple)) and len(pair) == 2 and all(map(_is_count, pair))):
                raise Untrainable(
                    f"{shown(pair)} is not the start of a span and its version", "version_spans", index, place
                )
            if pair[0] <= before or (place == 0 and pair[0] != 0):
                rule = f"after {before}, where the span before starts" if place else "0, where the first span starts"
                raise Untrainable(f"{pair[0]} is not {rule}", "version_spans", index, place)
            before = pair[0]


def _is_count(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and 0 <= int(value) < 2**53


def oldest_version(group: ScoredData) -> int | None:
    """The oldest policy version that a checked group was sampled under, as far as known."""
    if isinstance(group.version_spans, list):
        return min((version for spans in group.version_spans for _, version in spans), default=None)
    if isinstance(group.policy_versions, list):
        return min((first for first, _last in group.policy_versions), default=None)
    return None


def staleness_weight(staleness: NDArray[np.int64] | int, limit: int) -> NDArray[np.float64]:
    """The weight of what was sampled so many policy versions ago: 1 up to `limit`, then falling in proportion."""
    return np.asarray(np.minimum(1.0, (limit + 1) / (staleness + 1)))


def _check_finish_reasons(group: Mapping[str, object], tokens: _Rows) -> None:
    if (given := _given(group, "finish_reasons")) is None:
        return
    expect_count("finish_reasons", len(given), len(tokens.lengths))
    for index, reason in enumerate(given):
        if not isinstance(reason, str):
            raise Untrainable(f"{shown(reason)} is not a string", "finish_reasons", index)


def _check_routing(group: Mapping[str, object], tokens: _Rows, needs: GroupRequirements) -> None:
    if (given := _given(group, "routed_experts")) is None:
        if needs.routing_required:
            raise Untrainable(
                "missing: the trainer replays the sampler's routing; start vLLM with --enable-return-routed-experts, "
                "or the trainer with --routing-replay auto",
                "routed_experts",
            )
        return
    expect_count("routed_experts", len(given), len(tokens.lengths))
    if needs.routing is None:  # a model without experts does not read them
        return
    for index, (text, length) in enumerate(zip(given, tokens.lengths.tolist(), strict=True)):
        try:
            unpack_for(text, length, needs.routing)
        except ValueError as error:
            raise Untrainable(str(error), "routed_experts", index) from None


def _check_failed(group: Mapping[str, object]) -> None:
    if (failed := group.get("failed")) is None:
        return
    if not isinstance(failed, Mapping):
        raise Untrainable(f"{shown(failed)} is not an object", "failed")
    for cause, count in failed.items():
        if cause not in CAUSES:
            raise Untrainable(f"{shown(cause)} is not a cause: one of {', '.join(CAUSES)}", "failed")
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise Untrainable(f"{shown(count)} is not a number of samples", "failed", cause)


def shown(value: object) -> str:
    """ASCII, short, and cheap for a large value."""
    if isinstance(value, (list, tuple, dict, np.ndarray)):
        return f"{type(value).__name__} of {np.size(value) if isinstance(value, np.ndarray) else len(value)} entries"
    if isinstance(value, int) and value.bit_length() > 256:
        return "an integer of more than 256 bits"
    text = ascii(value[: SHOWN + 1] if isinstance(value, (str, bytes)) else value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
