"""What a model wrote, as an action of an OpenEnv environment: by the schema that the server gives.

    form_of(schema) ──▶ Form: text, json or tool      a schema with one plain field is answered by its value alone
    instructions(form, ...)                            what the model is told
    form.read(answer) ──▶ the action, None (a tool environment's answer without a call), or raises Unreadable

The answers are a model's: whatever is written, reading takes time linear in the length and raises nothing else.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from atroposlib.grading import extract_tagged, last_number

Kind = Literal["text", "json", "tool"]
Part = Literal["whole", "code_block", "answer_tag"]
Schema = Mapping[str, Any]

OPEN_CALL, CLOSE_CALL = "<tool_call>", "</tool_call>"
FENCE = "```"
TRIES = 32  # places where a JSON object may begin
REFERENCES = 8  # from one part of a schema to another
PLAIN = ("string", "integer", "number", "boolean")
NOT_SHOWN = ("metadata",)  # of an action: every environment has it, and none needs it
WORD = re.compile(r"\w+")


class Unreadable(ValueError):
    """The answer is not an action; the message is for the model."""


@dataclass(frozen=True)
class Form:
    """Describes how the model is to write an action: the value of `field` alone, a JSON object, or a tool call."""

    kind: Kind
    schema: Schema
    field: str = ""
    part: Part = "whole"

    def read(self, answer: str) -> dict[str, object] | None:
        """See the head of the module."""
        if self.kind == "tool":
            return _call(answer)
        if self.kind == "json":
            return _last_object(answer)
        schema = field_schema(self.schema, self.field)
        kind = plain_kind(schema)
        if kind != "string":
            whole = _json(answer.strip())
            if isinstance(whole, dict) and self.field in whole:
                return whole
        return {self.field: _value(_part(answer, self.part), kind, schema)}


def form_of(
    schema: Schema, kind: Kind | Literal["auto"] = "auto", field: str | None = None, part: Part = "whole"
) -> Form:
    """The form of an environment's actions. Raises ValueError where it was told something that the schema has not."""
    fields = open_fields(schema)
    if field is not None and field not in fields:
        raise ValueError(f"action_field {field!r} is none of the action's fields: {', '.join(fields) or 'it has none'}")
    required = [name for name in fields if name in schema.get("required", [])]
    alone = field or (fields[0] if len(fields) == 1 else required[0] if len(required) == 1 else None)
    fits = alone is not None and plain_kind(field_schema(schema, alone)) is not None
    if kind == "auto":
        kind = "tool" if is_tool_schema(schema) else "text" if fits else "json"
    if kind != "text":
        return Form(kind, schema)
    if alone is None or not fits:
        raise ValueError(
            "action_format text needs one field of text, number or choice; name it with --env.action_field:"
            f" {', '.join(fields) or 'the action has none'}"
        )
    return Form("text", schema, alone, part)


def is_tool_schema(schema: Schema) -> bool:
    """Return whether actions are tool calls: OpenEnv's CallToolAction, or its bare Action, as MCP environments have."""
    fields = open_fields(schema)
    return not fields or {"tool_name", "arguments"} <= {*fields}


def open_fields(schema: Schema) -> list[str]:
    """The fields that an action leaves open."""
    properties = schema.get("properties")
    found = properties if isinstance(properties, dict) else {}
    return [
        str(name)
        for name, value in found.items()
        if name not in NOT_SHOWN and not (isinstance(value, dict) and "const" in value)
    ]


def field_schema(schema: Schema, field: str) -> Schema:
    """Return the schema of a field with references followed and `null` beside one other choice left out."""
    schema_of_field: object = schema["properties"][field]
    for _ in range(REFERENCES):
        if not isinstance(schema_of_field, dict):
            return {}
        options = schema_of_field.get("anyOf")
        if isinstance(options, list):
            others = [option for option in options if not (isinstance(option, dict) and option.get("type") == "null")]
            if len(others) != 1:
                return schema_of_field
            schema_of_field = others[0]
        elif str(schema_of_field.get("$ref", "")).startswith("#/$defs/"):
            schema_of_field = (schema.get("$defs") or {}).get(schema_of_field["$ref"].removeprefix("#/$defs/"))
        else:
            return schema_of_field
    return {}


def plain_kind(field: Schema) -> str | None:
    """`choice`, `string`, `integer`, `number` or `boolean`; None for anything else."""
    choices = field.get("enum")
    if isinstance(choices, list):
        return "choice" if choices and all(isinstance(choice, str) for choice in choices) else None
    kind = field.get("type")
    return kind if kind in PLAIN else None


