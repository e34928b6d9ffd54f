"""A small MCP server, over its standard streams, or with a port over HTTP."""

import os
import sys
import time

from mcp.server.mcpserver import MCPServer

server = MCPServer("small")


@server.tool()
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@server.tool()
def refuse() -> str:
    """Refuses."""
    raise ValueError("not today")


@server.tool()
def pid() -> int:
    """Tells the number of this process."""
    return os.getpid()


@server.tool()
async def sleep(seconds: float) -> str:
    """Sleeps, and lets others work."""
    import anyio

    await anyio.sleep(seconds)
    return "awake"


@server.tool()
def die() -> str:
    """Ends this process."""
    os._exit(3)


@server.tool()
async def freeze() -> str:
    """Answers nothing any more."""
    time.sleep(60)  # noqa: ASYNC251  the whole server is paused
    return "thawed"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
