"""A text, and the tool calls that vLLM's own parsers find in it: a route of our vLLM server, for clients that sample
tokens.
"""

from typing import Annotated, Any

import msgspec
from msgspec import Struct

from atroposlib.wire.typed import Name

ROUTE = "/v1/tool_calls/parse"
LONGEST_TEXT = 1_000_000  # characters

Text = Annotated[str, msgspec.Meta(max_length=LONGEST_TEXT)]


class ParseToolCalls(Struct):
    """What is to be parsed: `tools` in OpenAI's form; without `parser` by the server's --tool-call-parser."""

    text: Text
    tools: list[dict[str, Any]]
    parser: Name | None = None


class FoundCall(Struct):
    """One call; `arguments` is the JSON that the model wrote, or that the parser made of it."""

    name: str
    arguments: str


class FoundToolCalls(Struct):
    """The text outside of the calls, and the calls in the order in which they were written."""

    parser: str
    content: str | None
    calls: list[FoundCall]
