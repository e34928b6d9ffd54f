"""What a server sampled: token ids as the model produced them, each with its log-probability and the policy that chose
it.
"""

from dataclasses import dataclass
from typing import Any, TypedDict

# What a call is given, in the words of OpenAI's API.
Arguments = dict[str, Any]
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
    token but the last, prompt included, as `atroposlib/routing.py` writes them; None without such.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    policy_versions: tuple[int, int] | None = None
    version_spans: list[tuple[int, int]] | None = None
    routed_experts: str | None = None

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
