"""Anthropic's Messages. Thoughts are thinking blocks, whose signature is their text as the model wrote it, so that a
client that sends them back gives the model exactly that.
"""

import json
from collections.abc import Iterator

import msgspec

from atroposlib.agents.dialects.chat import Event, as_call, with_numbers
from atroposlib.agents.dialects.responses import packed, unpacked
from atroposlib.agents.model_call import (
    BAD_REQUEST,
    FORBIDDEN,
    NOT_FOUND,
    TOO_LARGE,
    UNAUTHORISED,
    Answer,
    JsonObject,
    Messages,
    ModelCall,
    ModelReply,
    Refused,
    checked,
    function_tool,
    objects,
    only,
    refuse_unknown,
    required,
    texts,
    thoughts_of,
)
from atroposlib.api.groups.decoding import UNREADABLE, RefusedBody, refuse_unsayable

SAMPLING = frozenset(
    """
    temperature top_p top_k
""".split()
)
IGNORED = frozenset(
    """
    model metadata service_tier thinking container context_management cache_control output_config inference_geo
    proxy_x_session_id betas
""".split()
)
READ = frozenset(
    """
    messages system max_tokens stop_sequences stream tools tool_choice
""".split()
)
KNOWN = SAMPLING | IGNORED | READ
CHOICES = ("auto", "none")
REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
ERRORS = {UNAUTHORISED: "authentication_error", FORBIDDEN: "permission_error", NOT_FOUND: "not_found_error"}
ERRORS |= {TOO_LARGE: "request_too_large"}

PING: Event | None = ("ping", {"type": "ping"})


def read(body: JsonObject, *, counts: bool = False) -> ModelCall:
    """The call that a request asks for; one that only counts its tokens needs no `max_tokens`. Raises Refused."""
    refuse_unknown(body, KNOWN, "{name}: Extra inputs are not permitted")
    limit = checked(body, "max_tokens", int, least=1)
    if limit is None and not counts:
        raise Refused(BAD_REQUEST, "max_tokens: Field required", param="max_tokens")
    said = [each for at, one in enumerate(objects(body, "messages")) for each in _messages(one, f"messages.{at}")]
    if not said:
        raise Refused(BAD_REQUEST, "messages: at least one message is required", param="messages")
    system = checked(body, "system", str, list)
    head = [{"role": "system", "content": _text(system, "system")}] if system else []
    tools = [_tool(each, at) for at, each in enumerate(objects(body, "tools"))]
    shown, choice = _choice(checked(body, "tool_choice", dict), tools)
    sampling = with_numbers({name: body[name] for name in SAMPLING if body.get(name) is not None}, body)
    if stop := texts(body, "stop_sequences"):
        sampling["stop"] = stop
    if limit is not None:
        sampling["max_tokens"] = limit
    return ModelCall(head + said, shown or None, choice, 1, sampling, bool(checked(body, "stream", bool)))


def reply(call: ModelCall, result: ModelReply) -> JsonObject:
    """The body of a reply."""
    answer = result.answers[0]
    return _head(result) | {
        "content": blocks(answer),
        "stop_reason": _reason(answer),
        "stop_sequence": answer.stop,
        "usage": {"input_tokens": result.prompt_tokens, "output_tokens": result.completion_tokens},
    }


def events(call: ModelCall, result: ModelReply) -> Iterator[Event]:
    """The reply as a stream of the API's events."""
    for event in _events(result):
        yield event["type"], event


