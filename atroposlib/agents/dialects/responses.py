"""OpenAI's Responses. A response that names an earlier one continues its conversation; thoughts are `reasoning` items.

The text of an item's thoughts, with its tags and blanks, is its `encrypted_content`: a client that sends the item back
gives the model exactly what it wrote.
"""

import base64
import binascii
from collections.abc import Callable, Iterator
from itertools import groupby
from operator import itemgetter

from atroposlib.agents.dialects import chat
from atroposlib.agents.dialects.chat import Event, arguments_of, as_call
from atroposlib.agents.model_call import (
    BAD_REQUEST,
    Answer,
    JsonObject,
    Messages,
    ModelCall,
    ModelReply,
    Refused,
    allowed,
    checked,
    function_tool,
    objects,
    only,
    refuse_unknown,
    required,
    thoughts_of,
)

SAMPLING = frozenset(
    """
    temperature top_p top_k min_p seed
""".split()
)
IGNORED = frozenset(
    """
    model user metadata store service_tier parallel_tool_calls reasoning include truncation prompt_cache_key
    prompt_cache_retention safety_identifier max_tool_calls stream_options proxy_x_session_id top_logprobs
""".split()
)
READ = frozenset(
    """
    input instructions previous_response_id tools tool_choice max_output_tokens stream text background
    conversation prompt
""".split()
)
KNOWN = SAMPLING | IGNORED | READ
PARTS = ("input_text", "output_text", "text", "refusal")
Earlier = Callable[[str], Messages]

PING: Event | None = None
error = chat.error


def read(body: JsonObject, earlier: Earlier) -> ModelCall:
    """The call that a request asks for; `earlier` gives the conversation of a response by its id. Raises Refused."""
    refuse_unknown(body, KNOWN, "Unknown parameter: '{name}'.")
    for name in ("background", "conversation", "prompt"):
        if body.get(name):
            raise Refused(BAD_REQUEST, f"{name} is not supported here: send the input itself", param=name)
    form = (checked(body, "text", dict) or {}).get("format") or {}
    if not isinstance(form, dict) or form.get("type", "text") != "text":
        raise Refused(BAD_REQUEST, "text.format: only text is sampled here; ask for a form in the prompt", param="text")
    previous = checked(body, "previous_response_id", str)
    said = (earlier(previous) if previous else []) + _conversation(body)
    if not said:
        raise Refused(BAD_REQUEST, "input is empty; a response needs at least one item", param="input")
    instructions = checked(body, "instructions", str)
    tools = [_tool(each, at) for at, each in enumerate(objects(body, "tools"))]
    shown, choice = _choice(body.get("tool_choice"), tools)
    sampling = chat.with_numbers({name: body[name] for name in SAMPLING if body.get(name) is not None}, body)
    if limit := checked(body, "max_output_tokens", int, least=1):
        sampling["max_tokens"] = limit
    for name, value in (checked(body, "metadata", dict) or {}).items():
        if not isinstance(value, str):
            raise Refused(BAD_REQUEST, f"metadata.{name:.80} is {value!r:.80}: expected text", param="metadata")
    echoed = {name: body.get(name) for name in ("instructions", "previous_response_id", "metadata", "temperature")}
    echoed |= {"top_p": body.get("top_p"), "tools": body.get("tools") or [], "max_output_tokens": limit}
    echoed |= {"tool_choice": body.get("tool_choice") or "auto"}
    echoed["parallel_tool_calls"] = body.get("parallel_tool_calls") is not False
    system = [{"role": "system", "content": instructions}] if instructions else []
    return ModelCall(
        system + said,
        shown or None,
        choice,
        1,
        sampling,
        bool(checked(body, "stream", bool)),
        {"echoed": echoed, "said": said},
    )


def reply(call: ModelCall, result: ModelReply) -> JsonObject:
    """The body of a reply."""
    return _response(call, result, output(result), "incomplete" if _is_cut(result) else "completed")


