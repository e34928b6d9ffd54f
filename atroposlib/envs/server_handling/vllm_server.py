"""A vLLM server with this product's `/generate`: token ids in, token ids, log-probabilities and policy versions out.

POST <base_url without /v1>/generate   {"prompt": {"prompt_token_ids": [...]}, "logprobs": 0, n, max_tokens, ...}
chat and text completions              through <base_url> as for any OpenAI server
"""

import asyncio
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, ClassVar

import msgspec

from atroposlib.clients.replies import at_most, limit_of_sampling
from atroposlib.envs.errors import OtherTokenizer
from atroposlib.envs.server_handling.errors import (
    PermanentServerError,
    RetryableServerError,
    ServerError,
    ServerUnreachableError,
)
from atroposlib.envs.server_handling.openai_server import OpenAIServer, replied
from atroposlib.envs.server_handling.reasoning import ReasoningConfig
from atroposlib.envs.server_handling.sequences.reply_checks import raise_error_inside
from atroposlib.envs.server_handling.sequences.sampling import (
    LEAST_TEMPERATURE,
    Arguments,
    PromptLogprobs,
    SampledSequence,
    SampledTokens,
    Settings,
    settings_of,
    with_stop_ids,
)
from atroposlib.envs.server_handling.server_baseline import APIServerConfig
from atroposlib.errors import reading
from atroposlib.logs import get_logger
from atroposlib.row_files.json_text import encode
from atroposlib.utils.tokenizers import PROBES, Tokenizer, encode_prompt, load_tokenizer
from atroposlib.wire.tool_calls import ROUTE as TOOL_CALLS
from atroposlib.wire.tool_calls import FoundToolCalls, ParseToolCalls

log = get_logger(__name__)

TOKENIZE = "/tokenize"
TOKENIZE_LIMIT_S = 10.0
# What other dialects call max_tokens.
MAX_TOKENS_ALIASES = ("max_new_tokens", "max_completion_tokens")
# Arguments that choose things this client has already settled.
SETTLED = frozenset(
    {"model", "prompt", "input_ids", "top_k_logprobs", "extra_body", "skip_reasoning", *MAX_TOKENS_ALIASES}
)
# Arguments of OpenAI's SDK that say nothing about what is sampled.
OF_THE_SDK = frozenset(
    "user timeout extra_headers extra_query store metadata service_tier safety_identifier prompt_cache_key"
    " prompt_cache_retention stream_options parallel_tool_calls".split()
)


# Finish reasons of sequences that the server gave up; sampling them again is the only use for them.
UNFINISHED = frozenset({"abort", "error"})


class GenerateReply(msgspec.Struct):
    """The reply of /generate. [sequence][position] holds a list with one map from token id to log-probability."""

    prompt_token_ids: list[int]
    token_ids: list[list[int]]
    finish_reasons: list[str]
    logprobs: list[list[list[dict[int, float]]]]
    policy_versions: list[tuple[int, int]] | None = None
    version_spans: list[list[tuple[int, int]] | None] | None = None
    routed_experts: list[str] | None = None


class TokenizeReply(msgspec.Struct):
    """The reply of vLLM's /tokenize."""

    tokens: list[int]


class PromptLogprobsReply(msgspec.Struct):
    """The part of a /generate reply that describes the prompt: [position] holds one map, or several, or nothing."""

    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, float] | list[dict[int, float]] | None]


