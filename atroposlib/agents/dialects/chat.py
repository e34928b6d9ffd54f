"""OpenAI's Chat Completions.

A tool choice that names functions shows the model these alone. Under "required" the model may answer without a call:
what is sampled under a constraint is not what it would have said, and cannot be trained on. A developer's message is
shown as the system's, which all chat templates know.
"""

import json
from collections.abc import Iterator, Mapping, Sequence

from atroposlib.agents.model_call import (
    BAD_REQUEST,
    NOT_FOUND,
    TOO_LARGE,
    UNAUTHORISED,
    Answer,
    Call,
    JsonObject,
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
    texts,
)

ROLES = ("system", "developer", "user", "assistant", "tool")
# Passed on as they come: the managed server refuses what the trainer could not compute again.
SAMPLING = frozenset(
    """
    temperature top_p top_k min_p seed presence_penalty frequency_penalty logit_bias repetition_penalty
    min_tokens ignore_eos stop_token_ids chat_template_kwargs logprobs top_logprobs
""".split()
)
# Without effect on which tokens a model of ours may sample.
IGNORED = frozenset(
    """
    model user metadata store service_tier parallel_tool_calls reasoning_effort verbosity prompt_cache_key
    prompt_cache_retention safety_identifier proxy_x_session_id split
""".split()
)
READ = frozenset(
    """
    messages tools tool_choice n stop stream stream_options max_tokens max_completion_tokens response_format
    modalities
""".split()
)
KNOWN = SAMPLING | IGNORED | READ
NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(NUMBERS, (int, float)),
    **dict.fromkeys(("seed", "top_k", "min_tokens", "top_logprobs"), (int,)),
    **dict.fromkeys(("logprobs", "ignore_eos"), (bool,)),
    **dict.fromkeys(("logit_bias", "chat_template_kwargs"), (dict,)),
    "stop_token_ids": (list,),
}
END = "[DONE]"
Event = tuple[str | None, JsonObject | str]


def read(body: JsonObject) -> ModelCall:
    """The call that a request asks for. Raises Refused."""
    refuse_unknown(body, KNOWN, "Unrecognized request argument supplied: {name}")
    _refuse_other_forms(body)
    messages = [_message(each, at) for at, each in enumerate(objects(body, "messages"))]
    if not messages:
        raise Refused(BAD_REQUEST, "messages is empty; a chat completion needs at least one", param="messages")
    tools = [_tool(each, at) for at, each in enumerate(objects(body, "tools"))]
    shown, choice = _choice(body.get("tool_choice"), tools)
    limits = (checked(body, name, int, least=1) for name in ("max_completion_tokens", "max_tokens"))
    sampling = {name: body[name] for name in SAMPLING if body.get(name) is not None}
    options = checked(body, "stream_options", dict) or {}
    return ModelCall(
        messages,
        shown or None,
        choice,
        checked(body, "n", int, least=1) or 1,
        with_numbers(sampling, body)
        | _set(max_tokens=next((each for each in limits if each), None))
        | _set(stop=texts(body, "stop") or None),
        bool(checked(body, "stream", bool)),
        {"include_usage": bool(options.get("include_usage"))},
    )


def reply(call: ModelCall, result: ModelReply) -> JsonObject:
    """The body of a reply."""
    return _head(result, "chat.completion") | {
        "choices": [
            {"index": at, "message": _said(each), "finish_reason": each.reason, "logprobs": each.logprobs}
            for at, each in enumerate(result.answers)
        ],
        "usage": usage(result),
    }


def events(call: ModelCall, result: ModelReply) -> Iterator[Event]:
    """The reply as a stream: role, text, calls and reason of each answer, perhaps the usage, and the end."""
    head = _head(result, "chat.completion.chunk")
    asked = call.shown["include_usage"]
    more: JsonObject = {"usage": None} if asked else {}
    for at, each in enumerate(result.answers):
        for delta, reason in _deltas(each):
            logprobs = each.logprobs if "content" in delta and "role" not in delta else None
            choice = {"index": at, "delta": delta, "finish_reason": reason, "logprobs": logprobs}
            yield None, head | {"choices": [choice]} | more
    if asked:
        yield None, head | {"choices": [], "usage": usage(result)}
    yield None, END


def error(status: int, message: str, code: str | None = None, param: str | None = None) -> JsonObject:
    """An error's body."""
    kinds = {UNAUTHORISED: "authentication_error", NOT_FOUND: "invalid_request_error"}
    kind = "server_error" if status >= 500 else kinds.get(status, "invalid_request_error")
    named = {UNAUTHORISED: "invalid_api_key", TOO_LARGE: "request_too_large"}
    return {"error": {"message": message, "type": kind, "param": param, "code": code or named.get(status)}}


def error_event(body: JsonObject) -> Event:
    """An error after the stream has begun."""
    return None, body


PING: Event | None = None  # a comment keeps the stream alive


