"""An SGLang server: token ids by its own /generate, chat and text completions as any OpenAI server.

POST <base_url without /v1>/generate   {"input_ids", "sampling_params", "return_logprob": true}
reply (a list when n > 1)              {"meta_info": {"output_token_logprobs": [[logprob, id, text], ...],
                                                      "finish_reason": {"type": ...}}}
"""

from typing import Any

import msgspec

from atroposlib.envs.server_handling.errors import PermanentServerError
from atroposlib.envs.server_handling.sequences.sampling import Arguments, PromptLogprobs, SampledSequence, SampledTokens
from atroposlib.envs.server_handling.vllm_server import VLLMServer

MOST_DIGITS = 15  # of a policy version
# (log-probability, or None for the first token of a prompt; token id; text)
TokenLogprob = tuple[float | None, int, str | None]


class FinishReason(msgspec.Struct):
    """Says why a sequence ended."""

    type: str


class WeightSpan(msgspec.Struct):
    """Tokens from `start` up to `end` that one version of the weights sampled."""

    version: str
    start: int


class MetaInfo(msgspec.Struct):
    """Holds what SGLang says about one sequence. `weight_versions`, of a finished one, are in the order of its tokens;
    older releases give the last one alone. Versions are policy versions where weights are synchronised under numbers.
    """

    finish_reason: FinishReason | str | None = None
    output_token_logprobs: list[TokenLogprob] = []
    input_token_logprobs: list[TokenLogprob] = []
    input_top_logprobs: list[list[TokenLogprob] | None] = []
    weight_version: str | None = None
    weight_versions: list[WeightSpan] = []


class Sequence(msgspec.Struct):
    """One sequence of a reply."""

    meta_info: MetaInfo


class SGLangServer(VLLMServer):
    """Raises ValueError when the configuration has no base_url."""

    async def request_tokens(self, arguments: Arguments) -> SampledTokens:
        n = arguments.get("n") or 1
        ids, sampling = await self._prompt_and_sampling(arguments)
        sequences = await self._sequences({"input_ids": ids, "sampling_params": sampling, "return_logprob": True})
        if len(sequences) != n:
            raise PermanentServerError(f"{self.generate_url} was asked for {n} sequences and gave {len(sequences)}")
        return SampledTokens(ids, [self._sampled(sequence.meta_info) for sequence in sequences])

    async def request_prompt_logprobs(self, arguments: Arguments) -> PromptLogprobs:
        top_k = arguments.get("top_k", 1)
        ids, _ = await self._prompt_and_sampling(arguments)
        sequences = await self._sequences(
            {
                "input_ids": ids,
                "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
                "return_logprob": True,
                "logprob_start_len": 0,
                "top_logprobs_num": top_k,
            }
        )
        if len(sequences) != 1:
            raise PermanentServerError(f"{self.generate_url} was asked for 1 sequence and gave {len(sequences)}")
        own = sequences[0].meta_info.input_token_logprobs
        top = sequences[0].meta_info.input_top_logprobs if top_k else [None] * len(own)
        if not len(own) == len(top) == len(ids):
            raise PermanentServerError(
                f"{self.generate_url} gave {len(own)} and {len(top)} prompt positions for {len(ids)} tokens"
            )
        # A dict keeps the place of a key that comes again: the prompt's own token stays first.
        ranked = [
            {token: logprob for logprob, token in _known([at, *(others or [])])}
            for at, others in zip(own, top, strict=True)
        ]
        return {
            "prompt_tokens": ids,
            "prompt_topk_token_ids": [list(position) for position in ranked],
            "prompt_topk_logprobs": [list(position.values()) for position in ranked],
        }

    async def _prompt_and_sampling(self, arguments: Arguments) -> tuple[list[int], Arguments]:
        sampling = await self._body(arguments)
        ids = sampling.pop("prompt")["prompt_token_ids"]
        limit = sampling.pop("max_tokens", None)
        return ids, sampling if limit is None else {**sampling, "max_new_tokens": limit}

    async def _sequences(self, body: Arguments) -> list[Sequence]:
        shape: Any = list[Sequence] | Sequence
        reply: list[Sequence] | Sequence = self._decode(await self._generate(body), shape)
        return reply if isinstance(reply, list) else [reply]

    def _sampled(self, info: MetaInfo) -> SampledSequence:
        if not info.output_token_logprobs:
            raise PermanentServerError(f"{self.generate_url} returned no output_token_logprobs; is that SGLang?")
        pairs = _known(info.output_token_logprobs)
        if (missing := len(info.output_token_logprobs) - len(pairs)) > 0:  # NaN is null in its JSON
            raise PermanentServerError(
                f"{self.generate_url} returned {missing} sampled token(s) without a log-probability"
            )
        reason = (
            info.finish_reason.type if isinstance(info.finish_reason, FinishReason) else info.finish_reason or "stop"
        )
        spans = _spans(info)
        return SampledSequence(
            token_ids=[token for _, token in pairs],
            logprobs=[logprob for logprob, _ in pairs],
            finish_reason=reason,
            policy_versions=(spans[0][1], spans[-1][1]) if spans else None,
            version_spans=spans if info.weight_versions else None,
        )


def _spans(info: MetaInfo) -> list[tuple[int, int]] | None:
    """(start, policy version) of each run of tokens; None where the weights have no number."""
    spans = info.weight_versions or [WeightSpan(info.weight_version or "", 0)]
    numbered = all(span.version.isdecimal() and len(span.version) <= MOST_DIGITS for span in spans)
    return [(span.start, int(span.version)) for span in spans] if numbered else None


def _known(entries: list[TokenLogprob]) -> list[tuple[float, int]]:
    return [(logprob, token) for logprob, token, _ in entries if logprob is not None]
