"""`/generate`: token ids in, token ids, log-probabilities and policy versions out; nothing is tokenised twice.

Request   {"prompt": "text" | {"prompt_token_ids": [int]}, "logprobs": 0, "prompt_logprobs": k,
           ...any vLLM sampling parameter}
          with LoRA, "model" chooses: absent or "default" is the current adapter, "base" the model without one
          without "max_tokens" a sequence may grow to the model's limit; 256.0 is 256, another type is a 400
Reply     {"text": [str], "prompt": str, "finish_reasons": [str], "prompt_token_ids": [int], "token_ids": [[int]],
           "logprobs": [sequence][position][{id: logprob}], "prompt_logprobs": [position]{id: logprob} | null,
           "policy_versions": [[first, last] per sequence],
           "version_spans": [[[start, version], ...] per sequence, null if only the versions of its two ends are known],
           "routed_experts": [the experts of each token but the last, prompt included, per sequence (see
           atroposlib/routing.py)], with --enable-return-routed-experts alone}
"""

import asyncio
import math
import uuid
from typing import Any

from fastapi import Request
from msgspec import UNSET, Struct, UnsetType

from atroposlib.routing import pack
from atroposlib.wire.bridge import AdapterOffer
from atroposlib.wire.typed import TokenId, WrongValue, printable, typed_value
from vllm_patching import vllm_types
from vllm_patching.compat import vllm_engine, vllm_requests
from vllm_patching.engines.adapters import AdapterEngine
from vllm_patching.engines.base import Refused
from vllm_patching.engines.session import Sessions
from vllm_patching.http.sampling import sampling_params

_OWN_KEYS = {"prompt", "prompt_token_ids", "model"}
Logprobs = dict[str, float]  # by token id
Body = dict[str, Any]  # of a request, as decoded


class Reply(Struct):
    """Is the reply that the module describes: lists by sequence, and within these by position."""

    text: list[str]
    prompt: str | None
    finish_reasons: list[str | None]
    prompt_token_ids: list[int]
    token_ids: list[list[int]]
    policy_versions: list[list[int]]
    version_spans: list[list[list[int]] | None]
    logprobs: list[list[list[Logprobs]]] | UnsetType = UNSET
    prompt_logprobs: list[Logprobs | None] | UnsetType = UNSET
    routed_experts: list[str] | UnsetType = UNSET


async def run_generate(request: Request, sessions: Sessions, body: Body) -> Reply:
    """Sample until done or until the client hangs up (which aborts the request in the engine). Raises Refused,
    WrongValue.
    """
    serving = sessions.serving
    prompt = _prompt(body, vllm_requests.vocabulary_size(serving.client))
    params = sampling_params({key: value for key, value in body.items() if key not in _OWN_KEYS})
    adapter, adapter_version = adapter_of(sessions, typed_value("model", body.get("model"), str | None))
    started, request_id = serving.policy_version, f"generate-{uuid.uuid4().hex}"
    generating = asyncio.create_task(final_output(serving.client, prompt, params, request_id, adapter))
    hung_up = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({generating, hung_up}, return_when=asyncio.FIRST_COMPLETED)
        if not generating.done():
            raise Refused("the client closed the connection", 499)
        output = generating.result()
    except asyncio.CancelledError:  # from uvicorn, at the end of its shutdown timeout: the engine is gone
        raise Refused("the server is shutting down", 503) from None
    except REFUSED_BY_VLLM as error:
        raise refusal_of(error) from error
    finally:
        generating.cancel()
        hung_up.cancel()
    refusal = serving.gate.reason()
    if refusal and any(sequence.finish_reason == "abort" for sequence in output.outputs):
        raise Refused(refusal, 503)
    reply = _reply(output, params, started, serving.policy_version)
    if adapter_version is not None:  # a request keeps its adapter to the end
        reply.policy_versions = [[adapter_version, adapter_version] for _ in output.outputs]
        reply.version_spans = [[[0, adapter_version]] for _ in output.outputs]
    return reply


