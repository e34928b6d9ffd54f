"""What all rows share: the server, the reference, prompts of this run alone, and the limit that rounding sets."""

import secrets
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from atroposlib.rounding import EPSILON, rounding_limit
from sampler_doctor.reference import Array, Reference, Words, log_softmax
from sampler_doctor.servers.sampler import UNNAMED, Answer, Ask, Broken, NotOffered, NotShown, Sampler

Result = Literal["ok", "fails", "not offered", "not shown"]
ANSWER = 16  # tokens of an answer: most of PROMPT_TOKENS reach another block of 16 keys with it
FEW = 20  # log-probabilities at each token of an answer, at most
PROMPT_TOKENS = (4, 12, 40, 96)
LONG = 288  # tokens of a prompt that fills two blocks of any server's prefix cache
TEXT = (
    "A lighthouse stands on a cliff above the bay. Its keeper climbs one hundred and forty steps each evening, trims"
    " the wick, winds the clockwork that turns the lens, and writes the weather into a book. Ships far out at sea count"
    " the seconds between two flashes and so know which light they see. In winter the wind is so strong that the door"
    " cannot be opened, and then he stays upstairs with bread, tea and a radio. Once, in a storm, a gull flew against"
    " the glass. He mended its wing with a splint of two matches, fed it on herring for three weeks, and let it go. "
)


@dataclass(frozen=True)
class Found:
    """What a row found. `figure` and `limit` are in words, with their unit."""

    result: Result
    figure: str
    limit: str = ""


@dataclass(frozen=True)
class Gap:
    """How far log-probabilities are apart, in nats: root mean square, and the largest."""

    rms: float
    worst: float
    count: int

    def __str__(self) -> str:
        return f"{self.rms:.2g} nats rms, worst {self.worst:.2g}, of {self.count}"


def gap(differences: Iterable[float]) -> Gap:
    """Raises NotShown without differences."""
    values = np.array(list(differences), dtype=np.float64)
    if not values.size:
        raise NotShown("the server gave no log-probabilities to compare")
    return Gap(float(np.sqrt(np.mean(values**2))), float(np.abs(values).max()), values.size)


