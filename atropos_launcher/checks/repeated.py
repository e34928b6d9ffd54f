"""Compares what runs with --deterministic kept of their steps: with itself, or with another run.

metrics.jsonl  digests of each step ──┐
batches.jsonl  its groups ────────────┼──▶ the first step, group, sequence and token that is not as it should be
checkpoints/   weights ───────────────┘
"""

import struct
from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

import msgspec

from atroposlib.errors import AtroposError, reading
from atroposlib.files import expect_regular
from atroposlib.wire.batching import ScoredData
from example_trainer.output.step_chain import BATCHES, RECEIPT, StepDigests, read_batches, read_digests
from example_trainer.weights.manifest import digest_of_files

METRICS = "metrics.jsonl"
PARTS = ("tokens", "masks", "scores", "inference_logprobs")  # of a group, which are named when they differ


class _Receipt(msgspec.Struct):
    steps: Annotated[int, msgspec.Meta(ge=0)]
    chain: str = msgspec.field(name="chain_sha256")
    weights: str = msgspec.field(name="weights_sha256")
    finished: bool = True  # if not, the trained model is of before the run was started or resumed


def steps_of(run: Path) -> dict[int, StepDigests]:
    """The digests of each step of a run. Raises AtroposError where there are none."""
    path = run / METRICS
    with reading(f"cannot read {path}", AtroposError, remedy="wait for a step, restore it, or name another run"):
        found = read_digests(path)
    if not found:
        raise AtroposError(f"{run} cannot be checked: it has no digests, because it ran without --deterministic")
    return found


def faults(run: Path) -> Iterator[str]:
    """Yield a sentence for each thing of a run that is not as its trainer wrote it, in the order of the steps."""
    steps, batches = steps_of(run), dict(_batches(run))
    chain = weights = ""
    for number, (step, digests) in enumerate(sorted(steps.items()), start=1):
        if step != number:
            yield f"step {number} has no row in {METRICS}"
            return
        if weights and digests.weights_before != weights:
            yield f"step {step} began with other weights than step {step - 1} ended with"
        if digests != StepDigests.after(chain, digests.weights_before, digests.batch, digests.weights):
            yield f"step {step}: its row in {METRICS} was changed, or that of an earlier step"
        if step not in batches:
            yield f"step {step} has no groups in {BATCHES}"
        elif batches[step][0] != digests.batch:
            yield f"step {step}: a group in {BATCHES} was changed, added or removed"
        chain, weights = digests.chain, digests.weights
    yield from (f"{BATCHES} has groups of step {step}, of which there is no row" for step in batches.keys() - steps)
    yield from _of_receipt(run, steps)
    for step, folder in models_of(run, steps):
        if (found := _weights(folder)) != steps[step].weights:
            yield f"{folder.relative_to(run)} does not have the weights of step {step}: {found[:16]}"


def _of_receipt(run: Path, steps: Mapping[int, StepDigests]) -> Iterator[str]:
    """Compare the step that the receipt was written after. A run that was killed has that of its start."""
    told = _receipt(run)
    if told.steps > max(steps):
        yield f"{RECEIPT} was written after step {told.steps}, and {METRICS} ends with step {max(steps)}"
    elif told.steps and (steps[told.steps].chain, steps[told.steps].weights) != (told.chain, told.weights):
        yield f"step {told.steps} is not the one after which {RECEIPT} was written: its chain or weights differ"


def _receipt(run: Path) -> _Receipt:
    path = run / RECEIPT
    with reading(f"cannot read {path}", AtroposError, remedy="restore the file"):
        return msgspec.json.decode(expect_regular(path).read_bytes(), type=_Receipt)


def difference(one: Path, other: Path) -> str | None:
    """Describe the first difference of two runs; None where every step of both is equal. Raises AtroposError."""
    of_one, of_other = steps_of(one), steps_of(other)
    for step in sorted(of_one.keys() | of_other.keys()):
        if step not in of_one or step not in of_other:
            lacking = one if step not in of_one else other
            return f"{lacking} has no step {step}"
        mine, its = of_one[step], of_other[step]
        if mine.weights_before != its.weights_before:
            return f"step {step} began with other weights: {mine.weights_before[:16]} and {its.weights_before[:16]}"
        if mine.batch != its.batch:
            return f"step {step}: {_of_groups(dict(_batches(one))[step][1], dict(_batches(other))[step][1])}"
        if mine.weights != its.weights:
            return (
                f"step {step} made other weights of equal groups: {mine.weights[:16]} and {its.weights[:16]}"
                f"{_of_logprobs(one, other, step)}"
            )
    return None


