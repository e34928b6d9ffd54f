"""/metrics of the trainer for Prometheus: the last step's values, and sums since this process started.

It runs in a thread of its own on loopback, behind the same guard as our other servers. docs/trainer.md lists the names.
"""

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import msgspec
import uvicorn
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from atroposlib.addresses import listening_socket
from atroposlib.api.http.connections import Connection, Connections, Limits
from atroposlib.errors import reading
from atroposlib.http_guard import HostGuard, OwnHosts
from atroposlib.logs import get_logger
from atroposlib.wire.step_seconds import ACTIVITIES, StepSeconds
from example_trainer.errors import TrainerError
from example_trainer.output.samples import Sample

HOST = "127.0.0.1"
STOP_S = 5.0
MOST_CONNECTIONS = 32  # each takes one of the files that the trainer may open
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "atropos_trainer_"
# metric, its text, the column of metrics.jsonl whose last value it is
GAUGES = (
    ("step", "Training steps done", "step"),
    ("policy_version", "Policy version that the last step made", "policy_version"),
    ("served_version", "Policy version that vLLM serves", "served_version"),
    ("reward_mean", "Mean score of the last batch", "reward_mean"),
    ("accuracy", "Held-out accuracy (0 to 1); absent for a step without an evaluation", "accuracy"),
    ("loss", "Loss of the last step before its update; absent without an update", "loss"),
    ("kl", "KL to the start model, in nats; absent without --kl-coef", "kl"),
    ("entropy", "Mean entropy of the trained tokens, in nats", "entropy"),
    ("grad_norm", "L2 norm of the gradient before clipping", "grad_norm"),
    ("staleness_mean", "Mean policy versions between sampler and trainer, over sampled tokens", "staleness_mean"),
    ("logprob_diff_mean", "Mean difference from the sampler's log-probabilities, in nats", "logprob_diff_mean"),
    ("vllm_servers", "vLLM servers that serve the last policy version", "servers"),
)
# metric, its text, label, and by the label's value the column, or activity, that is summed
SUMS = (
    ("tokens", "Tokens of the batches", "kind", {"sampled": "completion_tokens", "trained": "trained_tokens"}),
    ("seconds", "Seconds by what the trainer did", "phase", {name: name for name in ACTIVITIES}),
    (
        "sync_seconds",
        "Seconds of weight syncs: generation paused, bytes in transit, weights being changed",
        "part",
        {"stall": "sync_stall_s", "transfer": "sync_transfer_s", "apply": "sync_apply_s"},
    ),
    ("rejected_groups", "Groups set aside because they cannot be trained on", "", {"": "rejected_groups"}),
)

log = get_logger(__name__)


class StepCollector(Collector):
    """The metrics of the rows that it was given."""

    def __init__(self) -> None:
        self._last: dict[str, Any] = {}
        self._sums: Counter[str] = Counter()
        self._lock = threading.Lock()

    def note(self, row: Any) -> None:
        """One step's row of metrics.jsonl."""
        with self._lock:
            self._last = dict(row)
            counted = self._last | msgspec.convert(self._last, StepSeconds).by_activity()
            self._sums.update({name: counted.get(name) or 0 for *_, columns in SUMS for name in columns.values()})

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics that Prometheus collects."""
        with self._lock:
            last, sums = self._last, Counter(self._sums)
        for name, text, column in GAUGES:
            if (value := last.get(column)) is not None:
                yield GaugeMetricFamily(PREFIX + name, text, value=value)
        for name, text, label, columns in SUMS:
            family = CounterMetricFamily(PREFIX + name, text, labels=[label] if label else [])
            for value, column in columns.items():
                family.add_metric([value] if label else [], sums[column])
            yield family


class PrometheusSink:
    """A sink of metrics that is served on `port` until `resources` closes it. Raises TrainerError if it is taken."""

    def __init__(self, port: int, resources: ExitStack) -> None:
        self._collector = StepCollector()
        with reading(f"--metrics-port {port} cannot be listened on", TrainerError, remedy="give another, or 0"):
            listening = resources.enter_context(listening_socket(HOST, port))
        self.url = f"http://{HOST}:{listening.getsockname()[1]}/metrics"
        limited = partial(Connection, Connections(Limits(most=MOST_CONNECTIONS)))
        config = uvicorn.Config(
            metrics_app(self._collector),
            http=limited,  # type: ignore[arg-type]
            ws="none",
            log_config=None,
            lifespan="off",
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(
            target=server.run, kwargs={"sockets": [listening]}, name="TrainerMetrics", daemon=True
        )
        thread.start()

        def stop() -> None:
            server.should_exit = True
            thread.join(STOP_S)

        resources.callback(stop)
        log.info("Serving Prometheus metrics at %s", self.url)

    def write(self, row: object) -> None:
        """Take over one step's row."""
        self._collector.note(row)

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Prometheus takes numbers only."""


def metrics_app(collector: Collector) -> HostGuard:
    """GET /metrics."""
    registry = CollectorRegistry()
    registry.register(collector)

    async def metrics(request: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE)

    return HostGuard(Starlette(routes=[Route("/metrics", metrics)]), OwnHosts.of(HOST))
