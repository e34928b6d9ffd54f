"""Fixtures of the tests of the page."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.view.browser import CHROMIUM, OPTIONS, WIDE, Tab, Window, new_window
from tests.unit.view.support import make_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The directory of a short run."""
    return make_run(tmp_path / "r")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """One browser for the tests of this file."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="Playwright is not installed: pip install playwright"
    )
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Window]:
    """Two runs that have ended."""
    made = new_window(tmp_path_factory.mktemp("ended"), running=False)
    yield made
    made.end()


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Window]:
    """The first run is running; a test may write to its files."""
    made = new_window(tmp_path, running=True)
    yield made
    made.end()


@pytest.fixture
def tab(chromium: Any, request: pytest.FixtureRequest) -> Iterator[Tab]:
    if "live" in request.fixturenames:
        request.getfixturevalue("live")  # which then outlives the tab: its page asks again and again
    made = Tab(chromium, WIDE)
    yield made
    made.close()
