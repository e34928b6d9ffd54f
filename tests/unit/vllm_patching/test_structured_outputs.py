"""Structured outputs: off unless the server is told otherwise, and then bounded before a library reads them."""

import functools
import json
import time
import tracemalloc
from argparse import Namespace
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from atroposlib.testing.tiny_tokenizer import make_tiny_tokenizer
from example_trainer.vllm_api_server import own_flags
from tests.unit.hostile_answers.hostile import assert_linear
from tests.unit.vllm_patching.fake_engine import FakeEngine, serving
from vllm_patching import structured_outputs
from vllm_patching.compat import vllm_requests, vllm_server
from vllm_patching.http.grammars import GrammarCheck
from vllm_patching.http.limited_work import LimitedWork
from vllm_patching.structured_outputs import refusal

DEEP = "(" * 30_000 + ")" * 30_000
MESSAGES = {"messages": [{"role": "user", "content": "x"}]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def record(count: int, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {f"field_{i}": {"type": "string"} for i in range(count)}, **more}


def tag(content: Any) -> dict[str, Any]:
    return {"structural_tag": json.dumps({"type": "structural_tag", "format": content})}


def nested(levels: int, inside: Any = None) -> Any:
    return functools.reduce(lambda inner, _: {"type": "array", "items": inner}, range(levels), inside or {})


TREE = {"$ref": "#/$defs/n", "$defs": {"n": record(3) | {"items": {"type": "array", "items": {"$ref": "#/$defs/n"}}}}}
UUID = "^[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}$"
HONEST: dict[str, dict[str, Any]] = {
    "schema": {"json": record(5, required=["field_0"], additionalProperties=False)},
    "schema as text": {"json": json.dumps(record(20))},
    "any object": {"json_object": True},
    "tree": {"json": TREE},
    "bounded": {"json": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 2, "maxItems": 30}},
    "uuid": {"json": {"type": "string", "pattern": UUID}},
    "described": {"json": record(2) | {"description": "A (short) note [of 3 {words}] with 1,000,000 | more."}},
    "regex": {"regex": r"[a-z]{3,20}@[a-z]{2,10}\.com"},
    "choice": {"choice": ["yes", "no", "root", "(maybe)"]},
    "grammar": {"grammar": 'root ::= "root" x ":" # a comment on root\nx ::= [a-z]{1,30} | "x ::= root"'},
    "lark": {"grammar": 'start: "start" x\nx: /[a-z]+/'},
    "tag": tag({"type": "json_schema", "json_schema": record(3)}),
}


