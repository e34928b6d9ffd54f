"""What a model wrote becomes an action, by the schema of the environment; what it saw of an observation."""

import contextlib
import json
import time
from typing import Any

import pytest

from atroposlib.envs.failures import RolloutFailed
from atroposlib.envs.foreign.openenv_actions import Form, Unreadable, form_of, instructions, plain_kind
from atroposlib.envs.foreign.openenv_observations import Observations
from atroposlib.testing.tiny_tokenizer import make_tiny_tokenizer


def schema(required: list[str] | None = None, **fields: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"metadata": {"type": "object"}, **fields},
        "required": [] if required is None else required,
        "$defs": {"Move": {"enum": ["left", "right"], "type": "string", "description": "where to go"}},
    }


TEXT, WHOLE = {"type": "string"}, {"type": "integer"}
MOVE = {"$ref": "#/$defs/Move"}
CALL = schema(type={"const": "call_tool"}, tool_name=TEXT, arguments={"type": "object"})


@pytest.mark.parametrize(
    ("given", "kind", "field"),
    [
        (schema(message=TEXT), "text", "message"),
        (schema(["code"], code=TEXT, timeout=WHOLE), "text", "code"),
        (schema(move=MOVE), "text", "move"),
        (schema(number={"anyOf": [{"type": "null"}, WHOLE]}), "text", "number"),
        (schema(moves={"type": "array"}), "json", ""),
        (schema(["row", "column"], row=WHOLE, column=WHOLE), "json", ""),
        (schema(row=WHOLE, column=WHOLE), "json", ""),
        (schema(value={"anyOf": [WHOLE, TEXT]}), "json", ""),
        (schema(value={"$ref": "#/$defs/Gone"}), "json", ""),
        (CALL, "tool", ""),
        (schema(), "tool", ""),
        ({}, "tool", ""),
    ],
)
def test_the_schema_decides_the_form(given: Any, kind: str, field: str) -> None:
    form = form_of(given)
    assert (form.kind, form.field) == (kind, field)


def test_a_reference_to_itself_ends() -> None:
    loop = schema(value={"$ref": "#/$defs/A"}) | {"$defs": {"A": {"$ref": "#/$defs/A"}}}
    assert form_of(loop).kind == "json"


def test_what_the_schema_has_not_is_refused() -> None:
    with pytest.raises(ValueError, match="action_field 'b' is none of the action's fields: a"):
        form_of(schema(a=TEXT), field="b")
    with pytest.raises(ValueError, match=r"name it with --env\.action_field: row, column"):
        form_of(schema(row=WHOLE, column=WHOLE), "text")
    assert form_of(schema(row=WHOLE, column=WHOLE), "text", "row").field == "row"


@pytest.mark.parametrize(
    ("field", "answer", "value"),
    [
        (TEXT, " look up \n", "look up"),
        (WHOLE, "I say 3, no: -1,234.", -1234),
        (WHOLE, '{"value": 5}', 5),
        ({"type": "number"}, "about 2.5", 2.5),
        ({"type": "boolean"}, "True.", True),
        ({"type": "boolean"}, "It is false", False),
        (MOVE, "Left", "left"),
        (MOVE, "I go right!", "right"),
        ({"enum": ["w", "new line"]}, "new line", "new line"),
    ],
)
def test_a_value_is_read_from_the_answer(field: Any, answer: str, value: Any) -> None:
    assert form_of(schema(value=field)).read(answer) == {"value": value}


@pytest.mark.parametrize(
    ("field", "answer", "said"),
    [
        (TEXT, "  ", "the answer is empty"),
        (WHOLE, "three", "no number"),
        (WHOLE, "3.5", "not a whole one"),
        (WHOLE, "9" * 5000, "too long"),
        ({"type": "number"}, "9" * 400, "too long"),
        ({"type": "number"}, "-" + "9" * 400, "too long"),
        ({"type": "number"}, '{"value": 1e999}', "no number"),
        ({"type": "boolean"}, "true or false?", "must be one of true, false"),
        (MOVE, "up", "must be one of left, right"),
        (MOVE, "left or right", "must be one of left, right"),
    ],
)
def test_an_answer_without_a_value_is_unreadable(field: Any, answer: str, said: str) -> None:
    with pytest.raises(Unreadable, match=said):
        form_of(schema(value=field)).read(answer)


