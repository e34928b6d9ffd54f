"""The lists of the page: runs with their notes, groups with their scores, logs."""

import json
from pathlib import Path

from tests.unit.view.browser import NEEDS_CHROMIUM, WIDE, Tab, Window, box_of, texts, until
from tests.unit.view.page_runs import append, sample

pytestmark = NEEDS_CHROMIUM


def names(window: Window, tab: Tab) -> list[str]:
    return texts(tab.page, "tbody [data-row]")


def test_a_run_that_died_says_of_what(tab: Tab, live: Window) -> None:
    line = "2026-11-26 12:00:00 ERROR   [launcher] vllm (pid 5) died: killed by signal KILL.\n"
    (live.runs / "second" / "launcher.log").write_text(line)
    page = tab.open(live, "#/run/second")
    page.get_by_text("vllm (pid 5) died: killed by signal KILL").wait_for()
    assert texts(page, "#state .badge") == ["✗ failed"]
    page.keyboard.press("u")
    page.get_by_text("vllm (pid 5) died: killed by signal KILL").wait_for()


def test_the_head_of_a_run_needs_no_scrolling(tab: Tab, window: Window) -> None:
    page = tab.open(window, "#/run/first")
    page.locator("path.line").first.wait_for()
    facts = dict(zip(texts(page, "dt"), texts(page, "dd"), strict=True))
    assert facts["Learning rate"] == "0.01"
    assert facts["Environment"] == "sums"
    titles = texts(page, ".cards h2")
    assert titles == ["Step", "Held-out accuracy", "Reward", "Time per step", "Tokens per second"]
    assert texts(page, ".way .big") == ["16.7 %", "66.7 %"]
    last = box_of(page.locator(".cards > *").last)
    assert last["y"] + last["height"] < WIDE["height"] / 2
    assert "9 s" in page.locator(".cards").inner_text()
    assert "22" in texts(page, ".cards .big")[-1]  # 200 tokens in 9 s


def test_runs_are_searched_sorted_and_opened_by_their_row(tab: Tab, window: Window) -> None:
    page = tab.open(window, "#/")
    page.locator("[data-row]").first.wait_for()
    page.get_by_role("button", name="Reward").click()
    page.locator("[aria-sort=descending]", has_text="Reward").wait_for()
    assert names(window, tab) == ["first", "second"]
    page.get_by_role("button", name="Reward").click()
    page.locator("[aria-sort=ascending]", has_text="Reward").wait_for()
    assert names(window, tab) == ["second", "first"]
    assert page.evaluate("document.activeElement.textContent") == "Reward"
    page.keyboard.press("/")
    page.keyboard.type("FIRST")
    until(page, "document.querySelectorAll('main tbody tr').length === 1")
    assert "q=FIRST" in page.url
    page.locator("tbody .in-reward").click()
    page.get_by_role("heading", name="first").wait_for()


def test_a_note_and_tags_are_given_and_found(tab: Tab, live: Window) -> None:
    page = tab.open(live, "#/run/first")
    page.get_by_role("button", name="Note").click()
    page.get_by_label("Note", exact=True).fill("<b>falls</b> after step 10")
    page.get_by_label("Tags").fill("baseline, lr sweep ,")
    page.get_by_role("button", name="Save").click()
    page.locator("#state .note", has_text="<b>falls</b> after step 10").wait_for()
    kept = json.loads((live.runs / "first/notes.json").read_text())
    assert kept == {"note": "<b>falls</b> after step 10", "tags": ["baseline", "lr sweep"]}
    page.get_by_role("link", name="lr sweep").click()
    until(page, "document.querySelectorAll('main tbody tr').length === 1")
    assert names(live, tab) == ["first"]
    page.get_by_label("Notes of first").click()
    assert page.get_by_label("Tags").input_value() == "baseline, lr sweep"
    page.get_by_label("Tags").fill("x" * 41)
    page.get_by_role("button", name="Save").click()
    page.locator("#notes .bad", has_text="40").wait_for()
    tab.said.clear()  # the browser's own line about status 422
    page.get_by_role("button", name="Cancel").click()
    assert json.loads((live.runs / "first/notes.json").read_text()) == kept


def test_scores_are_a_strip_and_numbers_and_rows_open(tab: Tab, live: Window) -> None:
    row = sample(3, 9, "What of eight?", ["a"] * 7 + ["b"], [1.0] * 6 + [0.5, 0.0])
    append(live.runs / "first/samples.jsonl", row)
    page = tab.open(live, "#/run/first/groups?q=eight")
    page.get_by_text("1 to 1 of 1 group").wait_for()
    assert texts(page, ".in-scores small") == ["6 × 1, 0.5, 0"]
    classes = page.locator(".in-scores i").evaluate_all(
        "parts => parts.map(part => [part.className, part.style.flexGrow])"
    )
    assert classes == [["right", "6"], ["partly", "1"], ["wrong", "1"]]
    page.locator(".in-mean").click()
    page.locator(".answer").first.wait_for()
    assert texts(page, ".answer .score") == ["✓ 1", "◐ 0.5", "✗ 0"]
    assert texts(page, ".answer:first-child .badge") == ["× 6"]
    page.get_by_role("button", name="Tokens").click()
    page.locator(".t").first.wait_for()
    assert page.locator(".answer").count() == 8  # each has numbers of its own


def test_groups_are_filtered_by_the_names_that_they_carry(tab: Tab, live: Window) -> None:
    append(live.runs / "first/samples.jsonl", sample(3, 9, "A query?", ["a", "b"], [1.0, 0.0]) | {"env": "sqldb"})
    page = tab.open(live, "#/run/first/groups")
    page.locator("[data-row]").first.wait_for()
    assert texts(page, "th")[5] == "Environment"
    page.get_by_label("Environment").select_option("sqldb")
    page.get_by_text("1 to 1 of 1 group").wait_for()
    assert "env=sqldb" in page.url
    page.reload()
    page.get_by_text("1 to 1 of 1 group").wait_for()
    assert page.get_by_label("Environment").input_value() == "sqldb"


def test_the_log_that_is_shown_is_marked(tab: Tab, live: Window) -> None:
    (live.runs / "first" / "launcher.log").write_text("2026-11-26 12:00:00 INFO [launcher] Started\n")
    page = tab.open(live, "#/run/first/logs")
    page.locator("[aria-current=page]", has_text="launcher").wait_for()
    page.get_by_role("link", name="trainer").click()
    page.locator(".button[aria-current=page]", has_text="trainer").wait_for()
    assert page.locator("main .button[aria-current]").count() == 1


def test_a_comparison_shows_defaults_and_no_ports(tab: Tab, live: Window) -> None:
    for number, name in enumerate(("first", "second")):
        run: Path = live.runs / name
        (run / "run.yaml").write_text(
            f"trainer: {{lr: {('0.1', '0.1, kl_coef: 0.05')[number]}}}\nvllm: {{port: {number}}}\n"
        )
        (run / "trainer.yaml").write_text("kl_coef: 0.0\n")
    page = tab.open(live, "#/compare?run=first&run=second")
    page.get_by_role("row", name="trainer.kl_coef").wait_for()
    assert texts(page, "tr:has-text('trainer.kl_coef') td") == ["0 (default)", "0.05"]
    assert page.get_by_role("row", name="vllm.port").count() == 0
