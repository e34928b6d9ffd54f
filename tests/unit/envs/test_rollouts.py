"""Rollouts of several sequences: from a managed server's nodes to what the trainer trains on."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atroposlib.envs.files.html_report import group_html
from atroposlib.envs.payloads import completion_lengths, defect, rejection, wire_form
from atroposlib.envs.rollouts import Rollout, rollout_group
from atroposlib.envs.server_handling.managed_server import ManagedServer
from atroposlib.envs.server_handling.sequences.sequence_book import SequenceNode, trained_once
from atroposlib.envs.server_handling.server_harness import ServerHarness
from atroposlib.groups import size_of
from atroposlib.testing.tiny_tokenizer import make_tiny_tokenizer
from atroposlib.wire.batching import NO_LOGPROB, NOT_TRAINED, GroupRequirements, ScoredData
from example_trainer.data.batching import make_batch
from example_trainer.settings.loss import LossSettings

TOKENIZER = make_tiny_tokenizer()


def node(*sampled: int, version: int | None = 3) -> SequenceNode:
    """A prompt of one token and what was sampled after it."""
    return SequenceNode(
        full_text="",
        tokens=[9, *sampled],
        masked_tokens=[NOT_TRAINED, *sampled],
        logprobs=[1.0, *(-token / 10 for token in sampled)],
        metadata={"policy_versions": version and [version, version]},
    )


def rollout(*sequences: SequenceNode) -> Rollout:
    return Rollout("", [{"role": "user", "content": "?"}], sequences)


def test_a_group_says_which_sequences_are_one_rollout() -> None:
    group = rollout_group([rollout(node(1), node(2, 3)), rollout(node(4))], [1.0, 0.0])
    assert group["tokens"] == [[9, 1], [9, 2, 3], [9, 4]]
    assert group["rollouts"] == [0, 0, 1]
    assert group["scores"] == [1.0, 1.0, 0.0]
    assert group["policy_versions"] == [[3, 3]] * 3
    assert len(group["messages"] or []) == 3
    assert defect(group, GroupRequirements(trainable_only=True)) is None
    assert size_of(group) == 2
    assert completion_lengths(group) == [3, 1]
    assert rejection(group, group_size=2, max_token_len=3, scores_must_differ=True) is None


def test_rollouts_of_one_sequence_each_are_a_group_as_ever() -> None:
    group = rollout_group([rollout(node(1)), rollout(node(2, version=None))], [1.0, 0.0])
    assert "rollouts" not in group
    assert group["policy_versions"] is None
    assert b"rollouts" not in msgspec.json.encode(wire_form(group, 0, False))


def test_equal_scores_are_those_of_rollouts() -> None:
    group = rollout_group([rollout(node(1), node(2))], [1.0])
    assert rejection(group, group_size=1, max_token_len=-1, scores_must_differ=True) is None
    wrong = rejection(group, group_size=2, max_token_len=-1, scores_must_differ=True)
    assert wrong is not None
    assert wrong.reason == "1 rollouts instead of 2 (group_size)"


def test_the_trainer_gives_each_sequence_its_rollouts_advantage() -> None:
    group = rollout_group([rollout(node(1), node(2, 3)), rollout(node(4))], [1.0, 0.0])
    group["generation_params"] = {"temperature": 1.0}
    item = msgspec.json.decode(msgspec.json.encode(wire_form(group, 0, False)), type=ScoredData)
    batch = make_batch([item], seq_len=8, policy_version=3, loss=LossSettings(advantage="group_mean"))
    assert [(each.rollout, each.advantages[-1]) for each in batch.sequences] == [(0, 0.5), (0, 0.5), (1, -0.5)]
    assert (batch.rollouts, batch.sampled_sequences, batch.completion_tokens) == (2, 3, 4)


@pytest.mark.parametrize("track_tree", [False, True])
async def test_branches_of_one_rollout_train_what_they_share_once(track_tree: bool) -> None:
    harness = ServerHarness()
    first, branches = TOKENIZER.encode("ab"), [TOKENIZER.encode("c"), TOKENIZER.encode("d")]
    harness.set_tokens_and_logprobs_response("Q", TOKENIZER.encode("Q"), [first], [[-0.5, -0.25]], ["stop"])
    harness.set_tokens_and_logprobs_response(
        "Qab.", TOKENIZER.encode("Qab."), branches, [[-1.0], [-2.0]], ["stop", "stop"]
    )
    managed = ManagedServer(harness, TOKENIZER, track_tree=track_tree)
    await managed.completion(prompt="Q")
    await managed.completion(prompt="Qab.", n=2)
    once = trained_once(managed.current_nodes)
    sampled = [TOKENIZER.decode([token for token in each.masked_tokens if token != NOT_TRAINED]) for each in once]
    assert sampled == (["ab", "c", "d"] if track_tree else ["abc", "d"])
    for each in once:
        assert len(each.tokens) == len(each.masked_tokens) == len(each.logprobs)
        assert [value == 1.0 for value in each.logprobs] == [token == NOT_TRAINED for token in each.masked_tokens]
    assert "".join(TOKENIZER.decode(each.tokens) for each in once).count("Qab.") == 2


def test_the_same_answer_sampled_twice_is_trained_twice() -> None:
    twice = [node(1, 2), node(1, 2)]
    assert trained_once(twice) == twice


@st.composite
def several_nodes(draw: st.DrawFn) -> list[SequenceNode]:
    """Sequences over two tokens, so that many share what they carry on."""
    nodes = []
    for tokens in draw(st.lists(st.lists(st.integers(0, 1), max_size=6), max_size=6)):
        trained = draw(st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens)))
        masks = [token if is_trained else NOT_TRAINED for token, is_trained in zip(tokens, trained, strict=True)]
        logprobs = [-0.5 if is_trained else NO_LOGPROB for is_trained in trained]
        each = SequenceNode(full_text="", tokens=tokens, masked_tokens=masks, logprobs=logprobs)
        each._carried = draw(st.integers(0, len(tokens)))
        nodes.append(each)
    return nodes


@given(several_nodes())
def test_a_carried_token_is_context_where_an_earlier_sequence_trains_it(nodes: list[SequenceNode]) -> None:
    for index, (before, after) in enumerate(zip(nodes, trained_once(nodes), strict=True)):
        is_context = [
            place < before._carried
            and any(
                other.tokens[: place + 1] == before.tokens[: place + 1] and other.masked_tokens[place] != NOT_TRAINED
                for other in nodes[:index]
            )
            for place in range(len(before.tokens))
        ]
        for values, own, nothing in (
            (after.masked_tokens, before.masked_tokens, NOT_TRAINED),
            (after.logprobs, before.logprobs, NO_LOGPROB),
        ):
            assert values == [nothing if is_so else value for is_so, value in zip(is_context, own, strict=True)]


def test_many_branches_of_one_rollout_look_at_each_token_a_few_times() -> None:
    class Tokens(list[int]):
        looks = 0

        def __getitem__(self, key: Any) -> Any:
            Tokens.looks += 1
            return super().__getitem__(key)

        def __iter__(self) -> Iterator[int]:
            Tokens.looks += len(self)
            return super().__iter__()

    nodes = [node(*range(50)) for _ in range(20)]
    for each in nodes:
        each.tokens, each._carried = Tokens(each.tokens), 51
    once = trained_once(nodes)
    assert [sum(mask != NOT_TRAINED for mask in each.masked_tokens) for each in once] == [50, *[0] * 19]
    assert Tokens.looks <= 2 * 20 * 51


def test_a_page_of_groups_shows_each_rollout_once() -> None:
    messages = [[{"role": "assistant", "content": text}] for text in ("first", "second", "alone")]
    page = group_html({"scores": [1.0, 1.0, 0.0], "messages": messages, "rollouts": [0, 0, 1], "images": None}, 7)
    assert "Group 7: 2 samples, mean score 0.500" in page
    assert "second" in page
    assert "first" not in page
