"""Every field that the batching API's wire accepts is used, refused or said to be carried; none is dropped silently."""

import ast
import gc
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from atroposlib.groups import CHECKED_FIELDS, NOT_TRAINED_ON, Untrainable, check
from atroposlib.wire import batching
from atroposlib.wire.batching import GroupRequirements, PostedData, ScoredData
from example_trainer.data.batching import make_batch
from example_trainer.settings.loss import LossSettings
from tests.unit.trainer.fakes import as_records, item

ROOT = Path(__file__).parents[3]
TABLE = re.compile(r"^\| field \|.*what our trainer does \|\n\|.*\n((?:\|.*\n)+)", re.MULTILINE)

# field: a value that changes what the trainer computes or counts
USED: dict[str, Any] = {
    "tokens": [[5, 6, 7, 8, 9, 10], [5, 6, 7, 8, 3, 3]],
    "masks": [[-100] * 4 + [9, 10], [-100] * 5 + [12]],
    "scores": [0.0, 1.0],
    "advantages": [[2.0], [-2.0]],
    "ref_logprobs": [[-1.0] * 6, [-1.0] * 6],
    "inference_logprobs": [[1.0] * 4 + [-0.1, -0.1], [1.0] * 4 + [-0.1, -0.1]],
    "generation_params": {"temperature": 0.5},
    "overrides": [{"top_k": 3}, {}],
    "group_overrides": {"top_p": 0.5},
    "policy_versions": [[0, 0], [0, 0]],
    "version_spans": [[[0, 0]], [[0, 0]]],
    "rollouts": [0, 1],
    "finish_reasons": ["length", "stop"],
    "failed": {"timeout": 1},
    "routed_experts": ["?", "?"],
}
# refused too, unless the trainer distils
OF_TEACHER: dict[str, Any] = {
    "distill_token_ids": [[[], *([each] for each in tokens)] for tokens in ([6, 7, 8, 9, 10], [6, 7, 8, 11, 12])],
    "distill_logprobs": [[[], *[[-0.25]] * 5]] * 2,
}
NOT_READ = {"messages": [[], []], "env_id": 3}  # as docs/api.md says
ORDERS = {"ordinal"}  # the groups of a batch, with --deterministic: example_trainer/data/order.py
REFUSED = OF_TEACHER | {"images": ["x", None]}


def plain() -> dict[str, Any]:
    group = item([1.0, 0.0])
    group["tokens"] = [[5, 6, 7, 8, 9, 10], [5, 6, 7, 8, 11, 12]]
    group["masks"] = [[-100] * 4 + [9, 10], [-100] * 4 + [11, 12]]
    group["inference_logprobs"] = [[1.0] * 4 + [-0.5, -0.5]] * 2
    return group


def outcome(group: dict[str, Any]) -> str:
    """All that a batch of this group is, as text."""
    batch = make_batch(as_records([group]), seq_len=64, policy_version=3)
    return str({name: value for name, value in vars(batch).items() if name != "shown"})


def test_every_field_of_a_group_is_classified() -> None:
    fields = set(ScoredData.__struct_fields__)
    assert fields == {*USED, *NOT_READ, *REFUSED, *ORDERS}
    assert set(PostedData.__struct_fields__) - fields == {"idempotency_key"}  # the API's alone
    assert set(REFUSED) == set(NOT_TRAINED_ON)
    assert set(CHECKED_FIELDS) == {*USED, *REFUSED}  # none passes unseen


@pytest.mark.parametrize("field", USED)
def test_a_field_that_is_used_changes_what_is_trained(field: str) -> None:
    needs_more = {"rollouts": {"scores": [1.0, 1.0]}, "routed_experts": {}}
    group = plain()
    if field == "rollouts":
        group["rollouts"], before = [0, 1], outcome(plain() | {"scores": [1.0, 1.0], "rollouts": [0, 0]})
        assert outcome(group | needs_more[field]) != before
    elif field == "routed_experts":
        shape = batching.RoutingShape(2, 1, 4)
        with pytest.raises(Untrainable, match="routed_experts"):
            check(group | {field: USED[field]}, GroupRequirements(trainable_only=True, routing=shape))
    elif field == "finish_reasons":
        cut = make_batch(as_records([group | {field: USED[field]}]), seq_len=64, policy_version=3)
        assert cut.cut_answers == 1
    else:
        assert outcome(group | {field: USED[field]}) != outcome(group)


