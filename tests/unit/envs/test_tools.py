"""Tools from plain functions: their schema, their calls, and what models get wrong about them."""

import asyncio
import datetime
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from atroposlib.envs import tools
from atroposlib.envs.errors import EnvError
from atroposlib.envs.failures import RolloutFailed
from atroposlib.envs.server_handling.errors import PermanentServerError, ServerError
from atroposlib.envs.tools import BadTool, CallResult, Tool, Toolbox, ToolError, documented


class Place(BaseModel):
    """A model as an argument."""

    city: str
    country: str = "FR"


def weather(
    place: Place, day: datetime.date, unit: Literal["C", "F"] = "C", hours: Annotated[int, Field(ge=1)] = 24
) -> str:
    """Tells the weather
    of one day.

    Args:
        place: Where, as a city
            and its country.
        day (date): Which day.

    Returns:
        A sentence.
    """
    return f"{place.city} {place.country} {day:%d.%m.} {unit} {hours}"


def divide(dividend: float, divisor: float) -> float:
    """Divides."""
    return dividend / divisor


async def waits(seconds: float) -> str:
    """Waits."""
    await asyncio.sleep(seconds)
    return "awake"


async def call(function: Any, arguments: str, **settings: Any) -> CallResult:
    tool = Tool.of(function)
    return await Toolbox([tool], **settings).call(tool.name, arguments)


def test_schema_comes_from_type_hints_and_descriptions_from_the_docstring() -> None:
    function = Tool.of(weather).schema["function"]
    assert function["name"] == "weather"
    assert function["description"] == "Tells the weather of one day."
    parameters = function["parameters"]
    assert parameters["required"] == ["place", "day"]
    assert parameters["additionalProperties"] is False
    assert parameters["properties"] == {
        "place": {"$ref": "#/$defs/Place", "description": "Where, as a city and its country."},
        "day": {"type": "string", "format": "date", "description": "Which day."},
        "unit": {"type": "string", "enum": ["C", "F"], "default": "C"},
        "hours": {"type": "integer", "minimum": 1, "default": 24},
    }
    assert parameters["$defs"]["Place"]["required"] == ["city"]


def test_docstring_without_sections_is_the_description() -> None:
    assert documented("Looks\n  a word up: in the dictionary.") == ("Looks a word up: in the dictionary.", {})
    assert documented("") == ("", {})


async def test_arguments_are_converted_as_the_type_hints_say() -> None:
    result = await call(weather, '{"place": {"city": "Lyon"}, "day": "2026-02-01", "unit": "F"}')
    assert result == CallResult("Lyon FR 01.02. F 24", "Lyon FR 01.02. F 24")


async def test_methods_keep_the_state_of_their_object() -> None:
    class Counter:
        count = 0

        def add(self, json: int, _more: int = 0) -> dict[str, int]:
            """Adds."""
            self.count += json + _more
            return {"count": self.count}

    counter = Counter()
    box = Toolbox([counter.add])
    assert (await box.call("add", '{"json": 2}')).text == '{"count":2}'
    assert (await box.call("add", '{"json": 2, "_more": 1}')).value == {"count": 5}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ('{"dividend": 1}', "divisor: missing"),
        ("", "dividend: missing; divisor: missing"),
        ('{"dividend": 1, "divisor": "x"}', "divisor: Input should be a valid number"),
        ('{"dividend": 1, "divisor": 2, "rest": 3}', "rest: there is no such argument"),
        ("[1, 2]", "expected a JSON object"),
        ("null", "expected a JSON object"),
        ('"1 / 2"', "expected a JSON object"),
        ('{"dividend": 1', "Invalid JSON"),
        ("[" * 200_000, "recursion limit exceeded"),
        ('{"dividend": ' + '{"a": ' * 100_000, "recursion limit exceeded"),
        ('{"dividend": ' + "9" * 100_000 + "}", "number out of range"),
        ('{"dividend": "' + "9" * 1_000_000 + '", "divisor": []}', "divisor: Input should be a valid number"),
        ('{"dividend": 1, "divisor": "\\ud800"}', "Invalid JSON"),
        ("{" + ", ".join(f'"a{number}": 1' for number in range(10_000)) + "}", "and 9999 more"),
    ],
    ids=range(14),
)
async def test_wrong_arguments_are_named_briefly_and_the_function_is_not_called(arguments: str, named: str) -> None:
    calls: list[float] = []

    def divide(dividend: float, divisor: float) -> None:
        """Divides."""
        calls.append(dividend)

    result = await call(divide, arguments)
    assert result.error == "arguments"
    assert result.text.startswith("Error: wrong arguments of divide: ")
    assert named in result.text
    assert len(result.text) < 2000
    assert not calls


async def test_wrong_name_gets_the_right_ones() -> None:
    box = Toolbox([divide, weather])
    result = await box.call("dvide", "{}")
    assert result.error == "unknown"
    assert result.text == "Error: there is no tool 'dvide'; did you mean 'divide'?; the tools are: divide, weather"
    assert len((await box.call("x" * 1_000_000, "{}")).text) < 1000


