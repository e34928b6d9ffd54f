"""/events: queue, rates and scores as server-sent events, one every few seconds, for people who watch a run.

event: status
data: {"current_step": 7, "queue_size": 12, "groups_per_s": 3.5, "tokens_per_s": 4100.0, "score_mean": 0.62, ...}
"""

import asyncio
import copy
import time
from collections.abc import AsyncIterator

import msgspec

from atroposlib.api.figures import Figures
from atroposlib.api.service import RolloutService


async def status_events(service: RolloutService, interval_s: float) -> AsyncIterator[bytes]:
    """Events until the client goes away; the first comes at once."""
    before, then = copy.copy(service.figures), time.monotonic()
    while True:
        now = time.monotonic()
        told = msgspec.json.encode(summary(service, before, now - then))
        before, then = copy.copy(service.figures), now
        yield b"event: status\ndata: " + told + b"\n\n"
        await asyncio.sleep(interval_s)


def summary(service: RolloutService, before: Figures, seconds: float) -> dict[str, float | int | None]:
    """Where the queue stands, and what has happened since `before`, `seconds` ago."""
    service.hear_silence()
    now, queue = service.figures, service.state.queue
    status = queue.status()
    posted = now.sequences - before.sequences

    def rate(what: str) -> float:
        return round((getattr(now, what) - getattr(before, what)) / seconds, 3) if seconds > 0 else 0.0

    return {
        "current_step": status.current_step,
        "queue_size": status.queue_size,
        "leases": len(service.state.leases.held()),
        "held_bytes": service.held_bytes,
        "environments": sum(environment.counts for environment in queue.environments),
        "policy_version": service.state.policy_version,
        "groups_per_s": rate("groups"),
        "tokens_per_s": rate("tokens"),
        "batches_per_s": rate("batches"),
        "score_mean": round((now.score_sum - before.score_sum) / posted, 6) if posted else None,
        "stale_dropped": now.stale_dropped,
        "stale_down_weighted": now.stale_down_weighted,
        "groups_rejected": now.rejected.total(),
    }
