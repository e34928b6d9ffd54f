"""The rules of batching as functions over plain lists of items, by the names of the archived ancestor's
`atroposlib.api.utils`.

An item is a mapping with `tokens` (a list of sequences) and optionally `env_id`. Items are never split and never
changed. The server itself works on `atroposlib.api.state.selection`, whose rules these are.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from atroposlib.api.state.selection import Group, Lanes, indices_summing_to, packed_batch

Item = Mapping[str, Any]


def find_groups_summing_to_target(buffer: Sequence[Item], target_size: int) -> list[int]:
    """Rising indices of the groups in `buffer` whose sequences sum to exactly `target_size`; empty without any."""
    return indices_summing_to([len(item["tokens"]) for item in buffer], target_size)


def grab_exact_from_heterogeneous_queue(queue: list[Item], batch_size: int) -> tuple[list[Item] | None, list[Item]]:
    """A batch of exactly `batch_size` sequences by the rule of packs and the queue without it, or (None, `queue`)."""
    return _grab(queue, batch_size, {})


def grab_batch_with_minimum_allocations(
    queue: list[Item], batch_size: int, env_configs: Sequence[Mapping[str, Any]]
) -> tuple[list[Item] | None, list[Item]]:
    """Grab as `grab_exact_from_heterogeneous_queue` does, but fill each connected environment's `min_batch_allocation`
    (share of the batch) first.

    `env_configs` holds mappings with `registered_id`, `connected` and `min_batch_allocation` (None: no minimum).
    """
    minimums = {
        env["registered_id"]: env["min_batch_allocation"]
        for env in env_configs
        if env.get("connected", False) and env.get("min_batch_allocation") is not None
    }
    return _grab(queue, batch_size, minimums)


def _grab(queue: list[Item], batch_size: int, minimums: Mapping[int, float]) -> tuple[list[Item] | None, list[Item]]:
    groups = (Group(index, len(item["tokens"]), item.get("env_id"), item) for index, item in enumerate(queue))
    lanes = Lanes(group for group in groups if group.size)
    chosen = packed_batch(lanes, batch_size, minimums) if lanes.size >= batch_size else None
    if chosen is None:
        return None, queue
    gone = {group.order for group in chosen}
    return [group.record for group in chosen], [item for index, item in enumerate(queue) if index not in gone]
