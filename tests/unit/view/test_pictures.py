"""Eight views of realistic runs, light and dark, wide and narrow: none is wider than the window, and none is empty.

`pytest tests/unit/view/test_pictures.py --pictures docs/images` writes the pictures that docs/watch.md shows.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atroposlib.view.run_data.runs import Runs
from tests.unit.view.browser import NARROW, NEEDS_CHROMIUM, WIDE, Tab, Window
from tests.unit.view.realistic_runs import START, write_runs

pytestmark = [*NEEDS_CHROMIUM, pytest.mark.slow]

# name: address, what is there when it is drawn
VIEWS = {
    "runs": ("#/", "tbody [data-row]"),
    "run": ("#/run/arithmetic-baseline", "path.line"),
    "starting": ("#/run/gsm8k-1.5b-lora", ".bars progress"),
    "chart": ("#/run/two-environments?chart=reward_mean&apart=yes&smooth=0.6", ".full path.smooth"),
    "groups": ("#/run/arithmetic-baseline/groups?signal=yes&sort=oldest&offset=20", "tbody [data-row]"),
    "tokens": ("#/run/arithmetic-baseline/groups?step=7&sort=spread", "tbody [data-row]"),
    "held-out": ("#/run/arithmetic-higher-lr/groups?source=held_out&version=20&sort=score", "tbody [data-row]"),
    "compare": ("#/compare?run=arithmetic-baseline&run=arithmetic-higher-lr", "path.line"),
}
LOOKS = [("light", WIDE), ("dark", WIDE), ("light", NARROW), ("dark", NARROW)]
WIDEST_BYTES = 120_000  # of a picture in docs/


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Window]:
    directory = tmp_path_factory.mktemp("realistic")
    write_runs(directory)
    made = Window(directory, Runs([], directory / "runs"))
    yield made
    made.end()


@pytest.mark.parametrize(("scheme", "size"), LOOKS, ids=["light", "dark", "light-narrow", "dark-narrow"])
def test_eight_views_of_realistic_runs(
    chromium: Any, window: Window, scheme: str, size: dict[str, int], tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    from PIL import Image

    kept = pytestconfig.getoption("--pictures") if (scheme, size) == ("light", WIDE) else None
    tab = Tab(chromium, size, scheme)
    tab.page.clock.set_fixed_time(START + 47)
    for name, (address, drawn) in VIEWS.items():
        tab.page.goto("about:blank")
        page = tab.open(window, address)
        page.locator(drawn).first.wait_for(state="attached")
        if name == "tokens":
            page.locator("[data-row]").first.click()
            page.get_by_role("button", name="Tokens").click()
            page.locator(".t.h4").first.wait_for()
        page.evaluate("document.activeElement.blur()")
        assert page.evaluate("document.documentElement.scrollWidth") <= size["width"], name
        page.screenshot(path=tmp_path / f"{name}.png")
        with Image.open(tmp_path / f"{name}.png") as image:
            picture = image.convert("RGB")
        shades = picture.getcolors(1 << 24)
        assert len(shades or []) > 100, name
        if kept:
            file = Path(kept) / f"window-{name}.webp"
            picture.save(file, lossless=True, quality=100, method=6)
            assert file.stat().st_size <= WIDEST_BYTES, name
    tab.close()
