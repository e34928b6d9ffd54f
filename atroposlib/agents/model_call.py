"""What every dialect of the endpoint is translated to and from: one call of the model, and its reply.

    body of a request ──dialects/*.py──▶ ModelCall ──▶ session ──▶ ModelReply ──dialects/*.py──▶ body of a reply, events

`ModelReply` is written to the journal, so a reply that is sent again is the same to the last id.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct
from openai.types.chat import ChatCompletion
from openai.types.chat.chat_completion import Choice

JsonObject = dict[str, Any]
Messages = list[JsonObject]

MOST_TEXTS = 64  # stop sequences, for which vLLM looks at each token
BAD_REQUEST, UNAUTHORISED, FORBIDDEN, NOT_FOUND, TOO_LARGE = 400, 401, 403, 404, 413


class Refused(Exception):
    """A request that gets an error in its dialect's own form; `code` is OpenAI's word for it, `param` the field."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param


@dataclass(frozen=True)
class ModelCall:
    """One request, in the form of OpenAI's chat messages. `sampling` is what `ManagedServer.chat_completion` takes
    besides the fields here; `shown` is what only the form of the reply depends on.
    """

    messages: Messages
    tools: list[JsonObject] | None = None
    tool_choice: str | None = None
    n: int = 1
    sampling: JsonObject = field(default_factory=dict)
    stream: bool = False
    shown: JsonObject = field(default_factory=dict)

    def key(self) -> str:
        """The hash of all that decides which tokens are sampled: a retry has the same one, streamed or not."""
        return _hash([self.messages, self.tools, self.tool_choice, self.n, self.sampling])

    def place(self) -> str:
        """The hash of the conversation up to the model's last words, which this call continues."""
        last = max((at for at, message in enumerate(self.messages) if message["role"] == "assistant"), default=-1)
        return _hash(self.messages[: last + 1])


class Call(Struct, frozen=True):
    """A tool call. `arguments` is the JSON text that the model wrote."""

    id: str
    name: str
    arguments: str


class Answer(Struct, frozen=True):
    """One of n answers. `reason` is "stop", "length" or "tool_calls"; `stop` the stop sequence that ended it."""

    text: str
    reason: str
    calls: list[Call] = []
    stop: str | None = None
    logprobs: JsonObject | None = None

    @property
    def parts(self) -> tuple[str, str]:
        """(thoughts with their tags and the blanks behind them, what is said then), which together are `text`."""
        thoughts, mark, said = self.text.partition("</think>")
        if not mark:
            return "", self.text
        return thoughts + mark + said[: len(said) - len(said.lstrip())], said.lstrip()


class ModelReply(Struct, frozen=True):
    """All answers to a call. `created` is in seconds since 1970."""

    id: str  # without a dialect's prefix
    created: int
    model: str
    answers: list[Answer]
    prompt_tokens: int
    completion_tokens: int


def reply_of(completion: ChatCompletion, stop: Sequence[str]) -> ModelReply:
    """The reply of a managed server, without the stop sequences that ended its answers."""
    usage = completion.usage
    return ModelReply(
        id=completion.id.partition("-")[2].replace("-", ""),
        created=completion.created,
        model=completion.model,
        answers=[_answer(choice, stop) for choice in completion.choices],
        prompt_tokens=usage.prompt_tokens if usage else 0,
        completion_tokens=usage.completion_tokens if usage else 0,
    )


def _answer(choice: Choice, stop: Sequence[str]) -> Answer:
    text = choice.message.content or ""
    calls = [
        Call(call.id, call.function.name, call.function.arguments)
        for call in choice.message.tool_calls or []
        if call.type == "function"
    ]
    found = [(at, each) for each in stop if (at := text.find(each)) >= 0] if choice.finish_reason == "stop" else []
    at, ended_by = min(found, default=(len(text), None))
    logprobs = choice.logprobs.model_dump() if choice.logprobs else None
    return Answer(text[:at], choice.finish_reason, calls, ended_by, logprobs)


def thoughts_of(raw: str) -> str:
    """What a model thought, without tags."""
    return raw.strip().removeprefix("<think>").removesuffix("</think>").strip()


