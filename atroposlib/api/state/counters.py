"""Counts since the start of this process, for /metrics."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Counters:
    """Each only ever rises."""

    groups: int = 0
    rollouts: int = 0
    sequences: int = 0
    tokens: int = 0
    repeated_posts: int = 0
    batches: int = 0
    rollouts_delivered: int = 0
    redelivered: int = 0
    acknowledged: int = 0
    stale_dropped: int = 0
    stale_down_weighted: int = 0
    forgotten: int = 0
    rejected: Counter[str] = field(default_factory=Counter)  # who found the group untrainable -> groups set aside
    refused: Counter[int] = field(default_factory=Counter)  # HTTP status -> replies
