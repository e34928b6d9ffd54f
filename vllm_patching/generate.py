"""`/generate`: token ids in, token ids, log-probabilities and policy versions out; nothing is tokenised twice.

Request   {"prompt": "text" | {"prompt_token_ids": [int]}, "logprobs": 0, "prompt_logprobs": k, ...any vLLM sampling parameter}
          with LoRA, "model" chooses: absent or "default" is the current adapter, "base" the model without one
          without "max_tokens" a sequence may grow to the model's limit
Reply     {"text": [str], "prompt": str, "finish_reasons": [str], "prompt_token_ids": [int], "token_ids": [[int]],
           "logprobs": [sequence][position][{id: logprob}], "prompt_logprobs": [position]{id: logprob} | null,
           "policy_versions": [[first, last] per sequence]}
"""

import asyncio
import difflib
import uuid
from typing import Any

from fastapi import Request

from vllm_patching import compat
from vllm_patching.adapters import Adapters
from vllm_patching.replies import Refused

_OWN_KEYS = {"prompt", "prompt_token_ids", "model"}


async def run_generate(request: Request, body: dict[str, Any]) -> dict[str, Any]:
    """Sample until done or until the client hangs up (which aborts the request in the engine). Raises Refused."""
    prompt = _prompt(body)
    params = _sampling_params(body)
    bridge = request.app.state.bridge
    adapter, adapter_version = _adapter(request, body)
    started = bridge.policy_version
    generating = asyncio.create_task(_final_output(bridge.engine, prompt, params, adapter))
    hung_up = asyncio.create_task(_disconnected(request))
    try:
        done, _ = await asyncio.wait({generating, hung_up}, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:  # uvicorn's, at the end of its grace: the engine is gone
        generating.cancel()
        hung_up.cancel()
        raise Refused("the server is shutting down", 503) from None
    if generating not in done:
        generating.cancel()
        raise Refused("the client closed the connection", 499)
    hung_up.cancel()
    try:
        output = generating.result()
    except ValueError as error:  # vLLM's verdict on the prompt, e.g. longer than --max-model-len
        raise Refused(str(error), 400) from error
    refusal = bridge.gate.reason()
    if refusal and any(sequence.finish_reason == "abort" for sequence in output.outputs):
        raise Refused(refusal, 503)
    reply = _reply(output, params, started, bridge.policy_version)
    if adapter_version is not None:  # a request keeps its adapter to the end
        reply["policy_versions"] = [[adapter_version, adapter_version] for _ in output.outputs]
    return reply


def _adapter(request: Request, body: dict[str, Any]) -> tuple[Any, int | None]:
    """The adapter that the request samples from, and its policy version; nothing and None on a server without LoRA."""
    adapters: Adapters | None = request.app.state.adapters
    if adapters is None:
        return None, None
    return adapters.resolve(body.get("model"))


def _prompt(body: dict[str, Any]) -> Any:
    prompt = body.get("prompt", body)
    if isinstance(prompt, str):
        return prompt
    ids = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else None
    if not isinstance(ids, list) or not ids or not all(type(token) is int and token >= 0 for token in ids):
        raise Refused("prompt must be a string or {'prompt_token_ids': [non-negative ints]}", 422)
    return {"prompt_token_ids": ids}


def _sampling_params(body: dict[str, Any]) -> Any:
    known = compat.SamplingParams.__struct_fields__
    chosen = {key: value for key, value in body.items() if key not in _OWN_KEYS and value is not None}
    for key in chosen:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            raise Refused(f"unknown sampling parameter {key!r}" + (f"; did you mean {close[0]!r}?" if close else ""), 422)
    try:
        return compat.SamplingParams(**{"max_tokens": None, **chosen, "output_kind": compat.RequestOutputKind.FINAL_ONLY})
    except (ValueError, TypeError) as error:
        raise Refused(str(error), 422) from error


async def _final_output(engine: Any, prompt: Any, params: Any, adapter: Any) -> Any:
    outputs = [output async for output in engine.generate(prompt, params, f"generate-{uuid.uuid4().hex}", lora_request=adapter)]
    return outputs[-1]


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _reply(output: Any, params: Any, started: int, finished: int) -> dict[str, Any]:
    reply: dict[str, Any] = {
        "text": [sequence.text for sequence in output.outputs],
        "prompt": output.prompt,
        "finish_reasons": [sequence.finish_reason for sequence in output.outputs],
        "prompt_token_ids": list(output.prompt_token_ids),
        "token_ids": [list(sequence.token_ids) for sequence in output.outputs],
        "policy_versions": [compat.policy_versions(sequence, started, finished) for sequence in output.outputs],
    }
    if params.logprobs is not None:
        reply["logprobs"] = [[[{str(token): entry.logprob}] for token, entry in _sampled(sequence)] for sequence in output.outputs]
    if params.prompt_logprobs is not None:
        reply["prompt_logprobs"] = [
            None if position is None else {str(token): entry.logprob for token, entry in position.items()}
            for position in output.prompt_logprobs
        ]
    return reply


def _sampled(sequence: Any) -> list[tuple[int, Any]]:
    return [(token, position[token]) for token, position in zip(sequence.token_ids, sequence.logprobs, strict=True)]
