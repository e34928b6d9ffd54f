"""A real Chromium, driven by Playwright, on the real server of the window."""

import shutil
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from atroposlib.view.run_data.runs import Runs
from atroposlib.view.server import create_app
from tests.serving import threaded_app
from tests.unit.view.page_runs import mark_running, write_model, write_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
OPTIONS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"]
DEADLINE_MS = 20_000
WIDE = {"width": 1600, "height": 900}
NARROW = {"width": 390, "height": 844}
NEEDS_CHROMIUM = [
    pytest.mark.services,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: apt-get install chromium"),
]


class Window:
    """The server over the runs of a directory, in a thread."""

    def __init__(self, directory: Path, runs: Runs | None = None) -> None:
        self.runs = directory
        app = create_app(runs or Runs([directory / "first", directory / "second"]))
        self._served = ExitStack()
        self.url = f"http://127.0.0.1:{self._served.enter_context(threaded_app(app, at_once=True, lifespan='off'))}"

    def end(self) -> None:
        self._served.close()


def new_window(directory: Path, running: bool) -> Window:
    write_model(directory / "model")
    for seed, name in enumerate(("first", "second"), 1):
        write_run(directory / name, seed, directory / "model")
    if running:
        mark_running(directory / "first")
    return Window(directory)


class Tab:
    """A page of its own, without cookies or storage, that is watched."""

    def __init__(self, browser: Any, size: dict[str, int], scheme: str = "light") -> None:
        self.context = browser.new_context(viewport=size, color_scheme=scheme, reduced_motion="reduce")
        self.page = self.context.new_page()
        self.page.set_default_timeout(DEADLINE_MS)
        self.asked: list[str] = []
        self.said: list[str] = []
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))

    def open(self, window: Window, address: str) -> Any:
        self.page.goto(f"{window.url}/{address}")
        self.page.locator("main h1").wait_for()
        return self.page

    def close(self, expected: str = "") -> None:
        origins = {urlsplit(url).netloc for url in self.asked if not url.startswith("data:")}
        self.context.close()
        assert len(origins) <= 1, origins
        assert [text for text in self.said if not (expected and expected in text)] == []


def until(page: Any, expression: str) -> None:
    """Wait until the expression is true in the page, whose policy forbids what `wait_for_function` does."""
    deadline = time.monotonic() + DEADLINE_MS / 1000
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, expression
        page.wait_for_timeout(20)


def box_of(locator: Any) -> dict[str, float]:
    """The place of what is shown: it has none in the moment in which the page draws it anew."""
    deadline = time.monotonic() + DEADLINE_MS / 1000
    while (box := locator.bounding_box()) is None:
        assert time.monotonic() < deadline, locator
        locator.page.wait_for_timeout(20)
    return dict(box)


def texts(page: Any, selector: str) -> list[str]:
    return [text.strip() for text in page.locator(selector).all_inner_texts()]
