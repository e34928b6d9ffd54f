"""`view-run`, also `view-run-multimodal`: a window on a run.

    view-run RUN_DIRECTORY...     the window of `atropos view`, on the run's files
    view-run --api-url URL        the last groups of a live run whose files are elsewhere

The latter asks the batching API for its latest example again and again (GET /latest_example), and adds what is new to
the page. It neither resets the run nor takes anything from it.
"""

import asyncio
import contextlib
import html
import sys
from argparse import Namespace
from collections import deque
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI
from fastapi.responses import HTMLResponse, JSONResponse
from pydantic import Field

from atroposlib.config import Config, load_config
from atroposlib.envs.files.html_report import STYLE, group_html
from atroposlib.errors import one_line_errors
from atroposlib.http_guard import HostGuard, HostName, OwnHosts
from atroposlib.logs import configure_logging, get_logger
from atroposlib.utils.tokenizers import load_tokenizer
from atroposlib.view.run_data.runs import Runs
from atroposlib.view.serve import page_of, run

log = get_logger(__name__)

REQUEST_TIMEOUT_S = 10.0
# Adds new groups above the others and leaves those alone, so that what is opened stays open.
SCRIPT = """
let last = LAST;
const note = document.getElementById('note'), groups = document.getElementById('groups');
async function look() {
  try {
    const found = await (await fetch('new?after=' + last)).json();
    if (found.last < last) location.reload();
    note.textContent = found.note;
    groups.insertAdjacentHTML('afterbegin', found.html);
    last = found.last;
    for (const old of [...groups.children].slice(MOST)) if (!old.open) old.remove();
  } catch { note.textContent = 'view-run does not answer'; }
  setTimeout(look, INTERVAL);
}
setTimeout(look, INTERVAL);
"""


class ViewConfig(Config):
    """Show the latest groups of a batching API in the browser; `view-run RUN_DIRECTORY...` opens the window of `atropos
    view`.
    """

    api_url: str = Field(default="http://localhost:8000", description="Address of the batching API.")
    token: str = Field(default="", repr=False, description="Bearer token of the API, if it has one.")
    host: str = Field(default="127.0.0.1", description="Address to serve the page on.")
    allowed_host: list[HostName] = Field(
        default=[], description="Another host name under which browsers may address it; repeatable."
    )
    port: int = Field(default=9002, ge=0, le=65535, description="Port to serve the page on.")
    tokenizer: str | None = Field(
        default=None, description="Tokenizer for groups without messages; without it their token ids are shown."
    )
    interval: float = Field(default=2.0, gt=0, description="Seconds between two requests.")
    groups: int = Field(default=20, ge=1, description="Number of groups to show.")
    group_size: int | None = Field(default=None, ge=1, description="Samples of each group to show; default: all.")
    max_token_len: int | None = Field(
        default=None, description="Accepted from 0.4.0 and not used: nothing is registered with the API."
    )


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
            self.problem = f"{self.config.api_url} does not answer: {error or type(error).__name__}"
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
        """The page, which asks for what is new."""
        interval = max(500, round(1000 * self.config.interval))
        script = SCRIPT.replace("LAST", str(self.seen)).replace("MOST", str(self.config.groups))
        return (
            f"<!doctype html><meta charset=utf-8><title>view-run</title><style>{STYLE}</style><h1>Latest groups</h1>"
            f"<p id=note>{html.escape(self.note())}</p><div id=groups>{self.groups_after(0)}</div>"
            f"<script>{script.replace('INTERVAL', str(interval))}</script>"
        )

    def note(self) -> str:
        """Say how many groups there were, or what is wrong."""
        return self.problem or f"{self.seen} different groups seen at {self.config.api_url}"

    def groups_after(self, number: int) -> str:
        """The sections of the groups after this one, newest first."""
        return "".join(
            group_html(self._cut(self._with_text(group)), group["number"])
            for group in self.groups
            if group["number"] > number
        )

    def _cut(self, group: dict[str, Any]) -> dict[str, object]:
        """The first samples, as many as are asked for: of each list that has one entry per sample."""
        size, count = self.config.group_size, len(group["scores"])
        return group | {
            name: values[:size] for name, values in group.items() if isinstance(values, list) and len(values) == count
        }

    def _with_text(self, group: dict[str, Any]) -> dict[str, object]:
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

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(HostGuard, hosts=OwnHosts.of(watcher.config.host, watcher.config.allowed_host))

    @app.get("/")
    async def page() -> HTMLResponse:
        return HTMLResponse(watcher.page())

    @app.get("/new")
    async def new(after: int = 0) -> JSONResponse:
        return JSONResponse({"last": watcher.seen, "note": watcher.note(), "html": watcher.groups_after(after)})

    return app


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    first_flag = next((place for place, word in enumerate(words) if word.startswith("-")), len(words))
    directories = [Path(word) for word in words[:first_flag]]
    config = load_config(ViewConfig, words[first_flag:], prog="view-run")
    configure_logging("view-run")
    with one_line_errors("view-run", OSError):
        if directories:
            show_files(directories, config)
            return
        app = create_app(Watcher(config))
    log.info("Open http://%s:%d", config.host, config.port)
    uvicorn.run(app, host=config.host, port=config.port, log_level="warning")


def show_files(directories: Sequence[Path], config: ViewConfig) -> None:
    """The window of `atropos view` on these runs. Raises NotADirectoryError, CannotServe."""
    for directory in directories:
        if not directory.is_dir():
            raise NotADirectoryError(f"{directory} is not a directory: name a run's, or --api-url")
    runs = Runs(directories)
    where = Namespace(host=config.host, port=config.port, allowed_host=config.allowed_host, open=False)
    run(where, runs, page_of(list(runs.all())))


if __name__ == "__main__":
    main()