def output(result: ModelReply) -> list[JsonObject]:
    """The items of a reply: thoughts, what is said, and calls."""
    answer = result.answers[0]
    raw, said = answer.parts
    items: list[JsonObject] = []
    if raw:
        summary = [{"type": "summary_text", "text": thoughts_of(raw)}]
        items.append(
            {"id": f"rs_{result.id}", "type": "reasoning", "summary": summary, "encrypted_content": packed(raw)}
        )
    if said or not answer.calls:
        part = {"type": "output_text", "text": said, "annotations": [], "logprobs": []}
        items.append({"id": f"msg_{result.id}", "type": "message", "role": "assistant", "content": [part]})
    items += [
        {"id": f"fc_{call.id}", "type": "function_call", "call_id": call.id, "name": call.name}
        | {"arguments": call.arguments}
        for call in answer.calls
    ]
    return [item if item["type"] == "reasoning" else item | {"status": _status(answer)} for item in items]


def messages_of(items: list[JsonObject]) -> Messages:
    """Items as chat messages: what the model said, thought and called between two others is one message."""
    messages: Messages = []
    for role, group in groupby((_item(item, at) for at, item in enumerate(items)), itemgetter("role")):
        said = [*group]
        messages += [_joined(said)] if role == "assistant" else said
    return messages


def events(call: ModelCall, result: ModelReply) -> Iterator[Event]:
    """The reply as a stream of the API's events, numbered."""
    for number, event in enumerate(_events(call, result)):
        yield event["type"], event | {"sequence_number": number}


def error_event(body: JsonObject) -> Event:
    """An error after the stream has begun."""
    given = body["error"]
    return "error", {
        "type": "error",
        "code": given["code"] or given["type"],
        "message": given["message"],
        "param": given["param"],
        "sequence_number": 0,
    }


def _events(call: ModelCall, result: ModelReply) -> Iterator[JsonObject]:
    started = _response(call, result, [], "in_progress")
    yield {"type": "response.created", "response": started}
    yield {"type": "response.in_progress", "response": started}
    for at, item in enumerate(output(result)):
        empty: dict[str, JsonObject] = {
            "message": {"content": []},
            "reasoning": {"summary": []},
            "function_call": {"arguments": ""},
        }
        begun = item | empty[item["type"]] | ({} if item["type"] == "reasoning" else {"status": "in_progress"})
        yield {"type": "response.output_item.added", "output_index": at, "item": begun}
        place = {"item_id": item["id"], "output_index": at}
        for event in _inside(item):
            yield place | event
        yield {"type": "response.output_item.done", "output_index": at, "item": item}
    kind = "response.incomplete" if _is_cut(result) else "response.completed"
    yield {"type": kind, "response": reply(call, result)}


def _inside(item: JsonObject) -> Iterator[JsonObject]:
    if item["type"] == "function_call":
        name, text = "response.function_call_arguments", item["arguments"]
        yield {"type": f"{name}.delta", "delta": text}
        yield {"type": f"{name}.done", "arguments": text, "name": item["name"]}
        return
    more: JsonObject = {}
    if item["type"] == "reasoning":
        place, part = {"summary_index": 0}, item["summary"][0]
        outer, inner = "response.reasoning_summary_part", "response.reasoning_summary_text"
    else:
        place, part = {"content_index": 0}, item["content"][0]
        outer, inner, more = "response.content_part", "response.output_text", {"logprobs": []}
    yield place | {"type": f"{outer}.added", "part": part | {"text": ""}}
    yield place | {"type": f"{inner}.delta", "delta": part["text"], **more}
    yield place | {"type": f"{inner}.done", "text": part["text"], **more}
    yield place | {"type": f"{outer}.done", "part": part}


def _response(call: ModelCall, result: ModelReply, items: list[JsonObject], status: str) -> JsonObject:
    used = {
        "input_tokens": result.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": result.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": result.prompt_tokens + result.completion_tokens,
    }
    echoed: JsonObject = call.shown["echoed"]
    return echoed | {
        "id": f"resp_{result.id}",
        "object": "response",
        "created_at": result.created,
        "model": result.model,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "output": items,
        "usage": None if status == "in_progress" else used,
    }


