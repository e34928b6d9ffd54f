"""From API items to sequences: advantages, skipped groups, temperatures, and errors that name the item."""

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from example_trainer.data.advantages import group_advantages, has_signal
from example_trainer.data.batching import Batch, make_batch
from example_trainer.settings.loss import LossSettings
from tests.unit.trainer.fakes import as_records, item


def batch_of(*items: dict[str, Any], seq_len: int = 64, policy_version: int = 0, all_groups: bool = False) -> Batch:
    return make_batch(
        as_records(items),
        seq_len=seq_len,
        policy_version=policy_version,
        loss=LossSettings(entropy_coef=0.01 if all_groups else 0),
    )


def advantages_of(batch: Batch) -> list[float]:
    return [float(sequence.advantages[-1]) for sequence in batch.sequences]


def test_advantage_is_score_minus_mean_over_std_plus_epsilon() -> None:
    scores = np.array([1.0, 0.0, 0.0, 0.0])
    assert group_advantages(scores, "group_mean").tolist() == [0.75, -0.25, -0.25, -0.25]
    assert group_advantages(scores, "group_std")[0] == pytest.approx(0.75 / (0.1875**0.5 + 1e-4), rel=1e-12)


def test_a_group_of_one_keeps_its_score() -> None:
    assert group_advantages(np.array([0.5]), "group_std").tolist() == [0.5]
    assert has_signal(np.array([0.5]))
    assert not has_signal(np.array([0.0]))


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=16))
def test_advantages_sum_to_zero_and_keep_the_order(scores: list[float]) -> None:
    array = np.array(scores)
    advantages = group_advantages(array, "group_std")
    assert advantages.sum() == pytest.approx(0, abs=1e-6)
    order = np.argsort(array, kind="stable")
    assert (np.diff(advantages[order]) >= 0).all()


def test_groups_of_equal_scores_are_counted_and_left_out() -> None:
    batch = batch_of(item([1.0, 1.0]), item([0.0, 1.0], seed=1), item([0.0, 0.0, 0.0], seed=2))
    assert (batch.groups, batch.zero_variance_groups, batch.sampled_sequences, len(batch.sequences)) == (3, 2, 7, 2)
    assert batch.reward_mean == pytest.approx(3 / 7)
    assert batch.reward_std == pytest.approx((12 / 49) ** 0.5)


def test_scores_that_differ_by_the_rounding_of_their_sums_are_no_signal() -> None:
    """Three groups of equal rewards, added up in other orders, and one of rewards that are small but not equal."""
    large = 3e6
    equal = [item([0.1 + 0.2, 0.3]), item([0.7 + 0.2 + 0.1, 1.0, 1.0]), item([large + 0.1 + 0.2, large + 0.3])]
    batch = batch_of(*equal, item([1e-9, 0.0], seed=1))
    assert (batch.groups, batch.zero_variance_groups, len(batch.sequences)) == (4, 3, 2)


def test_the_sequences_of_a_rollout_share_its_score_which_counts_once() -> None:
    together = item([1.0, 1.0, 1.0, 0.0, 0.5], rollouts=[0, 0, 0, 1, 2])
    apart = item([1.0, 0.0, 0.5])
    batch, expected = batch_of(apart, together, apart), batch_of(apart)
    one, two, three = advantages_of(expected)
    assert advantages_of(batch) == [one, two, three, one, one, one, two, three, one, two, three]
    assert [sequence.rollout for sequence in batch.sequences] == [0, 1, 2, 3, 3, 3, 4, 5, 6, 7, 8]
    assert (batch.rollouts, batch.sampled_sequences) == (9, 11)
    assert (batch.reward_mean, batch.reward_std) == pytest.approx((expected.reward_mean, expected.reward_std))


def test_a_group_of_one_rollout_keeps_its_score_in_each_of_its_sequences() -> None:
    assert advantages_of(batch_of(item([0.5, 0.5], rollouts=[0, 0]))) == [0.5, 0.5]
    silent = batch_of(item([1.0, 1.0, 1.0], rollouts=[0, 0, 1]))
    assert (silent.sequences, silent.zero_variance_groups, silent.rollouts) == ([], 1, 2)


