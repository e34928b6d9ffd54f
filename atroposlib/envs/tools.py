"""Tools that a model may call: plain Python functions, with their JSON schema from type hints and docstring.

    def square(number: float) -> float:        ─▶ Tool.of: {"name", "description", "parameters": JSON schema}
        "Squares a number. ..."                               │ shown to the model by the chat template
    Toolbox.call("square", '{"number": 3}') ◀── the model's call
          │ validated by pydantic, run under a time limit, a plain function in a thread
          ▼
    CallResult("9.0") or CallResult("Error: ...", error="arguments"), which the model reads as the next message

What is wrong with a call is told to the model and counted; it never ends the run. Only what no policy is to blame for
is raised: RolloutFailed, a ServerError and an EnvError, from inside of a tool.
"""

import asyncio
import contextvars
import functools
import inspect
import re
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

from pydantic import PydanticSchemaGenerationError, PydanticUserError, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, to_json

from atroposlib.envs.errors import EnvError, WrongSetting
from atroposlib.envs.failures import RolloutFailed, carried
from atroposlib.envs.server_handling.errors import ServerError
from atroposlib.flags import nearest

CallError = Literal["unknown", "arguments", "raised", "timeout"]
NOT_THE_POLICYS = (RolloutFailed, ServerError, EnvError)

NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")  # OpenAI's rule
SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?):[ \t]*$", re.MULTILINE)
ARGUMENT = re.compile(r"(\w+)(?:[ \t]*\([^)]*\))?:[ \t]*(.*)")
UNFINISHED_MOST = 64  # calls of plain functions that run on after their time limit
NAMED_ERRORS = 3  # wrong arguments that one message names
SHOWN_CHARS = 200


class BadTool(WrongSetting):
    """A function cannot be a tool; the message names it and says why."""


class ToolError(Exception):
    """Raised by a tool for the model to read its text, as it is."""


def listed(tools: object, where: str) -> list[Any]:
    """Return the functions that an author gave as `where`. Raises BadTool for one function, or its name, alone."""
    if not isinstance(tools, Iterable) or isinstance(tools, str):
        raise BadTool(f"{where} gives {getattr(tools, '__name__', tools)!r} instead of a list: write [f], or (f,)")
    return list(tools)


@dataclass(frozen=True, slots=True)
class Tool:
    """Describes something that a model may call. `run` gets the arguments as the model wrote them, in JSON, and raises
    WrongArguments for those that do not fit.
    """

    name: str
    description: str
    parameters: Mapping[str, object]  # a JSON schema of type object
    run: Callable[[str], Awaitable[object]]
    has_own_limit: bool = False  # `run` raises TimeoutError by itself, after a time of its own

    @classmethod
    def of(cls, function: "Callable[..., object] | Tool") -> "Tool":
        """The tool of a plain or async function with type hints. Raises BadTool."""
        if isinstance(function, Tool):
            return function
        name = getattr(function, "__name__", "")
        if not NAME.fullmatch(name):
            raise BadTool(f"a tool needs a name of 1 to 64 letters, digits, _ and -, and {function!r} has {name!r}")
        kinds = {each.name: each.kind for each in inspect.signature(function).parameters.values()}
        for parameter, kind in kinds.items():
            if kind not in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY):
                raise BadTool(f"tool {name}: a model passes arguments by name, and {parameter} takes none by name")

        @functools.wraps(function)
        def given(**arguments: object) -> dict[str, object]:
            return arguments

        try:
            adapter: TypeAdapter[object] = TypeAdapter(cast(Any, _by_name(given)))
            schema = adapter.json_schema()
        except (PydanticSchemaGenerationError, PydanticUserError, NameError, TypeError) as error:
            raise BadTool(f"tool {name}: no JSON schema from its type hints: {str(error).splitlines()[0]}") from error
        summary, described = documented(inspect.getdoc(function) or "")
        return cls(name, summary, _described(schema, described), functools.partial(_run, function, adapter))

    @property
    def schema(self) -> dict[str, Any]:
        """Return the schema that OpenAI's API and chat templates take."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


ToolLike: TypeAlias = Tool | Callable[..., object]


@dataclass(frozen=True, slots=True)
class CallResult:
    """Holds what the model reads, the tool's own value, what was wrong with the call, if anything was, and what the
    tool raised, which its author wants to see.
    """

    text: str
    value: object = None
    error: CallError | None = None
    raised: Exception | None = None


class Toolbox:
    """The tools of one rollout. `time_limit_s` is for each call, `longest_result` in characters. Raises BadTool for two
    tools with the same name.
    """

    def __init__(self, tools: Iterable[ToolLike], time_limit_s: float = 30.0, longest_result: int = 10_000) -> None:
        made = [Tool.of(each) for each in tools]
        self.tools = {tool.name: tool for tool in made}
        if twice := [name for name, count in Counter(tool.name for tool in made).items() if count > 1]:
            raise BadTool(f"two tools are named {twice[0]}; rename one of them")
        self._time_limit_s = time_limit_s
        self._longest_result = longest_result

    @property
    def schemas(self) -> list[dict[str, object]]:
        """Return the schemas of all tools, for `tools=` of a chat completion."""
        return [tool.schema for tool in self.tools.values()]

    async def call(self, name: str, arguments: str) -> CallResult:
        """The result of one call. Raises what is not the policy's fault: RolloutFailed, ServerError, EnvError."""
        tool = self.tools.get(name)
        if tool is None:
            known = ", ".join(self.tools) or "none"
            wrong = f"there is no tool {name[:SHOWN_CHARS]!r}{nearest(name[:SHOWN_CHARS], list(self.tools))}"
            return self._failed("unknown", f"{wrong}; the tools are: {known}")
        limit_s = None if tool.has_own_limit else self._time_limit_s
        try:
            async with asyncio.timeout(limit_s) as limit:
                value = await tool.run(arguments or "{}")
        except NOT_THE_POLICYS:
            raise
        except WrongArguments as error:
            return self._failed("arguments", f"wrong arguments of {name}: {error}")
        except ToolError as error:
            return self._failed("raised", str(error))
        except (Exception, SystemExit) as raised:  # the tool's code may raise anything, and the model is to read it
            if isinstance(raised, TimeoutError) and (limit.expired() or tool.has_own_limit):
                return self._failed("timeout", f"{name} took longer than {self._time_limit_s:g} s")
            told = carried(raised)
            return self._failed("raised", f"{name} failed: {type(told).__name__}: {told}", told)
        return CallResult(self._shortened(as_text(value)), value)

    def _failed(self, error: CallError, message: str, raised: Exception | None = None) -> CallResult:
        return CallResult(self._shortened(as_text(f"Error: {message}")), None, error, raised)

    def _shortened(self, text: str) -> str:
        if len(text) <= self._longest_result:
            return text
        return f"{text[: self._longest_result]}\n[cut after {self._longest_result} of {len(text)} characters]"


