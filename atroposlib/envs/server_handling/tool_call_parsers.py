"""Who finds the tool calls in what a model wrote: the `tool_parser` of a ManagedServer.

    hermes, llama3_json, mistral   ours, in the text (tool_call_translator.py)
    vllm, vllm:NAME                vLLM's own, in the text, by a route of our vLLM server; without NAME the parser that
                                   its --tool-call-parser names
    renderers, renderers:NAME      those of the package `renderers`, in the token ids; without NAME that of the model,
                                   by the name or path of its tokenizer

A model may write calls while it thinks, and does not make those: what stands before the first `</think>` is content.
"""

from collections.abc import Awaitable, Callable, Sequence
from importlib.util import find_spec
from typing import Any

from atroposlib.envs.server_handling.dispatching.dispatch import Split
from atroposlib.envs.server_handling.server_baseline import InferenceCalls
from atroposlib.envs.server_handling.tool_call_translator import PARSERS, Parsed
from atroposlib.extras import MissingExtra
from atroposlib.flags import nearest
from atroposlib.utils.tokenizers import Tokenizer

# (text, its token ids, tools in OpenAI's form, split) -> what is found
ToolCallParser = Callable[[str, Sequence[int], Sequence[object], Split], Awaitable[Parsed]]

END_OF_THOUGHTS = "</think>"
OURS = "hermes"


def check_tool_parser(name: str) -> str:
    """`name`, if it is of one of the three forms. Raises ValueError."""
    kind, _, chosen = name.partition(":")
    if name in PARSERS or name in ("vllm", "renderers") or (kind in ("vllm", "renderers") and chosen):
        return name
    known = [*PARSERS, "vllm", "vllm:NAME", "renderers", "renderers:NAME"]
    raise ValueError(f"tool_parser {name!r} is not known{nearest(name, known)}; choose one of: {', '.join(known)}")


def text_parser(name: str) -> str:
    """The parser of `name` that reads text here: itself, or hermes, in whose form calls of unknown origin are shown."""
    return name if name in PARSERS else OURS


def without_thoughts(text: str) -> tuple[str, str]:
    """Split off what a model thought, with the tag that ends it, from what it said then."""
    thoughts, mark, said = text.partition(END_OF_THOUGHTS)
    return (thoughts + mark, said) if mark else ("", text)


def tool_call_parser(name: str, tokenizer: Tokenizer, server: InferenceCalls) -> ToolCallParser:
    """The parser of `name`; `server` is asked for vLLM's. Raises ValueError, and MissingExtra without `renderers`."""
    kind, _, chosen = check_tool_parser(name).partition(":")
    if kind == "vllm":
        return _of_vllm(server, chosen or None)
    if kind == "renderers":
        return _of_renderers(tokenizer, chosen or None)
    return _of_text(name)


def _of_text(name: str) -> ToolCallParser:
    async def parse(text: str, token_ids: Sequence[int], tools: Sequence[object], split: Split) -> Parsed:
        thoughts, said = without_thoughts(text)
        content, calls = PARSERS[name](said)
        return thoughts + content, calls

    return parse


def _of_vllm(server: InferenceCalls, chosen: str | None) -> ToolCallParser:
    async def parse(text: str, token_ids: Sequence[int], tools: Sequence[object], split: Split) -> Parsed:
        thoughts, said = without_thoughts(text)
        content, calls = await server.parse_tool_calls(text=said, tools=list(tools), parser=chosen, split=split)
        return thoughts + content, calls

    return parse


def _of_renderers(tokenizer: Tokenizer, chosen: str | None) -> ToolCallParser:
    if find_spec("renderers") is None:
        raise MissingExtra("tool_parser 'renderers' needs the package renderers; pip install 'renderers>=0.1.12'")
    from pydantic import TypeAdapter
    from renderers import RendererConfig, create_renderer

    config = None if chosen is None else TypeAdapter(RendererConfig).validate_python({"name": chosen})
    renderer = create_renderer(tokenizer, config)

    async def parse(text: str, token_ids: Sequence[int], tools: Sequence[Any], split: Split) -> Parsed:
        message = renderer.parse_response(list(token_ids), tools=[tool["function"] for tool in tools])
        calls = [(call.name, call.arguments) for call in message.tool_calls if call.status == "ok"]
        thoughts = f"{message.reasoning_content}{END_OF_THOUGHTS}" if message.reasoning_content else ""
        return (thoughts + message.content, calls) if calls else (text, [])

    return parse
