"""/metrics for Prometheus: the service's counts at the time of the request, and how long posts take."""

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atroposlib.api.service import RolloutService

POST_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
TIMED_PATHS = frozenset({"/scored_data", "/scored_data_list"})


class Metrics(Collector):
    """The registry of one app: what it reads from the service, and a histogram."""

    def __init__(self, service: RolloutService) -> None:
        self._service = service
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self.post_seconds = Histogram(
            "atropos_post_seconds", "Seconds to receive and store a post", buckets=POST_SECONDS, registry=self._registry
        )

    def collect(self) -> Iterator[Metric]:
        """Every metric but the histogram."""
        counters, queue = self._service.counters, self._service.state.queue
        for name, text, total in (
            ("groups_posted", "Groups accepted", counters.groups),
            ("rollouts_posted", "Rollouts accepted", counters.rollouts),
            ("sequences_posted", "Sequences accepted", counters.sequences),
            ("tokens_posted", "Tokens accepted", counters.tokens),
            ("posts_repeated", "Posts answered from their idempotency key", counters.repeated_posts),
            ("batches_delivered", "Batches delivered, redeliveries included", counters.batches),
            ("batches_redelivered", "Batches delivered again", counters.redelivered),
            ("batches_acknowledged", "Leases acknowledged", counters.acknowledged),
            ("rollouts_delivered", "Rollouts delivered", counters.rollouts_delivered),
            ("groups_forgotten", "Groups of another run that were removed", counters.forgotten),
        ):
            yield CounterMetricFamily(f"atropos_{name}", text, value=total)
        for name, text, label, totals in (
            (
                "stale_groups",
                "Groups above --max-staleness",
                "action",
                {"dropped": counters.stale_dropped, "down-weighted": counters.stale_down_weighted},
            ),
            (
                "groups_rejected",
                "Groups set aside",
                "found_by",
                {found_by: counters.rejected[found_by] for found_by in ("trainer", "delivery")},
            ),
            (
                "refused",
                "Replies with status 400 and above",
                "status",
                {str(status): count for status, count in sorted(counters.refused.items())},
            ),
        ):
            family = CounterMetricFamily(f"atropos_{name}", text, labels=[label])
            for value, total in totals.items():
                family.add_metric([value], total)
            yield family
        for name, text, gauge in (
            ("queued_groups", "Groups that wait", queue.status().queue_size),
            ("waiting_rollouts", "Rollouts that wait for a batch", queue.lanes.size),
            ("batch_rollouts", "Rollouts of a batch", queue.registration.batch_size if queue.registration else 0),
            ("held_bytes", "Bytes of all groups that wait or are leased", self._service.held_bytes),
            ("leases", "Batches leased to a trainer", len(self._service.state.leases.held())),
            (
                "environments",
                "Environments that are registered and not silent",
                sum(environment.counts for environment in queue.environments.values()),
            ),
            ("current_step", "Batches delivered to this trainer, from its starting step", queue.current_step),
            (
                "policy_version",
                "Policy version that the trainer last reported; -1 if none",
                self._service.state.policy_version,
            ),
            ("journal_failed", "1 while the journal cannot be written", self._service.journal_error is not None),
        ):
            yield GaugeMetricFamily(f"atropos_{name}", text, value=-1 if gauge is None else gauge)
        drops = GaugeMetricFamily(
            "atropos_dropped_groups",
            "Groups that an environment has dropped since the last one it posted",
            labels=["environment", "reason"],
        )
        for env_id, report in self._service.reports.registered.items():
            for reason, count in report.dropped.items():
                drops.add_metric([queue.name_of(env_id), reason], count)
        yield drops

    def text(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self._registry)


@dataclass
class Measured:
    """ASGI middleware: counts refusals and times posts."""

    app: ASGIApp
    service: RolloutService
    metrics: Metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] >= 400:
                self.service.counters.refused[message["status"]] += 1
            await send(message)

        if scope["type"] == "http" and scope["path"] in TIMED_PATHS:
            with self.metrics.post_seconds.time():
                await self.app(scope, receive, counting)
        else:
            await self.app(scope, receive, counting)