def test_each_sequence_its_own_rollout_is_what_no_rollouts_say() -> None:
    plain = batch_of(item([1.0, 0.0, 0.25], seed=2))
    numbered = batch_of(item([1.0, 0.0, 0.25], seed=2, rollouts=[0, 1, 2]))
    assert (plain.rollouts, plain.reward_std) == (numbered.rollouts, numbered.reward_std)
    for left, right in zip(plain.sequences, numbered.sequences, strict=True):
        assert left.advantages.tobytes() == right.advantages.tobytes()
        assert left.rollout == right.rollout


@pytest.mark.parametrize(
    "silent",
    [
        item([0.1, 0.1, 0.1]),  # whose mean is not 0.1
        item([0.0]),
        item([1.0, 0.0], advantages=[[0.0], [0.0]]),
        item([1.0, 0.0], overrides=[{"set_advantage_to_zero": True}] * 2),
        item([1.0, 0.0], group_overrides={"staleness_weight": 0.0}),
    ],
    ids=["equal scores", "one of score zero", "given", "set to zero", "too old"],
)
def test_groups_without_a_signal_can_be_kept_with_advantages_of_zero(silent: dict[str, Any]) -> None:
    left_out, kept = batch_of(silent), batch_of(silent, all_groups=True)
    assert (left_out.sequences, left_out.trained_tokens, left_out.zero_variance_groups) == ([], 0, 1)
    assert advantages_of(kept) == [0.0] * len(silent["scores"])
    assert (kept.trained_tokens, kept.zero_variance_groups) == (kept.completion_tokens, 1)
    figures = ("groups", "sampled_sequences", "completion_tokens", "reward_mean", "reward_std")
    assert all(getattr(kept, name) == getattr(left_out, name) for name in figures)


def test_keeping_all_groups_changes_none_that_has_a_signal() -> None:
    groups = [item([1.0, 0.0, 0.25]), item([1.0, 0.0], seed=1, overrides=[{"set_advantage_to_zero": True}, {}])]
    assert advantages_of(batch_of(*groups, all_groups=True)) == advantages_of(batch_of(*groups))


def test_advantage_set_to_zero_still_counts_in_the_denominator() -> None:
    batch = batch_of(item([1.0, 0.0], overrides=[{"set_advantage_to_zero": True}, {}]))
    assert advantages_of(batch) == [0.0, pytest.approx(-0.5 / 0.5001)]


def test_given_advantages_are_used_as_they_are() -> None:
    group = item([1.0, 1.0])
    group["advantages"] = [[0.25] * len(group["tokens"][0]), [3.0]]
    assert advantages_of(batch_of(group)) == [0.25, 3.0]
    group["advantages"] = [[0.0], [0.0]]
    assert batch_of(group).zero_variance_groups == 1


def test_long_sequences_lose_their_end_and_are_counted() -> None:
    group = item([1.0, 0.0], prompt=4, longest=12, seed=3)
    lengths = [len(tokens) for tokens in group["tokens"]]
    assert lengths[0] != lengths[1]
    batch = batch_of(group, seq_len=max(lengths) - 1)
    assert batch.truncated_sequences == 1
    assert [len(sequence.tokens) for sequence in batch.sequences] == [
        min(length, max(lengths) - 1) for length in lengths
    ]
    assert batch_of(group, seq_len=4).sequences == []  # only prompts are left


@pytest.mark.parametrize("loss_mean", ["token", "sequence", "constant"])
def test_cut_answers_are_masked_but_stay_in_the_means(loss_mean: Any) -> None:
    group = item([1.0, 0.0, 0.25], finish_reasons=["stop", "length", "stop"])
    (item_of,) = as_records([group])

    def batch(**loss: Any) -> Batch:
        return make_batch([item_of], seq_len=64, policy_version=0, loss=LossSettings(loss_mean=loss_mean, **loss))

    whole, masked = batch(), batch(mask_truncated=True)
    assert advantages_of(masked) == [advantages_of(whole)[0], advantages_of(whole)[2]]
    assert [sequence.weight for sequence in masked.sequences] == [whole.sequences[0].weight, whole.sequences[2].weight]
    figures = ("loss_divisor", "completion_tokens", "reward_mean", "sampled_sequences", "cut_answers")
    assert all(getattr(masked, name) == getattr(whole, name) for name in figures)
    assert whole.cut_answers == 1


