"""The age of waiting groups in policy versions, and what happens to those that are too old. Pure.

A group is as old as the oldest policy version that one of its sequences was sampled under. Groups without versions
have no age.
"""

import heapq
from collections.abc import Iterable

from atroposlib.api.state.changes import StoredGroup
from atroposlib.api.state.selection import Group

SPARE = 64  # entries that the heap may have beyond two for each waiting group


class WaitingVersions:
    """Finds the waiting groups that were sampled before a policy version, in time and memory that grow with their
    number only.
    """

    def __init__(self) -> None:
        self._version_of: dict[int, int] = {}  # order of a group -> its version
        self._oldest_first: list[tuple[int, int]] = []  # heap of (version, order); may hold groups that left

    def add(self, groups: Iterable[Group[StoredGroup]]) -> None:
        """Add waiting groups."""
        for group in groups:
            if group.record.version is not None:
                self._version_of[group.order] = group.record.version
                heapq.heappush(self._oldest_first, (group.record.version, group.order))

    def discard(self, groups: Iterable[Group[StoredGroup]]) -> None:
        """Remove groups that no longer wait."""
        for group in groups:
            self._version_of.pop(group.order, None)
        if len(self._oldest_first) > 2 * len(self._version_of) + SPARE:
            self._oldest_first = [(version, order) for order, version in self._version_of.items()]
            heapq.heapify(self._oldest_first)

    def before(self, version: int) -> list[int]:
        """Orders of the waiting groups that were sampled before `version`, oldest first."""
        older: dict[tuple[int, int], None] = {}  # a group that was lent and came back may stand there twice
        while self._oldest_first and self._oldest_first[0][0] < version:
            sampled, order = heapq.heappop(self._oldest_first)
            if self._version_of.get(order) == sampled:
                older[sampled, order] = None
        for entry in older:
            heapq.heappush(self._oldest_first, entry)
        return [order for _, order in older]
