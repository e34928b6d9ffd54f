"""Conversations as prompt text, by the tokenizer's own chat template."""

import json
import re
from collections.abc import Mapping, Sequence

from pydantic import BaseModel

from atroposlib.logs import get_logger
from atroposlib.utils.tokenizers import Tokenizer

log = get_logger(__name__)

# Templates of reasoning models drop <think> blocks from earlier turns; under these private-use names they see none.
_TAG = re.compile("<(/?think)>")
_STAND_IN = re.compile("\ue000(/?think)\ue001")
# What `apply_chat_template` takes for itself: an agent's own template could run for ever, or make text without end.
NOT_FOR_TEMPLATES = frozenset(
    """
    conversation messages chat_template tools add_generation_prompt continue_final_message tokenize padding truncation
    max_length return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs
""".split()
)
TEXT_PARTS = ("text", "input_text", "output_text", "refusal")  # types of a message's parts, in OpenAI's two APIs
# As the chat templates of Hermes and Qwen say it.
TOOLS_PROMPT = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[object],
    *,
    preserve_think_blocks: bool = False,
    tools: Sequence[object] | None = None,
    template_arguments: Mapping[str, object] | None = None,
) -> str:
    """The prompt for the next reply to `messages`; if the last one is the assistant's, for the rest of that one.

    `messages` are in OpenAI's form: mappings or the SDK's objects, with a text or a list of text parts as content.
    `preserve_think_blocks` keeps the thoughts of earlier turns, which the template may otherwise drop. Where the
    template shows no `tools`, the system prompt describes them. Raises ValueError for an empty conversation, for
    content that is not text, or that the template cannot show, and for `template_arguments` that are not its own.
    """
    if refused := sorted(NOT_FOR_TEMPLATES & {*(template_arguments or {})}):
        raise ValueError(f"chat_template_kwargs: {refused[0]} is no argument of a chat template: leave it out")
    if not messages:
        raise ValueError("a chat completion needs at least one message")
    shown = [plain_message(message, index) for index, message in enumerate(messages)]
    if preserve_think_blocks:
        shown = [_hide_think_tags(message) for message in shown]
    continued = shown[-1]["role"] == "assistant"
    arguments: dict[str, object] = dict(template_arguments or {})
    if continued:
        arguments["continue_final_message"] = True

    def rendered(conversation: Sequence[Mapping[str, object]], **more: object) -> str:
        try:
            return str(
                tokenizer.apply_chat_template(
                    conversation, tokenize=False, add_generation_prompt=not continued, **arguments, **more
                )
            )
        except TypeError as error:  # the template computes with what is no text
            raise ValueError(
                f"the chat template cannot show this conversation ({error}): correct its fields"
            ) from error

    text = rendered(shown, tools=list(tools)) if tools else rendered(shown)
    if tools and text == rendered(shown):
        log.debug("The chat template shows no tools: the system prompt describes them")
        text = rendered(_with_described(tools, shown))
    return _STAND_IN.sub(r"<\1>", text) if preserve_think_blocks else text


def plain_message(message: object, index: int = 0) -> dict[str, object]:
    """`message` as a mapping whose content is text, as vLLM's chat route gives it to a template of texts.

    Raises ValueError for a part that is not text; `index` is the message's place in the conversation.
    """
    if isinstance(message, BaseModel):
        message = message.model_dump(exclude_none=True)
    if not isinstance(message, Mapping) or "role" not in message:
        raise ValueError(f"messages[{index}] is {message!r:.80}: expected a mapping with role and content")
    content = message.get("content")
    if content is None or isinstance(content, str):
        return dict(message)
    if isinstance(content, Mapping) or not isinstance(content, Sequence):
        raise ValueError(f"messages[{index}].content is {content!r:.80}: expected text or a list of text parts")
    return {**message, "content": "\n".join(_part_text(part, index) for part in content)}


def _part_text(part: object, index: int) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    text = (part.get("text", part.get("refusal"))) if isinstance(part, Mapping) else None
    if kind not in TEXT_PARTS or not isinstance(text, str):
        raise ValueError(
            f"messages[{index}].content has a part of type {kind!r}: only text can be sampled from here; leave it out"
        )
    return text


def _with_described(tools: Sequence[object], messages: Sequence[Mapping[str, object]]) -> list[Mapping[str, object]]:
    """`messages` with `tools` in the system prompt, in the form of Hermes and Qwen."""
    described = TOOLS_PROMPT.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if messages[0]["role"] != "system":
        return [{"role": "system", "content": described}, *messages]
    return [{**messages[0], "content": f"{messages[0]['content']}\n\n{described}"}, *messages[1:]]


def _hide_think_tags(message: dict[str, object]) -> dict[str, object]:
    content = message.get("content")
    if message["role"] != "assistant" or not isinstance(content, str):
        return message
    return {**message, "content": _TAG.sub("\ue000\\1\ue001", content)}
