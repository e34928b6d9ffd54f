"""Turns a finished conversation into what the trainer needs: token ids, and a mask that is -100 where nothing is
trained.
"""

from collections.abc import Sequence
from typing import Any

from atroposlib.type_definitions import Message
from atroposlib.utils.tokenizers import chat_ids
from atroposlib.wire.batching import NOT_TRAINED

TRAINED_ROLES = frozenset({"assistant", "agent"})


def tokenize_for_trainer(
    tokenizer: Any,
    chat: Sequence[Message],
    include_messages: bool = False,
    train_on_all_assistant_turns: bool = False,
    finish_reason: str = "",
    first_turn: int = 0,
) -> dict[str, Any]:
    """`tokens` and `masks` of one length (and `messages` on request) for `chat`.

    The mask shows the last message's tokens, or those of all assistant and agent turns from `first_turn` on, as far as
    the template keeps them (some drop the thoughts of earlier turns). A reply that was cut off
    (`finish_reason` "length") ends without the end-of-sequence token that the template adds. Raises ValueError for
    an empty chat.
    """
    if not chat:
        raise ValueError("tokenize_for_trainer got an empty chat; it needs at least one message")
    tokens = chat_ids(tokenizer, chat)
    last = len(chat) - 1
    trained = [turn for turn in range(first_turn, len(chat)) if chat[turn]["role"] in TRAINED_ROLES]
    masks = [NOT_TRAINED] * len(tokens)
    for turn in trained if train_on_all_assistant_turns else [last]:
        start = 0  # of what the message says itself, behind its role header
        if turn == 0 and chat[0]["role"] in TRAINED_ROLES:
            start = _behind_header(tokenizer, tokens)
        elif turn > 0:
            before = chat_ids(tokenizer, chat[:turn], add_generation_prompt=chat[turn]["role"] in TRAINED_ROLES)
            start = _shared_length(before, tokens)
        end = len(tokens) if turn == last else _end(chat_ids(tokenizer, chat[: turn + 1]), start, tokens)
        masks[start:end] = tokens[start:end]
    if finish_reason == "length":
        tokens, masks = _without_ending(tokenizer, tokens, masks)
    result: dict[str, object] = {"tokens": tokens, "masks": masks}
    return result | {"messages": chat} if include_messages else result


def _behind_header(tokenizer: Any, tokens: list[int]) -> int:
    """Return where a first message of the model's begins. Nothing that comes before it tells, so its header, which may
    stand behind the template's own system prompt, is that of a reply to another message.
    """
    asked = [{"role": "user", "content": "?"}]
    header = chat_ids(tokenizer, asked, add_generation_prompt=True)[len(chat_ids(tokenizer, asked)) :]
    places = ((_shared_length(header, tokens[at : at + len(header)]), -at) for at in range(len(tokens)))
    length, before = max(places, default=(0, 0))
    return length - before if length else 0


def _end(until: list[int], start: int, tokens: list[int]) -> int:
    """Return where the turn that begins at `start` ends, which is the last of `until`. Where others follow it, the
    template may have dropped its beginning: then the longest end of it that stands at `start` counts.
    """
    shared = _shared_length(until, tokens)
    if shared == len(until):
        return shared
    left = (begin for begin in range(start, len(until)) if until[begin:] == tokens[start : start + len(until) - begin])
    return max(shared, next((start + len(until) - begin for begin in left), start))


def _shared_length(prefix: list[int], tokens: list[int]) -> int:
    """Length of the common start: a template may render a turn differently once others follow it."""
    return next(
        (at for at, (left, right) in enumerate(zip(prefix, tokens, strict=False)) if left != right),
        min(len(prefix), len(tokens)),
    )


def _without_ending(tokenizer: Any, tokens: list[int], masks: list[int]) -> tuple[list[int], list[int]]:
    """Without the last end-of-sequence token and the whitespace that templates put after it."""
    end = len(tokens)
    while end and tokens[end - 1] != tokenizer.eos_token_id and not tokenizer.decode([tokens[end - 1]]).strip():
        end -= 1
    if end and tokens[end - 1] == tokenizer.eos_token_id:
        return tokens[: end - 1], masks[: end - 1]
    return tokens, masks
