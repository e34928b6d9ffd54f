"""`InferenceCalls`: the calls that every client of inference servers offers, for one server, several, or a
conversation. `APIServer`: one server, with its limits, health and timings, and the four requests that a backend
implements.

A request for more completions than `max_n_completions` is sent as several and merged again.
"""

import asyncio
import functools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np

from atroposlib.envs.errors import NotReplayed
from atroposlib.envs.metrics import Metrics
from atroposlib.envs.server_handling.dispatching.admission import AdmissionGate
from atroposlib.envs.server_handling.dispatching.dispatch import (
    SPLITS,
    Dispatcher,
    RetryPolicy,
    Split,
    gather_or_cancel,
    run_with_retries,
)
from atroposlib.envs.server_handling.dispatching.health import HealthMonitor
from atroposlib.envs.server_handling.dispatching.request_seeds import with_seed
from atroposlib.envs.server_handling.dispatching.throttle import Throttle
from atroposlib.envs.server_handling.errors import PermanentServerError, RetryableServerError, ServerError, describe
from atroposlib.envs.server_handling.reasoning import ReasoningConfig
from atroposlib.envs.server_handling.sequences.sampling import (
    Arguments,
    PromptLogprobs,
    SampledSequence,
    SampledTokens,
    Settings,
    TokensAndLogprobs,
    settings_of,
)
from atroposlib.envs.server_handling.sequences.sampling_ledger import SampledLedger
from atroposlib.envs.server_handling.server_config import APIServerConfig, ServerBaseline
from atroposlib.errors import reading
from atroposlib.groups import NOT_REPLAYED, check_ids, check_sampled, not_replayed, shown
from atroposlib.utils.tokenizers import Tokenizer

if TYPE_CHECKING:  # openai's types cost half a second, which `--help` does not need
    from openai.types import Completion
    from openai.types.chat import ChatCompletion

__all__ = ["APIServer", "APIServerConfig", "ReasoningConfig", "ServerBaseline"]

T = TypeVar("T")
Reply = TypeVar("Reply", "ChatCompletion", "Completion")
FIRST_STATUS_S = 0.1
METRIC_NAMES: dict[Split, str] = {"train": "request", "eval": "eval_request"}


