r"""The process in which `environments/calculator_tool_server.py` runs its tool; see `loop.py` for its protocol.

{"text": "... <tool_call>{...}</tool_call>", "time_limit_s": 5.0}  ──▶  {"result": "391"}
"""

from decimal import Decimal
from typing import Any

from atroposlib.child_processes.loop import answer_requests
from atroposlib.grading.arithmetic import ExpressionError, compute
from atroposlib.utils.tool_call_parser import parse_tool_call

TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Computes an expression of numbers, + - * / and brackets.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}


def tool_result(text: str) -> str | None:
    """Return what the calculator replies to the call in `text`; None when that is not a call."""
    if "<tool_call>" not in text:
        return None
    _, arguments, failed = parse_tool_call(text, [TOOL])
    expression = arguments.get("expression")
    if failed or not isinstance(expression, str):
        return 'Error: expected {"name": "calculator", "arguments": {"expression": "..."}}'
    try:
        value = compute(expression).value
    except ExpressionError as error:
        return f"Error: {error}"
    # Decimal, since a float ends at 1e308 and an expression does not.
    return str(value) if value.denominator == 1 else f"{value} = {Decimal(value.numerator) / value.denominator:.6g}"


def answer(request: dict[str, Any]) -> dict[str, object]:
    """The tool's reply to the call in a message."""
    return {"result": tool_result(request["text"])}


if __name__ == "__main__":
    answer_requests(answer)
