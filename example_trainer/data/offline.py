"""Offline data: examples that the policy did not sample, from a file to the arrays that are trained on.

    {"prefix": ..., "completion": ...}          one answer is demonstrated; its tokens are trained
    {"messages": [...]}                         every assistant turn is demonstrated
    {"prefix": ..., "pos": ..., "neg": ...}     of two answers, one is better
    {"pos": [...], "neg": [...]}                the same, of chats

A `prefix`, and what follows it, is text or a list of messages. Text is tokenised as it stands, without special tokens
that it does not name: the two commands that write such files keep them, with the token that ends an answer. Other keys
(`score`) are not read. `prompt`, `chosen` and `rejected` are other names of `prefix`, `pos` and `neg`.
"""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray

from atroposlib.envs.data.dataset import Row, read_rows
from atroposlib.errors import reading
from atroposlib.utils.tokenize_for_trainer import tokenize_for_trainer
from atroposlib.wire.batching import NOT_TRAINED
from example_trainer.data.batching import Sequence
from example_trainer.errors import TrainerError

Text = str | list[dict[str, Any]]  # as it stands, or messages
FORMS = (("messages",), ("completion",), ("pos", "neg"))  # the keys of a line's answers
OTHER_NAMES = {"prompt": "prefix", "chosen": "pos", "rejected": "neg"}
EXPECTED = "write prefix and completion, messages, or pos and neg with or without a prefix"


class OfflineDataError(TrainerError):
    """A file that cannot be trained on; names the line."""


@dataclass(frozen=True)
class Example:
    """What is given, and what should follow: one answer, or the better and the worse one of a pair."""

    where: str  # the file and the line
    prefix: Text
    answers: tuple[Text, ...]


Sides = tuple[Sequence, ...]  # an example's answers, each behind its prefix


def read_examples(path: Path) -> list[Example]:
    """The examples of a file: all demonstrations, or all pairs. Raises DataError or OfflineDataError."""
    examples = [_example(row) for row in read_rows(path)]
    first = examples[0]
    for example in examples:
        if len(example.answers) != len(first.answers):
            raise OfflineDataError(
                f"{example.where} is {_kind(example)}, and {first.where} {_kind(first)}: give them in separate files"
            )
    return examples


def _kind(example: Example) -> str:
    return "a demonstration" if len(example.answers) == 1 else "a pair"


def _example(row: Row) -> Example:
    values = {OTHER_NAMES.get(name, name): value for name, value in row.values.items() if value is not None}
    given = [names for names in FORMS if any(name in values for name in names)]
    if len(given) > 1:
        found = " and ".join(name for names in given for name in names if name in values)
        raise OfflineDataError(f"{row.where} has {found}, of which one form is trained on: {EXPECTED}")
    names = given[0] if given else FORMS[-1]
    if absent := [name for name in names if name not in values]:
        raise OfflineDataError(f"{row.where} has no {absent[0]} but {', '.join(row.values) or 'no key'}: {EXPECTED}")
    answers = tuple(values[name] for name in names)
    prefix = [] if names == ("messages",) else values.get("prefix", [] if isinstance(answers[0], list) else "")
    for name, text in [("prefix", prefix), *zip(names, answers, strict=True)]:
        _expect_text(f"{row.where}, {name}", text, type(prefix))
    if len(answers) == 2 and answers[0] == answers[1]:
        raise OfflineDataError(f"{row.where}: pos and neg are equal, so neither is better; remove the pair")
    return Example(row.where, prefix, answers)


def _expect_text(where: str, text: object, kind: type) -> None:
    if not isinstance(text, kind) or not isinstance(text, str | list):
        raise OfflineDataError(f"{where} is {type(text).__name__}: give text everywhere, or messages everywhere")
    for message in text if isinstance(text, list) else ():
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise OfflineDataError(
                f'{where} has a message that is not {{"role": ..., "content": ...}}: {message!r:.80}'
            )
        if not isinstance(message["content"], str) and not (message["content"] is None and message.get("tool_calls")):
            raise OfflineDataError(f"{where} has a message whose content is {message['content']!r:.80}: give its text")


def tokenized(examples: Items[Example], tokenizer: Any, seq_len: int) -> tuple[list[Sides], int, int]:
    """The examples as sequences of at most `seq_len` tokens; how many lost their end; and how many are left out, as no
    token to train on remained of an answer. Raises OfflineDataError.
    """
    found: list[Sides] = []
    cut = 0
    for example in examples:
        with reading(f"{example.where} cannot be tokenised", OfflineDataError, also=(TemplateError, TypeError)):
            whole = [_tokens(example.prefix, answer, tokenizer) for answer in example.answers]
        for _, trained in whole:
            if not trained.any():
                raise OfflineDataError(
                    f"{example.where} has no token to train on: an answer is empty, or no assistant's"
                )
        cut += any(len(tokens) > seq_len for tokens, _ in whole)
        sides = tuple(_sequence(tokens[:seq_len], trained[:seq_len]) for tokens, trained in whole)
        if all(side.trained_tokens for side in sides):
            found.append(sides)
    if not found:
        raise OfflineDataError(f"no answer of {len(examples)} begins within --seq-len {seq_len} tokens: raise it")
    return found, cut, len(examples) - len(found)


def _tokens(prefix: Text, answer: Text, tokenizer: Any) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Ids [length], and which of them are trained: never the first, which nothing predicts."""
    if isinstance(answer, str):
        given = tokenizer.encode(prefix, add_special_tokens=False)
        tokens = np.array([*given, *tokenizer.encode(answer, add_special_tokens=False)], np.int64)
        trained = np.arange(len(tokens)) >= max(1, len(given))
        return tokens, trained
    turns: Any = [*prefix, *answer]
    chat = tokenize_for_trainer(tokenizer, turns, train_on_all_assistant_turns=True, first_turn=len(prefix))
    tokens = np.array(chat["tokens"], np.int64)
    trained = (np.array(chat["masks"]) != NOT_TRAINED) & (np.arange(len(tokens)) > 0)
    ends = trained & (tokens == tokenizer.eos_token_id)  # of answers; behind a user's begins what is trained
    trained[1:] &= ~ends[:-1]  # a template's line end, which no model is asked for
    return tokens, trained


def _sequence(tokens: NDArray[np.int64], trained: NDArray[np.bool_]) -> Sequence:
    return Sequence(
        tokens=tokens,
        trained=trained,
        sampler_logprobs=None,
        advantages=np.ones(len(tokens), np.float32),
        reference_logprobs=None,
        temperature=1.0,
    )


def order_of(update: int, count: int, examples: int, seed: int) -> list[int]:
    """Which `count` of the examples update number `update` trains on, from 0: all of them in turn, in another order in
    each round, which the seed decides.
    """
    places = (divmod(place, examples) for place in range(update * count, (update + 1) * count))
    return [int(_order_in(round_, examples, seed)[at]) for round_, at in places]


@lru_cache(maxsize=2)
def _order_in(round_: int, examples: int, seed: int) -> NDArray[np.int64]:
    return np.random.default_rng((seed, round_)).permutation(examples)
