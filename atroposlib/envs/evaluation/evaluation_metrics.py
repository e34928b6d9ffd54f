"""The metrics of an evaluation with several samples per question, and the tables that `evaluate` prints.

samples ──▶ summary: mean score, avg@N, pass@k, tokens, cost ──▶ table
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

MILLION = 1e6
ROUNDING = 1e-9  # relative, of a score that was added up: 0.7 + 0.2 + 0.1 is below 1
# Of an evaluation, in its directory beside metrics.json: the table, the samples, and the greedy answers that are kept.
TABLE = "table.txt"
SAMPLES = "samples.jsonl"
ANSWERS = "answers.jsonl"


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer or conversation."""

    index: int  # of the question
    number: int  # of the sample
    score: float | None
    tokens: tuple[int, int] = (0, 0)  # of prompts and of answers
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Prices:
    """Holds the prices of a million tokens."""

    prompt: float = 0.0
    answer: float = 0.0


def is_right(score: float, right_from: float) -> bool:
    """Return whether a score is at least `right_from`, but for rounding."""
    return score >= right_from or math.isclose(score, right_from, rel_tol=ROUNDING)


def pass_at_k(samples: int, right: int, k: int) -> float:
    """The chance that one of `k` samples is right, drawn from `samples` of which `right` are. Chen et al. 2021, arXiv
    2107.03374, equation 1.
    """
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def summary(
    samples: Sequence[Sample], per_question: int, right_from: float, prices: Prices = Prices()
) -> dict[str, float]:
    """Means over questions, so that one of which some samples failed counts as much as others. Samples beyond
    `per_question`, which a file may have, are left out.
    """
    samples = [sample for sample in samples if sample.number < per_question]
    scores: dict[int, list[float]] = defaultdict(list)
    for sample in samples:
        if sample.score is not None:
            scores[sample.index].append(sample.score)
    counts = {
        index: (len(of_question), sum(is_right(score, right_from) for score in of_question))
        for index, of_question in scores.items()
    }
    shares = [right / count for count, right in counts.values()]
    metrics = {
        "questions": float(len(counts)),
        "samples": float(sum(count for count, _ in counts.values())),
        "failed": float(sum(sample.error is not None for sample in samples)),
        "mean_score": _mean([_mean(of_question) for of_question in scores.values()]),
        "accuracy": _mean(shares),
        f"avg@{per_question}": _mean(shares),  # the same, by the name that reports use
        "standard_error": _standard_error(shares),
    }
    for k in _powers(per_question):
        able = [pass_at_k(count, right, k) for count, right in counts.values() if count >= k]
        if able:
            metrics[f"pass@{k}"] = _mean(able)
    prompt, answer = (sum(sample.tokens[which] for sample in samples) for which in (0, 1))
    metrics |= {"prompt_tokens": float(prompt), "completion_tokens": float(answer)}
    if prices.prompt or prices.answer:
        metrics["cost"] = (prompt * prices.prompt + answer * prices.answer) / MILLION
    return metrics


def sampled_table(title: str, metrics: Mapping[str, float]) -> str:
    """Format what `summary` gives, and `seconds`, as lines to print."""
    answers = max(1.0, metrics["samples"])
    rows = {
        "questions, samples, failed": " ".join(f"{metrics[key]:.0f}" for key in ("questions", "samples", "failed")),
        "mean score": f"{metrics['mean_score']:.3f}",
    }
    for key, value in metrics.items():
        if key.startswith("avg@"):
            rows[key] = f"{100 * value:.1f} % ± {100 * metrics['standard_error']:.1f}"
        elif key.startswith("pass@"):
            rows[key] = f"{100 * value:.1f} %"
    for name, key in (("prompt tokens", "prompt_tokens"), ("answer tokens", "completion_tokens")):
        rows[name] = f"{metrics[key]:.0f} ({metrics[key] / answers:.0f} per sample)"
    if "cost" in metrics:
        rows["cost"] = f"{metrics['cost']:.4g}"
    return table(title, rows | {"seconds": f"{metrics['seconds']:.1f}"})


def table(title: str, rows: Mapping[str, object]) -> str:
    """A line for each row, under `title`; floats with four digits."""
    shown = {name: f"{value:.4g}" if isinstance(value, float) else str(value) for name, value in rows.items()}
    width = max(map(len, shown), default=0)
    return "\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in shown.items())])


def _powers(most: int) -> Iterator[int]:
    """1, 2, 4, ... and `most`."""
    k = 1
    while k < most:
        yield k
        k *= 2
    yield most


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _standard_error(values: Sequence[float]) -> float:
    """Compute the standard error of the mean over questions."""
    if len(values) < 2:
        return 0.0
    mean = _mean(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))
