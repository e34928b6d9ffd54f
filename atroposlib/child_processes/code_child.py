"""Calls a function of a program that a model wrote, in a sandboxed child of `ChildPool`; end the child afterwards.

    {"program": "def solve(n): ...", "function": "solve", "calls": [[1], [2]], "cpu_s": 2.0}
        ──▶ {"outcomes": [{"value": 1}, {"error": "ZeroDivisionError: division by zero"}], "error": ""}

It never sees what the results should be: a program that takes over this process can claim results, and cannot know the
right ones. The caller compares them.
"""

import json
import resource
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

from atroposlib.child_processes.loop import answer_requests

SHOWN = 300  # characters of an error
VALUE_CHARS = 100_000


class _OutOfTime(BaseException):
    """The program has used its CPU time. No Exception, so that `except Exception` of the program lets it through."""


def _out_of_time(number: int, frame: FrameType | None) -> None:
    raise _OutOfTime


def answer(request: dict[str, Any]) -> dict[str, object]:
    """See the module's head. The limit of CPU time is one for the whole request."""
    signal.signal(signal.SIGPROF, _out_of_time)
    signal.setitimer(signal.ITIMER_PROF, request["cpu_s"], 0.1)  # again and again, should the program catch it
    try:
        return _outcomes(request)
    except _OutOfTime:  # between two calls
        return {"outcomes": [], "error": _described(_OutOfTime(), request["cpu_s"])}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _outcomes(request: dict[str, Any]) -> dict[str, object]:
    space: dict[str, Any] = {"__name__": "program"}
    try:
        exec(compile(request["program"], "program.py", "exec"), space)
        function: Callable[..., object] = space[request["function"]]
    except KeyError:
        return {"outcomes": [], "error": f"it defines no {request['function']}"}
    except BaseException as error:  # whatever the program raises, SystemExit too
        return {"outcomes": [], "error": _described(error, request["cpu_s"])}
    return {"outcomes": [_outcome(function, call, request["cpu_s"]) for call in request["calls"]], "error": ""}


def _outcome(function: Callable[..., object], call: list[object], cpu_s: float) -> dict[str, object]:
    try:
        text = json.dumps(function(*json.loads(json.dumps(call))))  # a copy: the program may change its arguments
    except BaseException as error:  # see above
        return {"error": _described(error, cpu_s)}
    if len(text) > VALUE_CHARS:
        return {"error": f"the result has {len(text)} characters, more than {VALUE_CHARS}"}
    return {"value": json.loads(text)}


def _described(error: BaseException, cpu_s: float) -> str:
    if type(error) is _OutOfTime:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return f"it took more than {cpu_s:g} s of CPU time ({used.ru_utime + used.ru_stime:.1f} s)"
    try:
        return f"{type(error).__name__}: {error}"[:SHOWN]
    except BaseException:  # its class is the program's own
        return "an exception that cannot be shown"


if __name__ == "__main__":
    answer_requests(answer)
