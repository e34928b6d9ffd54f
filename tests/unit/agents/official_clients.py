"""One agent, written for each API with its official package: it asks, calls a tool if the model wants it, and goes on.

Each returns what the model said at last. `stream` takes the reply as a stream, by the package's own helper.
"""

import json
from collections.abc import Callable
from typing import Any

import anthropic
import openai

from tests.unit.agents.support import PARAMETERS

SYSTEM, ASKED, FOUND, AGAIN = "Be brief.", "How many cats?", "two cats", "Sure?"
FUNCTION = {"name": "search", "description": "Searches.", "parameters": PARAMETERS}
MODEL = "fake"
LIMIT = 2000


def chat_sync(url: str, key: str, stream: bool) -> str:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    messages: list[Any] = [{"role": "developer", "content": SYSTEM}, {"role": "user", "content": ASKED}]
    given: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": LIMIT,
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": {"type": "function", "function": {"name": "search"}},
    }
    said = ""
    for more in (None, [{"type": "text", "text": AGAIN}]):
        if more is not None:
            messages.append({"role": "user", "content": more})
        while True:
            if stream:
                with client.chat.completions.stream(messages=messages, **given) as events:
                    reply = events.get_final_completion()
            else:
                reply = client.chat.completions.create(messages=messages, **given)
            message = reply.choices[0].message
            messages.append(message.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True))
            if not message.tool_calls:
                break
            assert json.loads(message.tool_calls[0].function.arguments) == {"query": "cats"}
            messages.append({"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": FOUND})
        said = message.content or ""
    return said


async def chat_async(url: str, key: str, stream: bool) -> str:
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    messages: list[Any] = [{"role": "developer", "content": SYSTEM}, {"role": "user", "content": ASKED}]
    given: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": LIMIT,
        "tools": [{"type": "function", "function": FUNCTION}],
    }
    said = ""
    for more in (None, AGAIN):
        if more is not None:
            messages.append({"role": "user", "content": more})
        while True:
            if stream:
                async with client.chat.completions.stream(messages=messages, **given) as events:
                    reply = await events.get_final_completion()
            else:
                reply = await client.chat.completions.create(messages=messages, **given)
            message = reply.choices[0].message
            messages.append(message.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True))
            if not message.tool_calls:
                break
            messages.append({"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": FOUND})
        said = message.content or ""
    return said


RESPONSES: dict[str, Any] = {
    "model": MODEL,
    "max_output_tokens": LIMIT,
    "instructions": SYSTEM,
    "tools": [{"type": "function", **FUNCTION}],
}


def responses_sync(url: str, key: str, stream: bool) -> str:
    """Sends back all items each time."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    items: list[Any] = [{"role": "user", "content": ASKED}]
    reply: Any = None
    for more in (None, AGAIN):
        if more is not None:
            items.append({"role": "user", "content": [{"type": "input_text", "text": more}]})
        while True:
            if stream:
                with client.responses.stream(input=items, **RESPONSES) as events:
                    reply = events.get_final_response()
            else:
                reply = client.responses.create(input=items, **RESPONSES)
            items += [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in reply.output]
            calls = [item for item in reply.output if item.type == "function_call"]
            items += [{"type": "function_call_output", "call_id": call.call_id, "output": FOUND} for call in calls]
            if not calls:
                break
    return str(reply.output_text)


async def responses_async(url: str, key: str, stream: bool) -> str:
    """Names the response before."""
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    items: list[Any] = [{"role": "user", "content": ASKED}]
    earlier: dict[str, Any] = {}
    reply: Any = None
    for more in (None, AGAIN):
        if more is not None:
            items = [{"role": "user", "content": more}]
        while True:
            if stream:
                async with client.responses.stream(input=items, **RESPONSES, **earlier) as events:
                    reply = await events.get_final_response()
            else:
                reply = await client.responses.create(input=items, **RESPONSES, **earlier)
            earlier = {"previous_response_id": reply.id}
            calls = [item for item in reply.output if item.type == "function_call"]
            items = [{"type": "function_call_output", "call_id": call.call_id, "output": FOUND} for call in calls]
            if not calls:
                break
    return str(reply.output_text)


MESSAGES: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": LIMIT,
    "system": SYSTEM,
    "tools": [{"name": "search", "description": "Searches.", "input_schema": PARAMETERS}],
}


def messages_sync(url: str, key: str, stream: bool) -> str:
    client = anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)
    messages: list[Any] = [{"role": "user", "content": ASKED}]
    reply: Any = None
    for more in (None, AGAIN):
        if more is not None:
            messages.append({"role": "user", "content": [{"type": "text", "text": more}]})
        while True:
            if stream:
                with client.messages.stream(messages=messages, tool_choice={"type": "auto"}, **MESSAGES) as events:
                    reply = events.get_final_message()
            else:
                reply = client.messages.create(messages=messages, tool_choice={"type": "auto"}, **MESSAGES)
            if not _go_on(reply, messages):
                break
    return "".join(block.text for block in reply.content if block.type == "text")


async def messages_async(url: str, key: str, stream: bool) -> str:
    client = anthropic.AsyncAnthropic(base_url=url, auth_token=key, api_key=None, max_retries=0)
    messages: list[Any] = [{"role": "user", "content": ASKED}]
    reply: Any = None
    for more in (None, AGAIN):
        if more is not None:
            messages.append({"role": "user", "content": more})
        while True:
            if stream:
                async with client.messages.stream(messages=messages, **MESSAGES) as events:
                    reply = await events.get_final_message()
            else:
                reply = await client.messages.create(messages=messages, **MESSAGES)
            if not _go_on(reply, messages):
                break
    return "".join(block.text for block in reply.content if block.type == "text")


def _go_on(reply: Any, messages: list[Any]) -> bool:
    messages.append({"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in reply.content]})
    calls = [block for block in reply.content if block.type == "tool_use"]
    for call in calls:
        assert call.input == {"query": "cats"}
        result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": FOUND}]}
        messages.append({"role": "user", "content": [result]})
    return bool(calls)


AGENTS: dict[str, Callable[[str, str, bool], Any]] = {
    "chat": chat_sync,
    "chat async": chat_async,
    "responses": responses_sync,
    "responses async": responses_async,
    "messages": messages_sync,
    "messages async": messages_async,
}