@pytest.mark.parametrize(("settings", "divisor"), [({"loss_mean": "sequence"}, 3), ({"algorithm": "dr_grpo"}, 3 * 64)])
def test_a_rollout_without_a_token_counts_in_the_mean_over_rollouts(settings: dict[str, Any], divisor: int) -> None:
    group = item([1.0, 0.0, 0.0])
    for rows in ("tokens", "masks", "inference_logprobs"):
        del group[rows][0][4:]
    (item_of,) = as_records([group])
    batch = make_batch([item_of], seq_len=64, policy_version=0, loss=LossSettings.model_validate(settings))
    assert (batch.rollouts, len(batch.sequences), batch.loss_divisor) == (3, 2, divisor)


def test_without_finish_reasons_nothing_is_known_to_be_cut() -> None:
    (item_of,) = as_records([item([1.0, 0.0])])
    batch = make_batch([item_of], seq_len=64, policy_version=0, loss=LossSettings(mask_truncated=True))
    assert (len(batch.sequences), batch.cut_answers) == (2, None)


def test_a_batch_of_cut_answers_alone_has_nothing_to_train_on() -> None:
    (item_of,) = as_records([item([1.0, 0.0], finish_reasons=["length"] * 2)])
    batch = make_batch([item_of], seq_len=64, policy_version=0, loss=LossSettings(algorithm="dapo"))
    assert (batch.sequences, batch.zero_variance_groups, batch.groups) == ([], 0, 1)


def test_failed_rollouts_are_counted_and_enter_no_mean() -> None:
    batch = batch_of(item([1.0, 0.0], failed={"timeout": 1, "scorer": 2}))
    assert (batch.failed_rollouts, batch.rollouts, batch.reward_mean) == (3, 2, 0.5)


def test_completion_tokens_count_all_that_was_sampled() -> None:
    """The denominator of the loss: groups of equal scores and what `seq_len` cuts off count too."""
    groups = [item([1.0, 1.0]), item([0.0, 1.0], seed=1)]
    sampled = sum(mask != -100 for group in groups for row in group["masks"] for mask in row)
    assert batch_of(*groups).completion_tokens == batch_of(*groups, seq_len=5).completion_tokens == sampled


def with_answers_of(*lengths: int, **fields: Any) -> dict[str, Any]:
    """A group with answers of so many tokens to a prompt of two."""
    tokens = [[1] * (2 + length) for length in lengths]
    return item([float(index) for index in range(len(lengths))]) | {
        "tokens": tokens,
        "masks": [[-100] * 2 + [1] * length for length in lengths],
        "inference_logprobs": [[1.0] * 2 + [-1.0] * length for length in lengths],
        **fields,
    }


def test_staleness_is_of_sampled_tokens_and_of_a_sequence_s_first_version_where_it_has_no_other() -> None:
    first = with_answers_of(1, 3, policy_versions=[[3, 4], [2, 2]])
    batch = batch_of(first, item([1.0, 0.0]), policy_version=5)
    assert (batch.staleness_mean, batch.staleness_max) == ((1 * 2 + 3 * 3) / 4, 3)
    assert batch_of(item([1.0, 0.0])).staleness_mean is None
    spans = with_answers_of(1, 4, policy_versions=[[1, 5], [1, 5]], version_spans=[[[0, 1], [2, 5]], [[0, 3], [4, 4]]])
    found = batch_of(spans, policy_version=5)  # no token that was sampled is of version 1
    assert (found.staleness_mean, found.staleness_max) == ((0 + 2 * 2 + 2 * 1) / 5, 2)


def test_a_first_token_is_never_trained_even_where_the_mask_names_it() -> None:
    """Nothing predicts it: a row of -1 would read another sequence's logits."""
    group = item([1.0, 0.0], seed=3)
    group["masks"] = [list(tokens) for tokens in group["tokens"]]
    group["inference_logprobs"] = [[-0.5] * len(tokens) for tokens in group["tokens"]]
    batch = batch_of(group)
    assert [sequence.trained.tolist() for sequence in batch.sequences] == [
        [False] + [True] * (len(tokens) - 1) for tokens in group["tokens"]
    ]
    group["tokens"], group["masks"], group["inference_logprobs"] = [[5], [6]], [[5], [6]], [[-0.5], [-0.5]]
    assert batch_of(group).sequences == []


