"""What an answer is made of: text, thoughts and tool calls, which a model writes into its text."""

import re

import msgspec

_TAGS = re.compile(r"<(think|tool_call)>(.*?)(?:</\1>|\Z)", re.DOTALL)
_OPENS, _CLOSES = "<think>", "</think>"


def parts_of(text: str) -> list[dict[str, object]]:
    """Split a text at `<think>` and `<tool_call>`. A prompt may open the thought, and a cut answer may not close it."""
    opens = text.find(_OPENS)
    if _CLOSES in text and (opens < 0 or _CLOSES not in text[opens:]):
        text = f"{_OPENS}{text}"
    found, at = [], 0
    for tag in _TAGS.finditer(text):
        found += _plain(text[at : tag.start()])
        found.append({"thought": tag[2].strip()} if tag[1] == "think" else {"call": _call(tag[2].strip())})
        at = tag.end()
    return found + _plain(text[at:])


def _plain(text: str) -> list[dict[str, object]]:
    return [{"text": text.strip()}] if text.strip() else []


def _call(text: str) -> dict[str, object]:
    """The tool's name and arguments; the text itself where it is not JSON."""
    try:
        found = msgspec.json.decode(text)
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {"arguments": text}