def test_a_trainer_that_distils_uses_what_a_teacher_says() -> None:
    needs = GroupRequirements(trainable_only=True, teacher_top_k=0)
    loss = LossSettings(distill_coef=1.0)
    for name in OF_TEACHER:
        group = plain() | OF_TEACHER | {name: None}
        with pytest.raises(Untrainable, match=rf"^{name}: missing: the trainer distils .*teacher_enabled.*, or start"):
            check(group, needs)
    batch = make_batch(as_records([plain() | OF_TEACHER]), seq_len=64, policy_version=3, loss=loss, needs=needs)
    assert not batch.rejected
    for sequence, tokens in zip(batch.sequences, plain()["tokens"], strict=True):
        assert sequence.teacher_ids is not None
        assert sequence.teacher_logprobs is not None
        assert sequence.teacher_ids[:, 0].tolist() == tokens
        assert sequence.teacher_logprobs[1:, 0].tolist() == [-0.25] * 5


@pytest.mark.parametrize("field", NOT_READ)
def test_a_field_that_is_not_read_changes_nothing(field: str) -> None:
    assert outcome(plain() | {field: NOT_READ[field]}) == outcome(plain())


@pytest.mark.parametrize("field", REFUSED)
def test_a_field_that_is_not_trained_on_is_refused_by_name(field: str) -> None:
    (record,) = as_records([plain() | {field: REFUSED[field]}])
    assert isinstance(record, ScoredData)
    groups: tuple[Any, ...] = (plain() | {field: REFUSED[field]}, record)
    for group in groups:
        with pytest.raises(Untrainable, match=rf"^{field}: .*; .*post"):
            check(group, GroupRequirements(trainable_only=True))
        check(group, GroupRequirements())  # other trainers get it
    for nothing in (None, [], [None, None]):
        check(plain() | {field: nothing}, GroupRequirements(trainable_only=True))


def test_the_page_says_what_becomes_of_each_field() -> None:
    table = TABLE.search((ROOT / "docs/api.md").read_text())
    assert table is not None
    rows = [row.split("|")[1:3] for row in table[1].splitlines()]
    said = {name: what for names, what in rows for name in re.findall(r"`(\w+)`", names)}
    assert set(said) == set(ScoredData.__struct_fields__)
    assert {name for name, what in said.items() if "refuses the group" in what} == set(REFUSED)
    assert {name for name, what in said.items() if "does not read them: they" in what} == set(NOT_READ)


def records() -> Iterator[type[msgspec.Struct]]:
    for value in vars(batching).values():
        if isinstance(value, type) and issubclass(value, msgspec.Struct) and value.__struct_fields__:
            yield value


def parsed(source: str) -> ast.Module:
    """As `ast.parse`, without garbage collection: what that closes may warn, and Python 3.11 then counts its own depth
    wrong (SystemError: AST constructor recursion depth mismatch).
    """
    gc.disable()
    try:
        return ast.parse(source)
    finally:
        gc.enable()


def attributes_read() -> set[str]:
    """Names that the product reads of some object, or names by a string."""
    found: set[str] = set()
    for package in ("atropos_launcher", "atroposlib", "example_trainer", "environments", "vllm_patching"):
        for file in (ROOT / package).rglob("*.py"):
            if file.name == "batching.py" and file.parent.name == "wire":
                continue
            for node in ast.walk(parsed(file.read_text())):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                    found.add(node.attr)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.add(node.value)
    return found


def test_every_field_of_every_record_is_read_somewhere_or_documented_for_other_clients() -> None:
    read, page = attributes_read(), (ROOT / "docs/api.md").read_text()
    unread = {
        f"{record.__name__}.{field}"
        for record in records()
        for field in record.__struct_fields__
        if field not in read and not re.search(rf"\b{field}\b", page)
    }
    assert not unread