@pytest.mark.parametrize("given", [None, [[0.5], [-2.0]]], ids=["of the group", "given"])
def test_the_staleness_weight_scales_all_advantages_of_the_group(given: list[list[float]] | None) -> None:
    plain = advantages_of(batch_of(item([1.0, 0.0], advantages=given)))
    weighted = item([1.0, 0.0], advantages=given, group_overrides={"staleness_weight": 0.25})
    assert advantages_of(batch_of(weighted)) == [value / 4 for value in plain]
    assert plain[0] != 0
    weighted["group_overrides"] = {"staleness_weight": None, "temperature": 0.5}
    assert advantages_of(batch_of(weighted)) == plain
    weighted["group_overrides"] = {"staleness_weight": 0.0}  # it teaches nothing any more
    found = batch_of(weighted)
    assert (found.sequences, found.zero_variance_groups) == ([], 1)


def test_tokens_of_known_versions_have_weights_of_their_own() -> None:
    group = with_answers_of(3, 3)
    (plain, _) = batch_of(group).sequences
    group["group_overrides"] = {"staleness_weight": 0.25, "staleness_limit": 1}
    (alike, _) = batch_of(group, policy_version=9).sequences
    group["version_spans"] = [[[0, 2], [3, 6], [4, 9]], [[0, 9]]]
    mixed, fresh = batch_of(group, policy_version=9).sequences
    assert (alike.advantages / plain.advantages).tolist() == [0.25] * 5
    assert (mixed.advantages / plain.advantages).tolist() == [0.25, 0.25, 0.25, 0.5, 1.0]
    assert (fresh.advantages / plain.advantages).tolist() == [-1.0] * 5


def test_one_group_s_staleness_weight_is_not_another_s() -> None:
    old, new = item([1.0, 0.0], group_overrides={"staleness_weight": 0.5}), item([1.0, 0.0], seed=1)
    found = advantages_of(batch_of(old, new))
    assert found[:2] == [value / 2 for value in found[2:]]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [(1.0, 0), (1.0, 0)]),
        ({"generation_params": {"top_p": 0.9}}, [(0.9, 0), (0.9, 0)]),
        ({"group_overrides": {"top_k": 20}}, [(1.0, 20), (1.0, 20)]),
        ({"group_overrides": {"top_p": 0.5}, "generation_params": {"top_p": 0.9}}, [(0.9, 0), (0.9, 0)]),
        ({"overrides": [{"top_p": 0.3}, {"top_k": 7}], "generation_params": {"top_k": 5}}, [(0.3, 5), (1.0, 7)]),
        ({"generation_params": {"top_k": -1, "top_p": 1}}, [(1.0, 0), (1.0, 0)]),
        ({"overrides": [None, {"top_p": 0.3}]}, [(1.0, 0), (0.3, 0)]),
    ],
)
def test_truncation_of_each_sequence_is_its_sampler_s(
    fields: dict[str, Any], expected: list[tuple[float, int]]
) -> None:
    batch = batch_of(item([1.0, 0.0], **fields))
    assert [(sequence.top_p, sequence.top_k) for sequence in batch.sequences] == expected


def test_long_sequences_of_groups_without_a_signal_are_counted() -> None:
    group = item([1.0, 1.0], seed=3)
    longest = max(len(tokens) for tokens in group["tokens"])
    assert batch_of(group, seq_len=longest - 1).truncated_sequences == 1


