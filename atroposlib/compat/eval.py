"""Standalone evaluations: no environment, no trainer, one inference server.

    class Addition(EvalBase):
        def setup_data(self) -> list: ...                              # the questions
        async def run_item(self, server, data_item): ...               # ({"accuracy": 1.0}, what is kept of the sample)

    asyncio.run(eval_runner(Addition(temperature=0.0, eval_dir="results")))      # --server-url, --model-name, --api-key

Metrics are means over the questions. With `eval_dir` they are written there as `metrics.json`, the samples as
`samples.jsonl`.
"""

import contextlib
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from openai.types.chat import ChatCompletion
from pydantic import Field, SecretStr

from atroposlib.config import Config, load_config
from atroposlib.envs.files.records import markdown_table, write_eval_results
from atroposlib.envs.server_handling.dispatching.dispatch import gather_or_cancel
from atroposlib.envs.server_handling.managed_server import ManagedServer
from atroposlib.envs.server_handling.server_baseline import InferenceCalls
from atroposlib.envs.server_handling.server_config import APIServerConfig, ServerType
from atroposlib.envs.server_handling.server_manager import ServerManager
from atroposlib.logs import configure_logging, get_logger

log = get_logger(__name__)


def pass_at_k(m: int, c: float, k: int) -> float:
    """The chance that one of `k` samples is right, drawn from `m` of which `c` are. Chen et al. 2021, arXiv
    2107.03374, equation 1. Raises ValueError for what cannot be drawn.
    """
    if not 1 <= k <= m or not 0 <= round(c) <= m:
        raise ValueError(
            f"pass@{k} of {m} samples with {c:g} right is not defined: draw k from 1 to the number of samples"
        )
    return 1.0 - math.comb(m - round(c), k) / math.comb(m, k)


def evaluate_log(
    metrics: Mapping[str, object],
    eval_dir: str | None = None,
    task_name: str | None = None,
    model_name: str | None = None,
    start_time: float | None = None,
    end_time: float | None = None,
    generation_parameters: Mapping[str, object] | None = None,
    samples: Sequence[object] | None = None,
    verbose: bool = True,
) -> None:
    """Write `metrics` and `samples` to `eval_dir`; without one only say so. Times are seconds."""
    if eval_dir is None:
        log.warning("The evaluation is not written to files: eval_dir is not set")
        return
    if verbose:
        print(markdown_table(metrics), flush=True)
    write_eval_results(
        Path(eval_dir),
        task_name or "eval",
        metrics,
        samples,
        model_name=model_name,
        start_time=start_time,
        end_time=end_time,
        generation_parameters=generation_parameters,
    )
    log.info("Wrote the evaluation to %s", eval_dir)


class EvalBase(ABC):
    """Write `setup_data` and `run_item`. Further keyword arguments become attributes.

    Those that are read here: temperature (0), top_p (1), max_tokens (-1, the server's own), eval_dir (None), verbose
    (False).
    """

    temperature: float = 0.0
    top_p: float = 1.0
    max_tokens: int = -1
    eval_dir: str | None = None
    verbose: bool = False

    def __init__(self, pass_at_n: int = 1, pass_at_n_samples: int = 1, **attributes: object) -> None:
        self.pass_at_n = pass_at_n
        self.pass_at_n_samples = pass_at_n_samples
        for name, value in attributes.items():
            setattr(self, name, value)
        self.data = self.setup_data()

    @abstractmethod
    def setup_data(self) -> list[Any]:
        """The questions; called once, by the constructor."""

    @abstractmethod
    async def run_item(self, server: ServerManager, data_item: Any) -> tuple[dict[str, float], Any]:
        """The metrics of one question, the same names for all, and what of it goes to the samples."""

    @property
    def task_name(self) -> str:
        """`Addition@1`, or `Addition@1:4` where four samples stand for one."""
        samples = f":{self.pass_at_n_samples}" if self.pass_at_n_samples != self.pass_at_n else ""
        return f"{type(self).__name__}@{self.pass_at_n}{samples}"

    def get_generation_params(self) -> dict[str, Any]:
        """The sampling parameters of every request."""
        return {
            "temperature": self.temperature,
            "n": max(self.pass_at_n, self.pass_at_n_samples),
            "top_p": self.top_p,
            "max_tokens": self.max_tokens,
        }

    async def chat_completion(
        self, server: InferenceCalls | ManagedServer, messages: Sequence[Mapping[str, object]]
    ) -> ChatCompletion:
        """`n` replies to `messages` of a server, or of a managed one."""
        return await server.chat_completion(
            messages=messages,
            **{key: value for key, value in self.get_generation_params().items() if key != "max_tokens" or value >= 0},
        )

    async def __call__(self, server_manager: ServerManager) -> dict[str, float]:
        """Ask everything, and return the means."""
        if not self.data:
            raise ValueError(f"{self.task_name} has no questions: setup_data returned an empty list")
        log.info("Evaluating %s: %d questions to %s", self.task_name, len(self.data), server_manager.model_name)
        start = time.time()
        results = await gather_or_cancel([self.run_item(server_manager, item) for item in self.data])
        end = time.time()
        metrics = {name: sum(each[name] for each, _ in results) / len(results) for name in results[0][0]}
        log.info("%s: %s (%.1f s)", self.task_name, metrics, end - start)
        evaluate_log(
            metrics,
            eval_dir=self.eval_dir,
            task_name=self.task_name,
            model_name=server_manager.model_name,
            start_time=start,
            end_time=end,
            generation_parameters=self.get_generation_params(),
            samples=[sample for _, sample in results],
            verbose=self.verbose,
        )
        return metrics


class EvalRunnerConfig(Config):
    """Evaluate a model behind an OpenAI-compatible API."""

    server_url: str = Field(
        default="http://localhost:8000", description="Address of the inference server, with its /v1."
    )
    model_name: str = Field(default="default", description="Name of the model at the server.")
    server_type: ServerType = Field(
        default="openai", description="Protocol of the server; managed servers need one with token ids."
    )
    tokenizer_name: str = Field(
        default="none", description="Tokenizer of managed servers; 'none' means that of model_name."
    )
    api_key: SecretStr = Field(
        default=SecretStr(""), description="Its key.", json_schema_extra={"env": "OPENAI_API_KEY"}
    )


async def eval_runner(eval_env: EvalBase, argv: Sequence[str] | None = None) -> dict[str, float]:
    """Run `eval_env` on the server of the command line, and return its metrics."""
    flags = load_config(EvalRunnerConfig, argv, prog=type(eval_env).__name__)
    configure_logging(type(eval_env).__name__)
    server = APIServerConfig(
        base_url=flags.server_url,
        model_name=flags.model_name,
        server_type=flags.server_type,
        tokenizer_name=flags.tokenizer_name,
        api_key=flags.api_key.get_secret_value(),
        health_check=False,
    )
    async with contextlib.aclosing(ServerManager([server])) as servers:
        return await eval_env(servers)