def error(status: int, message: str, code: str | None = None, param: str | None = None) -> JsonObject:
    """An error's body."""
    kind = "api_error" if status >= 500 else ERRORS.get(status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def error_event(body: JsonObject) -> Event:
    """An error after the stream has begun."""
    return "error", body


def blocks(answer: Answer) -> list[JsonObject]:
    """The blocks of an answer: thoughts, what is said, and calls."""
    raw, said = answer.parts
    thinking = {"type": "thinking", "thinking": thoughts_of(raw), "signature": packed(raw)}
    return [
        *([thinking] if raw else []),
        *([{"type": "text", "text": said}] if said else []),
        *(
            {"type": "tool_use", "id": each.id, "name": each.name, "input": _input(each.arguments)}
            for each in answer.calls
        ),
    ]


def _events(result: ModelReply) -> Iterator[JsonObject]:
    answer = result.answers[0]
    used = {"input_tokens": result.prompt_tokens, "output_tokens": 0}
    started = _head(result) | {"content": [], "stop_reason": None, "stop_sequence": None, "usage": used}
    yield {"type": "message_start", "message": started}
    for at, block in enumerate(blocks(answer)):
        empty: dict[str, JsonObject] = {
            "thinking": {"thinking": "", "signature": ""},
            "text": {"text": ""},
            "tool_use": {"input": {}},
        }
        yield {"type": "content_block_start", "index": at, "content_block": block | empty[block["type"]]}
        for delta in _deltas(block):
            yield {"type": "content_block_delta", "index": at, "delta": delta}
        yield {"type": "content_block_stop", "index": at}
    ended = {"stop_reason": _reason(answer), "stop_sequence": answer.stop}
    counted = {"input_tokens": result.prompt_tokens, "output_tokens": result.completion_tokens}
    yield {"type": "message_delta", "delta": ended, "usage": counted}
    yield {"type": "message_stop"}


def _deltas(block: JsonObject) -> list[JsonObject]:
    match block["type"]:
        case "text":
            return [{"type": "text_delta", "text": block["text"]}]
        case "tool_use":
            return [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]
    return [
        {"type": "thinking_delta", "thinking": block["thinking"]},
        {"type": "signature_delta", "signature": block["signature"]},
    ]


def _head(result: ModelReply) -> JsonObject:
    return {"id": f"msg_{result.id}", "type": "message", "role": "assistant", "model": result.model}


def _reason(answer: Answer) -> str:
    return "stop_sequence" if answer.stop is not None else REASONS[answer.reason]


def _input(arguments: str) -> object:
    """A call's arguments as an object; what a model wrote that is none, under a name of its own."""
    try:
        value = msgspec.json.decode(arguments)
        refuse_unsayable(value)
    except (*UNREADABLE, RefusedBody):  # also NaN, half a surrogate pair, and what nests too deep for its reader
        return {"arguments": arguments}
    return value if isinstance(value, dict) else {"arguments": value}


def _messages(message: JsonObject, where: str) -> Messages:
    """The chat messages of one of Anthropic's: results of tools, then what the user says; or what the model said."""
    role = message.get("role")
    content = message.get("content")
    if role not in ("user", "assistant", "system"):
        raise Refused(BAD_REQUEST, f"{where}.role: expected user or assistant, not {role!r:.80}", param=where)
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    given = objects(message, "content")
    results = [_result(each, where) for each in given if each.get("type") == "tool_result"]
    calls = [_call(each, where) for each in given if each.get("type") == "tool_use"]
    rest = [each for each in given if each.get("type") not in ("tool_result", "tool_use")]
    said = "".join(_block(each, where) for each in rest)
    if results and not rest:
        return results
    return [*results, {"role": role, "content": said} | ({"tool_calls": calls} if calls else {})]


def _result(block: JsonObject, where: str) -> JsonObject:
    text = _text(block.get("content"), where)
    return {"role": "tool", "tool_call_id": str(block.get("tool_use_id")), "content": text}


def _call(block: JsonObject, where: str) -> JsonObject:
    name = block.get("name")
    if not isinstance(name, str):
        raise Refused(BAD_REQUEST, f"{where}: a tool_use block needs a name", param=where)
    given = checked(block, "input", dict) or {}
    return as_call(block.get("id"), name, json.dumps(given, ensure_ascii=False))


def _text(content: object, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(_block(each, where) for each in objects({where: content}, where))


def _block(block: JsonObject, where: str) -> str:
    kind = block.get("type")
    if kind == "thinking":
        raw = unpacked(str(block.get("signature")))
        return raw if raw is not None else f"<think>\n{block.get('thinking', '')}\n</think>\n\n"
    if kind == "redacted_thinking":
        return ""
    if kind != "text" or not isinstance(block.get("text"), str):
        raise Refused(
            BAD_REQUEST,
            f"{where} has a block of type {kind!r:.80}: only text can be sampled from here; leave it out",
            param=where,
        )
    return str(block["text"])


def _tool(tool: JsonObject, at: int) -> JsonObject:
    if tool.get("type", "custom") != "custom":
        raise Refused(BAD_REQUEST, f"tools.{at} is of type {tool['type']!r:.80}: only custom tools can be offered")
    return function_tool(tool.get("name"), tool.get("description"), tool.get("input_schema"), f"tools.{at}")


def _choice(choice: JsonObject | None, tools: list[JsonObject]) -> tuple[list[JsonObject], str | None]:
    if choice is None:
        return tools, None
    if choice.get("type") == "tool":
        return only(tools, [choice.get("name")]), "required"
    if choice.get("type") == "any":
        return tools, required(tools)
    if choice.get("type") not in CHOICES:
        raise Refused(BAD_REQUEST, f"tool_choice.type is {choice.get('type')!r:.80}: expected auto, any, tool or none")
    return tools, str(choice["type"])
