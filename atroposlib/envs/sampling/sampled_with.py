"""What a group says of how its sequences were sampled: filled in from what was sampled, and compared with it.

    nodes or ledger ──settings of each sequence──▶ generation_params of the group, or overrides of each sequence

The trainer computes with these. An author may leave them out; what an author writes must be true.
"""

import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from atroposlib.envs.errors import NotReplayed
from atroposlib.envs.payloads import SAMPLING, ScoredDataGroup
from atroposlib.envs.server_handling.sequences.sampling import Settings
from atroposlib.groups import shown

PLAIN: Settings = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}  # what a trainer assumes where nothing is said
ALWAYS_SAID = ("temperature", "top_p")
READ_FROM = ("overrides", "generation_params", "group_overrides")  # by the trainer, in this order


def fields_of(settings: Sequence[Settings]) -> dict[str, object]:
    """`generation_params` of sequences that were sampled alike, or `overrides` of each."""
    written = [{name: value for name, value in each.items() if _is_said(name, value)} for each in settings]
    if all(each == written[0] for each in written):
        return {"generation_params": written[0]} if written else {}
    return {"overrides": written}


def one_setting(found: Sequence[Settings], index: int) -> Settings | None:
    """The one of a sequence, None if it is not known. Raises NotReplayed if its turns differ."""
    if len(found) > 1:
        first, second = found[:2]
        name = next(name for name in {**first, **second} if first.get(name) != second.get(name))
        raise NotReplayed(
            f"sequence {index}: one turn was sampled with {name} {shown(first.get(name))}, another with"
            f" {shown(second.get(name))}, and the trainer computes a sequence with one; sample all turns that are"
            " trained on alike, or mask the others"
        )
    return found[0] if found else None


def with_settings(group: ScoredDataGroup, found: Sequence[Sequence[Settings]]) -> ScoredDataGroup:
    """`group`, with what it does not say of how its sequences were sampled; `found` are the settings of each, none
    where they are not known. Raises NotReplayed if what it says is another, naming both.
    """
    missing: list[Settings] = []
    for index, each in enumerate(found):
        settings = one_setting(each, index) or {}
        _expect_true(group, index, settings)
        said = _said(group, index)
        missing.append(
            {name: value for name, value in settings.items() if name not in said and value != PLAIN.get(name)}
        )
    if not any(missing):
        return group
    given = group.get("overrides") or [{} for _ in missing]
    overrides = [{**(mine or {}), **more} for mine, more in zip(given, missing, strict=True)]
    return ScoredDataGroup(**{**group, "overrides": overrides})


def _is_said(name: str, value: object) -> bool:
    return name in ALWAYS_SAID or value != PLAIN.get(name)


def _said(group: Mapping[str, Any], index: int) -> dict[str, tuple[str, object]]:
    """Return what the trainer reads of one sequence's sampling: name to field and value."""
    settings: dict[str, tuple[str, object]] = {}
    for field in READ_FROM:
        given = group.get(field)
        if field == "overrides" and given:
            given = given[index] if index < len(given) else None
        for name, value in given.items() if isinstance(given, Mapping) else ():
            if name in SAMPLING and value is not None:
                settings.setdefault(name, (field, value))
    return settings


def _expect_true(group: Mapping[str, object], index: int, settings: Settings) -> None:
    greedy = settings.get("temperature") == 0
    for name, (field, value) in _said(group, index).items() if settings else ():
        if name in ("top_p", "top_k") and greedy:  # nobody reads them
            continue
        sampled = settings.get(name)
        if not isinstance(value, numbers.Real) and name in PLAIN:
            continue  # the check of the group names it
        if not _same(name, value, sampled):
            raise NotReplayed(
                f"{field} of sequence {index}: {name} {shown(value)}, but it was sampled with {name}"
                f" {shown('nothing' if sampled is None else sampled)}; leave the field out: what was sampled is posted"
                " by itself"
            )


def _same(name: str, said: Any, sampled: Any) -> bool:
    if name == "top_k":
        return bool(max(0, int(said)) == sampled)
    if isinstance(said, numbers.Real) and isinstance(sampled, numbers.Real):
        return math.isclose(said, sampled, rel_tol=1e-9)
    return sampled is None or bool(said == sampled)  # a setting that changes nothing is not in what was sampled
