"""One inference server as its clients see it: limits, health, timings, and the four requests that a backend
implements.
"""

from abc import abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar, TypeVar

import numpy as np
from openai.types import Completion
from openai.types.chat import ChatCompletion

from atroposlib.envs.server_handling.admission import AdmissionGate
from atroposlib.envs.server_handling.calls import InferenceCalls
from atroposlib.envs.server_handling.dispatch import SPLITS, Dispatcher, RetryPolicy, Split, run_with_retries
from atroposlib.envs.server_handling.health import HealthMonitor
from atroposlib.envs.server_handling.reasoning import ReasoningConfig
from atroposlib.envs.server_handling.sampling import SampledTokens
from atroposlib.envs.server_handling.server_config import APIServerConfig, ServerBaseline
from atroposlib.envs.server_handling.stats import RequestStats

__all__ = ["APIServer", "APIServerConfig", "ReasoningConfig", "ServerBaseline"]

T = TypeVar("T")


class APIServer(InferenceCalls):
    """One server. Its public calls wait for a slot and for health, and retry, here; a ServerManager does so over
    several.

    A backend implements `probe` and the `request_*` methods: one attempt each, no waiting, errors from `errors.py`.
    """

    supports_token_ids: ClassVar[bool] = False

    def __init__(
        self, config: APIServerConfig, reasoning_config: ReasoningConfig | None = None, retry: RetryPolicy | None = None
    ) -> None:
        self.config = config
        self.reasoning_config = reasoning_config or ReasoningConfig()
        self.retry = retry or RetryPolicy()
        self.gates: dict[Split, AdmissionGate] = {
            "train": AdmissionGate(config.num_max_requests_at_once),
            "eval": AdmissionGate(config.num_requests_for_eval),
        }
        self.stats: dict[Split, RequestStats] = {split: RequestStats(config.rolling_buffer_length) for split in SPLITS}
        self.health = HealthMonitor(
            self.name, self.probe, enabled=config.health_check, dead_interval_s=self.retry.dead_interval_s
        )
        self.dedicated_users = 0
        self._dispatchers: dict[Split, Dispatcher] = {split: Dispatcher([self], split) for split in SPLITS}

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

    @abstractmethod
    async def probe(self) -> str | None:
        """Ask, cheaply and within seconds, whether the server can serve; None if so, else what is wrong."""

    @abstractmethod
    async def request_chat(self, arguments: dict[str, Any]) -> ChatCompletion:
        """One chat completion request."""

    @abstractmethod
    async def request_completion(self, arguments: dict[str, Any]) -> Completion:
        """One text completion request."""

    @abstractmethod
    async def request_tokens(self, arguments: dict[str, Any]) -> SampledTokens:
        """One request for sampled token ids. Raises NotImplementedError where the protocol has none."""

    @abstractmethod
    async def request_prompt_logprobs(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """One request for the log-probabilities of a prompt. Raises NotImplementedError where the protocol has none."""

    async def close(self) -> None:
        """Stop probing and close connections; a backend closes its own first."""
        await self.health.close()

    async def update_weight(self, weight: float) -> None:
        """Scale both limits by the environment's share (0..1)."""
        for gate in self.gates.values():
            gate.set_weight(weight)

    async def wandb_metrics(self, metrics: dict[str, Any] | None, server_name: str) -> dict[str, Any]:
        """`metrics` with this server's request timings since the last call."""
        named = dict(metrics or {})
        for split, prefix in (("train", "request"), ("eval", "eval_request")):
            durations, attempts = self.stats["train" if split == "train" else "eval"].take()
            if not durations.size:
                continue
            named[f"server/{server_name}_{prefix}_time_avg"] = float(durations.mean())
            named[f"server/{server_name}_{prefix}_time_std"] = float(durations.std())
            named[f"server/{server_name}_{prefix}_time_99p"] = float(np.percentile(durations, 99))
            if split == "train":
                named[f"server/{server_name}_average_num_attempts"] = float(attempts.mean())
            else:
                named[f"server/{server_name}_eval_retry_rate"] = float((attempts > 1).mean())
        return named

    async def _run(self, what: str, operation: Callable[["APIServer"], Awaitable[T]], split: Split) -> T:
        result, _ = await run_with_retries(self._dispatchers[split], self.retry, split, what, operation)
        return result