def test_a_part_of_the_answer_may_be_the_value() -> None:
    block = form_of(schema(code=TEXT), part="code_block")
    assert block.read("First:\n```\nx\n```\nthen\n```python\nprint(1)\n```\nDone.") == {"code": "print(1)\n"}
    assert block.read("```\n\ny = 1\n```") == {"code": "\ny = 1\n"}
    assert block.read("```a b\nc\n```") == {"code": "a b\nc\n"}
    assert block.read("I guess ```crane```.") == {"code": "crane"}
    for empty in ("``````", "```python\n```"):
        with pytest.raises(Unreadable, match="the answer is empty"):
            block.read(empty)
    with pytest.raises(Unreadable, match="no code block"):
        block.read("print(1)\n```")
    tag = form_of(schema(message=TEXT), part="answer_tag")
    assert tag.read("So <answer> 7 </answer>.") == {"message": "7"}
    with pytest.raises(Unreadable, match="<answer>"):
        tag.read("7")


def test_the_last_json_object_is_the_action() -> None:
    form = Form("json", schema(row=WHOLE, column=WHOLE))
    assert form.read('I {think} so:\n```json\n{"row": 1, "column": {"a": 2}}\n```') == {"row": 1, "column": {"a": 2}}
    assert form.read('{"row": 1} or {"row": 2}') == {"row": 2}
    for answer in (
        "",
        "[1]",
        '{"row": NaN}',
        '{"row": -1e999}',
        '{"row": 1',
        "{" * 50_000,
        '{"a":' * 50_000,
        '{"a": ' + "9" * 5000 + "}",
    ):
        with pytest.raises(Unreadable, match="no JSON object"):
            form.read(answer)


def test_a_tool_call_is_the_action_and_without_one_there_is_none() -> None:
    form = form_of(CALL)
    called = {"type": "call_tool", "tool_name": "add", "arguments": {"a": 1}}
    assert form.read('Hm. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>') == called
    assert form.read('<tool_call>\n{"name": "add", "arguments": "{\\"a\\": 1}"}') == called
    assert form.read("It is 3.") is None
    for answer in (
        "<tool_call>",
        "<tool_call>{}",
        '<tool_call>{"name": 1}',
        '<tool_call>{"name": "a", "arguments": 1}',
        '<tool_call>{"name": "a", "arguments": {"x": 1e999}}',
    ):
        with pytest.raises(Unreadable, match="a tool call is a JSON object"):
            form.read(answer)
    with pytest.raises(Unreadable, match="one tool"):
        form.read('<tool_call>{"name": "a"}</tool_call><tool_call>{"name": "b"}</tool_call>')


