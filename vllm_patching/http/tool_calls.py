"""vLLM's own tool parsers on a text, for clients that sample tokens by /generate and get no `tool_calls`.

    POST /v1/tool_calls/parse {"text", "tools", "parser"} ──▶ {"parser", "content", "calls": [{"name", "arguments"}]}

A model wrote the text, so expect anything. Parsing happens in two threads of its own and never holds up the server: one
that takes too long is answered, and its thread is free again when it ends.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from atroposlib.wire.tool_calls import FoundCall, FoundToolCalls, ParseToolCalls
from atroposlib.wire.typed import printable
from vllm_patching import compat
from vllm_patching.engines.base import Refused

THREADS = 2
TIME_LIMIT_S = 20.0


class ToolCallParsing:
    """`chosen` is the server's --tool-call-parser. `engine` is vLLM's client of its engine, which has the tokenizer."""

    def __init__(self, engine: Any, chosen: str | None, time_limit_s: float = TIME_LIMIT_S) -> None:
        self._engine = engine
        self._chosen = chosen
        self._time_limit_s = time_limit_s
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="tool-calls")

    async def found(self, request: ParseToolCalls) -> FoundToolCalls:
        """What the parser finds. Raises Refused for a parser that there is not, that does not suit the model, or that
        takes too long.
        """
        name = request.parser or self._chosen
        if name is None:
            raise Refused("no tool parser: name one in the request, or start the server with --tool-call-parser", 400)
        if name not in (known := compat.tool_parsers()):
            raise Refused(f"tool parser {name!r} is not one of vLLM's: {', '.join(known)}", 400)
        tokenizer = self._engine.get_tokenizer()
        parsing = asyncio.get_running_loop().run_in_executor(
            self._threads, compat.parse_tool_calls, tokenizer, name, request.text, request.tools
        )
        try:
            content, calls = await asyncio.wait_for(parsing, self._time_limit_s)
        except TimeoutError:
            raise Refused(
                f"tool parser {name} took longer than {self._time_limit_s:g} s on {len(request.text)} characters", 422
            ) from None
        except Exception as error:  # of vLLM's parsers, of which each raises its own
            raise Refused(f"tool parser {name}: {type(error).__name__}: {printable(str(error), 500)}", 400) from error
        return FoundToolCalls(name, content, [FoundCall(*call) for call in calls])
