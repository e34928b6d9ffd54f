"""What the model answers, in a few lines: a row of samples.jsonl -> text. Environments write a row for each group."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from atroposlib.processes.log_files import printable

ANSWER_LINES = 4
LINE_LENGTH = 110
FIRST_READ_BYTES = 256 << 10
MOST_BYTES = 64 << 20  # a row that is longer is not shown


def latest_sample(run_dir: Path) -> list[str]:
    """Lines of the newest group of a run that has answers to show; none where there is no such group."""
    files = [path for path in run_dir.glob("samples*.jsonl") if path.is_file() and not path.is_symlink()]
    if not files:
        return []
    samples = map(sample_lines, last_rows(max(files, key=lambda path: path.stat().st_mtime)))
    return next(filter(None, samples), [])


def last_rows(path: Path) -> Iterator[dict[str, object]]:
    """The last complete rows of a file of JSON lines, newest first; as many as a short look at its end gives."""
    size, length = path.stat().st_size, FIRST_READ_BYTES
    with path.open("rb") as file:
        while True:
            file.seek(max(0, size - length))
            *lines, _ = file.read(length).split(b"\n")  # the last is empty, or half written
            if len(lines) > 1 or (lines and length >= size):
                break
            if length >= min(size, MOST_BYTES):
                return
            length *= 8
    for line in reversed(lines if length >= size else lines[1:]):
        try:
            row = json.loads(line)
        except ValueError:  # not ours
            return
        if isinstance(row, dict):
            yield row


def sample_lines(row: Mapping[str, object]) -> list[str]:
    """The group's first answer with its reward, and the question before it. Nothing in them is obeyed by a terminal."""
    answers, scores = row.get("messages"), row.get("scores")
    if not (isinstance(answers, list) and isinstance(scores, list) and answers and len(scores) == len(answers)):
        return []
    turns = [turn for turn in _turns(answers[0]) if turn[1].strip()]
    numbers = [score for score in scores if isinstance(score, int | float)]
    if not turns or len(numbers) < len(scores):
        return []
    rollouts = row.get("rollouts")  # of several sequences, perhaps
    if isinstance(rollouts, list) and len(rollouts) == len(numbers):
        numbers = list(dict(zip(map(str, rollouts), numbers, strict=True)).values())
    mean = sum(numbers) / len(numbers)
    head = f"Sample: reward {numbers[0]:.2f}, mean of its {len(numbers)} answers {mean:.2f}"
    questions = [text for role, text in turns[:-1] if role == "user"]
    return [
        head,
        *(f"    > {line}" for text in questions[-1:] for line in few_lines(text, 2)),
        *(f"    < {line}" for line in few_lines(turns[-1][1], ANSWER_LINES)),
    ]


def few_lines(text: str, most: int) -> list[str]:
    """At most so many lines of a text, each cut to a length, `…` where something is left out."""
    lines = [printable(line.rstrip()) for line in text.splitlines() if line.strip()]
    shown = [line if len(line) <= LINE_LENGTH else f"{line[: LINE_LENGTH - 1]}…" for line in lines[:most]]
    if len(lines) > most:
        shown[-1] = f"{shown[-1][: LINE_LENGTH - 2].rstrip('…')} …"
    return shown


def _turns(messages: object) -> list[tuple[str, str]]:
    """Role and text of each message that has text."""
    if isinstance(messages, str):
        return [("assistant", messages)]
    if not isinstance(messages, list):
        return []
    return [
        (str(each.get("role")), each["content"])
        for each in messages
        if isinstance(each, dict) and isinstance(each.get("content"), str)
    ]
