"""The curves of the page: what is folded, the range of steps, smoothing, scales, one curve over the page, its files."""

import csv
import io
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.unit.view.browser import NEEDS_CHROMIUM, Tab, Window, box_of, texts, until
from tests.unit.view.page_runs import append, metrics_row, sample

pytestmark = NEEDS_CHROMIUM

REWARD = "[data-chart=reward_mean]"


def long_run(live: Window, **columns: Any) -> None:
    """Rows of 20 steps for the first run; a column is a function of the step."""
    rows = [metrics_row(step, 0.05 * step) | {key: of(step) for key, of in columns.items()} for step in range(1, 21)]
    (live.runs / "first/metrics.jsonl").write_text("")
    append(live.runs / "first/metrics.jsonl", *rows)


def shown(page: Any) -> list[str]:
    """The charts that are not folded."""
    page.locator(f"{REWARD} path.line").first.wait_for(state="attached")
    charts = page.locator("main > .charts > [data-chart]")
    return list(charts.evaluate_all("charts => charts.map(chart => chart.dataset.chart)"))


def heights(page: Any, path: str) -> list[float]:
    """How far below the top of its plot each point of a path is, in percent."""
    points = page.locator(path).first.get_attribute("d")[1:].replace("Z", "").replace("M", "L").split("L")
    return [float(point.removesuffix("h0").split()[1]) for point in points]


def test_empty_and_constant_curves_are_folded_with_a_line_that_says_so(tab: Tab, live: Window) -> None:
    long_run(live, grad_norm=lambda step: 1 + step % 3)
    page = tab.open(live, "#/run/first")
    assert shown(page)[:4] == ["reward_mean", "accuracy", "entropy", "loss"]
    assert not {"kl", "failed_rollouts", "staleness"} & set(shown(page))
    assert "grad_norm" in shown(page)
    said = page.locator(".folded summary").inner_text()
    assert "KL to the start model (the loss has no KL term)" in said
    assert "Failed rollouts (always 0)" in said
    page.locator(".folded summary").click()
    page.locator(".folded [data-chart=failed_rollouts] .plot").wait_for()


def test_axes_are_named_and_their_marks_contain_the_curve(tab: Tab, live: Window) -> None:
    long_run(
        live, loss=lambda step: 0.145 - 0.007 * step, reward_std=lambda step: (0.05 * step * (1 - 0.05 * step)) ** 0.5
    )
    page = tab.open(live, "#/run/first")
    shown(page)
    assert texts(page, f"{REWARD} .axis") == ["step"]
    assert texts(page, "[data-chart=accuracy] .axis") == ["policy version"]
    marks = [float(text.replace("−", "-")) for text in texts(page, "[data-chart=loss] .left")]
    assert min(marks) <= 0.005
    assert max(marks) >= 0.138
    assert all(0 <= height <= 100 for height in heights(page, "[data-chart=loss] path.line"))


def test_the_band_ends_where_scores_end(tab: Tab, live: Window) -> None:
    long_run(live, reward_std=lambda step: (0.05 * step * (1 - 0.05 * step)) ** 0.5)
    page = tab.open(live, "#/run/first")
    shown(page)
    assert texts(page, f"{REWARD} .left")[-1] == "1"
    band = heights(page, f"{REWARD} path.band")
    assert (min(band), max(band)) == (0, 100)  # of an axis from 0 to 1
    long_run(live, reward_std=lambda step: 2.0)  # scores of some other range
    page.reload()
    shown(page)
    assert float(texts(page, f"{REWARD} .left")[-1]) >= 3