class Session:
    """One pass over a server that serves `reference`."""

    def __init__(self, sampler: Sampler, reference: Reference, words: Words, longest: int, dtype: str) -> None:
        self.sampler, self.reference, self.words, self.longest = sampler, reference, words, longest
        self.dtype = dtype
        self.few = min(sampler.top, FEW)
        self._nonce = np.random.default_rng(secrets.randbits(64))  # that no other run has filled the prefix cache

    def prompt(self, length: int) -> tuple[int, ...]:
        """Return `length` token ids that nobody has sent before: a few random ones, then text."""
        length = max(1, min(length, self.longest - ANSWER - 1))
        noise = [int(token) for token in self._nonce.choice(self._plain, 3)]
        return tuple([*noise, *self._text(length)][:length])

    @cached_property
    def prompts(self) -> list[tuple[int, ...]]:
        """Prompts of several lengths."""
        return [self.prompt(length) for length in PROMPT_TOKENS]

    @cached_property
    def flattest(self) -> tuple[int, ...]:
        """Return, of a few of the shortest prompts, that behind which the distribution is flattest: for rows that draw
        often, which has the server compute the prompt once per draw.
        """

        def entropy(prompt: tuple[int, ...]) -> float:
            logprobs = log_softmax(self.reference.after(prompt))
            return -float(np.sum(np.exp(logprobs) * logprobs))

        return max([self.prompts[0], *(self.prompt(PROMPT_TOKENS[0]) for _ in range(2))], key=entropy)

    @cached_property
    def _plain(self) -> NDArray[np.int64]:
        """Tokens that are no special ones."""
        special = set(self.words.tokenizer.all_special_ids) if self.words.tokenizer is not None else set()
        return np.array([token for token in range(self.reference.vocabulary) if token not in special])

    def _text(self, length: int) -> list[int]:
        if self.words.tokenizer is None:
            return [int(token) for token in self._nonce.choice(self._plain, length)]
        ids = self.words.ids(TEXT)
        return (ids * (length // len(ids) + 1))[:length]

    def greedy(self, prompt: Sequence[int], tokens: int = 1, **options: object) -> Answer:
        """Return one answer at temperature 0."""
        return self.ask(Ask(prompt, tokens, 0.0, self.few, options))[0]

    def ask(self, ask: Ask) -> list[Answer]:
        """Return answers whose token ids are known. Raises NotOffered where they are not."""
        answers = self._sampled(ask)
        if any(UNNAMED in answer.tokens for answer in answers):
            raise NotOffered("the server gives no token ids, and some of these tokens read alike")
        return answers

    def _sampled(self, ask: Ask) -> list[Answer]:
        """Return answers whose tokens the model has. Raises Broken for others, which another model would give."""
        answers, known = self.sampler.sample(ask), self.reference.vocabulary
        named = chain.from_iterable((*each.tokens, *chain(*each.top)) for each in answers)
        if foreign := [token for token in named if not UNNAMED <= token < known]:
            raise Broken(f"the server names token {foreign[0]}, and --model has {known} tokens: name what is served")
        return answers

    def at_once(self, asks: Sequence[Ask]) -> list[Answer]:
        """Return the first answer to each of these requests, which are sent at the same time. Raises as `ask`."""
        with ThreadPoolExecutor(len(asks)) as pool:
            return [answers[0] for answers in pool.map(self.ask, asks)]

    @cached_property
    def answers(self) -> list[tuple[tuple[int, ...], Answer]]:
        """Answers at temperature 1, with their prompts."""
        asks = [Ask(prompt, ANSWER, 1.0, self.few, {"seed": place}) for place, prompt in enumerate(self.prompts)]
        return list(zip(self.prompts, self.at_once(asks), strict=True))

    def against_reference(self, prompt: Sequence[int], answer: Answer) -> list[float]:
        """Return served less reference log-probabilities of every token that the answer names."""
        if not answer.tokens:
            raise NotShown("the answer is empty")
        rows = log_softmax(self.reference.along(prompt, answer.tokens))
        return [
            value - float(row[token])
            for row, token, own, top in zip(rows, answer.tokens, answer.logprobs, answer.top, strict=True)
            for token, value in {**top, **({} if token == UNNAMED else {token: own})}.items()
        ]

    def first_difference(self) -> Gap:
        """Compare the first token's distributions: before a limit is known."""
        whole = [self._sampled(Ask(prompt, 1, 0.0, self.sampler.top))[0] for prompt in self.prompts]
        pairs = zip(self.prompts, whole, strict=True)
        return gap(value for prompt, answer in pairs for value in self.against_reference(prompt, answer))

    @cached_property
    def spread(self) -> float:
        """Return the standard deviation of log-probabilities over the vocabulary, in nats."""
        return float(np.mean([log_softmax(self.reference.after(prompt)).std() for prompt in self.prompts]))

    def limit(self, dtype: str | None = None) -> float:
        """Return what rounding explains, in nats, root mean square."""
        return rounding_limit([dtype or self.dtype], self.spread)

    def judge(self, found: Gap, words: str = "", *, factor: float = 1.0) -> Found:
        """Compare a difference with what rounding explains, `factor` times."""
        limit = self.limit() * factor
        figure = f"{found}{words}"
        return Found("ok" if found.rms <= limit else "fails", figure, f"{limit:.2g} ({self.dtype})")

    def probabilities(self, prompt: Sequence[int]) -> Array:
        """Return the reference's distribution behind `prompt`, [vocabulary]."""
        found: Array = np.exp(log_softmax(self.reference.after(tuple(prompt))))
        return found


def finest_dtype(session: Session) -> str:
    """Return the finest dtype whose rounding explains the first difference; the coarsest where none does."""
    found = session.first_difference()
    by_size = sorted(EPSILON, key=session.limit)
    return next((dtype for dtype in by_size if found.rms <= session.limit(dtype)), by_size[-1])
