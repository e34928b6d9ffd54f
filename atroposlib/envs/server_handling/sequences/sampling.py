"""What a server sampled: token ids as the model produced them, each with its log-probability and the policy that chose
it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, TypedDict

from atroposlib.groups import not_replayed

# What a call is given, in the words of OpenAI's API.
Arguments = dict[str, Any]
# Which distribution a sequence was sampled from: temperature, top_p, top_k, and what the trainer does not replay.
Settings = dict[str, Any]
LEAST_TEMPERATURE = 0.01  # vLLM raises those between 0 and this one
GREEDY_BELOW = 1e-5  # vLLM's and SGLang's rule
# (prompt tokens, output tokens per sequence, log-probabilities per sequence, finish reason per sequence)
TokensAndLogprobs = tuple[list[int], list[list[int]], list[list[float]], list[str]]


class PromptLogprobs(TypedDict):
    """The token at each position of a prompt, and the likeliest ones there, see `InferenceCalls.get_logprobs`."""

    prompt_tokens: list[int]
    prompt_topk_token_ids: list[list[int]]
    prompt_topk_logprobs: list[list[float]]


@dataclass(frozen=True, slots=True)
class SampledSequence:
    """One completion. Raises ValueError unless it has a token, and exactly one log-probability per token.

    `policy_versions` are the versions that sampled the first and the last token, `version_spans` the runs of tokens of
    one version, as (start, version); None when the server does not say. `routed_experts` are the experts that read each
    token but the last, prompt included, as `atroposlib/routing.py` writes them; None without such. `settings` are those
    of the request that sampled it.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    policy_versions: tuple[int, int] | None = None
    version_spans: list[tuple[int, int]] | None = None
    routed_experts: str | None = None
    settings: Settings | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if not self.token_ids:
            raise ValueError(
                "a sampled sequence has no tokens; a model samples at least one, if only the end of its turn"
            )
        if len(self.token_ids) != len(self.logprobs):
            raise ValueError(
                f"{len(self.token_ids)} sampled tokens came with {len(self.logprobs)} log-probabilities; need one each"
            )


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The completions of one prompt, with the prompt's ids as the model saw them."""

    prompt_token_ids: list[int]
    sequences: list[SampledSequence]


def settings_of(arguments: Mapping[str, Any], least_temperature: float = 0.0) -> Settings:
    """Return the settings that a call asks for, with the servers' defaults where it says nothing. Greedy sampling reads
    neither top_p nor top_k; a server may raise a temperature above 0 to its `least_temperature`.
    """
    given = {**(arguments.get("extra_body") or {}), **arguments}
    temperature, top_p, top_k = (given.get(name) for name in ("temperature", "top_p", "top_k"))
    temperature = 1.0 if temperature is None else temperature
    others = {name: given[name] for name in not_replayed(given)}
    if temperature < GREEDY_BELOW:
        return {"temperature": 0.0, "top_p": 1.0, "top_k": 0, **others}
    return {
        "temperature": max(float(temperature), least_temperature),
        "top_p": 1.0 if top_p is None else float(top_p),
        "top_k": 0 if top_k is None else max(0, int(top_k)),
        **others,
    }


def with_stop_ids(arguments: Arguments, extra_body: bool = False) -> Arguments:
    """Return `arguments` with the token ids among `stop` as `stop_token_ids`, as vLLM and SGLang call them; with
    `extra_body` in there, as OpenAI's SDK wants what OpenAI does not know. Raises ValueError for anything else in
    `stop`.
    """
    stop = arguments.get("stop")
    given = stop if isinstance(stop, (list, tuple)) else [stop]
    if wrong := [each for each in given if isinstance(each, bool) or not isinstance(each, (str, int, NoneType))]:
        raise ValueError(f"stop has {wrong[0]!r}: expected texts and token ids")
    ids = [each for each in given if isinstance(each, int)]
    if not ids:
        return arguments
    body = dict(arguments.get("extra_body") or {})
    known = body if extra_body else arguments
    ids = [*(known.get("stop_token_ids") or []), *ids]
    texts = [each for each in given if isinstance(each, str)]
    changed = {**arguments, "stop": texts or None}
    if extra_body:
        return {**changed, "extra_body": {**body, "stop_token_ids": ids}}
    return {**changed, "stop_token_ids": ids}