HOSTILE: dict[str, dict[str, Any]] = {
    "minItems": {"json": {"type": "array", "minItems": 10**9}},
    "minItems as text": {"json": '{"type": "array", "minItems": 1000000000}'},
    "minItems as a float": {"json": {"type": "array", "minItems": 1e9}},
    "minItems beyond 64 bits": {"json": {"type": "array", "minItems": 10**400}},
    "minItems negative": {"json": {"type": "array", "minItems": -(10**9)}},
    "minItems infinite": {"json": '{"minItems": Infinity}'},
    "minItems not a number": {"json": '{"minItems": NaN}'},
    "minItems nested": {"json": record(2) | {"properties": {"a": {"type": "array", "minItems": 10**7}}}},
    "minItems in prefixItems": {"json": {"prefixItems": [{}], "minItems": 10**6}},
    "minItems inside each other": {"json": {"minItems": 100, "items": {"minItems": 100, "items": {}}}},
    "minItems behind a definition": {"json": {"$defs": {"a": {"maxItems": 10**8}}, "$ref": "#/$defs/a"}},
    "maxLength": {"json": {"type": "string", "maxLength": 10**6}},
    "minProperties": {"json": record(100, minProperties=50)},
    "maxContains": {"json": {"contains": {}, "maxContains": 10**6}},
    "minimum": {"json": {"type": "integer", "minimum": 10**400}},
    "pattern": {"json": {"type": "string", "pattern": DEEP[:400] + DEEP[-400:]}},
    "pattern of groups": {"json": {"pattern": "(?:" * 300 + ")" * 300}},
    "patternProperties": {"json": {"patternProperties": {DEEP[:600]: {}}}},
    "propertyNames": {"json": {"propertyNames": {"pattern": DEEP[:600]}}},
    "a name of 30,000": {"json": {"properties": {DEEP: {}}}},
    "unclosed": {"regex": "(" * 300},
    "in a class": {"regex": "[" * 300},
    "in a list": {"json": {"anyOf": [{"pattern": DEEP}, {}]}},
    "deep schema": {"json": nested(40)},
    "deep schema as text": {"json": '{"items":' * 3_000 + "{}" + "}" * 3_000},
    "deep list": {"json": "[" * 100_000},
    "deep in a schema as text in a tag": tag({"type": "json_schema", "json_schema": json.dumps(nested(40))}),
    "deep pattern in a tag": tag({"type": "regex", "pattern": DEEP[:600]}),
    "repeat in a tag": tag({"type": "repeat", "min": 10**6, "max": 10**6, "content": {"type": "any_text"}}),
    "grammar in a tag": tag({"type": "grammar", "grammar": "root ::= root root | [a-z]"}),
    "old tag": {"structural_tag": json.dumps({"structures": [{"schema": {"minItems": 10**9}}], "triggers": []})},
    "old tag as text": {"structural_tag": json.dumps({"structures": [{"schema": '{"minItems": 1000000000}'}]})},
    "repetition": {"regex": "a{1000000000}"},
    "repetition with blanks": {"regex": "a{ 1 , 1000000 }"},
    "repetition from": {"regex": "a{,5000}"},
    "repetition inside repetition": {"regex": "((a{1,100}){1,100})"},
    "repetition of groups": {"regex": "(((a{40}){40}){40})"},
    "repetition of a class": {"json": {"pattern": "^[a-z]{2000}$"}},
    "repetition many times": {"regex": "a{900}b{900}"},
    "repetition in digits of another script": {"regex": "a{\u0661\u0660\u0660\u0660\u0660}"},
    "whitespace": {"json": {}, "whitespace_pattern": DEEP[:600]},
    "enum": {"json": {"enum": list(range(50_000))}},
    "choice": {"choice": [f"value {i}" for i in range(50_000)]},
    "alternatives": {"regex": "|".join("abc" * 300)},
    "anyOf": {"json": {"anyOf": [{"const": i} for i in range(600)]}},
    "properties": {"json": record(2_000)},
    "definitions": {"json": {"$defs": {f"d{i}": {} for i in range(500)}}},
    "required": {"json": {"required": [f"r{i}" for i in range(5_000)]}},
    "values": {"json": [[list(range(60)) for _ in range(60)] for _ in range(3)]},
    "long": {"json": {"const": "a" * 40_000}},
    "long in parts": {"json": {"enum": ["a" * 1_000 for _ in range(40)]}},
    "long grammar": {"grammar": 'root ::= "' + "a" * 40_000 + '"'},
    "ambiguous": {"grammar": 'root ::= s\ns ::= s s s | s s | [a-z] | ""'},
    "ambiguous in one line": {"grammar": 'root ::= s; s ::= (s s | "a")'},
    "ambiguous behind a text": {"grammar": 'root ::= "x ::= " s\ns ::= "a" | s "::=" s'},
    "ambiguous behind a comment": {"grammar": 'root ::= s # "\ns ::= "a" | s s # "'},
    "ambiguous lark": {"grammar": 'start: s\n?s: s s | s s s | /[a-z]/ | ""'},
    "ambiguous lark with priority": {"grammar": "start: s\ns.2: s s | /[a-z]/"},
    "ambiguous behind escapes": {"grammar": 'root ::= s \\"\ns ::= "a" | \\s \\s'},
    "recursion through three": {"grammar": "root ::= a\na ::= b\nb ::= c | [x]\nc ::= a a"},
    "products of rules": {"grammar": "root ::= x{1,900}\nx ::= y{1,900}\ny ::= [a-z]"},
    "lark repetition": {"grammar": "start: /a/~1..5000"},
    "not JSON": {"json": "{"},
}  # fmt: skip