class InferenceCalls(ABC):
    """Chat, completion, sampled tokens and prompt log-probabilities; `split` ("train" or "eval") chooses the limit
    that counts.

    All raise PermanentServerError, RetryableServerError (after finite retries) or NoLiveServerError.
    """

    max_n_completions: int | None = None
    # A tokenizer that is already loaded. Without it, `tokenizer_id` is loaded.
    tokenizer: Any = None

    @functools.cached_property
    def ledger(self) -> SampledLedger:
        """Return the ledger of how each sequence was sampled."""
        return SampledLedger()

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

    async def chat_completion(self, *, split: Split = "train", **arguments: object) -> "ChatCompletion":
        """Arguments as for OpenAI's chat completions; `model` is filled in."""
        return merge_replies(
            await self._in_parts(arguments, "chat completion", lambda server, part: server.request_chat(part), split)
        )

    async def completion(self, *, split: Split = "train", **arguments: object) -> "Completion":
        """Arguments as for OpenAI's completions; `model` is filled in."""
        return merge_replies(
            await self._in_parts(arguments, "completion", lambda server, part: server.request_completion(part), split)
        )

    async def sample_tokens(self, *, split: Split = "train", **arguments: object) -> SampledTokens:
        """Completions as token ids, for `prompt` (text) or `input_ids`, with n, max_tokens, temperature, top_p, stop,
        ... Raises NotReplayed where tokens to train on would be sampled from what the trainer cannot compute.
        """
        if split == "train":
            refuse_what_is_not_replayed(arguments)
        parts = await self._in_parts(arguments, "token sampling", _sampled, split)
        sequences = [sequence for part in parts for sequence in part.sequences]
        prompt, to_train = parts[0].prompt_token_ids, split == "train"
        for each in sequences:
            if each.settings is not None:
                self.ledger.record(prompt, each.token_ids, each.logprobs, each.settings, trained=to_train)
        return SampledTokens(prompt, sequences)

    async def tokens_and_logprobs_completion(self, *, split: Split = "train", **arguments: object) -> TokensAndLogprobs:
        """`sample_tokens` as (prompt tokens, output tokens, log-probabilities, finish reasons)."""
        sampled = await self.sample_tokens(split=split, **arguments)
        return (
            sampled.prompt_token_ids,
            [sequence.token_ids for sequence in sampled.sequences],
            [sequence.logprobs for sequence in sampled.sequences],
            [sequence.finish_reason for sequence in sampled.sequences],
        )

    async def get_logprobs(self, *, split: Split = "train", **arguments: object) -> PromptLogprobs:
        """The token at each position of `prompt` or `input_ids`, and the `top_k` (default 1) most likely ones there.

        Returns prompt_tokens [position], prompt_topk_token_ids and prompt_topk_logprobs `[position][k]`: the prompt's
        own token, then the others, most likely first, so that k is top_k, or top_k + 1 where its own is not among
        them. With top_k 0 it is its own alone. Nothing precedes the first position, so its lists are empty.
        """
        return await self._run(
            "prompt log-probabilities", lambda server: server.request_prompt_logprobs(arguments), split
        )

    async def parse_tool_calls(
        self, *, text: str, tools: Sequence[object], parser: str | None = None, split: Split = "train"
    ) -> tuple[str, list[tuple[str, str]]]:
        """Return what a tool parser of the server (its own choice without `parser`) finds in what a model wrote: the
        text outside of the calls, then (name, arguments in JSON) of each call.
        """
        return await self._run(
            "tool-call parsing", lambda server: server.request_tool_calls(text, tools, parser), split
        )

    async def _in_parts(
        self,
        arguments: Arguments,
        what: str,
        request: Callable[["APIServer", Arguments], Awaitable[T]],
        split: Split,
    ) -> list[T]:
        async def one_part(part: Arguments) -> T:
            if split == "train":
                part = with_seed(part)
            return await self._run(what, lambda server: request(server, part), split)

        n = arguments.get("n") or 1
        limit = self.max_n_completions
        if limit is None or n <= limit:
            return [await one_part(arguments)]
        sizes = [min(limit, n - done) for done in range(0, n, limit)]  # 20 under 8 is [8, 8, 4]
        return await gather_or_cancel([one_part({**arguments, "n": size}) for size in sizes])


