"""`view-run`, also `view-run-multimodal`: a window on a run.

    view-run RUN_DIRECTORY...     the window of `atropos view`, on the run's files
    view-run --api-url URL        the same window, on the last groups of a live run whose files are elsewhere

The latter asks the batching API for its latest example again and again (GET /latest_example), and keeps what is new as
the files of a run directory, which goes when the command ends. It neither resets the run nor takes anything from it.
"""

import os
import re
import sys
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import httpx
import msgspec
from pydantic import Field

from atroposlib.clients.bearer import bearer
from atroposlib.config import Config, load_config
from atroposlib.errors import one_line_errors
from atroposlib.http_guard import HostName
from atroposlib.logs import configure_logging, get_logger
from atroposlib.processes.identity import boot_id, first_ticks
from atroposlib.utils.tokenizers import load_tokenizer
from atroposlib.view.run_data.run_end import LAUNCHER
from atroposlib.view.run_data.run_files import ProcessRecord
from atroposlib.view.run_data.runs import Runs
from atroposlib.view.serve import page_of, run

log = get_logger(__name__)

REQUEST_TIMEOUT_S = 10.0
SHOWN = ("scores", "tokens", "messages", "images", "rollouts")


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
    """Keeps the last groups of a run in `directory`, one file for each, so that a group keeps its address in the window
    while older ones go.
    """

    def __init__(self, config: ViewConfig, directory: Path) -> None:
        self.config, self.directory = config, directory
        self._headers = bearer(config.token, "--token")
        self.seen = 0
        self.note = ""
        self._last: dict[str, object] | None = None
        self._tokenizer = load_tokenizer(config.tokenizer) if config.tokenizer else None
        mark_running(directory)
        self._tell("nothing asked yet")

    def look(self, client: httpx.Client) -> None:
        """Ask once, and keep the group if it is a new one. What is wrong becomes the run's log."""
        try:
            reply = client.get(f"{self.config.api_url.rstrip('/')}/latest_example")
            reply.raise_for_status()
            self._keep(msgspec.json.decode(reply.content, type=dict[str, object]))
        except (httpx.HTTPError, ValueError) as error:
            self._tell(f"{self.config.api_url} does not answer: {error or type(error).__name__}")
        except (OverflowError, TypeError) as error:  # of the tokenizer, for tokens that are none of its own
            self._tell(f"the tokens of a group at {self.config.api_url} cannot be decoded: {error}")
        except OSError as error:
            self._tell(f"a group cannot be kept in {self.directory}: {error.strerror}")
        else:
            self._tell(f"{self.seen} different groups seen at {self.config.api_url}")

    def watch(self, stopped: threading.Event) -> None:
        """Look again and again until the event is set."""
        with httpx.Client(headers=self._headers, timeout=REQUEST_TIMEOUT_S, trust_env=False) as client:
            self.look(client)
            while not stopped.wait(self.config.interval):
                self.look(client)

    def _keep(self, group: dict[str, object]) -> None:
        shown = {name: group.get(name) for name in SHOWN}
        if not shown["scores"] or shown == self._last:
            return
        row = msgspec.json.encode({**self._cut(self._with_text(shown)), "time": time.time()})
        path = self.directory / f"samples_{self.seen + 1}.jsonl"
        path.with_suffix(".new").write_bytes(row + b"\n")
        path.with_suffix(".new").rename(path)
        self.seen, self._last = self.seen + 1, shown
        (self.directory / f"samples_{self.seen - self.config.groups}.jsonl").unlink(missing_ok=True)

    def _cut(self, group: dict[str, object]) -> dict[str, object]:
        """The first samples, as many as are asked for: of each list that has one entry per sample."""
        size, count = self.config.group_size, _length(group["scores"])
        return {
            name: values[:size] if isinstance(values, list) and len(values) == count else values
            for name, values in group.items()
        }

    def _with_text(self, group: dict[str, object]) -> dict[str, object]:
        if group["messages"] or self._tokenizer is None or not isinstance(group["tokens"], list):
            return group
        return group | {"messages": [self._tokenizer.decode(tokens) for tokens in group["tokens"]]}

    def _tell(self, note: str) -> None:
        if note == self.note:
            return
        self.note = note
        log.info("%s", note)
        with suppress(OSError):  # a full disk, of which the terminal has been told
            (self.directory / f"{LAUNCHER}.log").write_text(f"{note}\n", encoding="utf-8")


def mark_running(directory: Path) -> None:
    """Make the window show this directory as a run that continues as long as this process."""
    (directory / "pids").mkdir(parents=True)
    start = first_ticks(os.getpid())
    assert start is not None
    record = msgspec.json.encode(ProcessRecord(os.getpid(), start, boot_id()))
    (directory / "pids" / LAUNCHER).write_bytes(record)


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
        else:
            show_live(config)


def show_files(directories: Sequence[Path], config: ViewConfig) -> None:
    """The window of `atropos view` on these runs. Raises NotADirectoryError, CannotServe."""
    for directory in directories:
        if not directory.is_dir():
            raise NotADirectoryError(f"{directory} is not a directory: name a run's, or --api-url")
    runs = Runs(directories)
    _serve(config, runs, page_of(list(runs.all())))


def show_live(config: ViewConfig) -> None:
    """The window on the last groups of a run that its API knows. Raises OSError, CannotServe."""
    name = re.sub(r"[^\w.-]+", "_", config.api_url.partition("://")[2] or config.api_url)[:100].strip("_.") or "run"
    with tempfile.TemporaryDirectory(prefix="view-run-") as parent:
        watcher, stopped = Watcher(config, Path(parent) / name), threading.Event()
        thread = threading.Thread(target=watcher.watch, args=[stopped], daemon=True)
        thread.start()
        try:
            _serve(config, Runs([watcher.directory], keep_notes=False), f"{page_of([name])}/groups")
        finally:
            stopped.set()
            thread.join(REQUEST_TIMEOUT_S)


def _serve(config: ViewConfig, runs: Runs, page: str) -> None:
    run(Namespace(host=config.host, port=config.port, allowed_host=config.allowed_host, open=False), runs, page)


def _length(values: object) -> int:
    return len(values) if isinstance(values, list) else -1


if __name__ == "__main__":
    main()