class WrongArguments(Exception):
    """The arguments of a call do not fit the tool's schema; the message names each that does not."""


def as_text(value: object) -> str:
    """Show what a tool returned, as a model reads it: text as it is, anything else as JSON; what JSON has no form for,
    by `str`. Half a surrogate pair, which no tokenizer takes, becomes a question mark.
    """
    text = value if isinstance(value, str) else to_json(value, fallback=str, inf_nan_mode="constants").decode()
    return text.encode("utf-8", "replace").decode()


def documented(docstring: str) -> tuple[str, dict[str, str]]:
    """(description, {parameter: its description}) of a docstring in Google's style."""
    first, *sections = SECTION.split(docstring)
    described: dict[str, list[str]] = {}
    for title, body in zip(sections[::2], sections[1::2], strict=True):
        if title not in ("Args", "Arguments", "Parameters"):
            continue
        lines = [line for line in body.expandtabs().splitlines() if line.strip()]
        depth = min((len(line) - len(line.lstrip()) for line in lines), default=0)
        name = ""
        for line in lines:
            match = ARGUMENT.fullmatch(line[depth:])
            if match:
                name = match[1]
                described[name] = [match[2]]
            elif name:
                described[name].append(line.strip())
    return " ".join(first.split()), {name: " ".join(words).strip() for name, words in described.items()}


def _by_name(given: Callable[..., object]) -> Callable[..., object]:
    """`given` with a signature of keyword-only parameters: a JSON array is then no list of arguments."""
    signature = inspect.signature(given)
    keyword = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in signature.parameters.values()]
    given.__signature__ = signature.replace(parameters=keyword)  # type: ignore[attr-defined]
    return given


def _described(schema: dict[str, Any], described: Mapping[str, str]) -> dict[str, object]:
    """`schema` with the docstring's descriptions, where the type hints have none; without pydantic's titles."""
    for name, parameter in schema.get("properties", {}).items():
        parameter.pop("title", None)
        if name in described:
            parameter.setdefault("description", described[name])
    return schema


async def _run(function: Callable[..., Any], adapter: TypeAdapter[Any], arguments: str) -> object:
    """The function's result. Raises WrongArguments, and what the function raises."""
    try:
        values: dict[str, object] = adapter.validate_json(arguments)
    except ValidationError as error:
        raise WrongArguments(_reasons(error.errors(include_url=False))) from None
    if inspect.iscoroutinefunction(inspect.unwrap(function)):
        return await function(**values)
    value = await in_thread(functools.partial(function, **values))
    return await value if inspect.isawaitable(value) else value


def _reasons(errors: list[ErrorDetails]) -> str:
    """The first of `errors`, each with its argument."""
    named = [_reason(error) for error in errors[:NAMED_ERRORS]]
    more = len(errors) - len(named)
    return "; ".join(named) + (f"; and {more} more" if more else "")


def _reason(error: ErrorDetails) -> str:
    place, kind = ".".join(str(part) for part in error["loc"]), error["type"]
    if kind in ("arguments_type", "unexpected_positional_argument"):
        return "expected a JSON object"
    if kind == "missing_keyword_only_argument":
        return f"{place}: missing"
    if kind == "unexpected_keyword_argument":
        return f"{place}: there is no such argument"
    got = "" if kind == "json_invalid" else f" (got {error['input']!r:.{SHOWN_CHARS}})"
    return f"{place}: {error['msg']}{got}" if place else f"{error['msg']}{got}"


_unfinished: set[threading.Thread] = set()


async def in_thread(call: Callable[[], object]) -> object:
    """The result of `call`, in a thread of its own. One that is given up runs on, and does not keep the process alive;
    while 64 do, RolloutFailed is raised. (The threads of asyncio's executor are awaited when the process ends.)
    """
    _unfinished.difference_update([thread for thread in _unfinished if not thread.is_alive()])
    if len(_unfinished) >= UNFINISHED_MOST:
        raise RolloutFailed(
            f"{len(_unfinished)} calls of tools run on after their time limit: bound their work, or write them async"
        )
    loop, context = asyncio.get_running_loop(), contextvars.copy_context()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(method: Callable[[Any], None], result: object) -> None:
        if not future.done():
            method(result)

    def work() -> None:
        try:
            method, result = future.set_result, context.run(call)
        except BaseException as error:
            method, result = future.set_exception, carried(error)
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, method, result)

    thread = threading.Thread(target=work, name="tool", daemon=True)
    thread.start()
    try:
        return await future
    except asyncio.CancelledError:
        _unfinished.add(thread)
        raise