class APIServer(InferenceCalls):
    """One server. Its public calls wait for a slot and for health, and retry, here; a ServerManager does so over
    several.

    A backend implements `probe` and the `request_*` methods: one attempt each, no waiting, errors from `errors.py`.
    A class written for the archived ancestor implements its hooks instead: `check_server_status_task`, which sets
    `server_healthy`, and the wrappers below. Whatever a hook raises is tried again.
    """

    supports_token_ids: ClassVar[bool] = True

    def __init__(self, config: APIServerConfig, reasoning_config: ReasoningConfig | None = None) -> None:
        self.config = config
        self.reasoning_config = reasoning_config or ReasoningConfig()
        self.retry = RetryPolicy()
        self.throttle = Throttle(self.name)
        self.gates: dict[Split, AdmissionGate] = {
            "train": AdmissionGate(config.num_max_requests_at_once, self.throttle),
            "eval": AdmissionGate(config.num_requests_for_eval, self.throttle),
        }
        # (seconds, tries) of each call that succeeded since the metrics were last asked for
        self.timings: dict[Split, deque[tuple[float, int]]] = {
            split: deque(maxlen=config.rolling_buffer_length) for split in SPLITS
        }
        self.health = HealthMonitor(
            self.name, self.probe, enabled=config.health_check, dead_interval_s=self.retry.dead_interval_s
        )
        self.dedicated_users = 0
        self._dispatchers: dict[Split, Dispatcher[APIServer]] = {split: Dispatcher([self], split) for split in SPLITS}
        self._said_healthy = True  # by check_server_status_task
        self._status_task: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        """The address, as it appears in logs and errors."""
        return self.config.base_url or type(self).__name__

    @property
    def tokenizer_id(self) -> str:
        return self.config.tokenizer_id

    @property
    def model_name(self) -> str:
        return self.config.model_name

    @property
    def timeout_s(self) -> float:
        """Seconds that one request may take."""
        return self.config.timeout

    @property
    def server_healthy(self) -> bool:
        """Return whether the server answered lately."""
        return self.health.live

    @server_healthy.setter
    def server_healthy(self, healthy: bool) -> None:
        self._said_healthy = healthy

    async def probe(self) -> str | None:
        """Ask, cheaply and within seconds, whether the server can serve; None if so, else what is wrong."""
        if self._status_task is None:
            self._status_task = asyncio.create_task(self.check_server_status_task())
            await asyncio.wait([self._status_task], timeout=FIRST_STATUS_S)
        if self._status_task.done() and (error := self._status_task.exception()) is not None:
            self._status_task = None  # begun again by the next probe
            return f"{self.name}: {describe(error)}"
        return None if self._said_healthy else f"{self.name}: check_server_status_task finds it unhealthy"

    async def context_length(self) -> int | None:
        """Tokens that a prompt and its answer may have together; None if the server does not say."""
        return None

    async def request_chat(self, arguments: Arguments) -> "ChatCompletion":
        """One chat completion request."""
        return await self._hooked(self._chat_completion_wrapper, self.chat_arguments(arguments))

    async def request_completion(self, arguments: Arguments) -> "Completion":
        """One text completion request."""
        return await self._hooked(self._completion_wrapper, arguments)

    async def request_tokens(self, arguments: Arguments) -> SampledTokens:
        """One request for sampled token ids. Raises NotImplementedError where the protocol has none."""
        prompt, *sequences = await self._hooked(self._tokens_and_logprobs_completion_wrapper, arguments)
        sampled = []
        for tokens, logprobs, reason in zip(*sequences, strict=True):
            if not tokens or len(tokens) != len(logprobs):
                raise PermanentServerError(f"{self.name} gave {len(tokens)} tokens and {len(logprobs)} logprobs")
            sampled.append(SampledSequence(tokens, logprobs, reason["type"] if isinstance(reason, dict) else reason))
        return SampledTokens(prompt, sampled)

    def settings_of(self, arguments: Arguments) -> Settings:
        """The settings with which this server samples for such a request."""
        return settings_of(arguments)

    async def request_prompt_logprobs(self, arguments: Arguments) -> PromptLogprobs:
        """One request for the log-probabilities of a prompt. Raises NotImplementedError where the protocol has none."""
        return await self._hooked(self._get_logprobs_wrapper, arguments)

    async def request_tool_calls(
        self, text: str, tools: Sequence[object], parser: str | None
    ) -> tuple[str, list[tuple[str, str]]]:
        """One request for the tool calls in a text. Raises NotImplementedError where the protocol has none."""
        raise NotImplementedError(f"{self.name} parses no tool calls: tool_parser 'vllm' needs server_type 'vllm'")

    async def compare_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Raise OtherTokenizer if the server makes other ids of a text than `tokenizer`, where it can be asked."""

    def chat_arguments(self, arguments: Arguments) -> Arguments:
        """`arguments` with the model and what the reasoning configuration adds."""
        prepared = {**arguments, "model": self.config.model_name}
        if prepared.pop("skip_reasoning", False):
            return prepared
        return self.reasoning_config.chat_arguments(prepared, self.config.base_url)

    # --- the ancestor's hooks, which get the arguments of a call and the model -------------------------------------

    async def check_server_status_task(self, chat_completion: bool = True) -> None:
        """Set `server_healthy`, once or again and again. It starts with the first probe."""

    async def _chat_completion_wrapper(self, **kwargs: object) -> "ChatCompletion":
        raise NotImplementedError(f"{type(self).__name__} has no chat completions")

    async def _completion_wrapper(self, **kwargs: object) -> "Completion":
        raise NotImplementedError(f"{type(self).__name__} has no text completions")

    async def _tokens_and_logprobs_completion_wrapper(self, **kwargs: object) -> tuple[list[Any], ...]:
        """(prompt tokens, output tokens, their log-probabilities, finish reasons), the last three a sequence each."""
        raise NotImplementedError(f"{type(self).__name__} gives no token ids")

    async def _get_logprobs_wrapper(self, **kwargs: object) -> PromptLogprobs:
        raise NotImplementedError(f"{type(self).__name__} does not implement get_logprobs: it has no log-probabilities")

    async def _hooked(self, hook: Callable[..., Awaitable[T]], arguments: Arguments) -> T:
        try:
            return await hook(**{**arguments, "model": self.config.model_name})
        except (ServerError, NotImplementedError):
            raise
        except Exception as error:  # whatever a class out there raises: the ancestor tried again after any of it
            raise RetryableServerError(f"{self.name}: {describe(error)}") from error

    async def close(self) -> None:
        """Stop probing and close connections; a backend closes its own first."""
        await self.health.close()
        await self.throttle.close()
        if self._status_task is not None:
            self._status_task.cancel()
            await asyncio.gather(self._status_task, return_exceptions=True)

    async def update_weight(self, weight: float) -> None:
        """Scale both limits by the environment's share (0..1)."""
        for gate in self.gates.values():
            gate.set_weight(weight)

    async def wandb_metrics(self, metrics: Metrics | None, server_name: str) -> Metrics:
        """`metrics` with this server's request timings since the last call."""
        named = dict(metrics or {})
        for split, prefix in METRIC_NAMES.items():
            if not self.timings[split]:
                continue
            durations, attempts = np.asarray(self.timings[split], dtype=float).T
            self.timings[split].clear()
            named |= {
                f"server/{server_name}_{prefix}_time_avg": float(durations.mean()),
                f"server/{server_name}_{prefix}_time_std": float(durations.std()),
                f"server/{server_name}_{prefix}_time_99p": float(np.percentile(durations, 99)),
            }
            if split == "train":
                named[f"server/{server_name}_average_num_attempts"] = float(attempts.mean())
            else:
                named[f"server/{server_name}_eval_retry_rate"] = float((attempts > 1).mean())
        return named

    async def _run(self, what: str, operation: Callable[["APIServer"], Awaitable[T]], split: Split) -> T:
        result, _ = await run_with_retries(self._dispatchers[split], self.retry, split, what, operation)
        return result


def refuse_what_is_not_replayed(arguments: Arguments) -> None:
    """Raise NotReplayed for a sampling parameter that changes the distribution in a way the trainer does not know."""
    given = {**(arguments.get("extra_body") or {}), **arguments}
    for name in not_replayed(given):
        raise NotReplayed(f"{name} {shown(given[name])} {NOT_REPLAYED} (an evaluation, split 'eval', may use it)")


async def _sampled(server: APIServer, arguments: Arguments) -> SampledTokens:
    """Return what the server sampled. Raises PermanentServerError for what no model samples, the server's fault."""
    samples = await server.request_tokens(arguments)
    with reading(f"{server.name} returned what no model can sample", PermanentServerError):
        check_ids("prompt_token_ids", samples.prompt_token_ids)
        for sequence in samples.sequences:
            check_sampled(sequence.token_ids, sequence.logprobs, sequence.policy_versions, sequence.version_spans)
    settings = server.settings_of(arguments)
    sequences = [replace(sequence, settings=settings) for sequence in samples.sequences]
    return SampledTokens(samples.prompt_token_ids, sequences)


def merge_replies(parts: Sequence[Reply]) -> Reply:
    """One reply with the choices of all, numbered again, and their token counts added up."""
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
