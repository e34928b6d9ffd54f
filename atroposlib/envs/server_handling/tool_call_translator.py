"""Tool calls between the text that a model writes and OpenAI's `tool_calls`; needs no vLLM.

    reply text               ──parse_model_output─────────────▶ content, tool_calls
    messages with tool_calls ──convert_messages_for_template──▶ text

The text that a call was parsed from is kept by the call's id, so that the conversation is rendered back to exactly
what the model wrote, and a ManagedServer recognises it as the continuation of what it sampled.
"""

import json
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from openai.types.chat import ChatCompletionMessageFunctionToolCall
from openai.types.chat.chat_completion_message_function_tool_call import Function

from atroposlib.flags import nearest
from atroposlib.type_definitions import Messages
from atroposlib.wire.typed import encodable

# Environments ask for this before they parse tool calls; here it takes no vLLM.
VLLM_AVAILABLE = True

# (content before the calls, [(name, arguments)])
Parsed = tuple[str, list[tuple[str, Any]]]

HERMES_FORM = ("hermes", "qwen", "qwen25")  # parsers of the form between these tags
OPENING, CLOSING = "<tool_call>", "</tool_call>"


class _Unlocated(str):
    """A text in which a JSONDecodeError counts no lines: it would count those before each tag that opens no call."""

    def count(self, *_: object) -> int:
        return 0

    def rfind(self, *_: object) -> int:
        return -1


def parse_hermes(text: str) -> Parsed:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes and Qwen write it; the last may be left
    open. JSON is read before tags, so that a call may have them in its arguments.
    """
    return text.partition(OPENING)[0], [call for body, _ in hermes_bodies(text) for call in body]


def unread_calls(text: str) -> int:
    """Count the marked calls in `text` that hold no readable call: one that is cut, or not JSON."""
    return sum(not body for body, _ in hermes_bodies(text))


def hermes_bodies(text: str) -> Iterator[tuple[list[tuple[str, object]], int]]:
    """The calls behind each opening tag of `text`, and where they end; what stands inside of a call's JSON opens
    none.
    """
    text, position, closed = _Unlocated(text), 0, 0
    while (start := text.find(OPENING, position)) >= 0:
        start += len(OPENING)
        values, position = _json_values(text, start)
        calls = [call for value in values for call in _named(value)]
        if not calls:
            if 0 <= closed < start:
                closed = text.find(CLOSING, start)
            position = max(position, closed)
        yield calls, position


def parse_llama_json(text: str) -> Parsed:
    """Llama 3: the whole reply is `{"name": ..., "parameters": {...}}`, or several with `;` between, perhaps after
    <|python_tag|>.
    """
    before, tag, after = text.rpartition("<|python_tag|>")
    bodies = (after if tag else text).strip()
    if not bodies.startswith("{"):
        return text, []
    values, _ = _json_values(bodies)
    return before.strip(), [call for value in values for call in _named(value, needs_arguments=not tag)]


def parse_mistral(text: str) -> Parsed:
    """`[TOOL_CALLS] [{"name": ..., "arguments": {...}}]`."""
    before, tag, after = text.partition("[TOOL_CALLS]")
    return (before.strip(), _calls(after)) if tag else (text, [])


PARSERS: dict[str, Callable[[str], Parsed]] = {
    "hermes": parse_hermes,
    "qwen": parse_hermes,
    "qwen25": parse_hermes,
    "llama3_json": parse_llama_json,
    "llama4_json": parse_llama_json,
    "mistral": parse_mistral,
}


def _calls(body: str) -> list[tuple[str, object]]:
    return [call for value in _json_values(body)[0] for call in _named(value)]


def _json_values(text: str, position: int = 0) -> tuple[list[object], int]:
    """The JSON values that stand in `text` one after the other from `position`, and where they end."""
    decoder, values = json.JSONDecoder(strict=False), []
    end = position
    while (position := _past_blanks(text, position)) < len(text):
        try:
            value, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):  # no JSON, a number of more than 4300 digits, or nested too deep
            break
        values += value if isinstance(value, list) else [value]
        end = position
    return values, end


def _past_blanks(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \n\t\r;":
        position += 1
    return position


def _named(value: object, needs_arguments: bool = False) -> Iterator[tuple[str, object]]:
    """The call that a JSON value says; with `needs_arguments` an object with a name alone is data, and no call."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return
    keys = [key for key in ("arguments", "parameters") if key in value]
    if keys or not needs_arguments:
        given = value[keys[0]] if keys else {}
        yield value["name"], {} if given is None else given


