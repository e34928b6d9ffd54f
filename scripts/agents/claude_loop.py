"""A loop with a tool on the package anthropic, which calls Messages: `python claude_loop.py TASK` (docs/agents.md)."""

import sys

import anthropic

NUMBER = {"type": "number"}
SCHEMA = {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"]}
TOOLS = [{"name": "add", "description": "Adds two numbers.", "input_schema": SCHEMA}]


def add(numbers):
    try:
        return str(float(numbers["a"]) + float(numbers["b"]))
    except (KeyError, TypeError, ValueError) as error:
        return f"wrong input: {error!r}"


client = anthropic.Anthropic()
said = [{"role": "user", "content": sys.argv[1]}]
for _ in range(3):
    reply = client.messages.create(model="any", max_tokens=96, messages=said, tools=TOOLS)
    said.append({"role": "assistant", "content": reply.content})
    calls = [block for block in reply.content if block.type == "tool_use"]
    if not calls:
        break
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": add(call.input)} for call in calls]
    said.append({"role": "user", "content": results})
print("".join(block.text for block in reply.content if block.type == "text"))
