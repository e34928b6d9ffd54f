"""Where the answers of a fake inference server come from: a list, at random, or the right one at a rate.

Each is called with the text of a prompt and returns an iterator with one answer per sample. The same seed gives the
same random and right answers to the same prompts, in whatever order these are asked.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import count, cycle
from pathlib import Path
from random import Random

from atroposlib.errors import reading
from atroposlib.flags import ConfigError

REFERENCE = "REFERENCE"  # in the text of a right answer: its reference answer
NO_ANSWER = "I do not know."
MOST_WORDS = 12
# Numbers and words, and what the answers of models contain that parsers stumble over.
ODD_WORDS = (
    "<answer>",
    "</answer>",
    "</think>",
    "\\boxed{",
    "}",
    "\n",
    "```",
    "1/0",
    "-0.0",
    "1e999",
    "½",
    "é",
    "答案",
    "🙂",
)


class CannotAnswer(ValueError):
    """The server lacks what it needs to answer; the message names the remedy."""


class InTurn:
    """`texts` one after the other, from sample to sample and from request to request."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = cycle(texts)

    def __call__(self, prompt: str) -> Iterator[str]:
        return self._texts


class AtRandom:
    """Up to twelve words, numbers and odd signs per answer."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._asked: Counter[str] = Counter()

    def __call__(self, prompt: str) -> Iterator[str]:
        while True:
            yield random_text(Random(f"{self._seed} {self._asked[prompt]} {prompt}"))
            self._asked[prompt] += 1


def random_text(random: Random) -> str:
    """One random answer."""
    kinds: list[Callable[[], str]] = [
        lambda: str(random.randint(-10, 100)),
        lambda: "".join(random.choices("abcdefghijklmnopqrstuvwxyz", k=random.randint(1, 8))),
        lambda: random.choice(ODD_WORDS),
    ]
    return " ".join(random.choice(kinds)() for _ in range(random.randint(1, MOST_WORDS)))


class Right:
    """The right answer to the share `rate` of samples, an answer of `otherwise` to the others.

    Right ones are spread evenly (systematic sampling): of n samples of one prompt, `rate * n` are right, rounded up or
    down so that the rate holds over all prompts. `text` is the right answer, with the reference answer for REFERENCE.
    """

    def __init__(
        self, rate: float, otherwise: Callable[[str], Iterator[str]], *, text: str = REFERENCE, seed: int = 0
    ) -> None:
        self.reference: str | None = None  # the server sets it
        self._rate = rate
        self._otherwise = otherwise
        self._text = text
        self._seed = seed
        self._turns: dict[str, Iterator[bool]] = {}

    def __call__(self, prompt: str) -> Iterator[str]:
        """Raises CannotAnswer without a reference answer."""
        others = self._otherwise(prompt)
        turns = self._turns.setdefault(prompt, self._spread(Random(f"{self._seed} {prompt}").random()))
        return (self._right() if is_right else next(others) for is_right in turns)

    def _spread(self, phase: float) -> Iterator[bool]:
        for index in count():
            yield int(phase + (index + 1) * self._rate) > int(phase + index * self._rate)

    def _right(self) -> str:
        if self.reference is None:
            raise CannotAnswer(
                "no environment has told the reference answer, which --right needs: only `process` of an environment"
                " with reference_answer(item) tells it; for anything else start this server with --answer or --random"
            )
        return self._text.replace(REFERENCE, self.reference)


def read_answers(path: Path) -> list[str]:
    """One answer per line; in a .jsonl file, each line is a JSON string. Raises ConfigError."""
    with reading(f"--answers {path}", ConfigError):
        content = path.read_bytes()
        is_json = path.suffix == ".jsonl"  # in which a string may hold what else ends a line
        texts = list(map(json.loads, content.splitlines())) if is_json else content.decode().splitlines()
    if not texts or not all(isinstance(text, str) for text in texts):
        raise ConfigError(f"--answers {path}: expected one answer per line (in a .jsonl file, a JSON string per line)")
    return texts