def _batches(run: Path) -> Iterator[tuple[int, tuple[str, list[ScoredData]]]]:
    path = run / BATCHES
    with reading(f"cannot read {path}", AtroposError, remedy="restore the file"):
        for step, digest, groups in read_batches(path):
            yield step, (digest, groups)


def models_of(run: Path, steps: Container[int]) -> Iterator[tuple[int, Path]]:
    """Yield each model that the run kept after one of `steps`, with that step. The trained model of a run that was
    resumed, and has not finished again, is left out: its step may have been done again, with other settings. Raises
    AtroposError if the receipt cannot be read.
    """
    told = _receipt(run)
    for folder in sorted((run / "checkpoints").glob("*")):
        name = folder.name.removeprefix("step_").removeprefix("best_model_")
        if name == "final_model" and told.finished:
            name = str(told.steps)
        is_model = folder.is_dir() and not folder.is_symlink() and any(folder.glob("*.safetensors"))
        if is_model and name.isdecimal() and int(name) in steps:
            yield int(name), folder


def _weights(folder: Path) -> str:
    with reading(f"cannot read the weights in {folder}", AtroposError, remedy="restore the directory"):
        return digest_of_files(folder)


def _of_groups(ones: Sequence[ScoredData], others: Sequence[ScoredData]) -> str:
    """Name the first group of two batches that differs, with its sequence, token and both values."""
    for number, (one, other) in enumerate(zip_longest(ones, others), start=1):
        if one is None or other is None:
            return f"it has {len(ones)} groups, and {len(others)}"
        if one == other:
            continue
        if one.ordinal != other.ordinal:
            return f"group {number} is {one.ordinal} in one run, and {other.ordinal} in the other"
        for part in PARTS:
            for place, (mine, its) in enumerate(zip_longest(getattr(one, part) or (), getattr(other, part) or ())):
                if mine != its:
                    return f"group {number} {_told(one)}, sequence {place + 1}, {_of_values(part, mine, its)}"
        return f"group {number} {_told(one)} differs in what was said of its sampling"
    return "its groups are equal, but their rows are written otherwise"


def _told(group: ScoredData) -> str:
    return f"({group.ordinal[0]}, number {group.ordinal[2]})" if isinstance(group.ordinal, tuple) else ""


def _of_values(part: str, one: object, other: object) -> str:
    if not isinstance(one, list) or not isinstance(other, list):
        return f"{part}: {shown(one)} and {shown(other)}"
    for place, (mine, its) in enumerate(zip_longest(one, other)):
        if mine != its:
            return f"token {place}, {part}: {shown(mine)} and {shown(its)}"
    return part


def _of_logprobs(one: Path, other: Path, step: int) -> str:
    """Name the first token to which the two trainers gave other log-probabilities, if both runs kept them."""
    mine, its = _trained(one, step), _trained(other, step)
    for number, (row, its_row) in enumerate(zip(mine, its, strict=False), start=1):
        for sequence, (values, its_values) in enumerate(
            zip(row.get("logprobs") or (), its_row.get("logprobs") or (), strict=False), start=1
        ):
            for place, (value, its_value) in enumerate(zip(values or (), its_values or (), strict=False), start=1):
                if value != its_value:
                    where = f"group {number}, sequence {sequence}, trained token {place}"
                    return f"; the first log-probability that differs: {where}: {shown(value)} and {shown(its_value)}"
    return "; log-probabilities are equal, so the gradients or the optimizer differ"


def _trained(run: Path, step: int) -> list[Mapping[str, Any]]:
    path = run / "trained.jsonl"
    if not path.is_file():
        return []
    with reading(f"cannot read {path}", AtroposError, also=(msgspec.DecodeError,)):
        rows = (msgspec.json.decode(line) for line in path.read_bytes().splitlines())
        return [row for row in rows if row.get("step") == step]


def shown(value: object) -> str:
    """Write a value so that two that differ look different: a float with the bits of float32 or float64 in hex."""
    if not isinstance(value, float):
        return repr(value)
    try:
        narrow = struct.pack(">f", value)
    except OverflowError:
        narrow = b""
    bits = narrow if narrow and struct.unpack(">f", narrow)[0] == value else struct.pack(">d", value)
    return f"{value!r} (0x{bits.hex()})"
