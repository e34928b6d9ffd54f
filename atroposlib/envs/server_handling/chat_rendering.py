"""Conversations as prompt text, by the tokenizer's own chat template."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from atroposlib.utils.tokenizers import Tokenizer

# Templates of reasoning models drop <think> blocks from earlier turns; under these private-use names they see none.
_TAG = re.compile("<(/?think)>")
_STAND_IN = re.compile("\ue000(/?think)\ue001")


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    preserve_think_blocks: bool = False,
    tools: Sequence[Any] | None = None,
    template_arguments: Mapping[str, Any] | None = None,
) -> str:
    """The prompt for the next reply to `messages`; if the last one is the assistant's, for the rest of that one.

    `preserve_think_blocks` keeps the thoughts of earlier turns, which the template may otherwise drop. Raises
    ValueError for an empty conversation.
    """
    if not messages:
        raise ValueError("a chat completion needs at least one message")
    shown = [_hide_think_tags(message) for message in messages] if preserve_think_blocks else list(messages)
    continued = messages[-1]["role"] == "assistant"
    arguments: dict[str, Any] = dict(template_arguments or {})
    if continued:
        arguments["continue_final_message"] = True
    if tools:
        arguments["tools"] = list(tools)
    text = tokenizer.apply_chat_template(shown, tokenize=False, add_generation_prompt=not continued, **arguments)
    return _STAND_IN.sub(r"<\1>", text) if preserve_think_blocks else text


def _hide_think_tags(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    if message["role"] != "assistant" or not isinstance(content, str):
        return message
    return {**message, "content": _TAG.sub("\ue000\\1\ue001", content)}
