"""What a teacher says of a group is checked wherever the group is handed over: no nonsense becomes a number."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

from atroposlib.groups import Untrainable, check
from atroposlib.wire.batching import GroupRequirements
from example_trainer.data.batching import make_batch
from example_trainer.settings.loss import LossSettings
from tests.unit.trainer.fakes import VOCAB, as_records, item, with_made_up_teacher

NEEDS = GroupRequirements(trainable_only=True, vocab_size=VOCAB, teacher_top_k=2)
Group = dict[str, Any]


def taught() -> Group:
    return copy.deepcopy(with_made_up_teacher(item([1.0, 0.0], prompt=2, longest=6), 2))


def changed(field: str, value: object, *place: int) -> Callable[[Group], None]:
    def change(group: Group) -> None:
        into = group[field]
        for index in place[:-1]:
            into = into[index]
        into[place[-1]] = value

    return change


def shortened(field: str, *place: int) -> Callable[[Group], None]:
    def change(group: Group) -> None:
        into = group[field]
        for index in place:
            into = into[index]
        into.pop()

    return change


def both(one: Callable[[Group], None], other: Callable[[Group], None]) -> Callable[[Group], None]:
    def change(group: Group) -> None:
        one(group)
        other(group)

    return change


NONSENSE: dict[str, tuple[Callable[[Group], None], str]] = {
    "not a number": (
        changed("distill_logprobs", float("nan"), 1, 2, 1),
        r"distill_logprobs\[1\]\[2\]\[1\]: nan is not",
    ),
    "impossible": (
        changed("distill_logprobs", float("-inf"), 1, 2, 0),
        r"distill_logprobs\[1\]\[2\]\[0\]: -inf is not",
    ),
    "above 0": (changed("distill_logprobs", 0.5, 0, 2, 0), r"distill_logprobs\[0\]\[2\]\[0\]: 0.5 is not a teacher's"),
    "in words": (changed("distill_logprobs", "-1", 0, 2, 0), r"distill_logprobs\[0\]\[2\]\[0\]: '-1' is not a number"),
    "more than everything": (
        changed("distill_logprobs", [-0.1, -0.1, -0.1], 0, 2),
        r"distill_logprobs\[0\]\[2\]: probabilities that add up to 2.715, above 1",
    ),
    "fewer tokens": (shortened("distill_logprobs", 1), r"distill_logprobs\[1\]: \d entries for the \d tokens"),
    "fewer ids": (shortened("distill_token_ids", 1), r"distill_token_ids\[1\]: \d entries for the \d tokens"),
    "fewer sequences": (shortened("distill_token_ids"), r"distill_token_ids: 1 entries for 2 sequences"),
    "an id without a value": (shortened("distill_logprobs", 0, 2), r"distill_logprobs\[0\]\[2\]: 2 log-prob.* of 3"),
    "nothing": (
        both(changed("distill_logprobs", [], 0, 2), changed("distill_token_ids", [], 0, 2)),
        r"distill_token_ids\[0\]\[2\]: 0 tokens, and where one was sampled the trainer needs 2 .*--distill-top-k",
    ),
    "another token": (
        changed("distill_token_ids", 96, 0, 2, 0),
        r"distill_token_ids\[0\]\[2\]\[0\]: 96 is not the token",
    ),
    "another vocabulary": (
        changed("distill_token_ids", VOCAB, 0, 2, 1),
        r"\[0\]\[2\]\[1\]: 97 is not an id of the voc",
    ),
    "twice": (
        lambda group: changed("distill_token_ids", group["distill_token_ids"][0][2][0], 0, 2, 2)(group),
        r"distill_token_ids\[0\]\[2\]: \d+ is named twice",
    ),
    "no list": (changed("distill_logprobs", 7, 0), r"distill_logprobs\[0\]: 7 is not a list"),
}


@pytest.mark.parametrize("kind", NONSENSE)
def test_nonsense_of_a_teacher_is_refused_with_its_place(kind: str) -> None:
    change, message = NONSENSE[kind]
    group = taught()
    check(group, NEEDS)
    change(group)
    with pytest.raises(Untrainable, match=message):
        check(group, NEEDS)
    check(taught() | {"distill_logprobs": None, "distill_token_ids": None}, GroupRequirements(trainable_only=True))


def test_positions_that_were_not_sampled_need_no_teacher() -> None:
    group = taught()
    for name in ("distill_logprobs", "distill_token_ids"):
        for sequence in group[name]:
            sequence[:2] = [[], []]
    check(group, NEEDS)


def test_a_group_without_a_teacher_is_rejected_and_its_siblings_train() -> None:
    loss = LossSettings(distill_coef=1.0, distill="forward_kl", distill_top_k=2)
    groups = as_records([taught(), item([1.0, 0.0]), taught()])
    batch = make_batch(groups, seq_len=64, policy_version=0, loss=loss, needs=NEEDS)
    assert list(batch.rejected) == [1]
    assert "the trainer distils (--distill-coef); sample with a teacher" in batch.rejected[1]
    assert len(batch.sequences) == 4


def test_rewards_weigh_what_they_are_said_to() -> None:
    found = {}
    for weight in (0.0, 0.5, 1.0):
        loss = LossSettings(distill_coef=1.0, reward_coef=weight)
        batch = make_batch(as_records([taught()]), seq_len=64, policy_version=0, loss=loss, needs=NEEDS)
        assert batch.zero_variance_groups == 0
        found[weight] = [float(sequence.advantages[0]) for sequence in batch.sequences]
    assert found[0.0] == [0.0, 0.0]
    assert found[0.5] == pytest.approx([each / 2 for each in found[1.0]])


def test_groups_of_equal_scores_are_trained_on_where_a_teacher_speaks() -> None:
    group = taught() | {"scores": [1.0, 1.0]}
    loss = LossSettings(distill_coef=1.0)
    batch = make_batch(as_records([group]), seq_len=64, policy_version=0, loss=loss, needs=NEEDS)
    assert (batch.zero_variance_groups, len(batch.sequences)) == (1, 2)