def require(body: object) -> JsonObject:
    """`body`, if it is a JSON object. Raises Refused."""
    if not isinstance(body, dict):
        raise Refused(BAD_REQUEST, f"the body is {type(body).__name__}: expected a JSON object")
    return body


def checked(body: Mapping[str, object], name: str, *kinds: type, least: float | None = None) -> Any:
    """The field, None if it is absent or null. Raises Refused for another type than `kinds` or less than `least`."""
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        expected = " or ".join(kind.__name__ for kind in kinds)
        raise Refused(BAD_REQUEST, f"{name} is {value!r:.80}: expected {expected}", param=name)
    if least is not None and isinstance(value, (int, float)) and value < least:
        raise Refused(BAD_REQUEST, f"{name} is {value!r:.80}: expected at least {least:g}", param=name)
    return value


def objects(body: Mapping[str, object], name: str) -> list[JsonObject]:
    """A list of objects, empty if it is absent. Raises Refused."""
    values = checked(body, name, list) or []
    for at, each in enumerate(values):
        if not isinstance(each, dict):
            raise Refused(BAD_REQUEST, f"{name}[{at}] is {each!r:.80}: expected an object", param=f"{name}[{at}]")
    return list(values)


def texts(body: Mapping[str, object], name: str) -> list[str]:
    """A text or a list of texts, as a list. Raises Refused."""
    value = checked(body, name, str, list)
    given = [value] if isinstance(value, str) else value or []
    if len(given) > MOST_TEXTS:
        raise Refused(BAD_REQUEST, f"{name} has {len(given)} texts: expected at most {MOST_TEXTS}", param=name)
    if wrong := [each for each in given if not isinstance(each, str) or not each]:
        raise Refused(BAD_REQUEST, f"{name} has {wrong[0]!r:.80}: expected texts that are not empty", param=name)
    return given


def refuse_unknown(body: Mapping[str, object], known: frozenset[str], words: str) -> None:
    """Refuse fields that the dialect does not have; `words` is its sentence, with {name}. Raises Refused."""
    for name in body:
        if name not in known:
            raise Refused(BAD_REQUEST, words.format(name=name), param=name)


def function_tool(name: object, description: object, parameters: object, where: str) -> JsonObject:
    """A tool in the form of OpenAI's chat. Raises Refused for one without a name."""
    if not isinstance(name, str) or not name:
        raise Refused(BAD_REQUEST, f"{where} has no name: only functions can be offered", param=where)
    if description is not None and not isinstance(description, str):
        raise Refused(BAD_REQUEST, f"{where}: its description is {description!r:.80}: expected text", param=where)
    if parameters is not None and not isinstance(parameters, dict):
        raise Refused(BAD_REQUEST, f"{where}: its parameters are no JSON schema", param=where)
    given = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": {key: value for key, value in given.items() if value is not None}}


def only(tools: list[JsonObject], names: Sequence[object]) -> list[JsonObject]:
    """The tools of these names, which are all that the model is shown. Raises Refused for one that there is not."""
    known = dict.fromkeys(tool["function"]["name"] for tool in tools)
    for name in names:
        if not isinstance(name, str) or name not in known:
            said = f"tool_choice names {name!r:.80}, which is not in tools: {[*known]!s:.800}"
            raise Refused(BAD_REQUEST, said, param="tool_choice")
    chosen = {*names}
    return [tool for tool in tools if tool["function"]["name"] in chosen]


def required(tools: list[JsonObject]) -> str:
    """The choice to call one of these tools, or another. Raises Refused where there is none."""
    if not tools:
        raise Refused(BAD_REQUEST, "tool_choice asks for a call, and there are no tools", param="tool_choice")
    return "required"


def allowed(tools: list[JsonObject], mode: object) -> str:
    """The choice among tools that a request allows. Raises Refused for a mode that there is not."""
    if mode not in ("auto", "required"):
        raise Refused(BAD_REQUEST, f"tool_choice.mode is {mode!r:.80}: expected auto or required", param="tool_choice")
    return required(tools) if mode == "required" else "auto"


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
