from typing import Any

from atroposlib.compat.message_history_utils import ensure_trajectory_token_limit, strip_thinking, truncate_thinking
from atroposlib.testing.tiny_tokenizer import make_tiny_tokenizer
from atroposlib.utils.tokenize_for_trainer import tokenize_for_trainer

TOKENIZER = make_tiny_tokenizer()


def test_thoughts_are_stripped_or_cut_from_their_start() -> None:
    text = "a <think>first part\n\nsecond</think> b"
    assert strip_thinking(text) == "a  b"
    assert strip_thinking("no thoughts") == "no thoughts"
    assert truncate_thinking(text, TOKENIZER, 100) == "a <think>\nfirst part\n\nsecond\n</think> b"
    assert truncate_thinking(text, TOKENIZER, 12) == "a <think>\nsecond\n</think> b"
    assert truncate_thinking(text, TOKENIZER, 0) == "a <think></think> b"
    assert truncate_thinking("<think>open", TOKENIZER, 1) == "<think>open"


def step(turns: int) -> dict[str, Any]:
    messages = [{"role": "system", "content": "rules"}]
    for turn in range(turns):
        messages += [{"role": "user", "content": f"see {turn}"}, {"role": "assistant", "content": f"do {turn}"}]
    tokenized = tokenize_for_trainer(TOKENIZER, messages)  # type: ignore[arg-type]
    return {
        "messages": [messages] * 2,
        "tokens": [tokenized["tokens"]] * 2,
        "masks": [tokenized["masks"]] * 2,
        "scores": [0.0, 1.0],
    }


def test_old_turns_are_left_out_until_a_step_fits() -> None:
    long, limit = step(5), len(step(2)["tokens"][0])
    (fitted,) = ensure_trajectory_token_limit([long], TOKENIZER, limit)
    contents = [message["content"] for message in fitted["messages"][0]]
    assert contents == ["rules", "see 3", "do 3", "see 4", "do 4"]
    assert len(fitted["tokens"][1]) <= limit
    assert len(fitted["masks"][1]) == len(fitted["tokens"][1])
    assert fitted["scores"] == [0.0, 1.0]


def test_step_that_cannot_fit_is_left_out_and_short_ones_stay() -> None:
    short = step(1)
    assert ensure_trajectory_token_limit([short, step(3)], TOKENIZER, len(short["tokens"][0])) == [
        short,
        ensure_one(short),
    ]
    assert ensure_trajectory_token_limit([step(3)], TOKENIZER, 5) == []


def ensure_one(short: dict[str, Any]) -> Any:
    (fitted,) = ensure_trajectory_token_limit([step(3)], TOKENIZER, len(short["tokens"][0]))
    return fitted