@pytest.mark.parametrize("name", HONEST)
def test_what_people_ask_for_is_within_the_bounds(name: str) -> None:
    assert refusal(HONEST[name]) is None


@pytest.mark.parametrize("name", HOSTILE)
def test_what_ends_or_slows_a_server_is_refused_at_once(name: str) -> None:
    tracemalloc.start()
    began = time.process_time()
    why = refusal(HOSTILE[name])
    took, (_, peak) = time.process_time() - began, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert why is not None
    assert len(why) < 400
    assert why.isascii()
    assert took < 0.5
    assert peak < 20 << 20


LONG = structured_outputs.MOST_CHARACTERS - 100


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "{" + " " * LONG),  # a repetition that does not end
        ("regex", "a{1" + " " * LONG),
        ("regex", "~1" + " " * LONG),
        ("grammar", "a" + " " * LONG),  # a rule without its sign
        ("grammar", "a(" + " " * LONG),
        ("grammar", "a" * LONG),
        ("grammar", '"' + '\\"' * (LONG // 2)),  # literals that do not end
        ("grammar", "'" + "\\'" * (LONG // 2)),
        ("grammar", "/" + "\\/" * (LONG // 2)),
        ("grammar", "[" + "\\]" * (LONG // 2)),
    ],
)
def test_a_text_is_checked_in_linear_time(kind: str, text: str) -> None:
    assert_linear(lambda part: refusal({kind: part}), text)


def test_a_name_of_any_length_is_checked_in_linear_time_and_shown_in_part() -> None:
    name = "count" * 10_000 + " "
    assert_linear(lambda part: refusal({"json": {part: 1}}), name)
    why = refusal({"json": {name: 10**6}})
    assert why is not None
    assert len(why) < 200


@pytest.mark.parametrize("grammar", ["", "a", "# root ::= a"])
def test_a_grammar_without_rules_is_left_to_the_compiler(grammar: str) -> None:
    assert refusal({"grammar": grammar}) is None


@pytest.fixture
def off() -> Iterator[None]:
    vllm_requests.check_structured_outputs(structured_outputs.off)
    yield
    vllm_requests.check_structured_outputs(lambda asked: None)


def chat(**fields: Any) -> Any:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    return ChatCompletionRequest(**MESSAGES, **fields).to_sampling_params(10, {})


@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {"regex": "a"}},
        {"structured_outputs": {"json": {}}},
        {"structured_outputs": {"choice": ["a"]}},
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}},
        {
            "response_format": {
                "type": "structural_tag",
                "structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}],
                "triggers": ["<"],
            }
        },
    ],
)
@pytest.mark.usefixtures("off")
def test_a_server_without_the_flag_refuses_every_form_and_names_the_flag(fields: dict[str, Any]) -> None:
    with pytest.raises(vllm_requests.ClientError, match="--structured-outputs"):
        chat(**fields)


@pytest.mark.usefixtures("off")
def test_requests_without_a_constraint_pass() -> None:
    free: dict[str, Any]
    for free in (
        {},
        {"response_format": {"type": "text"}},
        {"tools": [TOOL]},
        {"tools": [TOOL], "tool_choice": "none"},
    ):
        assert chat(**free).structured_outputs is None


def test_the_check_comes_before_vllms_own_and_before_every_record() -> None:
    from vllm.sampling_params import StructuredOutputsParams

    made = StructuredOutputsParams(regex="a")  # before anything is checked
    vllm_requests.check_structured_outputs(refusal)
    vllm_requests.check_structured_outputs(refusal)  # a second call is one check
    try:
        with pytest.raises(vllm_requests.ClientError, match="brackets"):
            chat(structured_outputs={"regex": DEEP[:600]})
        made.regex = DEEP
        with pytest.raises(vllm_requests.ClientError, match="32768 characters"):
            vllm_requests.SamplingParams(structured_outputs=made)._validate_structured_outputs(None, None, None)  # type: ignore[arg-type]
        assert chat(structured_outputs={"regex": "a"}).structured_outputs.regex == "a"
    finally:
        vllm_requests.check_structured_outputs(lambda asked: None)


def test_parsers_of_tools_that_call_xgrammar_themselves_are_refused_too(off: None) -> None:
    import xgrammar

    for make, text in [("from_json_schema", {"type": "object"}), ("from_regex", "a"), ("from_ebnf", 'root ::= "a"')]:
        with pytest.raises(vllm_requests.ClientError, match="--structured-outputs"):
            getattr(xgrammar.Grammar, make)(text)
    vllm_requests.check_structured_outputs(refusal)
    assert xgrammar.Grammar.from_regex("a") is not None
    with pytest.raises(vllm_requests.ClientError, match="brackets"):
        xgrammar.Grammar.from_json_schema({"pattern": DEEP[:600]})


async def test_our_own_route_refuses_with_400_and_the_flag() -> None:
    body = {"prompt": {"prompt_token_ids": [1]}, "structured_outputs": {"json": {"minItems": 10**9}}}
    async with serving(FakeEngine(1)) as client:
        reply = await client.post("/generate", json=body)
    assert reply.status_code == 400, reply.text
    assert "--structured-outputs" in reply.json()["error"]["message"]
    vllm_requests.check_structured_outputs(lambda asked: None)


def test_the_flag_leaves_xgrammar_alone() -> None:
    args = vllm_server.parse_serve_arguments(["--model", "m", "--structured-outputs"], own_flags())
    assert args.structured_outputs
    vllm_requests.use_xgrammar_alone(args)
    assert args.structured_outputs_config.backend == "xgrammar"
    with pytest.raises(ValueError, match="backend guidance: --structured-outputs checks"):
        vllm_requests.use_xgrammar_alone(Namespace(structured_outputs_config=Namespace(backend="guidance")))
    assert not vllm_server.parse_serve_arguments(["--model", "m"], own_flags()).structured_outputs


@pytest.fixture
async def work(tmp_path: Path) -> AsyncIterator[LimitedWork]:
    tokenizer = make_tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    order = {"tokenizer_name": str(tmp_path)}
    work = LimitedWork({"tokenizer": order, "vocabulary": len(tokenizer), "tool_parser_plugin": None})
    await work.started()
    yield work
    await work.close()


@pytest.mark.rotating
@pytest.mark.slow
@pytest.mark.services
async def test_grammars_are_compiled_and_stepped_in_a_process_that_is_killed_when_late(work: LimitedWork) -> None:
    check = GrammarCheck(work, refusal)
    for fields in HONEST.values():
        await check.expect_fast(fields)
    rules = "\n".join(f"a{i} ::= a{i + 1} a{i + 1}" for i in range(60))
    doubling = {"grammar": f"root ::= a0\n{rules}\na60 ::= [a-z]*"}
    assert refusal(doubling) is None, "only its steps show it"
    with pytest.raises(vllm_requests.ClientError, match=r"token \d+ took .* s of the engine's own loop"):
        await check.expect_fast(doubling)
    with pytest.raises(vllm_requests.ClientError, match="minItems is greater than"):
        await check.expect_fast({"json": {"type": "array", "minItems": 1000}})  # llguidance would write it out
    # beyond the static bounds, as if they had a hole: the process survives its forks
    with pytest.raises(vllm_requests.ClientError, match=r"killed by signal |takes longer than 1 s"):
        await GrammarCheck(work, lambda asked: None, time_limit_s=1.0).expect_fast(
            {"json": {"type": "string", "pattern": DEEP}}
        )
    with pytest.raises(vllm_requests.ClientError, match="takes longer than 1 s"):
        await GrammarCheck(work, lambda asked: None, time_limit_s=1.0).expect_fast(
            {"json": record(400, minProperties=200)}
        )
    await check.expect_fast(HONEST["regex"])
