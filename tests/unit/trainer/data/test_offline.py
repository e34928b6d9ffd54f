"""Offline data: which lines are examples, which tokens of them are trained, and what is refused by its line."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atroposlib.envs.errors import DataError
from atroposlib.testing.tiny_tokenizer import THINK_DROPPING_CHATML, make_tiny_tokenizer
from example_trainer.data.offline import Example, OfflineDataError, order_of, read_examples, tokenized

TOKENIZER = make_tiny_tokenizer()
QUESTION = {"role": "user", "content": "2+2?"}
ANSWER = {"role": "assistant", "content": "4"}
WORSE = {"role": "assistant", "content": "5"}


def file_of(folder: Path, *lines: object) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize(
    ("line", "prefix", "answers"),
    [
        ({"prefix": "2+2=", "completion": "4", "score": 1.0}, "2+2=", ("4",)),
        ({"prompt": "2+2=", "completion": "4"}, "2+2=", ("4",)),
        ({"completion": "4"}, "", ("4",)),
        ({"messages": [QUESTION, ANSWER], "score": -1}, [], ([QUESTION, ANSWER],)),
        ({"prompt": [QUESTION], "completion": [ANSWER]}, [QUESTION], ([ANSWER],)),
        ({"prefix": "2+2=", "pos": "4", "neg": "5", "score": 1, "neg_score": 0}, "2+2=", ("4", "5")),
        ({"pos": [QUESTION, ANSWER], "neg": [QUESTION, WORSE]}, [], ([QUESTION, ANSWER], [QUESTION, WORSE])),
        ({"prompt": [QUESTION], "chosen": [ANSWER], "rejected": [WORSE]}, [QUESTION], ([ANSWER], [WORSE])),
    ],
)
def test_a_line_is_a_demonstration_or_a_pair(
    tmp_path: Path, line: dict[str, Any], prefix: object, answers: tuple[object, ...]
) -> None:
    (example,) = read_examples(file_of(tmp_path, line))
    assert (example.prefix, example.answers) == (prefix, answers)


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([{"completion": "4"}, {"pos": "4", "neg": "5"}], "rows.jsonl:2 is a pair, and .*rows.jsonl:1 a demonstration"),
        ([{"question": "2+2", "answer": "4"}], "rows.jsonl:1 has no pos but question, answer: write prefix and"),
        ([{"pos": "4"}], "rows.jsonl:1 has no neg but pos"),
        ([{"pos": "4", "neg": "4"}], "rows.jsonl:1: pos and neg are equal"),
        ([{"prefix": "2+2=", "completion": 4}], "rows.jsonl:1, completion is int: give text everywhere, or messages"),
        ([{"prefix": "2+2=", "completion": [ANSWER]}], "rows.jsonl:1, completion is list"),
        ([{"messages": "2+2=4"}], "rows.jsonl:1, messages is str: give text everywhere, or messages"),
        ([{"messages": {"role": "user"}}], "rows.jsonl:1, messages is dict"),
        ([{"messages": [QUESTION, {"role": "assistant"}]}], "rows.jsonl:1, messages has a message that is not"),
        ([{"completion": None}], "rows.jsonl:1 has no pos"),
        (
            [{"messages": [{"role": "assistant", "content": "4"}], "pos": "4", "neg": "5"}],
            "messages and pos and neg",
        ),
        ([{"completion": "4", "neg": "5"}], "rows.jsonl:1 has completion and neg, of which one form is trained on"),
        ([{"messages": [{"role": "assistant", "content": [{"type": "text", "text": "4"}]}]}], "give its text"),
    ],
)
def test_another_line_is_refused_by_its_number(tmp_path: Path, lines: list[object], says: str) -> None:
    with pytest.raises(OfflineDataError, match=says):
        read_examples(file_of(tmp_path, *lines))


def test_a_file_that_is_no_json_or_empty_is_refused(tmp_path: Path) -> None:
    for text, says in (("", "no rows"), ('{"completion": "4"}\n{"comp', "rows.jsonl:2 is not JSON")):
        (tmp_path / "rows.jsonl").write_text(text)
        with pytest.raises(DataError, match=says):
            read_examples(tmp_path / "rows.jsonl")


def trained_text(example: Example, seq_len: int = 500) -> list[str]:
    (sides,), _, _ = tokenized([example], TOKENIZER, seq_len)
    return [TOKENIZER.decode(side.tokens[side.trained].tolist()) for side in sides]


def test_of_text_what_follows_the_prefix_is_trained_and_of_a_chat_what_the_assistant_says() -> None:
    second = [{"role": "user", "content": "3+3?"}, {"role": "assistant", "content": "6"}]
    assert trained_text(Example("", "2+2=", ("4 done", "5"))) == ["4 done", "5"]
    assert trained_text(Example("", "", ("abc",))) == ["bc"]  # nothing predicts a first token
    assert trained_text(Example("", [], ([QUESTION, ANSWER, *second],))) == ["4<|im_end|>6<|im_end|>"]
    assert trained_text(Example("", [QUESTION, ANSWER, second[0]], ([second[1]],))) == ["6<|im_end|>"]
    assert trained_text(Example("", [QUESTION], ([ANSWER], [WORSE]))) == ["4<|im_end|>", "5<|im_end|>"]


def test_an_answer_right_behind_the_end_of_a_question_is_trained_whole() -> None:
    """Some templates end every message alike, and have no header before an answer."""
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    for example in (Example("", [], ([QUESTION, ANSWER],)), Example("", [QUESTION], ([ANSWER],))):
        ((side,),), _, _ = tokenized([example], tokenizer, 500)
        assert tokenizer.decode(side.tokens[side.trained].tolist()) == "4<|im_end|>"


def test_an_answer_behind_a_longer_prefix_than_the_template_keeps_is_trained_whole() -> None:
    tokenizer = make_tiny_tokenizer(chat_template=THINK_DROPPING_CHATML)
    thoughts = {"role": "assistant", "content": f"<think>{'hm ' * 20}</think>4"}
    example = Example("", [QUESTION, thoughts], ([{"role": "user", "content": "3+3?"}, WORSE],))
    ((side,),), _, _ = tokenized([example], tokenizer, 500)
    assert tokenizer.decode(side.tokens[side.trained].tolist()) == "5<|im_end|>"


def test_long_examples_are_cut_counted_and_left_out_where_no_answer_remains() -> None:
    examples = [Example("a:1", "12345", (answer,)) for answer in ("6", "678", "6")] + [
        Example("a:4", "123456789", ("6",))
    ]
    sides, cut, left_out = tokenized(examples, TOKENIZER, 7)
    assert [side.trained_tokens for (side,) in sides] == [1, 2, 1]
    assert (cut, left_out) == (2, 1)
    with pytest.raises(OfflineDataError, match="no answer of 1 begins within --seq-len 5 tokens"):
        tokenized(examples[:1], TOKENIZER, 5)


@pytest.mark.parametrize("example", [Example("a:1", "2+2=", ("",)), Example("a:1", [], ([QUESTION],))])
def test_an_example_without_a_token_to_train_on_is_refused(example: Example) -> None:
    with pytest.raises(OfflineDataError, match="a:1 has no token to train on"):
        tokenized([example], TOKENIZER, 100)


@given(st.integers(1, 12), st.integers(1, 30), st.integers(0, 5))
def test_each_round_has_every_example_once_in_an_order_of_its_own(count: int, examples: int, seed: int) -> None:
    rounds = 3
    updates = -(-rounds * examples // count)
    order = [index for update in range(updates) for index in order_of(update, count, examples, seed)]
    for begin in range(0, rounds * examples, examples):
        assert sorted(order[begin : begin + examples]) == list(range(examples))


def test_the_seed_decides_the_order() -> None:
    assert order_of(1, 8, 40, 0) == order_of(1, 8, 40, 0)
    assert order_of(1, 8, 40, 0) != order_of(1, 8, 40, 1)
    assert order_of(0, 40, 40, 0) != order_of(1, 40, 40, 0)
