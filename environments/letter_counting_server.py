"""Letter counting: how often does a letter occur in a word?

    python environments/letter_counting_server.py                          API on 8000, vLLM on 9001
    python environments/letter_counting_server.py serve --env.words_path words.txt --env.max_new_tokens 128

Words are made of random syllables, each from the seed and its number, or come from a file with one word per line. Half
of the questions ask for a letter that occurs. The count is read from the last <answer> tags.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from random import Random
from string import ascii_lowercase

from pydantic import Field, model_validator

from atroposlib.config import InputPathText
from atroposlib.envs.data.dataset import numbered_lines
from atroposlib.envs.errors import DataError
from atroposlib.envs.question_env import QuestionEnv, QuestionEnvConfig
from atroposlib.errors import reading
from atroposlib.grading import extract_tagged
from atroposlib.type_definitions import Messages

ONSETS = ("b", "br", "c", "ch", "d", "f", "g", "gr", "l", "m", "n", "p", "r", "s", "st", "t", "tr", "v")
VOWELS = ("a", "e", "ee", "i", "o", "oo", "ou", "u")
CODAS = ("", "", "l", "ll", "n", "r", "rr", "s", "ss", "t")
COUNT = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True, slots=True)
class Question:
    """A word and the letter to count in it."""

    word: str
    letter: str

    @property
    def count(self) -> int:
        """Count how often the letter stands in the word, in either case."""
        return self.word.lower().count(self.letter)


class LetterCountingConfig(QuestionEnvConfig):
    """Settings of the letter counting environment, besides those of every question environment."""

    max_new_tokens: int = Field(default=256, ge=1, description="Most tokens of one answer.")
    min_syllables: int = Field(default=2, ge=1, description="Fewest syllables of a generated word.")
    max_syllables: int = Field(default=6, ge=1, description="Most syllables of a generated word.")
    words_path: InputPathText | None = Field(
        default=None, description="File with one word per line; replaces the generated words."
    )

    @model_validator(mode="after")
    def _ordered(self) -> "LetterCountingConfig":
        if self.min_syllables > self.max_syllables:
            raise ValueError(f"min_syllables {self.min_syllables} is above max_syllables {self.max_syllables}")
        return self


class LetterCountingEnv(QuestionEnv):
    """See the module's head."""

    name = "letter_counting"
    env_config_cls = LetterCountingConfig

    async def setup(self) -> None:
        """Read the words, if they come from a file, and hold questions out."""
        config: LetterCountingConfig = self.config
        self.words = read_words(Path(config.words_path)) if config.words_path is not None else []
        self.held_out = [
            self._question(Random(f"{config.seed} held out {number}")) for number in range(config.held_out_limit)
        ]

    async def training_item(self, number: int) -> Question:
        """Question `number`; none of those held out, unless a short file of words has no others."""
        generator = Random(f"{self.config.seed} {number}")
        candidates = (self._question(generator) for _ in range(100))
        return next((question for question in candidates if question not in self.held_out), self._question(generator))

    def prompt(self, item: Question) -> Messages:
        """The question, and where to put the count."""
        return [
            {
                "role": "user",
                "content": f"How many times does the letter '{item.letter}' occur in the word '{item.word}'? Spell the"
                " word first, then write the count as a number inside <answer> </answer> tags.",
            }
        ]

    async def score(self, item: Question, answer: str) -> float:
        """1 for the right count, else 0."""
        given = extract_tagged(answer) or ""
        return float(COUNT.fullmatch(given) is not None and int(given) == item.count)

    def reference_answer(self, item: Question) -> str:
        """The count."""
        return str(item.count)

    def _question(self, generator: Random) -> Question:
        word = generator.choice(self.words) if self.words else make_word(generator, self.config)
        letters = word.lower() if generator.random() < 0.5 else ascii_lowercase
        return Question(word, generator.choice([letter for letter in letters if letter.isalpha()]))


def make_word(generator: Random, config: LetterCountingConfig) -> str:
    """A word that can be pronounced, if not understood."""
    return "".join(
        generator.choice(part)
        for _ in range(generator.randint(config.min_syllables, config.max_syllables))
        for part in (ONSETS, VOWELS, CODAS)
    )


def read_words(path: Path) -> list[str]:
    """The words of a file that hold a letter. Raises DataError."""
    with reading(f"cannot read words from {path}", DataError):
        words = [line.decode().strip() for _, line in numbered_lines(path)]
    usable = [word for word in words if any(letter.isalpha() for letter in word.lower())]
    if not usable:
        raise DataError(f"{path} contains no words; write one per line")
    return usable


if __name__ == "__main__":
    LetterCountingEnv.cli(default_command="serve")
