"""`generate_with_diverse_first_tokens`: completions of one prompt that differ in their first token."""

import asyncio
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

TOP_LOGPROBS = 20  # the most that OpenAI's protocol returns
# How the rest of each completion is sampled: close to the likeliest continuation of its first token.
CONTINUATION = {"top_p": 0.3, "extra_body": {"min_p": 0.5, "repetition_penalty": 1.05}}


async def generate_with_diverse_first_tokens(
    self: Any,
    messages: Sequence[Mapping[str, object]],
    prefill: str = "",
    n: int = 8,
    max_tokens: int = 4096,
    temperature: float = 1.0,
) -> list[str]:
    """Up to `n` completions by `self.server` (a server of chat completions), each with another first token.

    The first tokens are drawn without replacement from the 20 likeliest after `prefill`. Each text begins with its
    first token, without `prefill`. Raises ValueError if the server returns no log-probabilities.
    """

    async def completed(first: str) -> str:
        reply = await self.server.chat_completion(
            messages=[*messages, {"role": "assistant", "content": prefill + first}],
            n=1,
            max_tokens=max_tokens - 1,
            temperature=temperature,
            **CONTINUATION,
        )
        return first + (reply.choices[0].message.content or "")

    asked = await self.server.chat_completion(
        messages=[*messages, {"role": "assistant", "content": prefill}],
        n=1,
        max_tokens=1,
        temperature=0.0,
        logprobs=True,
        top_logprobs=TOP_LOGPROBS,
    )
    logprobs = asked.choices[0].logprobs
    if logprobs is None or not logprobs.content:
        raise ValueError("the server returned no log-probabilities of the first token: it must know top_logprobs")
    likeliest = {each.token: each.logprob for each in logprobs.content[0].top_logprobs}
    return await asyncio.gather(*(completed(first) for first in draw(likeliest, n, temperature)))


def draw(logprobs: Mapping[str, float], n: int, temperature: float) -> list[str]:
    """`n` different keys, or all, drawn one after the other in proportion to exp(logprob / temperature).

    Adding Gumbel noise and taking the largest does that (Kool et al. 2019, https://arxiv.org/abs/1903.06059).
    """
    noisy = {
        key: logprob / temperature - math.log(random.expovariate(1.0)) for key, logprob in logprobs.items()
    }  # -log of an exponential variable is a Gumbel variable
    return sorted(noisy, key=noisy.__getitem__, reverse=True)[:n]
