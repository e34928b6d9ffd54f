"""When to sample and when to evaluate: pure decisions on numbers that the serve loop reads.

The queue policy. A group counts from the moment its sampling starts until the trainer takes it: groups in flight and
groups queued together never exceed `max_batches_offpolicy` batches. When that is reached nothing new starts; what is
in flight is finished and kept. With `max_batches_offpolicy` 0 the limit is one batch, and sampling waits besides
until the trainer has trained on every batch it took, so that all samples come from the policy they train.
"""

import math
from dataclasses import dataclass

from atroposlib.envs.config import BaseEnvConfig, EvalHandlingEnum
from atroposlib.wire.batching import EnvStatus

# A trainer that took its last batch needs no more; if it then lost that batch it is given another after this long.
SURPLUS_PATIENCE_S = 60.0

EVALUATION_RUNS = "an evaluation is running"  # the reason of a Plan


@dataclass(frozen=True, slots=True)
class Plan:
    """Says how many groups to start now, and, when it is none, why."""

    start: int
    reason: str


def batch_share(batch_size: int, unallocated_fraction: float, min_batch_allocation: float | None) -> int:
    """Sequences of a batch that this environment may fill (`derived_batch_size`)."""
    return int(batch_size * (unallocated_fraction + (min_batch_allocation or 0.0)))


def plan(
    config: BaseEnvConfig,
    status: EnvStatus,
    *,
    batch_size: int,
    total_steps: int,
    in_flight: int,
    max_workers: int,
    evaluating: bool,
    idle_s: float,
    sending: int = 0,
    oversampling: float = 1.0,
    may_begin: int | None = None,
) -> Plan:
    """Groups to start. `in_flight` was counted before `status` was asked for; `idle_s` is the time since the trainer
    moved on. `sending` groups are as good as queued. With `oversampling` 2 half of the groups in flight are expected to
    be of use; `may_begin` is a limit.
    """
    if (reason := why_none(config, status, batch_size, total_steps, evaluating, idle_s)) is not None:
        return Plan(0, reason)
    max_workers = workers(config, max_workers, evaluating)
    batches = max(1, config.max_batches_offpolicy)
    share = batch_share(batch_size, status.unallocated_fraction, config.min_batch_allocation)
    limit = max(1, batches * share // config.group_size)
    # groups of others fill at most what is nobody's least share: no batch is formed without this environment's own
    of_others = batches * batch_share(batch_size, status.unallocated_fraction, None) // config.group_size
    queued = sending + status.self_queue_size + min(status.queue_size - status.self_queue_size, of_others)
    wanted = math.ceil((limit - queued) * oversampling)  # in flight
    if in_flight >= wanted:
        return Plan(0, f"{queued} groups queued and {in_flight} in flight reach the limit of {limit}")
    if may_begin == 0:
        return Plan(0, f"{in_flight} groups in flight are the last of max_items_per_batch")
    start = min(wanted - in_flight, max_workers - in_flight, wanted if may_begin is None else may_begin)
    return Plan(max(0, start), f"{in_flight} of {max_workers} workers are busy")


def plan_in_order(
    config: BaseEnvConfig,
    status: EnvStatus,
    *,
    batch_size: int,
    total_steps: int,
    in_flight: int,
    max_workers: int,
    evaluating: bool,
    idle_s: float,
    missing: int,
    under_way: int,
    may_begin: int | None,
    oversampling: float = 1.0,
) -> Plan:
    """The same for a run that can be repeated, whose environment gives each batch the same groups whatever waits at the
    API: `missing` of them; `under_way` are sampled, and perhaps of no use.
    """
    if (reason := why_none(config, status, batch_size, total_steps, evaluating, idle_s)) is not None:
        return Plan(0, reason)
    if not missing:
        return Plan(0, "the groups of this batch are given")
    max_workers = workers(config, max_workers, evaluating)
    wanted = math.ceil(missing * oversampling) - under_way
    start = min(wanted, max_workers - in_flight, wanted if may_begin is None else may_begin)
    return Plan(max(0, start), f"{under_way} groups of this batch are sampled, {in_flight} in all")


def why_none(
    config: BaseEnvConfig, status: EnvStatus, batch_size: int, total_steps: int, evaluating: bool, idle_s: float
) -> str | None:
    """Explain why nothing may be started, however few groups there are; None if it may."""
    if batch_size <= 0:
        return "the trainer has not reported its batch size"
    if evaluating and config.eval_handling is EvalHandlingEnum.STOP_TRAIN:
        return EVALUATION_RUNS
    untrained = max(0, status.current_step - status.trained_steps) if isinstance(status.trained_steps, int) else 0
    if config.max_batches_offpolicy == 0 and untrained:
        return f"on-policy: the trainer has {untrained} batch(es) to train on"
    if status.current_step >= total_steps and idle_s < SURPLUS_PATIENCE_S:
        return f"all {total_steps} batches have been delivered"
    return None


def workers(config: BaseEnvConfig, max_workers: int, evaluating: bool) -> int:
    """Return how many groups may be in flight."""
    limited = evaluating and config.eval_handling is EvalHandlingEnum.LIMIT_TRAIN
    return int(max_workers * config.eval_limit_ratio) if limited else max_workers


def evaluation_interval(config: BaseEnvConfig) -> int | None:
    """Policy versions between evaluations, or None for never."""
    return config.steps_per_eval if config.steps_per_eval > 0 else None


@dataclass
class EvaluationSchedule:
    """Chooses the policy versions to evaluate: every multiple of `interval`, the last one, what is served after it,
    and 0 if `at_start`.

    The same rule is announced to the API, so that a trainer knows whose evaluation to wait for.
    """

    interval: int | None
    last_version: int
    at_start: bool
    seen: int | None = None  # the version that was served last

    def is_due(self, version: int) -> bool:
        """Return whether `version` is one that is evaluated."""
        if version == 0:
            return self.at_start
        return self.interval is not None and (version % self.interval == 0 or version >= self.last_version)

    def went_back(self, version: int) -> bool:
        """Return whether `version` is earlier than one that was served: another trainer, or one that resumed."""
        return self.seen is not None and version < self.seen

    def advance(self, version: int) -> int | None:
        """Note that `version` is served now; the newest due one since the last call, or None.

        At the first call, and when a trainer has gone back to an earlier version, only `version` itself counts.
        """
        seen = version - 1 if self.seen is None or self.went_back(version) else self.seen
        self.seen = version
        return next((due for due in range(version, seen, -1) if self.is_due(due)), None)