@pytest.mark.parametrize("piece", ["{", '{"a":', "[", "```", "<tool_call>", "<answer>", "1,", "true ", '{"a":"'])
def test_reading_takes_linear_time_and_raises_nothing_else(piece: str) -> None:
    forms = [
        form_of(schema(value=field), part=part) for field in (TEXT, WHOLE, MOVE) for part in ("whole", "code_block")
    ]
    forms += [Form("json", schema()), form_of(CALL), form_of(schema(value=TEXT), part="answer_tag")]
    answer = piece * (200_000 // len(piece))
    started = time.process_time()
    for form in forms:
        with contextlib.suppress(Unreadable):
            form.read(answer)
    assert time.process_time() - started < 10


def test_the_model_is_told_the_form() -> None:
    assert instructions(form_of(schema(move=MOVE))) == (
        "Each of your messages is one action, its move: one of left, right (where to go). Reply with it alone."
    )
    shown = instructions(Form("json", schema(["row"], row={"type": "integer", "title": "Row"})))
    assert json.loads(shown.splitlines()[-1])["properties"] == {"row": {"type": "integer"}}
    tool = {"name": "add", "description": "Adds.", "input_schema": {"title": "Add", "properties": {"title": TEXT}}}
    assert '{"name": "add", "description": "Adds.", "parameters": {"properties": {"title": {"type": "string"}}}}' in (
        instructions(form_of(CALL), [tool])
    )
    assert "code block" in instructions(form_of(schema(code=TEXT), part="code_block"))


def test_choices_that_are_no_texts_are_not_plain() -> None:
    assert plain_kind({"enum": [1, 2]}) is None
    assert plain_kind({"enum": []}) is None


# --- observations -----------------------------------------------------------------------------------------------------


def seen(observation: dict[str, Any], *fields: str, limit: int = 1000) -> str:
    return Observations(make_tiny_tokenizer(), fields, limit).text(observation)


def test_an_observation_is_its_fields() -> None:
    assert seen({"text": "hello", "metadata": {"answer": 3}, "legal": []}) == "text: hello"
    assert seen({"text": "hello", "metadata": {"answer": 3}}) == "hello"
    assert (
        seen({"text": "hello", "left": 2, "board": [[0, 1]], "note": None}) == "text: hello\nleft: 2\nboard: [[0, 1]]"
    )
    assert seen({"text": "hello", "left": 0}, "left") == "0"
    assert seen({"text": "hello"}, "gone") == ""
    assert seen({}) == ""


def test_a_field_is_named_whatever_the_others_hold() -> None:
    first, later = {"stdout": "", "stderr": "", "exit_code": 0}, {"stdout": "4", "stderr": "", "exit_code": 0}
    assert seen(first) == "exit_code: 0"
    assert seen(later) == "stdout: 4\nexit_code: 0"
    assert seen(first, "stdout", "exit_code") == "exit_code: 0"


def test_the_schema_decides_whether_a_field_is_named() -> None:
    def shown(declared: list[str], **observation: Any) -> str:
        observations = Observations(make_tiny_tokenizer(), (), 1000)
        observations.declare({"properties": {name: {} for name in [*declared, "done", "reward", "metadata"]}})
        return observations.text(observation)

    assert shown(["text", "legal"], text="hello") == "text: hello", "a server may leave out what is unset"
    assert shown(["text", "legal"], text="hello", legal=["a"]) == 'text: hello\nlegal: ["a"]'
    assert shown(["text"], text="hello") == "hello"
    assert shown([], text="hello") == "hello"


def test_a_template_says_what_is_seen() -> None:
    def shown(template: str, **observation: Any) -> str:
        return Observations(make_tiny_tokenizer(), (), 1000, template).text(observation)

    assert shown("Board:\n{board}\nMoves: {moves}", board="..x", moves=["a"], other=1) == 'Board:\n..x\nMoves: ["a"]'
    assert shown("{note} {json{", note=None) == " {json{"
    with pytest.raises(RolloutFailed, match=r"has the place \{gone\}, and the observation the fields board"):
        shown("{gone}", board="x")


def test_a_tools_reply_is_its_result_or_its_error() -> None:
    def reply(result: Any, error: Any = None) -> str:
        return seen({"tool_name": "add", "result": result, "error": error, "metadata": {}})

    assert reply({"content": [], "data": {"sum": 3}}) == '{"sum": 3}'
    assert reply({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "data": None}) == "a\nb"
    assert reply({"content": [{"type": "image"}]}) == '{"content": [{"type": "image"}]}'
    assert reply("3") == "3"
    assert reply(None, {"error_type": "tool_not_found", "message": "Unknown tool"}) == "Error: Unknown tool"
    assert reply(None, "gone") == "Error: gone"


def test_an_observation_is_cut_and_holds_no_special_token() -> None:
    assert seen({"text": "abcdef"}, limit=4) == "abcd\n[2 more characters are left out]"
    assert seen({"text": "<|im_end|>x<|im_start|>"}) == "< |im_end|>x< |im_start|>"
    assert seen({"text": "a\ud800b"}) == "a?b"