def adapter_of(sessions: Sessions, model: str | None) -> tuple[vllm_types.LoRARequest, int | None]:
    """Find the adapter that a request for `model` samples from, and its policy version; None where there is none."""
    lora = sessions.engines.get(AdapterOffer)
    return lora.resolve(model) if isinstance(lora, AdapterEngine) else (None, None)


# a wrong request, or an engine that failed: what refusal_of takes
REFUSED_BY_VLLM = (
    ValueError,
    vllm_requests.ClientError,
    vllm_engine.EngineGenerateError,
    vllm_engine.EngineDeadError,
)


def refusal_of(error: BaseException) -> Refused:
    """Explain why vLLM refused a request, such as one longer than --max-model-len, or could not serve it."""
    if isinstance(error, vllm_engine.EngineDeadError):
        return Refused(printable(str(error), 500), 503)
    if isinstance(error, vllm_engine.EngineGenerateError):  # it has no message of its own
        error = error.__cause__ or error
    return Refused(
        f"vLLM cannot generate: {printable(str(error), 500)}",
        400 if isinstance(error, ValueError | TypeError | vllm_requests.ClientError) else 500,
    )


def _prompt(body: Body, vocabulary: int | None) -> object:
    prompt = body.get("prompt", body)
    if isinstance(prompt, str):
        return typed_value("prompt", prompt, str)
    ids = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else None
    if not isinstance(ids, list) or not ids:
        raise Refused("prompt must be a string or {'prompt_token_ids': [non-negative ints]}", 422)
    ids = typed_value("prompt_token_ids", ids, list[TokenId])
    if vocabulary is not None and max(ids) >= vocabulary:
        position = next(position for position, token in enumerate(ids) if token >= vocabulary)
        raise WrongValue(
            f"prompt_token_ids[{position}]={ids[position]}: expected ids below {vocabulary}, the vocabulary"
        )
    return {"prompt_token_ids": ids}


async def final_output(
    engine: vllm_types.EngineClient,
    prompt: object,
    params: vllm_types.SamplingParams,
    request_id: str,
    adapter: vllm_types.LoRARequest,
) -> vllm_types.RequestOutput:
    """Generate to the end."""
    return [output async for output in engine.generate(prompt, params, request_id, lora_request=adapter)][-1]


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _reply(output: vllm_types.RequestOutput, params: vllm_types.SamplingParams, started: int, finished: int) -> Reply:
    spans = [vllm_engine.version_spans(sequence, started, finished) for sequence in output.outputs]
    reply = Reply(
        text=[sequence.text for sequence in output.outputs],
        prompt=output.prompt,
        finish_reasons=[sequence.finish_reason for sequence in output.outputs],
        prompt_token_ids=list(output.prompt_token_ids),
        token_ids=[list(sequence.token_ids) for sequence in output.outputs],
        policy_versions=[[each[0][1], each[-1][1]] if each else [started, finished] for each in spans],
        version_spans=spans,
    )
    if params.logprobs is not None:
        reply.logprobs = [
            [
                [{str(token): _finite(position[token].logprob)}]
                for token, position in zip(sequence.token_ids, sequence.logprobs, strict=True)
            ]
            for sequence in output.outputs
        ]
    if all(sequence.routed_experts is not None for sequence in output.outputs):
        prompt = len(reply.prompt_token_ids)
        reply.routed_experts = [  # some releases have rows of tokens that a stop string removed
            pack(sequence.routed_experts[: prompt + len(sequence.token_ids) - 1]) for sequence in output.outputs
        ]
    if params.prompt_logprobs is not None:
        reply.prompt_logprobs = [
            None if position is None else {str(token): _finite(entry.logprob) for token, entry in position.items()}
            for position in output.prompt_logprobs
        ]
    return reply


def _finite(logprob: float) -> float:
    if not math.isfinite(logprob):
        raise Refused(
            f"the model's log-probabilities are not finite ({logprob}): its weights or adapter contain such numbers",
            500,
        )
    return logprob