def test_a_drag_zooms_and_the_range_stands_in_the_address(tab: Tab, live: Window) -> None:
    long_run(live)
    page = tab.open(live, "#/run/first")
    shown(page)
    box = box_of(page.locator(f"{REWARD} .plot"))
    at = [box["x"] + box["width"] * share for share in (0.25, 0.75)]
    page.mouse.move(at[0], box["y"] + 50)
    page.mouse.down()
    page.mouse.move(at[1], box["y"] + 60, steps=3)
    assert page.locator(f"{REWARD} path.zoom").count() == 1
    page.mouse.up()
    page.get_by_text("Steps 5 to 15", exact=True).wait_for()
    assert page.url.endswith("#/run/first?from=5&to=15")
    assert page.locator(f"{REWARD} path.line").get_attribute("d").count("h0") == 11
    append(live.runs / "first/metrics.jsonl", metrics_row(21))
    page.get_by_text("21 of 5").wait_for()
    assert page.get_by_text("Steps 5 to 15", exact=True).is_visible()
    page.locator(f"{REWARD} .plot").focus()
    page.keyboard.press("+")
    page.get_by_text("Steps 8 to 12", exact=True).wait_for()
    page.get_by_role("button", name="All steps").click()
    page.get_by_text("Drag over a curve to zoom.").wait_for()


def test_smoothing_draws_a_second_line_over_what_was_measured(tab: Tab, live: Window) -> None:
    long_run(live, entropy=lambda step: step % 2)
    page = tab.open(live, "#/run/first")
    shown(page)
    page.get_by_label("Smoothing").select_option("strong")
    chart = "[data-chart=entropy]"
    page.locator(f"{chart} path.smooth").wait_for(state="attached")
    raw, smooth = heights(page, f"{chart} path.faint"), heights(page, f"{chart} path.smooth")
    assert max(raw) - min(raw) > 3 * (max(smooth[5:]) - min(smooth[5:]))
    assert page.locator("[data-chart=accuracy] path.smooth").count() == 0
    assert "smooth=0.93" in page.url


def test_a_log_scale_is_for_curves_above_zero(tab: Tab, live: Window) -> None:
    long_run(live, entropy=lambda step: 10.0**-step, loss=lambda step: -0.1 * step)
    page = tab.open(live, "#/run/first")
    shown(page)
    page.get_by_label("Log scale").check()
    page.get_by_text("linear: not all are above 0").first.wait_for()
    found = heights(page, "[data-chart=entropy] path.line")
    steps = [round(other - one, 6) for one, other in pairwise(found)]
    assert len(set(steps)) == 1  # each step is a tenth of the one before
    assert "linear" in page.locator("[data-chart=loss] .unit").inner_text()
    assert "linear" not in page.locator("[data-chart=entropy] .unit").inner_text()


def test_one_curve_fills_the_page_and_leaves_it_as_it_was(tab: Tab, live: Window) -> None:
    long_run(live)
    page = tab.open(live, "#/run/first")
    shown(page)
    page.evaluate("scrollTo(0, 400)")
    page.locator("#enlarge-loss").click()
    box = box_of(page.locator(".full path.line").first)
    assert box["width"] > 1200
    assert box["height"] > 400
    page.get_by_label("Smoothing").select_option("light")  # the same tools, above the curve
    page.locator(".full path.smooth").wait_for(state="attached")
    append(live.runs / "first/metrics.jsonl", metrics_row(21))
    until(page, "document.querySelector('.full path.line').getAttribute('d').split('h0').length === 22")
    assert page.evaluate("document.activeElement.name") == "smooth"
    page.keyboard.press("Escape")
    page.locator(".full").wait_for(state="hidden")
    assert page.evaluate("scrollY") == 400
    assert "chart=" not in page.url
    page.locator("main > div > .tools").wait_for()
    page.goto(f"{live.url}/#/run/first?chart=lr")  # an address of a column that has no chart
    page.locator(".full path.line").first.wait_for(state="attached")
    page.locator(".full b", has_text="Learning rate").wait_for()