async def test_what_a_tool_raises_is_told_to_the_model() -> None:
    result = await call(divide, '{"dividend": 1, "divisor": 0}')
    assert (result.text, result.error) == ("Error: divide failed: ZeroDivisionError: float division by zero", "raised")
    assert isinstance(result.raised, ZeroDivisionError)

    def closed() -> None:
        """Refuses."""
        raise ToolError("the shop is closed on Sundays")

    result = await call(closed, "{}")
    assert (result.text, result.raised) == ("Error: the shop is closed on Sundays", None)

    async def late() -> None:
        """Raises what a time limit would."""
        raise TimeoutError("of its own")

    assert (await call(late, "{}")).text == "Error: late failed: TimeoutError: of its own"


@pytest.mark.parametrize("error", [SystemExit(3), StopIteration(3)])
async def test_a_tool_that_ends_the_process_or_an_iterator_has_failed(error: BaseException) -> None:
    def ends() -> None:
        """Runs a program that a model wrote."""
        raise error

    result = await asyncio.wait_for(call(ends, "{}"), 5)
    assert (result.text, result.error) == (f"Error: ends failed: RuntimeError: {type(error).__name__}: 3", "raised")


async def test_an_async_tool_that_ends_the_process_has_failed() -> None:
    async def ends() -> None:
        """Runs a program that a model wrote."""
        sys.exit(3)

    assert (await call(ends, "{}")).text == "Error: ends failed: RuntimeError: SystemExit: 3"


@pytest.mark.parametrize("error", [RolloutFailed("gone"), PermanentServerError("401"), EnvError("no disk")])
async def test_what_is_not_the_policys_fault_is_raised(error: Exception) -> None:
    def broken() -> None:
        """Raises."""
        raise error

    with pytest.raises((RolloutFailed, ServerError, EnvError), match=str(error)):
        await call(broken, "{}")


async def test_a_call_has_a_time_limit_whether_it_is_async_or_not() -> None:
    assert (await call(waits, '{"seconds": 0}')).text == "awake"
    result = await call(waits, '{"seconds": 60}', time_limit_s=0.01)
    assert (result.text, result.error) == ("Error: waits took longer than 0.01 s", "timeout")
    release = threading.Event()

    def hangs() -> bool:
        """Hangs."""
        return release.wait(60)

    result = await call(hangs, "{}", time_limit_s=0.01)
    assert (result.text, result.error) == ("Error: hangs took longer than 0.01 s", "timeout")
    release.set()


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    monkeypatch.setattr(tools, "_unfinished", set())
    event = threading.Event()
    yield event
    event.set()


async def test_threads_of_calls_that_never_end_are_bounded(release: threading.Event) -> None:
    def hangs() -> bool:
        """Hangs."""
        return release.wait(60)

    before = threading.active_count()
    for _ in range(tools.UNFINISHED_MOST):
        assert (await call(hangs, "{}", time_limit_s=0.001)).error == "timeout"
    with pytest.raises(RolloutFailed, match="64 calls of tools run on"):
        await call(hangs, "{}", time_limit_s=0.001)
    assert threading.active_count() <= before + tools.UNFINISHED_MOST
    release.set()
    for thread in list(tools._unfinished):
        await asyncio.to_thread(thread.join, 5)
    assert (await call(hangs, "{}", time_limit_s=5)).text == "true"


async def test_plain_functions_run_side_by_side() -> None:
    both = threading.Barrier(2, timeout=5)

    def meet() -> str:
        """Waits for the other."""
        both.wait()
        return "met"

    results = await asyncio.gather(call(meet, "{}"), call(meet, "{}"))
    assert [result.text for result in results] == ["met", "met"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("as it is", "as it is"),
        (None, "null"),
        ({"a": [1.5, True]}, '{"a":[1.5,true]}'),
        (float("nan"), "NaN"),
        (Path("/tmp/a"), '"/tmp/a"'),
        (Place(city="Lyon"), '{"city":"Lyon","country":"FR"}'),
        ("half a pair \ud800", "half a pair ?"),
        ("x" * 11, "x" * 10 + "\n[cut after 10 of 11 characters]"),
    ],
)
async def test_results_are_text_of_bounded_length(value: Any, text: str) -> None:
    def gives() -> Any:
        """Gives it."""
        return value

    assert (await call(gives, "{}", longest_result=max(10, len(text)) if len(text) != 42 else 10)).text == text


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: x, "a tool needs a name"),
        (divmod, "takes none by name"),
        (lambda *values: values, "a tool needs a name"),
    ],
)
def test_a_function_that_cannot_be_a_tool_is_refused_in_one_line(function: Any, reason: str) -> None:
    with pytest.raises(BadTool, match=reason) as refused:
        Tool.of(function)
    assert "\n" not in str(refused.value)


def test_parameters_that_cannot_be_passed_or_described_are_named() -> None:
    def many(*values: int) -> None:
        """Takes many."""

    def odd(lock: threading.Event) -> None:
        """Takes what JSON has no form for."""

    with pytest.raises(BadTool, match="tool many: a model passes arguments by name, and values takes none"):
        Tool.of(many)
    with pytest.raises(BadTool, match="tool odd: no JSON schema from its type hints"):
        Tool.of(odd)
    with pytest.raises(BadTool, match="two tools are named divide"):
        Toolbox([divide, divide])