def _is_cut(result: ModelReply) -> bool:
    return result.answers[0].reason == "length"


def _status(answer: Answer) -> str:
    return "incomplete" if answer.reason == "length" else "completed"


def _conversation(body: JsonObject) -> Messages:
    given = checked(body, "input", str, list)
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    return messages_of(objects(body, "input"))


def _item(item: JsonObject, at: int) -> JsonObject:
    where = f"input[{at}]"
    match item.get("type", "message"):
        case "message":
            role = item.get("role")
            if role not in ("user", "assistant", "system", "developer"):
                raise Refused(BAD_REQUEST, f"{where}.role is {role!r:.80}: expected a role of a message", param=where)
            return {"role": "system" if role == "developer" else role, "content": _text(item.get("content"), where)}
        case "function_call":
            if not isinstance(name := item.get("name"), str):
                raise Refused(BAD_REQUEST, f"{where} needs a name", param=where)
            call = as_call(item.get("call_id"), name, arguments_of(item))
            return {"role": "assistant", "content": "", "tool_calls": [call]}
        case "function_call_output":
            result = _text(item.get("output"), where)
            return {"role": "tool", "tool_call_id": str(item.get("call_id")), "content": result}
        case "reasoning":
            return {"role": "assistant", "content": _thoughts(item, where)}
        case other:
            raise Refused(
                BAD_REQUEST, f"{where} is of type {other!r:.80}, which cannot be sampled from here", param=where
            )


def _text(content: object, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise Refused(BAD_REQUEST, f"{where} has {content!r:.80}: expected text or a list of parts", param=where)
    return "".join(_part(part, where) for part in content)


def _part(part: object, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    text = part.get("text", part.get("refusal")) if isinstance(part, dict) else None
    if kind not in PARTS or not isinstance(text, str):
        raise Refused(
            BAD_REQUEST,
            f"{where} has a part of type {kind!r:.80}: only text can be sampled from here; leave it out",
            param=where,
        )
    return text


def _thoughts(item: JsonObject, where: str) -> str:
    if isinstance(packed := item.get("encrypted_content"), str) and (raw := unpacked(packed)) is not None:
        return raw
    summary = [each["text"] for each in objects(item, "summary") if isinstance(each.get("text"), str)]
    return f"<think>\n{''.join(summary)}\n</think>\n\n" if summary else ""


def _joined(parts: Messages) -> JsonObject:
    calls = [call for part in parts for call in part.get("tool_calls", [])]
    joined = {"role": "assistant", "content": "".join(part["content"] for part in parts)}
    return joined | ({"tool_calls": calls} if calls else {})


def _tool(tool: JsonObject, at: int) -> JsonObject:
    if tool.get("type") != "function":
        raise Refused(
            BAD_REQUEST,
            f"tools[{at}] is of type {tool.get('type')!r:.80}: only functions can be offered",
            param=f"tools[{at}]",
        )
    return function_tool(tool.get("name"), tool.get("description"), tool.get("parameters"), f"tools[{at}]")


def _choice(choice: object, tools: list[JsonObject]) -> tuple[list[JsonObject], str | None]:
    if choice is None or choice in ("auto", "none"):
        return tools, None if choice is None else str(choice)
    if choice == "required":
        return tools, required(tools)
    if isinstance(choice, dict) and choice.get("type") == "function":
        return only(tools, [choice.get("name")]), "required"
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        shown = only(tools, [each.get("name") for each in objects(choice, "tools")])
        return shown, allowed(shown, choice.get("mode"))
    raise Refused(
        BAD_REQUEST, f"tool_choice is {choice!r:.80}: expected auto, none, required, or a function", param="tool_choice"
    )


def packed(raw: str) -> str:
    """Thoughts as the text that a client sends back."""
    return base64.b64encode(raw.encode()).decode()


def unpacked(text: str) -> str | None:
    """Thoughts that this endpoint wrote; None for those of another."""
    try:
        raw = base64.b64decode(text, validate=True).decode()
    except (binascii.Error, ValueError):
        return None
    return raw if raw.rstrip().endswith("</think>") else None
