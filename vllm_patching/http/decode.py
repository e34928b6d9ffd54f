"""A trainer's proof of what this server really samples from: prompts answered greedily beside all other requests, and
the whole distribution at places of the answers.

    trainer ──prompts, steps──▶ bridge_watch on every worker ──▶ generate, all at once ──▶ bridge_watched ──▶ trainer

The rows are the logits that the sampler was given (decode_watch.py), with the served weights, cache and graphs.
"""

import asyncio
import uuid

import msgspec

from atroposlib.wire.bridge import Decoded, DecodeProbe
from atroposlib.wire.typed import WrongValue
from vllm_patching.compat import vllm_requests
from vllm_patching.engines.base import Refused
from vllm_patching.engines.session import Sessions
from vllm_patching.http.generate import REFUSED_BY_VLLM, adapter_of, final_output, refusal_of
from vllm_patching.http.sampling import sampling_params


class Probing:
    """One server's probes, one at a time: workers watch the requests of one."""

    def __init__(self) -> None:
        self._one = asyncio.Lock()

    async def decoded(self, sessions: Sessions, probe: DecodeProbe) -> Decoded:
        """Answer the probe's prompts. Raises Refused while generation is, and where the served version changed
        meanwhile; WrongValue for a probe that contradicts itself or the model.
        """
        serving = sessions.serving
        _check(probe, vllm_requests.vocabulary_size(serving.client), serving.max_model_len)
        if (reason := serving.gate.reason()) is not None:
            raise Refused(reason, 503)
        async with self._one:
            adapter, version = adapter_of(sessions, None)
            version = serving.policy_version if version is None else version
            params = sampling_params(
                {"temperature": 0.0, "max_tokens": probe.answer_tokens, "ignore_eos": True, "detokenize": False}
            )
            kept = serving.kv_on_sync == "keep"  # then an old version's keys and values are no fault
            salt = f"{probe.cache_salt}:{version}" if kept else probe.cache_salt
            prompts = [{"prompt_token_ids": prompt, "cache_salt": salt} for prompt in probe.prompts]
            ids = [f"probe-{uuid.uuid4().hex}" for _ in probe.prompts]
            watched = zip(ids, probe.prompts, probe.steps, strict=True)
            await serving.rpc("bridge_watch", {sent: (len(prompt), steps) for sent, prompt, steps in watched})
            try:
                answers = await asyncio.gather(
                    *(
                        final_output(serving.client, prompt, params, sent, adapter)
                        for sent, prompt in zip(ids, prompts, strict=True)
                    )
                )
            except REFUSED_BY_VLLM as error:
                await serving.rpc("bridge_watch", {})
                raise refusal_of(error) from error
            ranks = await serving.rpc("bridge_watched")
        if version != (now := serving.policy_version if adapter is None else version):
            raise Refused(f"the server came to serve policy version {now} while it decoded with version {version}")
        rows = next((rank for rank in ranks if rank), None)
        if rows is None:
            raise Refused("no rank saw the logits of its steps (with speculative decoding, a step has several)", 501)
        tokens = [list(answer.outputs[0].token_ids) for answer in answers]
        logits = [msgspec.convert(rows[sent], list[bytes]) for sent in ids]
        return Decoded(version, tokens, logits, [answer.num_cached_tokens or 0 for answer in answers])


def _check(probe: DecodeProbe, vocabulary: int | None, length: int | None) -> None:
    if len(probe.steps) != len(probe.prompts):
        raise WrongValue(
            f"probe: steps has {len(probe.steps)} lists, expected one for each of {len(probe.prompts)} prompts"
        )
    if (last := max((step for steps in probe.steps for step in steps), default=0)) >= probe.answer_tokens:
        raise WrongValue(f"probe: steps has {last}, expected numbers below answer_tokens={probe.answer_tokens}")
    longest = max(len(prompt) for prompt in probe.prompts) + probe.answer_tokens
    if length is not None and longest > length:
        raise WrongValue(f"probe: {longest} tokens of a prompt with its answer, expected at most {length}")
    largest = max(max(prompt) for prompt in probe.prompts)
    if vocabulary is not None and largest >= vocabulary:
        raise WrongValue(f"probe: token id {largest}, expected ids below {vocabulary}, the vocabulary")
