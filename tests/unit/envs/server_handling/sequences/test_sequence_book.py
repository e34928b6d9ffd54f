"""Extending a sequence says exactly what the prompt says, whatever the tokenizer merges at the seams."""

from hypothesis import given
from hypothesis import strategies as st

from atroposlib.envs.server_handling.sequences.sequence_book import (
    SequenceKeeper,
    SequenceNode,
    extended_prompt,
    fresh_prompt,
)
from atroposlib.testing.tiny_tokenizer import make_tiny_tokenizer
from atroposlib.wire.batching import NOT_TRAINED

TOKENIZER = make_tiny_tokenizer([("a", "b"), ("b", "a"), ("ab", "ab"), ("a", "ab"), ("b", "b")])
END = TOKENIZER.eos_token_id
LETTERS = st.text("abc", max_size=6)


def node_of(prompt: SequenceNode, sampled: list[int]) -> SequenceNode:
    return SequenceNode(
        full_text=prompt.full_text + TOKENIZER.decode(sampled, skip_special_tokens=True),
        tokens=prompt.tokens + sampled,
        masked_tokens=prompt.masked_tokens + sampled,
        logprobs=prompt.logprobs + [-0.5] * len(sampled),
        metadata={"policy_versions": [1, 2], "version_spans": [[0, 1], [len(prompt.tokens) + len(sampled) - 1, 2]]},
    )


@given(
    start=st.text("abc", min_size=1, max_size=6),
    turns=st.lists(
        # A model samples at least one token: letters, or the end of its turn, or both.
        st.tuples(LETTERS, st.booleans(), st.booleans(), LETTERS).filter(lambda turn: bool(turn[0]) or turn[1]),
        min_size=1,
        max_size=4,
    ),
)
def test_the_ids_say_what_the_prompt_says_and_sampled_ones_are_carried(
    start: str, turns: list[tuple[str, bool, bool, str]]
) -> None:
    prompt = fresh_prompt(start, TOKENIZER, templated=True)
    kept: list[int] = []
    for reply, ended, written, added in turns:
        # One token a letter: never what the tokenizer itself would make of the text.
        sampled = [token for letter in reply for token in TOKENIZER.encode(letter)] + [END] * ended
        node = node_of(prompt, sampled)
        text = node.full_text + "<|im_end|>" * written + added
        prompt = extended_prompt(text, node, TOKENIZER)
        kept += sampled if written or not ended else sampled[:-1]
        assert TOKENIZER.decode(prompt.tokens) == text
        assert [token for token in prompt.masked_tokens if token != NOT_TRAINED] == kept
        assert len(prompt.tokens) == len(prompt.masked_tokens) == len(prompt.logprobs)
        last = [len(node.tokens) - 1, 2]  # goes with the token
        spans = [[0, 1], last] if written or not ended else [[0, 1]]
        assert prompt.metadata == {"policy_versions": [1, 2], "version_spans": spans}


def _leaf(text: str) -> SequenceNode:
    return SequenceNode(full_text=text, tokens=[], masked_tokens=[], logprobs=[])


def test_a_list_keeps_the_order_of_calls_whichever_ends_first() -> None:
    book = SequenceKeeper(track_tree=False)
    first, second = book.open_call(), book.open_call()
    book.record(second, None, [_leaf("2a"), _leaf("2b")])
    book.record(first, None, [_leaf("1a"), _leaf("1b")])
    assert [node.full_text for node in book.current_nodes] == ["1a", "1b", "2a", "2b"]


def test_an_extension_takes_its_parents_place_even_beside_an_equal_node() -> None:
    book = SequenceKeeper(track_tree=False)
    twins = [_leaf("same"), _leaf("same")]
    book.record(book.open_call(), None, twins)
    book.record(book.open_call(), twins[1], [_leaf("same and more")])
    assert [node.full_text for node in book.current_nodes] == ["same", "same and more"]


def test_the_longest_prefix_is_found_in_both_books() -> None:
    for book in (SequenceKeeper(track_tree=False), SequenceKeeper(track_tree=True)):
        book.record(book.open_call(), None, [_leaf("Pans1"), _leaf("Pans10"), _leaf("Q")])
        found = book.longest_prefix("Pans10 and more")
        assert found is not None
        assert found.full_text == "Pans10"
        assert book.longest_prefix("Pan") is None


def test_a_tree_keeps_the_prefix_and_each_text_once() -> None:
    book = SequenceKeeper(track_tree=True)
    root = _leaf("root")
    book.record(book.open_call(), None, [root])
    book.record(book.open_call(), root, [_leaf("root a"), _leaf("root b"), _leaf("root b")])
    again = _leaf("root a")
    book.record(book.open_call(), root, [again])
    state = book.get_state()
    assert sorted(state["sequences"]) == ["root", "root a", "root b"]
    assert state["sequences"] == state["tree"]
    assert state["sequences"]["root a"] is again
    assert len(book.current_nodes) == 3
