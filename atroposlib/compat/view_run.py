"""`view-run`, also `view-run-multimodal`: a page with the last groups of a live run, which it neither resets nor takes
anything from.

It asks the batching API for its latest example again and again (GET /latest_example), and shows what it has seen on
a page of its own.
"""

import asyncio
import contextlib
import html
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI
from fastapi.responses import HTMLResponse
from pydantic import Field

from atroposlib.config import Config, load_config
from atroposlib.envs.html_report import STYLE, group_html
from atroposlib.errors import one_line_errors
from atroposlib.http_guard import HostGuard, HostName, OwnHosts
from atroposlib.logs import configure_logging, get_logger
from atroposlib.utils.tokenizers import load_tokenizer

log = get_logger(__name__)

REQUEST_TIMEOUT_S = 10.0


class ViewConfig(Config):
    """Flags."""

    api_url: str = Field(default="http://localhost:8000", description="Address of the batching API.")
    token: str = Field(default="", repr=False, description="Bearer token of the API, if it has one.")
    host: str = Field(default="127.0.0.1", description="Address to serve the page on.")
    allowed_host: list[HostName] = Field(default=[], description="A further name that browsers call it by; repeatable.")
    port: int = Field(default=9002, ge=0, le=65535, description="Port to serve the page on.")
    tokenizer: str | None = Field(
        default=None, description="Tokenizer to show groups without messages; their ids are shown if unset."
    )
    interval: float = Field(default=2.0, gt=0, description="Seconds between two looks.")
    groups: int = Field(default=20, ge=1, description="Groups to show.")


class Watcher:
    """The last groups of a run, newest first, and what is wrong when the API cannot be asked."""

    def __init__(self, config: ViewConfig) -> None:
        self.config = config
        self.groups: deque[dict[str, Any]] = deque(maxlen=config.groups)
        self.seen = 0
        self.problem = "nothing asked yet"
        self._tokenizer = load_tokenizer(config.tokenizer) if config.tokenizer else None

    async def look(self, client: httpx.AsyncClient) -> None:
        """Ask once, and keep the group if it is a new one."""
        try:
            reply = await client.get(f"{self.config.api_url.rstrip('/')}/latest_example")
            reply.raise_for_status()
            group = reply.json()
        except (httpx.HTTPError, ValueError) as error:
            self.problem = f"{self.config.api_url} cannot be asked: {error or type(error).__name__}"
            return
        self.problem = ""
        shown = {
            "scores": group["scores"],
            "tokens": group["tokens"],
            "messages": group.get("messages"),
            "images": group.get("images"),
            "rollouts": group.get("rollouts"),
        }
        if shown["scores"] and (not self.groups or shown != {key: self.groups[0][key] for key in shown}):
            self.seen += 1
            self.groups.appendleft({**shown, "number": self.seen})

    def page(self) -> str:
        """The page, which loads itself again."""
        note = self.problem or f"{self.seen} different groups seen at {self.config.api_url}"
        refresh = f"<meta http-equiv=refresh content={max(2, round(self.config.interval))}>"
        body = "".join(group_html(self._with_text(group), group["number"]) for group in self.groups)
        return (
            f"<!doctype html><meta charset=utf-8>{refresh}<title>view-run</title><style>{STYLE}</style>"
            f"<h1>Latest groups</h1><p>{html.escape(note)}</p>{body}"
        )

    def _with_text(self, group: dict[str, Any]) -> dict[str, Any]:
        if group["messages"] or self._tokenizer is None:
            return group
        return group | {"messages": [self._tokenizer.decode(tokens) for tokens in group["tokens"]]}


def create_app(watcher: Watcher) -> FastAPI:
    """The page's server; it looks while it is up."""

    async def watch() -> None:
        async with httpx.AsyncClient(
            headers={"Authorization": f"Bearer {watcher.config.token}"} if watcher.config.token else {},
            timeout=REQUEST_TIMEOUT_S,
            trust_env=False,
        ) as client:
            while True:
                await watcher.look(client)
                await asyncio.sleep(watcher.config.interval)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(watch())
        yield
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    app = FastAPI(lifespan=lifespan)
    app.add_middleware(HostGuard, hosts=OwnHosts.of(watcher.config.host, watcher.config.allowed_host))

    @app.get("/")
    async def page() -> HTMLResponse:
        return HTMLResponse(watcher.page())

    return app


def main() -> None:
    """Serve until interrupted."""
    config = load_config(ViewConfig, prog="view-run")
    configure_logging("view-run")
    with one_line_errors("view-run", OSError):
        app = create_app(Watcher(config))
    log.info("Open http://%s:%d", config.host, config.port)
    uvicorn.run(app, host=config.host, port=config.port, log_level="warning")


if __name__ == "__main__":
    main()