class CalledFunction(Function):
    """OpenAI's object; environments of the ancestor read it as a dict."""

    def __getitem__(self, key: str) -> object:
        return getattr(self, key)


class ToolCall(ChatCompletionMessageFunctionToolCall):
    """OpenAI's object; environments of the ancestor read it as a dict."""

    function: CalledFunction

    def __getitem__(self, key: str) -> object:
        return getattr(self, key)


class ToolCallTranslator:
    """One conversation's translator. Raises ValueError for a parser that is not known."""

    def __init__(self, tokenizer: Any, parser_name: str = "hermes") -> None:
        if parser_name not in PARSERS:
            raise ValueError(
                f"tool_parser '{parser_name}' is not known{nearest(parser_name, list(PARSERS))}; choose one of:"
                f" {', '.join(PARSERS)}"
            )
        self.tokenizer = tokenizer
        self.parser_name = parser_name
        self.parser = PARSERS[parser_name]
        self.call_id_to_raw_text: dict[str, str] = {}

    def parse_model_output(
        self, raw_text: str, tool_choice: str | None = None, tools: Sequence[object] | None = None
    ) -> tuple[str | None, list[ToolCall] | None, str]:
        """(content, tool calls or None, "tool_calls" or "stop"); without `tools`, or under tool_choice "none", the
        text as it is.
        """
        if tool_choice == "none" or not tools:
            return raw_text, None, "stop"
        return self.reply_of(raw_text, self.parser(raw_text))

    def reply_of(self, raw_text: str, parsed: Parsed) -> tuple[str | None, list[ToolCall] | None, str]:
        """Build the reply as `parse_model_output` does, for a text that is parsed already."""
        content, parsed_calls = parsed
        if not parsed_calls:
            return raw_text, None, "stop"
        try:
            calls = [
                ToolCall(
                    id=f"call_{uuid.uuid4().hex[:24]}",
                    type="function",
                    function=CalledFunction(
                        name=encodable(name),
                        arguments=encodable(given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)),
                    ),
                )
                for name, given in parsed_calls
            ]
        except RecursionError:  # nested just below what could be read
            return raw_text, None, "stop"
        self.call_id_to_raw_text.update({call.id: raw_text for call in calls})
        return content.strip() or None, calls, "tool_calls"

    def reconstruct_raw_text_from_tool_calls(self, tool_calls: Sequence[Mapping[str, Any]]) -> str:
        """The text that the model wrote to make these calls; for calls of unknown origin, in Hermes's form."""
        texts: list[str] = []
        known: set[str] = set()
        for call in tool_calls:
            text = self.call_id_to_raw_text.get(call.get("id", "")) or _hermes_text(call["function"])
            if text not in known or call.get("id", "") not in self.call_id_to_raw_text:
                texts.append(text)
                known.add(text)
        return "\n".join(texts)

    def convert_messages_for_template(self, messages: Sequence[Mapping[str, object]]) -> Messages:
        """`messages` with tool calls as the text of their message."""
        return [self._as_text(message) if message.get("tool_calls") else dict(message) for message in messages]

    def decode_with_tool_awareness(self, token_ids: Sequence[int], has_tools: bool = False) -> str:
        """The text of `token_ids`; with tools special tokens are kept, since they may mark a call."""
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=not has_tools))

    def _as_text(self, message: Mapping[str, Any]) -> dict[str, object]:
        text = self.reconstruct_raw_text_from_tool_calls(
            [call if isinstance(call, Mapping) else call.model_dump() for call in message["tool_calls"]]
        )
        content = message.get("content") or ""
        whole = text if content.strip() in text else f"{content}\n{text}"
        return {key: value for key, value in message.items() if key != "tool_calls"} | {"content": whole}


def _hermes_text(function: Mapping[str, object]) -> str:
    arguments = function.get("arguments") or "{}"
    with suppress(ValueError, RecursionError):  # arguments that are not JSON are shown as the text they are
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    body = json.dumps({"name": function["name"], "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{encodable(body)}\n</tool_call>"