def usage(result: ModelReply) -> JsonObject:
    """Tokens, as Chat Completions counts them."""
    total = result.prompt_tokens + result.completion_tokens
    return {
        "prompt_tokens": result.prompt_tokens,
        "completion_tokens": result.completion_tokens,
        "total_tokens": total,
    }


def with_numbers(sampling: JsonObject, body: Mapping[str, object]) -> JsonObject:
    """`sampling`, once the numbers in it are known to be numbers. Raises Refused."""
    for name in sampling:
        if name in KINDS:
            checked(body, name, *KINDS[name])
    return sampling


def _set(**fields: object) -> JsonObject:
    return {name: value for name, value in fields.items() if value is not None}


def _refuse_other_forms(body: JsonObject) -> None:
    form = checked(body, "response_format", dict) or {}
    if form.get("type", "text") != "text":
        raise Refused(
            BAD_REQUEST,
            f"response_format {form['type']!r:.80} is not enforced here: ask for it in the prompt",
            param="response_format",
        )
    if [each for each in checked(body, "modalities", list) or [] if each != "text"]:
        raise Refused(BAD_REQUEST, "modalities: only text can be sampled here", param="modalities")


def _message(message: JsonObject, at: int) -> JsonObject:
    where = f"messages[{at}]"
    role = message.get("role")
    if role not in ROLES:
        raise Refused(BAD_REQUEST, f"{where}.role is {role!r:.80}: expected one of {', '.join(ROLES)}", param=where)
    content = message.get("content")
    if not isinstance(content, (str, list)) and not (content is None and role == "assistant"):
        raise Refused(BAD_REQUEST, f"{where}.content is {content!r:.80}: expected text or a list of parts", param=where)
    calls = [_call(each, f"{where}.tool_calls") for each in objects(message, "tool_calls")]
    named = {name: message[name] for name in ("name", "tool_call_id") if isinstance(message.get(name), str)}
    role = "system" if role == "developer" else role
    return {"role": role, "content": content, **named} | ({"tool_calls": calls} if calls else {})


def _call(call: JsonObject, where: str) -> JsonObject:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Refused(BAD_REQUEST, f"{where} has {call!r:.80}: expected a function with a name", param=where)
    return as_call(call.get("id"), function["name"], arguments_of(function))


def arguments_of(call: JsonObject) -> str:
    """The arguments of a call that a client sends back, an object among them as its text. Raises Refused."""
    arguments = checked(call, "arguments", str, dict)
    if isinstance(arguments, dict):
        return json.dumps(arguments, ensure_ascii=False)
    return "{}" if arguments is None else str(arguments)


def as_call(identity: object, name: str, arguments: str) -> JsonObject:
    """A tool call in a message of the model's."""
    return {"id": str(identity), "type": "function", "function": {"name": name, "arguments": arguments}}


def _tool(tool: JsonObject, at: int) -> JsonObject:
    given = tool.get("function")
    function: Mapping[str, object] = given if isinstance(given, dict) else {}
    return function_tool(function.get("name"), function.get("description"), function.get("parameters"), f"tools[{at}]")


def _choice(choice: object, tools: list[JsonObject]) -> tuple[list[JsonObject], str | None]:
    """(tools that are shown, "auto", "none" or "required"), for each form of `tool_choice`."""
    if choice is None or choice in ("auto", "none"):
        return tools, None if choice is None else str(choice)
    if choice == "required":
        return tools, required(tools)
    if isinstance(choice, dict) and isinstance(function := choice.get("function"), dict):
        return only(tools, [function.get("name")]), "required"
    given = choice.get("allowed_tools") if isinstance(choice, dict) else None
    if isinstance(given, dict):
        named = [checked(each, "function", dict) or {} for each in objects(given, "tools")]
        shown = only(tools, [each.get("name") for each in named])
        return shown, allowed(shown, given.get("mode"))
    raise Refused(
        BAD_REQUEST, f"tool_choice is {choice!r:.80}: expected auto, none, required, or a function", param="tool_choice"
    )


def _head(result: ModelReply, kind: str) -> JsonObject:
    return {"id": f"chatcmpl-{result.id}", "object": kind, "created": result.created, "model": result.model}


def _calls(calls: Sequence[Call]) -> list[JsonObject]:
    return [as_call(each.id, each.name, each.arguments) for each in calls]


def _said(answer: Answer) -> JsonObject:
    text = answer.text or (None if answer.calls else "")
    calls = {"tool_calls": _calls(answer.calls)} if answer.calls else {}
    return {"role": "assistant", "content": text, "refusal": None, **calls}


def _deltas(answer: Answer) -> Iterator[tuple[JsonObject, str | None]]:
    yield {"role": "assistant", "content": ""}, None
    if answer.text:
        yield {"content": answer.text}, None
    for at, call in enumerate(_calls(answer.calls)):
        yield {"tool_calls": [{"index": at, **call}]}, None
    yield {}, answer.reason
