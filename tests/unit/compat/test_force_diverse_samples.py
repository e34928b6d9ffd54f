"""Completions that differ in their first token, under the path that users of 0.4.0 import."""

import math
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from atroposlib.compat.force_diverse_samples import draw
from atroposlib.utils.force_diverse_samples import (  # an old path
    generate_with_diverse_first_tokens,
)

PROMPT = [{"role": "user", "content": "Name a colour."}]


class Server:
    """Returns the likeliest tokens where it is asked for them, and else the end of a sentence."""

    def __init__(self, likeliest: dict[str, float] | None) -> None:
        self.likeliest = likeliest
        self.asked: list[dict[str, Any]] = []

    async def chat_completion(self, **arguments: Any) -> Any:
        self.asked.append(arguments)
        logprobs = None
        if self.likeliest is not None and arguments.get("logprobs"):
            top = [SimpleNamespace(token=token, logprob=value) for token, value in self.likeliest.items()]
            logprobs = SimpleNamespace(content=[SimpleNamespace(top_logprobs=top)])
        message = SimpleNamespace(content=" is one.")
        return SimpleNamespace(choices=[SimpleNamespace(message=message, logprobs=logprobs)])


async def test_each_completion_begins_with_another_token_and_continues_from_it() -> None:
    server = Server({"Red": -0.1, "Blue": -2.0, "Green": -5.0})
    env = SimpleNamespace(server=server)
    texts = await generate_with_diverse_first_tokens(env, PROMPT, prefill="I say: ", n=2, max_tokens=16)
    assert len(set(texts)) == 2
    first, *rest = server.asked
    assert (first["max_tokens"], first["top_logprobs"], first["messages"][-1]["content"]) == (1, 20, "I say: ")
    assert [text.removesuffix(" is one.") for text in texts] == [
        asked["messages"][-1]["content"].removeprefix("I say: ") for asked in rest
    ]
    assert {asked["max_tokens"] for asked in rest} == {15}
    assert PROMPT == [{"role": "user", "content": "Name a colour."}]
    every = await generate_with_diverse_first_tokens(env, PROMPT, n=8)
    assert sorted(every) == ["Blue is one.", "Green is one.", "Red is one."]


async def test_a_server_without_log_probabilities_is_an_error_with_the_remedy() -> None:
    with pytest.raises(ValueError, match="must know top_logprobs"):
        await generate_with_diverse_first_tokens(SimpleNamespace(server=Server(None)), PROMPT)


def test_tokens_are_drawn_by_their_probability_at_the_temperature() -> None:
    expected = {"a": 0.6, "b": 0.3, "c": 0.1}
    logprobs = {key: math.log(probability) for key, probability in expected.items()}
    counts = Counter(draw(logprobs, 1, temperature=1.0)[0] for _ in range(20_000))
    for key, probability in expected.items():
        assert abs(counts[key] / 20_000 - probability) < 0.02  # the standard deviation is at most 0.0035
    cold = Counter(draw({"a": math.log(0.8), "b": math.log(0.2)}, 1, temperature=0.1)[0] for _ in range(500))
    assert cold["a"] > 495  # its probability is 1 - 1e-6
