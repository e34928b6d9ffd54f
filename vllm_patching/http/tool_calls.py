"""vLLM's own tool parsers on a text, for clients that sample tokens by /generate and get no `tool_calls`.

    POST /v1/tool_calls/parse {"text", "tools", "parser"} ──▶ {"parser", "content", "calls": [{"name", "arguments"}]}

A model wrote the text, so expect anything: some parsers take minutes for one that repeats itself. Each text is parsed
in a process of its own that is killed when late (limited_work.py), and waits for texts of the same parser alone.
"""

from atroposlib.child_processes.lines import ChildRefused
from atroposlib.child_processes.pool import ChildFailed
from atroposlib.wire.tool_calls import LONGEST_TEXT, FoundCall, FoundToolCalls, ParseToolCalls
from atroposlib.wire.typed import encodable, printable
from vllm_patching.compat import vllm_server
from vllm_patching.engines.base import Refused
from vllm_patching.http.limited_work import LimitedWork

TIME_LIMIT_S = 5.0
# Parsers whose time grows faster than the text: in vLLM 0.32 they took over 12 s for 8,000 or 32,000 characters that
# repeat an opened call. An answer of a model, its thoughts included, is shorter than this.
SUPERLINEAR = ("glm45", "glm47", "ling3", "mimo", "qwen3_coder", "qwen3_xml", "seed_oss", "step3p5")
LONGEST_SUPERLINEAR = 65_536  # characters


class ToolCallParsing:
    """`chosen` is the server's --tool-call-parser."""

    def __init__(self, work: LimitedWork, chosen: str | None, time_limit_s: float = TIME_LIMIT_S) -> None:
        self._work = work
        self._chosen = chosen
        self._time_limit_s = time_limit_s

    async def found(self, request: ParseToolCalls) -> FoundToolCalls:
        """Return what the parser finds. Raises Refused for a parser that there is not, that does not suit the model,
        or that takes too long.
        """
        name = request.parser or self._chosen
        if name is None:
            raise Refused("no tool parser: name one in the request, or start the server with --tool-call-parser", 400)
        if name not in (known := vllm_server.tool_parsers()):
            raise Refused(f"tool parser {name!r} is not one of vLLM's: {', '.join(known)}", 400)
        if len(request.text) > (most := most_characters(name)):
            raise Refused(
                f"tool parser {name}: the text has {len(request.text)} characters, at most {most} are parsed", 400
            )
        try:
            reply = await self._work.ask(
                "parse", name, self._time_limit_s, parser=name, text=request.text, tools=request.tools
            )
        except ChildRefused as error:
            why = printable(str(error), 500)
            if error.is_wrong:
                raise Refused(f"tool parser {name}: {why}", 400) from error
            if why == "late":
                why = f"took longer than {self._time_limit_s:g} s"
            raise Refused(f"tool parser {name} {why} on {len(request.text)} characters", 422) from error
        except ChildFailed as error:
            raise Refused(f"tool parser {name}: its process failed: {printable(str(error), 500)}", 503) from error
        calls = [FoundCall(encodable(called), encodable(given)) for called, given in reply["calls"]]
        return FoundToolCalls(name, reply["content"], calls)


def most_characters(parser: str) -> int:
    """Return how long a text the parser gets at most."""
    return LONGEST_SUPERLINEAR if parser in SUPERLINEAR else LONGEST_TEXT