def compact(schema: object) -> object:
    """A schema without what says nothing to a model: titles, metadata."""
    if isinstance(schema, list):
        return [compact(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {}
    for key, value in schema.items():
        if key == "title" and isinstance(value, str):
            continue
        if key == "properties" and isinstance(value, dict):
            value = {name: part for name, part in value.items() if name not in NOT_SHOWN}
        kept[key] = {name: compact(part) for name, part in value.items()} if key == "properties" else compact(value)
    return kept


def instructions(form: Form, tools: Sequence[Mapping[str, object]] = ()) -> str:
    """Explain to the model how to write an action."""
    if form.kind == "tool":
        shown = "\n".join(
            _line(
                {"name": tool["name"], "description": tool["description"], "parameters": compact(tool["input_schema"])}
            )
            for tool in tools
        )
        return (
            f"You may call these tools:\n<tools>\n{shown}\n</tools>\nTo call one, end your message with\n"
            f'{OPEN_CALL}{{"name": "a tool", "arguments": {{"a parameter": "its value"}}}}{CLOSE_CALL}\n'
            "and its result comes as the next message. Call one tool in a message. When you are done, answer without a"
            " call."
        )
    if form.kind == "json":
        return f"Reply with one action: a JSON object that fits this schema.\n{_line(compact(form.schema))}"
    schema = field_schema(form.schema, form.field)
    where = {
        "whole": "Reply with it alone.",
        "code_block": f"Put it into a code block between {FENCE} lines.",
        "answer_tag": "Put it into <answer> </answer> tags.",
    }[form.part]
    return f"Each of your messages is one action, {_described(form, schema)}. {where}"


def _described(form: Form, found: Schema) -> str:
    about = found.get("description") or form.schema["properties"][form.field].get("description")
    kind = {"string": "a text", "integer": "a whole number", "number": "a number", "boolean": "true or false"}
    what = kind.get(str(plain_kind(found))) or f"one of {', '.join(found['enum'])}"
    return f"its {form.field}: {what}" + (f" ({about})" if isinstance(about, str) else "")


# --- reading ----------------------------------------------------------------------------------------------------------


def _part(answer: str, part: Part) -> str:
    if part == "code_block":
        return _code_block(answer)
    if part == "answer_tag":
        tagged = extract_tagged(answer)
        if tagged is None:
            raise Unreadable("there is no answer in <answer> </answer> tags")
        return tagged
    return answer.strip()


def _code_block(answer: str) -> str:
    """The last closed block between ``` lines, without the word that names its language."""
    before, closed, _ = answer.rpartition(FENCE)
    _, opened, block = before.rpartition(FENCE)
    if not closed or not opened:
        raise Unreadable(f"there is no code block between {FENCE} lines")
    first, ended, rest = block.partition("\n")
    return rest if ended and WORD.fullmatch(first.strip() or "x") else block


def _value(text: str, kind: str | None, field: Schema) -> object:
    """`text` as a value of that kind. Raises Unreadable."""
    if kind in ("integer", "number"):
        return _number(text, kind)
    if kind == "boolean":
        return _choice(text, ["true", "false"]) == "true"
    if kind == "choice":
        return _choice(text, field["enum"])
    if not text:
        raise Unreadable("the answer is empty")
    return text


def _number(text: str, kind: str) -> float | int:
    """The last number of the text."""
    written = last_number(text)
    if written is None:
        raise Unreadable("there is no number in the answer")
    try:
        return int(written) if kind == "integer" else _finite(written)
    except ValueError:
        raise Unreadable("the number is not a whole one, or too long") from None


def _choice(text: str, choices: Sequence[str]) -> str:
    """The choice that the text is, or the only one that it names."""
    said = text.strip().strip(".\"'`").casefold()
    for choice in choices:
        if choice.casefold() == said:
            return choice
    words = {word.casefold() for word in WORD.findall(text)}
    named = [choice for choice in choices if choice.casefold() in words]
    if len(named) != 1:
        raise Unreadable(f"the answer must be one of {', '.join(choices)}")
    return named[0]


def _call(answer: str) -> dict[str, object] | None:
    """OpenEnv's action for the tool call in the answer."""
    count = answer.count(OPEN_CALL)
    if not count:
        return None
    if count > 1:
        raise Unreadable("call one tool in a message")
    call = _json(answer.partition(OPEN_CALL)[2].partition(CLOSE_CALL)[0].strip())
    name = call.get("name") if isinstance(call, dict) else None
    arguments = call.get("arguments", {}) if isinstance(call, dict) else None
    if isinstance(arguments, str):
        arguments = _json(arguments)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise Unreadable('a tool call is a JSON object with "name" and "arguments"')
    return {"type": "call_tool", "tool_name": name, "arguments": arguments}


def _last_object(answer: str) -> dict[str, object]:
    """The last JSON object of the answer, in a code block or not."""
    decoder = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite)
    last: dict[str, object] | None = None
    start = answer.find("{")
    for _ in range(TRIES):
        if start < 0:
            break
        try:
            last, end = decoder.raw_decode(answer, start)
        except (ValueError, RecursionError):
            end = start + 1
        start = answer.find("{", end)
    if last is None:
        raise Unreadable("there is no JSON object in the answer")
    return last


def _json(text: str) -> object:
    """The value; None where it is not JSON."""
    try:
        return json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    except (ValueError, RecursionError):
        return None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _finite(written: str) -> float:
    number = float(written)
    if math.isinf(number):
        raise ValueError(f"{written} is too large")
    return number


def _line(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
