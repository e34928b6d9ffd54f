"""Held-out accuracy of one policy, as the trainer, the launcher and people read it: how many questions, how sure."""

import math
from collections.abc import Mapping, Sequence

import msgspec

MOST = 1e9  # as of a score: a larger number is no accuracy, and the sum of several might not be finite
FINAL = "final_"  # before the names of metrics of an evaluation with further questions, at the end of a run


class HeldOut(msgspec.Struct, frozen=True, omit_defaults=True):
    """Held-out accuracy of one policy, 0 to 1: the mean over the environments that evaluated it.

    `stderr` is its standard error and `questions` their number, None unless all environments count right answers.
    `final` is the accuracy with the further questions that environments ask at the end of a run, if any.
    """

    accuracy: float
    stderr: float | None = None
    questions: int | None = None
    final: "HeldOut | None" = None

    def __str__(self) -> str:
        """`98.4 % ± 1.4 (64 questions)`, with as much of it as is known."""
        error = "" if self.stderr is None else f" ± {100 * self.stderr:.1f}"
        return f"{100 * self.accuracy:.1f} %{error}" + (f" ({self.questions} questions)" if self.questions else "")


def does_as_well(last: HeldOut, best: HeldOut) -> bool:
    """Return whether the last policy answers as many of the further questions as the one that did best on the first
    ones, whose lead may be luck. False unless both were asked.
    """
    return last.final is not None and best.final is not None and last.final.accuracy >= best.final.accuracy


def held_out(results: Sequence[tuple[float | None, Mapping[str, float]]]) -> HeldOut | None:
    """Return what the results of one policy version, accuracy and metrics, one for each environment, have in common;
    None without an accuracy.
    """
    accuracy_of_all = _mean([(accuracy, metrics.get("total", 0)) for accuracy, metrics in results])
    final = _mean([(metrics.get(f"{FINAL}accuracy"), metrics.get(f"{FINAL}total", 0)) for _, metrics in results])
    return accuracy_of_all and msgspec.structs.replace(accuracy_of_all, final=final)


def _mean(results: Sequence[tuple[float | None, float]]) -> HeldOut | None:
    """Of accuracies and numbers of questions (0: not known), one pair for each environment."""
    measured = [(share, round(count)) for share, count in results if share is not None and abs(share) <= MOST]
    if not measured:
        return None
    accuracy = math.fsum(share for share, _ in measured) / len(measured)
    if not all(count > 0 and 0 <= share <= 1 for share, count in measured):  # such as 75, for 75 %
        return HeldOut(accuracy)
    errors = [standard_error(*each) for each in measured]
    return HeldOut(accuracy, math.hypot(*errors) / len(measured), sum(count for _, count in measured))


def standard_error(accuracy: float, questions: int) -> float:
    """Return half the width of Wilson's score interval (1927) at z = 1: about sqrt(p (1 - p) / n), and not 0 where all
    answers are right, or none.
    """
    variance = accuracy * (1 - accuracy) / questions
    return math.sqrt(variance + 1 / (4 * questions**2)) / (1 + 1 / questions)
