"""The calls that every client of inference servers offers, whether it stands for one server, for several, or for a
conversation.

A request for more completions than `max_n_completions` is sent as several and merged again.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from atroposlib.envs.server_handling.dispatch import Split, gather_or_cancel
from atroposlib.envs.server_handling.errors import PermanentServerError
from atroposlib.envs.server_handling.sampling import (
    Arguments,
    PromptLogprobs,
    SampledTokens,
    TokensAndLogprobs,
    merge_samples,
)
from atroposlib.groups import Untrainable, check_sampled

if TYPE_CHECKING:  # openai's types cost half a second, which `--help` does not need
    from openai.types import Completion
    from openai.types.chat import ChatCompletion
    from openai.types.completion_usage import CompletionUsage

T = TypeVar("T")


class Backend(Protocol):
    """One attempt at each kind of request, of one server; errors from `errors.py`."""

    @property
    def name(self) -> str:
        """The address, as it appears in logs and errors."""

    async def request_chat(self, arguments: Arguments) -> "ChatCompletion":
        """One chat completion request."""

    async def request_completion(self, arguments: Arguments) -> "Completion":
        """One text completion request."""

    async def request_tokens(self, arguments: Arguments) -> SampledTokens:
        """One request for sampled token ids. Raises NotImplementedError where the protocol has none."""

    async def request_prompt_logprobs(self, arguments: Arguments) -> PromptLogprobs:
        """One request for the log-probabilities of a prompt. Raises NotImplementedError where the protocol has none."""


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
    async def _run(self, what: str, operation: Callable[[Backend], Awaitable[T]], split: Split) -> T:
        """Choose a server, hold a slot of it, run `operation` on it, with retries."""

    async def chat_completion(self, *, split: Split = "train", **arguments: Any) -> "ChatCompletion":
        """Arguments as for OpenAI's chat completions; `model` is filled in."""
        parts = await self._in_parts(
            arguments, "chat completion", lambda server, part: server.request_chat(part), split
        )
        return merge_chat(parts)

    async def completion(self, *, split: Split = "train", **arguments: Any) -> "Completion":
        """Arguments as for OpenAI's completions; `model` is filled in."""
        parts = await self._in_parts(
            arguments, "completion", lambda server, part: server.request_completion(part), split
        )
        return merge_completions(parts)

    async def sample_tokens(self, *, split: Split = "train", **arguments: Any) -> SampledTokens:
        """Completions as token ids, for `prompt` (text) or `input_ids`, with n, max_tokens, temperature, top_p, stop,
        ...
        """
        return merge_samples(await self._in_parts(arguments, "token sampling", _sampled, split))

    async def tokens_and_logprobs_completion(self, *, split: Split = "train", **arguments: Any) -> TokensAndLogprobs:
        """`sample_tokens` as (prompt tokens, output tokens, log-probabilities, finish reasons)."""
        return (await self.sample_tokens(split=split, **arguments)).as_tuple()

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
        request: Callable[[Backend, Arguments], Awaitable[T]],
        split: Split,
    ) -> list[T]:
        async def one_part(part: Arguments) -> T:
            return await self._run(what, lambda server: request(server, part), split)

        sizes = split_count(arguments.get("n") or 1, self.max_n_completions)
        if len(sizes) == 1:
            return [await one_part(arguments)]
        return await gather_or_cancel([one_part({**arguments, "n": size}) for size in sizes])


async def _sampled(server: Backend, arguments: Arguments) -> SampledTokens:
    """What the server sampled. Raises PermanentServerError for what no model samples: the fault is the server's."""
    samples = await server.request_tokens(arguments)
    for sequence in samples.sequences:
        try:
            check_sampled(sequence.token_ids, sequence.logprobs)
        except Untrainable as error:
            raise PermanentServerError(f"{server.name} gave what no model samples: {error}") from error
    return samples


def split_count(n: int, limit: int | None) -> list[int]:
    """`n` as a list of counts, none above `limit`: 20 under 8 is [8, 8, 4]."""
    if limit is None or n <= limit:
        return [n]
    return [min(limit, n - done) for done in range(0, n, limit)]


def merge_chat(parts: Sequence["ChatCompletion"]) -> "ChatCompletion":
    """One reply with the choices of all, numbered anew, and their token counts added up."""
    if len(parts) == 1:
        return parts[0]
    choices = [choice for part in parts for choice in part.choices]
    numbered = [choice.model_copy(update={"index": index}) for index, choice in enumerate(choices)]
    return parts[0].model_copy(update={"choices": numbered, "usage": _total_usage([part.usage for part in parts])})


def merge_completions(parts: Sequence["Completion"]) -> "Completion":
    """As `merge_chat`, for text completions."""
    if len(parts) == 1:
        return parts[0]
    choices = [choice for part in parts for choice in part.choices]
    numbered = [choice.model_copy(update={"index": index}) for index, choice in enumerate(choices)]
    return parts[0].model_copy(update={"choices": numbered, "usage": _total_usage([part.usage for part in parts])})


def _total_usage(usages: "Sequence[CompletionUsage | None]") -> "CompletionUsage | None":
    from openai.types.completion_usage import CompletionUsage

    known = [usage for usage in usages if usage is not None]
    if not known:
        return None
    prompt, completion = sum(usage.prompt_tokens for usage in known), sum(usage.completion_tokens for usage in known)
    return CompletionUsage(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion)