def test_a_curve_is_downloaded_as_picture_and_as_table(tab: Tab, live: Window, tmp_path: Path) -> None:
    from PIL import Image

    long_run(live)
    page = tab.open(live, "#/run/first?chart=reward_mean")
    page.locator(".full path.line").first.wait_for(state="attached")
    with page.expect_download() as table:
        page.get_by_role("button", name="CSV").click()
    assert table.value.suggested_filename == "first-reward_mean.csv"
    rows = list(csv.reader(io.StringIO(Path(table.value.path()).read_text())))
    assert rows[0] == ["step", "reward_mean"]
    assert [float(row[1]) for row in rows[1:]] == [pytest.approx(0.05 * step) for step in range(1, 21)]
    with page.expect_download() as picture:
        page.get_by_role("button", name="PNG").click()
    assert picture.value.suggested_filename == "first-reward_mean.png"
    with Image.open(picture.value.path()) as image:
        assert image.width > 2400
        colours = image.convert("RGB").getcolors(1 << 20)
    assert colours is not None
    counts = {colour: count for count, colour in colours}
    assert counts[255, 255, 255] > 0.5 * image.width * image.height
    assert counts[11, 87, 168] > 1000  # the line


def test_environments_have_curves_of_their_own(tab: Tab, live: Window) -> None:
    long_run(live)
    rows = [sample(step, 5, "Use the tool.", ["a", "b"], [0.0, 0.0]) | {"env": "=tools"} for step in (1, 2, 3)]
    append(live.runs / "first/samples.jsonl", *rows)
    about = {"time": 0.0, "env": "=tools", "policy_version": 3, "accuracy": 0.25}
    append(live.runs / "first/evaluations.jsonl", about)
    page = tab.open(live, "#/run/first?chart=reward_mean")
    page.get_by_label("By environment").check()
    until(page, "document.querySelectorAll('.full path.line').length === 2")
    assert texts(page, ".full .value small") == ["=tools", "sums"]
    assert page.locator(".full path.band").count() == 0
    with page.expect_download() as table:
        page.get_by_role("button", name="CSV").click()
    assert Path(table.value.path()).read_text().splitlines()[0] == 'step,"\'=tools","sums"'
    page.keyboard.press("Escape")
    assert texts(page, "[data-chart=accuracy] .value small") == ["=tools", "sums"]


def test_more_metrics_are_grouped_and_in_words(tab: Tab, live: Window) -> None:
    long_run(live, my_own=lambda step: step, updates=lambda step: step)
    page = tab.open(live, "#/run/first")
    page.get_by_text("More metrics").click()
    boxes = [" ".join(text.split()) for text in texts(page, "fieldset")]
    groups = dict(zip(texts(page, "legend"), boxes, strict=True))
    assert "Learning rate lr" in groups["Optimizer"]
    assert "Training train_s" in groups["Seconds"]
    assert groups["Other columns"] == "Other columns my_own my_own"
    page.get_by_label("Updates so far").check()
    assert page.locator("[data-chart=updates] b").inner_text() == "Updates so far"


def test_the_first_minutes_show_what_is_loading(tab: Tab, live: Window) -> None:
    run = live.runs / "first"
    (run / "metrics.jsonl").write_text("")
    bar = {"name": "vllm", "note": "loading weights 50 %, 12 s of at most 30 min 0 s", "done": 3.5, "total": 8}
    (run / "starting.json").write_text(json.dumps({"bars": [bar]}))
    page = tab.open(live, "#/run/first")
    page.get_by_text("loading weights 50 %").wait_for()
    (run / "starting.json").write_text(json.dumps({"bars": [bar | {"note": "warming up", "done": 6}]}))
    page.get_by_text("warming up").wait_for()
    assert page.locator(".bars progress").evaluate("bar => [bar.value, bar.max]") == [6, 8]
    (run / "starting.json").unlink()
    append(run / "metrics.jsonl", metrics_row(1))
    page.locator(f"{REWARD} .dot").first.wait_for(state="attached")
    assert page.locator(".bars").is_hidden()
