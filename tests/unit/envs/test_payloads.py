from typing import Any

import msgspec
import pytest
from msgspec import to_builtins

from atroposlib.envs.payloads import completion_lengths, defect, group_items, rejection, wire_form
from atroposlib.groups import scores_differ
from atroposlib.wire.batching import GroupRequirements


def item(score: float = 1.0, **fields: Any) -> dict[str, Any]:
    return {"tokens": [1, 2, 3], "masks": [-100, 2, 3], "scores": score} | fields


def group(count: int = 2, **fields: Any) -> dict[str, Any]:
    return dict(group_items([item(float(index)) for index in range(count)])) | fields


def reject(candidate: dict[str, Any], **limits: Any) -> str | None:
    defaults: dict[str, Any] = dict(group_size=2, max_token_len=100, scores_must_differ=True)
    rejected = rejection(candidate, **defaults | limits)
    return None if rejected is None else rejected.reason


def test_optional_fields_are_lists_when_every_item_has_them_and_null_otherwise() -> None:
    grouped = group_items(
        [
            item(inference_logprobs=[1.0, -1.0, -2.0], advantages=[0.1] * 3),
            item(0.0, inference_logprobs=[1.0, -3.0, -4.0]),
        ]
    )
    assert grouped["inference_logprobs"] == [[1.0, -1.0, -2.0], [1.0, -3.0, -4.0]]
    assert grouped["advantages"] is None
    assert grouped["group_overrides"] is None
    assert grouped["overrides"] is None
    assert grouped["scores"] == [1.0, 0.0]


def test_generation_parameters_are_the_groups_when_alike_else_temperatures_become_overrides() -> None:
    alike = group_items([item(generation_params={"temperature": 0.7})] * 2)
    assert alike["generation_params"] == {"temperature": 0.7}
    assert alike["overrides"] is None
    first, second = {"temperature": 0.7, "top_p": 0.9, "n": 4}, {"top_p": 1.0}
    mixed = group_items([item(generation_params=first), item(generation_params=second, overrides={"sft": True})])
    assert mixed["generation_params"] is None
    assert mixed["overrides"] == [{"temperature": 0.7, "top_p": 0.9}, {"sft": True, "top_p": 1.0}]


def test_group_overrides_are_merged() -> None:
    assert group_items([item(group_overrides={"a": 1}), item(group_overrides={"b": 2})])["group_overrides"] == {
        "a": 1,
        "b": 2,
    }


def test_good_group_is_accepted_also_with_null_overrides() -> None:
    assert reject(group(group_overrides=None)) is None


@pytest.mark.parametrize(
    ("candidate", "reason"),
    [
        ({"tokens": [[1]], "scores": [1.0], "masks": None}, "it has no masks"),
        (group(scores=[1.0, float("nan")]), "scores[1]: nan is not a finite number"),
        (group(scores=[None, 1.0]), "scores[0]: None is not a finite number"),
        (group(scores=["right", 1.0]), "scores[0]: 'right' is not a finite number"),
        (group(scores=[10**400, 1.0]), "scores[0]: an integer of more than 256 bits is not a finite number"),
        (group(scores=iter([1.0, 0.0])), "_iterator object at "),
        (group(scores=[1.0]), "1 scores for 2 sequences"),
        (group(masks=[[1, 2, 3], [1, 2]]), "sequence 1: 2 masks for 3 tokens"),
        (group(inference_logprobs=[[1.0], [1.0, -1.0, -2.0]]), "sequence 0: 1 inference_logprobs for 3 tokens"),
        (group(policy_versions=[[0, 0]]), "1 policy_versions for 2 sequences"),
        (group(version_spans=[[[0, 0]]]), "1 version_spans for 2 sequences"),
    ],
)
def test_malformed_group_is_named_with_its_figures(candidate: dict[str, Any], reason: str) -> None:
    assert reason in (defect(candidate, GroupRequirements()) or "")


@pytest.mark.parametrize(
    ("candidate", "reason"),
    [(group(3), "3 rollouts instead of 2 (group_size)"), (group(scores=[1.0, 1.0]), "all scores are 1")],
)
def test_whole_group_of_no_use_is_rejected(candidate: dict[str, Any], reason: str) -> None:
    assert defect(candidate, GroupRequirements()) is None
    assert reason in (reject(candidate) or "")


def test_an_empty_list_of_log_probabilities_is_none() -> None:
    assert defect(group(inference_logprobs=[]), GroupRequirements()) is None
    assert defect(group(scores=[]), GroupRequirements()) == "0 scores for 2 sequences"


def test_a_sequence_as_long_as_the_limit_is_sent_and_the_limit_can_be_off() -> None:
    assert max(len(tokens) for tokens in group()["tokens"]) == 3
    assert reject(group(), max_token_len=3) is None
    assert "a sequence of 3 tokens exceeds the trainer's limit of 2" in (reject(group(), max_token_len=2) or "")
    assert reject(group(), max_token_len=-1) is None


@pytest.mark.parametrize(
    ("scores", "differ"),
    [
        ([0.1 + 0.2, 0.3], False),
        ([0.1 + 0.2 - 0.3, 0.0], False),
        ([1e6 * (0.1 + 0.2), 3e5], False),
        ([1, True, 1.0], False),
        ([1.0, 1.00001], True),
        ([0.0, 1e-6], True),
        ([-1e9, 1e9], True),
    ],
)
def test_scores_that_only_rounding_tells_apart_are_equal(scores: list[float], differ: bool) -> None:
    assert scores_differ(scores) is differ
    assert (reject(group(len(scores), scores=scores), group_size=len(scores)) is None) is differ


def test_equal_scores_pass_when_allowed_or_when_there_is_only_one() -> None:
    assert reject(group(scores=[0.0, 0.0]), scores_must_differ=False) is None
    assert reject(group(1), group_size=1) is None


def test_scores_that_differ_by_rounding_alone_are_equal() -> None:
    assert reject(group(scores=[0.1 + 0.2, 0.3])) == "all scores are 0.3"
    assert reject(group(scores=[1e-9, 0.0])) is None


def test_group_override_changes_the_expected_size() -> None:
    assert reject(group(3, group_overrides={"group_size": 3})) is None


def test_wire_form_has_known_set_fields_and_messages_only_on_request() -> None:
    sent = wire_form(group(messages=[[], []], unknown=1), env_id=3, include_messages=False)
    expected = {"tokens": [[1, 2, 3]] * 2, "masks": [[-100, 2, 3]] * 2, "scores": [0.0, 1.0], "env_id": 3}
    assert to_builtins(sent) == expected
    assert wire_form(group(messages=[[], []]), 3, include_messages=True).messages == [[], []]


def test_messages_with_half_a_surrogate_pair_are_sent_as_json_writes_it() -> None:
    call = {"function": {"name": "f", "arguments": "\ud800"}}
    said = [{"role": "assistant", "content": [{"text": "a\ud800é"}], "tool_calls": [call], "\udfff": None}]
    sent = wire_form(group(messages=[said, said]), 3, include_messages=True)
    (message,) = (msgspec.json.decode(msgspec.json.encode(sent.messages)) or [])[0]
    assert message == {
        "role": "assistant",
        "content": [{"text": "a\\ud800é"}],
        "tool_calls": [{"function": {"name": "f", "arguments": "\\ud800"}}],
        "\\udfff": None,
    }


def test_completion_lengths_count_sampled_tokens() -> None:
    assert completion_lengths(group()) == [2, 2]