def test_the_arrays_of_a_sequence_are_its_own_and_are_cut_alike() -> None:
    group = item([1.0, 0.0], seed=3)
    group["ref_logprobs"] = [[-1.0 - at / 8 for at in range(len(tokens))] for tokens in group["tokens"]]
    group["advantages"] = [
        [index + at / 8 for at in range(len(tokens))] for index, tokens in enumerate(group["tokens"])
    ]
    group["overrides"] = [{"temperature": 0.5}, {"temperature": 2.0}]
    longest = max(len(tokens) for tokens in group["tokens"])
    for seq_len in (longest, longest - 1, 5):
        batch = batch_of(group, seq_len=seq_len)
        assert batch.truncated_sequences == sum(len(tokens) > seq_len for tokens in group["tokens"])
        for index, sequence in enumerate(batch.sequences):
            assert sequence.tokens.tolist() == group["tokens"][index][:seq_len]
            assert sequence.trained.tolist() == [mask != -100 for mask in group["masks"][index][:seq_len]]
            for found, name in (
                (sequence.sampler_logprobs, "inference_logprobs"),
                (sequence.reference_logprobs, "ref_logprobs"),
                (sequence.advantages, "advantages"),
            ):
                assert found is not None
                assert found.tolist() == np.array(group[name][index][:seq_len], np.float32).tolist()
            assert sequence.temperature == [0.5, 2.0][index]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 1.0),
        ({"group_overrides": {"temperature": 0.6}}, 0.6),
        ({"group_overrides": {"temperature": 0.6}, "generation_params": {"temperature": 0.8}}, 0.8),
        ({"generation_params": {"temperature": 0.8}, "overrides": [{"temperature": 1.2}, {}]}, 1.2),
        ({"generation_params": {"temperature": 0.8}, "overrides": [{}, {"temperature": 1.2}]}, 0.8),
        ({"generation_params": {"temperature": 0.0}}, 1.0),
        ({"generation_params": {"temperature": None}, "group_overrides": {"temperature": 0.5}}, 0.5),
    ],
)
def test_temperature_comes_from_the_most_specific_place(fields: dict[str, Any], expected: float) -> None:
    assert batch_of(item([1.0, 0.0], **fields)).sequences[0].temperature == expected


def broken(change: str) -> dict[str, Any]:
    group = item([1.0, 0.0], env_id=7)
    logprobs, masks, scores = group["inference_logprobs"], group["masks"], group["scores"]
    edits: dict[str, tuple[Any, Any, Any]] = {
        "no logprobs": (group, "inference_logprobs", None),
        "short logprobs": (logprobs, 1, logprobs[1][:-1]),
        "missing list": (group, "inference_logprobs", logprobs[:1]),
        "short mask": (masks, 1, masks[1][:-1]),
        "mask of ones": (masks, 1, [-100] * 4 + [0] * (len(group["tokens"][1]) - 4)),
        "filler logprob": (logprobs[1], -1, 1.0),
        "nan logprob": (logprobs[1], -1, float("nan")),
        "nan score": (scores, 1, float("nan")),
        "scores": (group, "scores", [1.0]),
        "advantages": (group, "advantages", [[1.0, 2.0], [1.0, 2.0]]),
    }
    holder, place, value = edits[change]
    holder[place] = value
    return group


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("no logprobs", "inference_logprobs: missing: the loss needs"),
        ("short logprobs", r"inference_logprobs\[1\]: \d+ entries for the \d+ tokens"),
        ("missing list", "inference_logprobs: 1 entries for 2 sequences"),
        ("short mask", r"masks\[1\]: \d+ entries for the \d+ tokens"),
        ("mask of ones", r"masks\[1\]\[4\]: 0 is neither -100 nor the token"),
        ("filler logprob", r"inference_logprobs\[1\]\[\d+\]: 1.0 is not the log-probability of a sampled token"),
        ("nan logprob", r"inference_logprobs\[1\]\[\d+\]: nan is not the log-probability"),
        ("nan score", r"scores\[1\]: nan is not a number from"),
        ("scores", "scores: 1 entries for 2 sequences"),
        ("advantages", r"advantages\[0\]: 2 entries for the \d+ tokens"),
    ],
)
def test_a_bad_group_is_left_out_with_the_reason_and_counts_nowhere(change: str, says: str) -> None:
    good = item([1.0, 0.0])
    batch, alone = batch_of(good, broken(change)), batch_of(good)
    assert list(batch.rejected) == [1]
    assert re.match(says, batch.rejected[1])
    figures = ("groups", "sampled_sequences", "completion_tokens", "reward_mean", "reward_std", "trained_tokens")
    assert [getattr(batch, name) for name in figures] == [getattr(alone, name) for name in figures]
    assert batch_of(broken(change)).groups == 0
