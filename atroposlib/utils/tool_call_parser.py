"""Tool calls that a model wrote into its reply, as `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

import ast
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from atroposlib.grading.extraction import all_tagged
from atroposlib.logs import get_logger

log = get_logger(__name__)

NO_TOOL = "-ERROR-"


def extract_tool_call(text: str, preferred_tags: Sequence[str] | None = None) -> str | None:
    """Return what stands between the first pair of the first tag that occurs (default: tool_call); None when none does.
    JSON is read before tags: one that stands in a call's arguments ends no call.
    """
    for tag in preferred_tags or ["tool_call"]:
        if (call := _json_behind(text, f"<{tag}>")) is not None:
            return call
        calls = all_tagged(text, tag)
        if calls:
            return calls[0].strip()
    return None


def parse_tool_call(
    response: str,
    available_tools: Sequence[Mapping[str, Any]] | None = None,
    preferred_tags: Sequence[str] | None = None,
) -> tuple[str, dict[str, object], bool]:
    """(tool name, arguments, False), or ("-ERROR-", arguments if known, True) when there is no valid call.

    `available_tools`, each {"name": ...} or {"function": {"name": ...}}, limits the names that are valid.
    """
    written = extract_tool_call(response, preferred_tags)
    call = _as_mapping(written) if written else None
    if call is None:
        log.debug("No tool call in the reply %.200r", response)
        return NO_TOOL, {}, True
    name, arguments = call.get("name"), call.get("arguments", {})
    if not isinstance(arguments, dict):
        return NO_TOOL, {}, True
    known = (
        None
        if not available_tools
        else {tool.get("name") or tool.get("function", {}).get("name") for tool in available_tools}
    )
    if not isinstance(name, str) or not name or (known is not None and name not in known):
        return NO_TOOL, arguments, True
    return name, arguments, False


def _json_behind(text: str, opening: str) -> str | None:
    """The JSON object behind the first `opening`, as it is written, if its closing tag follows."""
    _, opened, body = text.partition(opening)
    body = body.lstrip()
    if not opened or not body.startswith("{"):
        return None
    with suppress(ValueError, RecursionError):
        _, end = json.JSONDecoder(strict=False).raw_decode(body)
        return body[:end] if body[end:].lstrip().startswith(opening.replace("<", "</", 1)) else None
    return None


def _as_mapping(text: str) -> dict[str, object] | None:
    """The JSON object in `text`, or the Python literal that models write instead."""
    readers: tuple[Callable[[str], object], ...] = (json.JSONDecoder(strict=False).decode, ast.literal_eval)
    for read in readers:
        with suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            value = read(text)
            return value if isinstance(value, dict) else None
    return None
