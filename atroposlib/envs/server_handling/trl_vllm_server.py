"""TRL's vLLM server (`trl vllm-serve`): prompts as text, replies as token ids.

POST <base_url>/generate/   {"prompts": [...], "n", "temperature", "max_tokens", ...}
reply                       {"completion_ids": [[...]]}, and from newer versions also "prompt_ids" and "logprobs"

Chat is rendered here by the tokenizer's template. Without "logprobs" it cannot feed a ManagedServer; chat and
completion work.
"""

import time
import uuid
from typing import Any, Literal

import msgspec
from openai.types import Completion, CompletionChoice
from openai.types.chat import ChatCompletion, ChatCompletionMessage
from openai.types.chat.chat_completion import Choice

from atroposlib.envs.server_handling.errors import PermanentServerError
from atroposlib.envs.server_handling.sequences.chat_rendering import render_chat
from atroposlib.envs.server_handling.sequences.sampling import (
    LEAST_TEMPERATURE,
    Arguments,
    PromptLogprobs,
    SampledSequence,
    SampledTokens,
    Settings,
    settings_of,
)
from atroposlib.envs.server_handling.vllm_server import VLLMServer
from atroposlib.errors import reading
from atroposlib.utils.tokenizers import encode_prompt

DEFAULTS = {
    "n": 1,
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "max_tokens": 1024,
}


class Reply(msgspec.Struct):
    """The reply to /generate/ for one prompt."""

    completion_ids: list[list[int]]
    prompt_ids: list[list[int]] | None = None
    logprobs: list[list[float]] | None = None


class TrlVllmServer(VLLMServer):
    """Raises ValueError when the configuration has no base_url."""

    @property
    def health_url(self) -> str:
        return f"{self.root_url}/health/"

    @property
    def generate_url(self) -> str:
        return f"{self.root_url}/generate/"

    async def request_chat(self, arguments: Arguments) -> ChatCompletion:
        tokenizer = await self._tokenizer()
        reply = await self._reply(
            render_chat(tokenizer, arguments["messages"], tools=arguments.get("tools")), arguments
        )
        return ChatCompletion(
            id=f"chatcmpl-{uuid.uuid4()}",
            object="chat.completion",
            created=int(time.time()),
            model=self.model_name,
            choices=[
                Choice(
                    index=index,
                    finish_reason=_reason(ids, tokenizer),
                    message=ChatCompletionMessage(role="assistant", content=_text(ids, tokenizer)),
                )
                for index, ids in enumerate(reply.completion_ids)
            ],
        )

    async def request_completion(self, arguments: Arguments) -> Completion:
        tokenizer = await self._tokenizer()
        reply = await self._reply(arguments["prompt"], arguments)
        return Completion(
            id=f"cmpl-{uuid.uuid4()}",
            object="text_completion",
            created=int(time.time()),
            model=self.model_name,
            choices=[
                CompletionChoice(index=index, finish_reason=_reason(ids, tokenizer), text=_text(ids, tokenizer))
                for index, ids in enumerate(reply.completion_ids)
            ],
        )

    async def request_tokens(self, arguments: Arguments) -> SampledTokens:
        tokenizer = await self._tokenizer()
        ids = arguments.get("input_ids") or encode_prompt(tokenizer, arguments["prompt"])
        reply = await self._reply(arguments.get("prompt") or tokenizer.decode(ids), arguments)
        if reply.logprobs is None or not reply.prompt_ids:
            raise PermanentServerError(
                f"{self.generate_url} returned no logprobs: this version of TRL does not work with a ManagedServer; "
                "update TRL"
            )
        if reply.prompt_ids[0] != ids:
            raise PermanentServerError(
                f"{self.generate_url} tokenised the prompt as {len(reply.prompt_ids[0])} ids, here it has {len(ids)}"
            )
        with reading(f"{self.generate_url} returned what no model can sample", PermanentServerError):
            return SampledTokens(
                ids,
                [
                    SampledSequence(completion, logprobs, _reason(completion, tokenizer))
                    for completion, logprobs in zip(reply.completion_ids, reply.logprobs, strict=True)
                ],
            )

    def settings_of(self, arguments: Arguments) -> Settings:
        # no other argument is sent
        return settings_of({name: arguments.get(name) for name in DEFAULTS}, LEAST_TEMPERATURE)

    async def request_prompt_logprobs(self, arguments: Arguments) -> PromptLogprobs:
        raise NotImplementedError(
            f"{self.name}: server_type 'trl' returns no prompt log-probabilities; use server_type 'vllm'"
        )

    async def _reply(self, prompt: str, arguments: Arguments) -> Reply:
        limit = arguments.get("max_completion_tokens")
        given = {name: arguments[name] for name in DEFAULTS if arguments.get(name) is not None}
        body = {**DEFAULTS, **({"max_tokens": limit} if limit else {}), **given, "prompts": [prompt]}
        reply: Reply = self._decode(await self._generate(body), Reply)
        if len(reply.completion_ids) != body["n"]:
            raise PermanentServerError(
                f"{self.generate_url} was asked for {body['n']} sequences and gave {len(reply.completion_ids)}"
            )
        return reply


def _text(ids: list[int], tokenizer: Any) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True))


def _reason(ids: list[int], tokenizer: Any) -> Literal["stop", "length"]:
    return "stop" if tokenizer.eos_token_id in ids else "length"
