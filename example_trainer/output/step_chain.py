"""What a run that can be repeated keeps of each step, so that anyone can check it, or compute it again.

    weights before ─┐
    its batch ──────┼─ SHA-256 each ──▶ row of metrics.jsonl, with the chain: the digest of the row before and of these
    weights after ──┘
    batches.jsonl: the groups that the step trained on, one line each, in their order

Whoever changes a group, a row or a checkpoint afterwards breaks the chain at that step. Loads no torch: `atropos
verify` reads what the trainer wrote.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from atroposlib.files import expect_regular
from atroposlib.groups import Untrainable
from atroposlib.row_files.record_file import as_lines
from atroposlib.wire.batching import ScoredData
from example_trainer.data.batching import Item

BATCHES, RECEIPT = "batches.jsonl", "receipt.json"  # files of a run
LINE_BYTES = 1 << 28  # of a row at most, whoever wrote it


class StepDigests(Struct, frozen=True):
    """SHA-256 in hex, of one step; `chain` is over those of all steps so far."""

    weights_before: str
    batch: str
    weights: str
    chain: str

    @classmethod
    def after(cls, chain: str, weights_before: str, batch: str, weights: str) -> "StepDigests":
        """The digests of the step after the one whose chain is given, which is empty for the first."""
        whole = "\n".join((chain, weights_before, batch, weights))
        return cls(weights_before, batch, weights, hashlib.sha256(whole.encode()).hexdigest())

    def columns(self) -> dict[str, str]:
        """Return the columns of metrics.jsonl."""
        return {f"sha256/{name}": value for name, value in msgspec.structs.asdict(self).items()}

    @classmethod
    def of_row(cls, row: Mapping[str, object]) -> "StepDigests | None":
        """The digests of a row; None for one of a run that cannot be repeated."""
        found = {name: row.get(f"sha256/{name}") for name in cls.__struct_fields__}
        return cls(**found) if all(isinstance(value, str) for value in found.values()) else None  # type: ignore[arg-type]


def batch_rows(step: int, items: Iterable[Item]) -> list[dict[str, Any]]:
    """Make the rows of batches.jsonl of one step. The env_id is not in them: it counts registrations."""
    rows = []
    for item in items:
        if not isinstance(item, Untrainable):
            group = msgspec.to_builtins(msgspec.structs.replace(item, env_id=None))
            rows.append({"step": step, **{name: value for name, value in group.items() if value is not None}})
    return rows


def batch_digest(rows: Sequence[Mapping[str, object]]) -> str:
    """Compute the digest of the rows as the file has them."""
    return hashlib.sha256(as_lines(*rows)).hexdigest()


def read_digests(path: Path) -> dict[int, StepDigests]:
    """The digests of each step that metrics.jsonl has. Raises OSError, and ValueError that names the line."""
    found: dict[int, StepDigests] = {}
    for number, step, row, _ in _rows(path):
        if (digests := StepDigests.of_row(row)) is not None:
            if step <= max(found, default=0):
                raise ValueError(f"line {number}: step {step} stands behind step {max(found)}: a row twice, or moved")
            found[step] = digests
    return found


def read_batches(path: Path) -> Iterator[tuple[int, str, list[ScoredData]]]:
    """Yield each step's number, digest and groups, in the file's order. Raises OSError, and ValueError that names the
    line.
    """
    last, digest, groups = 0, hashlib.sha256(), list[ScoredData]()
    for number, step, row, line in _rows(path):
        if step < last:
            raise ValueError(f"line {number}: a group of step {step} stands behind one of step {last}: added, or moved")
        if step != last and groups:
            yield last, digest.hexdigest(), groups
            digest, groups = hashlib.sha256(), []
        last = step
        digest.update(line)
        groups.append(_group(number, step, row))
    if groups:
        yield last, digest.hexdigest(), groups


def _rows(path: Path) -> Iterator[tuple[int, int, dict[str, Any], bytes]]:
    """(number of the line, step, row, line) of a file that somebody else may have written."""
    with expect_regular(path).open("rb") as lines:
        for number, line in enumerate(iter(partial(lines.readline, LINE_BYTES), b""), start=1):
            try:
                row = msgspec.json.decode(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"line {number} was cut or changed ({error})") from None
            step = row.get("step") if isinstance(row, dict) else None
            if type(step) is not int or step < 1:
                raise ValueError(f"line {number} was changed: it is no row of a step")
            yield number, step, row, line


def _group(number: int, step: int, row: dict[str, Any]) -> ScoredData:
    try:
        return msgspec.convert(row, ScoredData)
    except msgspec.ValidationError as error:
        raise ValueError(f"line {number} is no group of step {step} ({error})") from None
