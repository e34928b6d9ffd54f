"""The calls that every client of inference servers offers, whether it stands for one server, for several, or for a
conversation.

A request for more completions than `max_n_completions` is sent as several and merged again.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from atroposlib.envs.server_handling.dispatch import Split, gather_or_cancel
from atroposlib.envs.server_handling.errors import PermanentServerError
from atroposlib.envs.server_handling.sampling import (
    Arguments,
    PromptLogprobs,
    SampledTokens,
    TokensAndLogprobs,
)
from atroposlib.errors import reading
from atroposlib.groups import check_sampled

if TYPE_CHECKING:  # openai's types cost half a second, which `--help` does not need
    from openai.types import Completion
    from openai.types.chat import ChatCompletion

    from atroposlib.envs.server_handling.server_baseline import APIServer

T = TypeVar("T")
Reply = TypeVar("Reply", "ChatCompletion", "Completion")


class InferenceCalls(ABC):
    """Chat, completion, sampled tokens and prompt log-probabilities; `split` ("train" or "eval") chooses the limit
    that counts.

    All raise PermanentServerError, RetryableServerError (after finite retries) or NoLiveServerError.
    """

    max_n_completions: int | None = None
    # A tokenizer that is there already; else `tokenizer_id` says which to load.
    tokenizer: Any = None

    @property
    @abstractmethod
    def tokenizer_id(self) -> str:
        """Name or path of the tokenizer of the served model."""

    @property
    @abstractmethod
    def model_name(self) -> str:
        """Name that the server knows the model by."""

    @abstractmethod
    async def _run(self, what: str, operation: Callable[["APIServer"], Awaitable[T]], split: Split) -> T:
        """Choose a server, hold a slot of it, run `operation` on it, with retries."""

    async def chat_completion(self, *, split: Split = "train", **arguments: Any) -> "ChatCompletion":
        """Arguments as for OpenAI's chat completions; `model` is filled in."""
        return merge_replies(
            await self._in_parts(arguments, "chat completion", lambda server, part: server.request_chat(part), split)
        )

    async def completion(self, *, split: Split = "train", **arguments: Any) -> "Completion":
        """Arguments as for OpenAI's completions; `model` is filled in."""
        return merge_replies(
            await self._in_parts(arguments, "completion", lambda server, part: server.request_completion(part), split)
        )

    async def sample_tokens(self, *, split: Split = "train", **arguments: Any) -> SampledTokens:
        """Completions as token ids, for `prompt` (text) or `input_ids`, with n, max_tokens, temperature, top_p, stop,
        ...
        """
        parts = await self._in_parts(arguments, "token sampling", _sampled, split)
        return SampledTokens(parts[0].prompt_token_ids, [sequence for part in parts for sequence in part.sequences])

    async def tokens_and_logprobs_completion(self, *, split: Split = "train", **arguments: Any) -> TokensAndLogprobs:
        """`sample_tokens` as (prompt tokens, output tokens, log-probabilities, finish reasons)."""
        sampled = await self.sample_tokens(split=split, **arguments)
        return (
            sampled.prompt_token_ids,
            [sequence.token_ids for sequence in sampled.sequences],
            [sequence.logprobs for sequence in sampled.sequences],
            [sequence.finish_reason for sequence in sampled.sequences],
        )

    async def get_logprobs(self, *, split: Split = "train", **arguments: Any) -> PromptLogprobs:
        """The token at each position of `prompt` or `input_ids`, and the `top_k` (default 1) most likely ones there.

        Returns prompt_tokens [position], prompt_topk_token_ids and prompt_topk_logprobs [position][k]: the prompt's
        own token, then the others, most likely first, so that k is top_k, or top_k + 1 where its own is not among
        them. With top_k 0 it is its own alone. Nothing precedes the first position, so its lists are empty.
        """
        return await self._run(
            "prompt log-probabilities", lambda server: server.request_prompt_logprobs(arguments), split
        )

    async def _in_parts(
        self,
        arguments: Arguments,
        what: str,
        request: Callable[["APIServer", Arguments], Awaitable[T]],
        split: Split,
    ) -> list[T]:
        async def one_part(part: Arguments) -> T:
            return await self._run(what, lambda server: request(server, part), split)

        n = arguments.get("n") or 1
        limit = self.max_n_completions
        if limit is None or n <= limit:
            return [await one_part(arguments)]
        sizes = [min(limit, n - done) for done in range(0, n, limit)]  # 20 under 8 is [8, 8, 4]
        return await gather_or_cancel([one_part({**arguments, "n": size}) for size in sizes])


async def _sampled(server: "APIServer", arguments: Arguments) -> SampledTokens:
    """What the server sampled. Raises PermanentServerError for what no model samples: the fault is the server's."""
    samples = await server.request_tokens(arguments)
    with reading(f"{server.name} gave what no model samples", PermanentServerError):
        for sequence in samples.sequences:
            check_sampled(sequence.token_ids, sequence.logprobs)
    return samples


def merge_replies(parts: Sequence[Reply]) -> Reply:
    """One reply with the choices of all, numbered anew, and their token counts added up."""
    if len(parts) == 1:
        return parts[0]
    from openai.types.completion_usage import CompletionUsage

    choices = [choice for part in parts for choice in part.choices]
    numbered = [choice.model_copy(update={"index": index}) for index, choice in enumerate(choices)]
    usages = [part.usage for part in parts if part.usage is not None]
    prompt = sum(usage.prompt_tokens for usage in usages)
    completion = sum(usage.completion_tokens for usage in usages)
    total = CompletionUsage(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion)
    return parts[0].model_copy(update={"choices": numbered, "usage": total if usages else None})