class VLLMServer(OpenAIServer):
    """Raises ValueError when the configuration has no base_url."""

    supports_token_ids: ClassVar[bool] = True

    def __init__(self, config: APIServerConfig, reasoning_config: ReasoningConfig | None = None) -> None:
        if not config.base_url:
            raise ValueError(f"server_type '{config.server_type}' needs a base_url, e.g. http://localhost:9001/v1")
        super().__init__(config, reasoning_config)
        self.root_url = self.base_url.removesuffix("/v1")
        self._comparing = asyncio.Lock()
        self._compared = False  # whether its tokenizer is known to be the environment's

    @property
    def health_url(self) -> str:
        return f"{self.root_url}/health"

    @property
    def generate_url(self) -> str:
        """Return the URL that samples tokens."""
        return f"{self.root_url}/generate"

    async def request_tokens(self, arguments: Arguments) -> SampledTokens:
        reply = self._decode(await self._generate(await self._body(arguments) | {"logprobs": 0}), GenerateReply)
        expected = arguments.get("n") or 1
        counts = {
            len(reply.token_ids),
            len(reply.finish_reasons),
            len(reply.logprobs),
            len(reply.policy_versions or reply.token_ids),
            len(reply.version_spans or reply.token_ids),
            len(reply.routed_experts or reply.token_ids),
        }
        if counts != {expected}:
            raise PermanentServerError(
                f"{self.generate_url} was asked for {expected} sequences, its lists hold {sorted(counts)}"
            )
        if UNFINISHED & set(reply.finish_reasons):
            raise RetryableServerError(f"{self.generate_url} aborted a sequence before its end: {reply.finish_reasons}")
        return SampledTokens(reply.prompt_token_ids, [self._sequence(reply, index) for index in range(expected)])

    def settings_of(self, arguments: Arguments) -> Settings:
        return settings_of(arguments, LEAST_TEMPERATURE if self.config.server_type == "vllm" else 0.0)

    async def request_prompt_logprobs(self, arguments: Arguments) -> PromptLogprobs:
        body = await self._body({key: arguments[key] for key in ("prompt", "input_ids") if key in arguments})
        body |= {"prompt_logprobs": arguments.get("top_k", 1), "max_tokens": 1, "temperature": 0.0, "logprobs": 0}
        reply = self._decode(await self._generate(body), PromptLogprobsReply)
        if len(reply.prompt_token_ids) != len(reply.prompt_logprobs):
            raise PermanentServerError(
                f"{self.generate_url} gave {len(reply.prompt_logprobs)} prompt positions for"
                f" {len(reply.prompt_token_ids)} tokens"
            )
        ranked = [_own_token_first(*pair) for pair in zip(reply.prompt_token_ids, reply.prompt_logprobs, strict=True)]
        return {
            "prompt_tokens": reply.prompt_token_ids,
            "prompt_topk_token_ids": [[token for token, _ in position] for position in ranked],
            "prompt_topk_logprobs": [[logprob for _, logprob in position] for position in ranked],
        }

    async def request_tool_calls(
        self, text: str, tools: Sequence[Any], parser: str | None
    ) -> tuple[str, list[tuple[str, str]]]:
        if self.config.server_type != "vllm":  # of another protocol, in a class of this one's children
            return await super().request_tool_calls(text, tools, parser)
        body = ParseToolCalls(text, list(tools), parser)
        reply = self._decode(
            await self._post(f"{self.root_url}{TOOL_CALLS}", msgspec.to_builtins(body)), FoundToolCalls
        )
        return reply.content or "", [(call.name, call.arguments) for call in reply.calls]

    async def compare_tokenizer(self, tokenizer: Tokenizer) -> None:
        async with self._comparing:
            if self._compared or self.config.server_type != "vllm":
                return
            url, text = f"{self.root_url}{TOKENIZE}", "\n".join(PROBES)
            body = {"model": self.config.model_name, "prompt": text, "add_special_tokens": False}
            try:
                async with asyncio.timeout(TOKENIZE_LIMIT_S):
                    theirs = self._decode(await self._post(url, body), TokenizeReply).tokens
            except (RetryableServerError, ServerUnreachableError, TimeoutError):
                return  # sampling waits for it, and the next conversation asks again
            except ServerError as error:
                log.info("The tokenizer is not compared with that of %s: %s", self.name, error)
                theirs = []
            ours = list(tokenizer.encode(text, add_special_tokens=False))
            if theirs and theirs != ours:
                pairs = enumerate(zip_longest(ours, theirs))
                place, (own, its) = next((place, pair) for place, pair in pairs if pair[0] != pair[1])
                raise OtherTokenizer(
                    f"{self.name} does not read text as the tokenizer {getattr(tokenizer, 'name_or_path', '')} does:"
                    f" token {place} of a test text is {its} there and {own} here. Set --env.tokenizer_name to the"
                    " tokenizer of the served model"
                )
            self._compared = True

    async def _tokenizer(self) -> Any:
        return self.tokenizer or await asyncio.to_thread(load_tokenizer, self.tokenizer_id)

    async def _body(self, arguments: Arguments) -> Arguments:
        """The request for `arguments`: ids for the prompt, every sampling parameter as it came."""
        arguments = with_stop_ids(arguments)
        body = {
            **(arguments.get("extra_body") or {}),
            **{key: value for key, value in arguments.items() if key not in SETTLED | OF_THE_SDK},
        }
        for alias in MAX_TOKENS_ALIASES:
            if arguments.get(alias) is not None:
                body["max_tokens"] = arguments[alias]
        ids = arguments.get("input_ids")
        if ids is None:
            ids = encode_prompt(await self._tokenizer(), arguments["prompt"])
        return body | {"prompt": {"prompt_token_ids": ids}}

    async def _generate(self, body: Arguments) -> bytes:
        return await self._post(self.generate_url, body)

    async def _post(self, url: str, body: Arguments) -> bytes:
        encoded, typed = encode(body), {"Content-Type": "application/json"}
        with at_most(limit_of_sampling(body, prompt_tokens(body, len(encoded)))):
            async with replied(self.http, "POST", url, data=encoded, headers=typed) as reply:
                return await reply.read()

    def _decode(self, content: bytes, shape: type[object]) -> Any:
        with reading(
            f"{self.generate_url} replied in a format that this client does not read",
            PermanentServerError,
            also=(msgspec.DecodeError,),
        ):
            raise_error_inside(content, self.generate_url)
            return msgspec.json.decode(content, type=shape)

    def _sequence(self, reply: GenerateReply, index: int) -> SampledSequence:
        ids, positions = reply.token_ids[index], reply.logprobs[index]
        if (
            not ids
            or len(ids) != len(positions)
            or any(len(maps) != 1 or token not in maps[0] for token, maps in zip(ids, positions, strict=False))
        ):
            raise PermanentServerError(
                f"{self.generate_url} did not give one log-probability for each of {len(ids)} sampled tokens"
            )
        return SampledSequence(
            token_ids=ids,
            logprobs=[maps[0][token] for token, maps in zip(ids, positions, strict=True)],
            finish_reason=reply.finish_reasons[index],
            policy_versions=reply.policy_versions[index] if reply.policy_versions is not None else None,
            version_spans=reply.version_spans[index] if reply.version_spans is not None else None,
            routed_experts=reply.routed_experts[index] if reply.routed_experts is not None else None,
        )


def prompt_tokens(body: Arguments, nbytes: int) -> int:
    """Count the tokens of a request's prompt; return `nbytes` for one in text, which has at most as many tokens."""
    prompt = body.get("prompt")
    ids = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else body.get("input_ids")
    return len(ids) if isinstance(ids, list) else nbytes


def _own_token_first(own: int, position: dict[int, float] | list[dict[int, float]] | None) -> list[tuple[int, float]]:
    """(token id, log-probability) pairs of one position of a prompt: its own token, then the others, most likely
    first.
    """
    maps = position if isinstance(position, list) else [position or {}]
    return sorted((pair for entry in maps for pair in entry.items()), key=lambda pair: (pair[0] != own, -pair[1]))
