"""One inference server as its clients see it: limits, health, timings, and the four requests that a backend
implements.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np

from atroposlib.envs.metrics import Metrics
from atroposlib.envs.server_handling.admission import AdmissionGate
from atroposlib.envs.server_handling.calls import InferenceCalls
from atroposlib.envs.server_handling.dispatch import SPLITS, Dispatcher, RetryPolicy, Split, run_with_retries
from atroposlib.envs.server_handling.errors import PermanentServerError, RetryableServerError, ServerError, describe
from atroposlib.envs.server_handling.health import HealthMonitor
from atroposlib.envs.server_handling.reasoning import ReasoningConfig
from atroposlib.envs.server_handling.sampling import Arguments, PromptLogprobs, SampledSequence, SampledTokens
from atroposlib.envs.server_handling.server_config import APIServerConfig, ServerBaseline

if TYPE_CHECKING:
    from openai.types import Completion
    from openai.types.chat import ChatCompletion

__all__ = ["APIServer", "APIServerConfig", "ReasoningConfig", "ServerBaseline"]

T = TypeVar("T")
FIRST_STATUS_S = 0.1
METRIC_NAMES: dict[Split, str] = {"train": "request", "eval": "eval_request"}


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
        self.gates: dict[Split, AdmissionGate] = {
            "train": AdmissionGate(config.num_max_requests_at_once),
            "eval": AdmissionGate(config.num_requests_for_eval),
        }
        # (seconds, tries) of each call that succeeded since the metrics were last asked for
        self.timings: dict[Split, deque[tuple[float, int]]] = {
            split: deque(maxlen=config.rolling_buffer_length) for split in SPLITS
        }
        self.health = HealthMonitor(
            self.name, self.probe, enabled=config.health_check, dead_interval_s=self.retry.dead_interval_s
        )
        self.dedicated_users = 0
        self._dispatchers: dict[Split, Dispatcher] = {split: Dispatcher([self], split) for split in SPLITS}
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
        """Whether the server answered lately."""
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

    async def request_prompt_logprobs(self, arguments: Arguments) -> PromptLogprobs:
        """One request for the log-probabilities of a prompt. Raises NotImplementedError where the protocol has none."""
        return await self._hooked(self._get_logprobs_wrapper, arguments)

    def chat_arguments(self, arguments: Arguments) -> Arguments:
        """`arguments` with the model and what the reasoning configuration adds."""
        prepared = {**arguments, "model": self.config.model_name}
        if prepared.pop("skip_reasoning", False):
            return prepared
        return self.reasoning_config.chat_arguments(prepared, self.config.base_url)

    # --- the ancestor's hooks, which get the arguments of a call and the model -------------------------------------

    async def check_server_status_task(self, chat_completion: bool = True) -> None:
        """Set `server_healthy`, once or again and again. It starts with the first probe."""

    async def _chat_completion_wrapper(self, **kwargs: Any) -> "ChatCompletion":
        raise NotImplementedError(f"{type(self).__name__} has no chat completions")

    async def _completion_wrapper(self, **kwargs: Any) -> "Completion":
        raise NotImplementedError(f"{type(self).__name__} has no text completions")

    async def _tokens_and_logprobs_completion_wrapper(self, **kwargs: Any) -> tuple[list[Any], ...]:
        """(prompt tokens, output tokens, their log-probabilities, finish reasons), the last three a sequence each."""
        raise NotImplementedError(f"{type(self).__name__} gives no token ids")

    async def _get_logprobs_wrapper(self, **kwargs: Any) -> PromptLogprobs:
        raise NotImplementedError(f"{type(self).__name__} gives no prompt log-probabilities")

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
