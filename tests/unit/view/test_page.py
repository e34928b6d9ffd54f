"""The window's page in a real Chromium, driven by Playwright, on two small runs and the real server.

Whatever a test does, its page asks no other origin for anything and writes nothing to the console.
"""

import re
from typing import Any
from urllib.parse import quote

from tests.unit.view.browser import NARROW, NEEDS_CHROMIUM, WIDE, Tab, Window, box_of, texts, until
from tests.unit.view.page_runs import HOSTILE, append, metrics_row, sample

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="

# Controls and pictures of which a screen reader could not say what they are.
UNNAMED = """[...document.querySelectorAll("main button, main a, main input, main select, main [role=img]")]
    .filter(node => !(node.textContent.trim() || node.getAttribute("aria-label") || node.labels?.length))
    .map(node => node.outerHTML)"""

pytestmark = NEEDS_CHROMIUM


def test_three_clicks_lead_to_the_wrong_held_out_answers(tab: Tab, window: Window) -> None:
    page = tab.open(window, "#/")
    page.get_by_role("link", name="first").click()
    page.get_by_role("link", name="2 wrong of 6").click()
    page.locator(".in-answer").first.wait_for()
    assert texts(page, ".in-answer") == [f"Held-out answer {i} of version 3" for i in (1, 0)]
    assert texts(page, ".in-reference") == ["1", "0"]
    assert page.get_by_label("Wrong only").is_checked()
    page.get_by_role("link", name="Held-out question 0?").click()
    page.locator(".reference").first.wait_for()  # of the answer's own view: the list shows the answer, too
    assert "Reference answer: 0" in texts(page, ".reference")
    assert page.get_by_text("Held-out answer 0 of version 3").is_visible()


def test_the_window_tells_the_best_policy_beside_the_last_one(tab: Tab, live: Window) -> None:
    page = tab.open(live, "#/run/first")
    page.get_by_text("last and best: version 3").wait_for()  # whose accuracy is 66.7 %
    worse = {"time": 0.0, "env": "sums", "policy_version": 5, "accuracy": 0.5}
    again = {"time": 0.0, "env": "sums", "policy_version": 3, "accuracy": None}  # the best one, at the end of the run
    append(live.runs / "first/evaluations.jsonl", worse, again)
    page.get_by_text("last: version 5").wait_for()
    assert texts(page, ".way .big") == ["16.7 %", "66.7 %", "50 %"]
    assert texts(page, ".way small") == ["before training", "best: version 3", "last: version 5"]


def test_the_tab_of_held_out_answers_has_wrong_only_too(tab: Tab, window: Window) -> None:
    page = tab.open(window, "#/run/first")
    page.get_by_role("link", name="Held-out answers").click()
    page.get_by_label("Wrong only").check()
    page.get_by_text("1 to 7 of 7 answers").wait_for()  # 5 of version 0, 2 of version 3


def test_a_hostile_answer_stays_text(tab: Tab, window: Window) -> None:
    page = tab.open(window, "#/run/first/groups?step=3")
    page.get_by_role("link", name="Repeat: <img").click()
    page.locator(".answer").first.wait_for()
    assert HOSTILE in page.locator(".answer .text").first.inner_text()
    page.get_by_role("button", name="Tokens").click()
    page.locator(".t").first.wait_for()
    page.goto(f"{window.url}/#/run/first/logs?service=trainer")
    page.locator(".log", has_text="<img src=x").wait_for()
    page.goto(f"{window.url}/#/run/{quote(HOSTILE, safe='')}")
    page.get_by_text("There is no run named <img").wait_for()
    assert page.locator("main img, main script").count() == 0
    assert "owned" not in page.title().split("<")[0]


def test_images_of_the_data_are_drawn_and_no_others(tab: Tab, live: Window) -> None:
    elsewhere = "https://elsewhere.example/x.png"
    row = sample(3, 9, "What is this?", ["A pixel."], [1.0]) | {"images": [PIXEL]}
    urls = [f"data:image/png;base64,{PIXEL}", elsewhere]
    row["messages"][0][0]["content"] = [
        {"type": "text", "text": "Look closely."},
        *({"type": "image_url", "image_url": {"url": url}} for url in urls),
    ]
    row["messages"][0][1]["images"] = [elsewhere]
    append(live.runs / "first" / "samples.jsonl", row)
    page = tab.open(live, "#/run/first/groups?q=closely")
    page.get_by_role("link", name="Look closely.").click()
    page.locator(".answer img").first.wait_for()
    widths = page.locator("main img").evaluate_all("images => images.map(image => image.naturalWidth)")
    assert widths == [1, 1]


def test_the_keyboard_reaches_everything(tab: Tab, window: Window) -> None:
    page = tab.open(window, "#/")
    focused = "document.activeElement.textContent.trim()"
    page.locator("[data-row]").first.wait_for()
    page.keyboard.press("j")
    name = page.evaluate(focused)
    page.keyboard.press("Enter")
    page.get_by_role("heading", name=name, exact=True).wait_for()
    page.goto(f"{window.url}/#/run/first/groups?sort=oldest")
    page.locator("[data-row]").first.wait_for()
    page.keyboard.press("j")
    page.keyboard.press("j")
    assert page.evaluate(focused) == "What is 1 + 1?"
    page.keyboard.press("k")
    page.keyboard.press("/")
    page.keyboard.type("step 2")
    page.get_by_text("1 to 1 of 1 group").wait_for()
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.locator(".answer").first.wait_for()
    page.keyboard.press("u")
    page.get_by_text("1 to 1 of 1 group").wait_for()
    until(page, "document.activeElement.textContent == 'What is 6 * 7 in step 2?'")  # where one was
    page.keyboard.press("?")
    assert page.locator("#keys").is_visible()
    page.keyboard.press("Escape")
    assert not page.locator("#keys").is_visible()


def test_tab_visits_every_control_and_shows_where_it_is(tab: Tab, window: Window) -> None:
    page = tab.open(window, "#/run/first")
    wanted = page.locator("a:visible, button:visible, summary:visible, .plot[tabindex]:visible").count()
    seen = set()
    for _ in range(wanted + 2):
        page.keyboard.press("Tab")
        at = page.evaluate(
            """() => { const at = document.activeElement; const style = getComputedStyle(at);
            at.dataset.seen ??= Math.random(); return [at.tagName, at.dataset.seen, style.outlineStyle] }"""
        )
        if at[0] == "BODY":
            continue
        assert at[2] != "none", at
        seen.add(at[1])
    assert len(seen) >= wanted - 1  # the link that skips the head is out of sight until it has the focus


def test_j_and_k_lead_from_group_to_group(tab: Tab, window: Window) -> None:
    page = tab.open(window, "#/run/first/groups?step=1&sort=oldest")
    page.get_by_role("link", name="What is 6 * 7 in step 1?").click()
    page.get_by_role("link", name="Next").wait_for()
    page.keyboard.press("j")
    page.get_by_text("What is 1 + 1?").wait_for()
    page.get_by_text("Left out of training: all scores are equal").wait_for()
    page.keyboard.press("k")
    page.get_by_text("What is 6 * 7 in step 1?").wait_for()


def test_answers_stand_side_by_side_best_first(tab: Tab, window: Window) -> None:
    page = tab.open(window, "#/run/first/groups?q=step+1")
    page.get_by_role("link", name="What is 6 * 7 in step 1?").click()
    page.locator(".answer").first.wait_for()
    assert texts(page, ".answer .score") == ["✓ 1", "✗ 0"]
    assert texts(page, ".advantage") == ["advantage +1", "advantage −1"]
    assert texts(page, ".answer .text") == ["It is 42.", "It is 41."]
    assert page.get_by_text("What is 6 * 7 in step 1?").count() == 1
    assert "cut off" in texts(page, ".answer .badge")
    one, other = map(box_of, page.locator(".answer").all())
    assert one["y"] == other["y"]


def test_a_dropped_group_says_why(tab: Tab, window: Window) -> None:
    page = tab.open(window, "#/run/first/groups?dropped=yes&q=dropped")
    page.get_by_text("dropped: 2 of 2 answers are empty").wait_for()
    page.get_by_role("link", name="Which group was dropped?").click()
    page.get_by_text("Dropped: 2 of 2 answers are empty").wait_for()


def test_thoughts_tools_and_turns_are_set_apart(tab: Tab, window: Window) -> None:
    page = tab.open(window, "#/run/first/groups?q=tool")
    page.get_by_role("link", name="Use the tool.").click()
    page.get_by_role("link", name="Open answer 1").click()
    page.get_by_text("Tool call: calculate").wait_for()
    assert texts(page, ".conversation .role") == ["User", "Model", "Tool result", "Model"]
    assert page.get_by_text("Thought, 6 words").count() == 1
    assert page.get_by_text("First I multiply. Then I add.").is_visible()
    page.get_by_text("Thought, 6 words").click()
    assert not page.get_by_text("First I multiply. Then I add.").is_visible()
    assert '"expression":"6*7"' in page.locator(".tool pre").first.inner_text()


def test_token_heat_shows_identical_bits_and_values(tab: Tab, window: Window) -> None:
    page = tab.open(window, "#/run/first/groups?q=step+1")
    page.get_by_role("link", name="What is 6 * 7 in step 1?").click()
    page.get_by_role("button", name="Tokens").click()
    tokens = page.locator(".answer").first.locator(".t")
    tokens.first.wait_for()
    assert [token.get_attribute("class") for token in tokens.all()] == [
        f"t {look}" for look in "same h2 h5 h7 same same".split()
    ]
    page.get_by_text("Identical bits in trainer and sampler: 6 of 12 trained tokens").wait_for()
    tokens.first.hover()
    assert "difference 0: identical bits" in page.locator(".tip").inner_text()
    tokens.first.focus()
    page.keyboard.press("ArrowRight")
    assert "difference -1.00e-7" in page.locator(".tip").inner_text()
    page.get_by_label("Colour by").select_option("version")
    page.locator(".t.v0").first.wait_for()
    page.get_by_label("Colour by").select_option("mask")
    assert page.locator(".answer").first.locator(".t.off").count() == 3  # the prompt
    assert "colour=mask" in page.url


def test_a_link_restores_the_view(tab: Tab, window: Window) -> None:
    page = tab.open(window, "#/run/first/groups")
    page.locator("[data-row]").first.wait_for()
    page.get_by_label("Search").fill("What is")
    page.get_by_label("Signal").select_option("no")
    page.get_by_label("Order").select_option("oldest")
    page.get_by_text("1 to 3 of 3 groups").wait_for()
    found, address = texts(page, ".in-question"), page.url
    again = Tab(page.context.browser, WIDE)
    page = again.open(window, address.partition("/")[2].partition("/")[2].partition("/")[2])
    page.get_by_text("1 to 3 of 3 groups").wait_for()
    assert texts(page, ".in-question") == found
    assert page.get_by_label("Search").input_value() == "What is"
    again.close()


def test_two_runs_are_compared(tab: Tab, window: Window) -> None:
    page = tab.open(window, "#/")
    for name in ("first", "second"):
        page.get_by_label(f"Compare {name}").check()
    page.get_by_role("link", name="Compare 2 runs").click()
    page.get_by_role("row", name="trainer.lr").wait_for()
    assert texts(page, "tr:has-text('trainer.lr') td") == ["0.01", "0.02"]
    assert page.locator(".legend .look0, .legend .look1").count() == 2
    lines = page.locator("[data-chart=reward_mean] path.line")
    assert lines.count() == 2
    strokes = {
        line.evaluate("line => getComputedStyle(line).stroke + getComputedStyle(line).strokeDasharray")
        for line in lines.all()
    }
    assert len(strokes) == 2
    assert texts(page, "[data-chart=reward_mean] .value") == ["0.75", "0.375"]


def test_a_step_of_a_curve_is_read_and_leads_to_its_groups(tab: Tab, window: Window) -> None:
    page = tab.open(window, "#/run/first")
    plot = page.locator("[data-chart=reward_mean] .plot")
    plot.focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert texts(page, "[data-chart=reward_mean] .value") == ["0.5 ± 0.25"]
    assert texts(page, "[data-chart=entropy] .value") == ["1"]  # one crosshair for all
    page.keyboard.press("Enter")
    page.get_by_text("1 to 3 of 3 groups").wait_for()
    assert page.url.endswith("#/run/first/groups?step=2")
    page.keyboard.press("u")
    page.locator("[data-chart=accuracy] .plot").click()
    page.get_by_text("1 to 6 of 6 answers").wait_for()
    assert page.url.endswith("#/run/first/groups?source=held_out&version=0")


def test_more_metrics_and_the_timeline_stand_in_the_address(tab: Tab, window: Window) -> None:
    page = tab.open(window, "#/run/first")
    page.get_by_text("More metrics").click()
    page.get_by_label("lr").check()
    page.locator("[data-chart=lr] path.line").wait_for(state="attached")
    page.get_by_role("button", name="Zoom in").click()
    page.get_by_text(re.compile(r"Steps 2 to \d of 3")).wait_for()
    assert "more=lr" in page.url
    assert "from=2" in page.url
    page.locator("[data-chart=lr]").wait_for()


def test_what_is_missing_is_said(tab: Tab, window: Window) -> None:
    page = tab.open(window, "#/run/first/groups?source=dead_letters")
    page.get_by_text("No dead letters").wait_for()
    page.goto(f"{window.url}/#/run/first/groups?q=nowhere")
    page.get_by_text("Nothing matches these filters.").wait_for()
    page.goto(f"{window.url}/#/run/first")
    page.get_by_text(re.compile("Empty or constant: .*KL to the start model .the loss has no KL term.")).wait_for()


def test_a_theme_is_kept(tab: Tab, window: Window) -> None:
    page = tab.open(window, "#/")
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(background)
    page.keyboard.press("t")
    page.keyboard.press("t")
    assert page.evaluate(background) != light
    page.reload()
    page.get_by_role("button", name="Theme").wait_for()
    assert page.evaluate(background) != light


def test_nothing_is_wider_than_a_narrow_window(chromium: Any, window: Window) -> None:
    narrow = Tab(chromium, NARROW)
    page = narrow.open(window, "#/run/first/groups?q=tool")
    page.get_by_role("link", name="Use the tool.").click()
    page.locator(".answer").first.wait_for()
    group = page.url.partition("#")[2].partition("?")[0]
    views = {
        "/": "tbody tr",
        "/run/first": "path.line",
        "/run/first/groups": "tbody tr",
        "/run/first/groups?source=held_out": "tbody tr",
        "/run/first/logs?service=trainer": ".log:not(:empty)",
        "/compare?run=first&run=second": "path.line",
        f"{group}?show=tokens&numbers=yes": ".t",
        f"{group}?rollout=0": ".message",
    }
    for view, shown in views.items():
        page.goto(f"{window.url}/#{view}")
        page.locator(f"main {shown}").first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, view
        unnamed = page.evaluate(UNNAMED)
        assert unnamed == [], view
    narrow.close()


def test_nothing_below_the_curves_can_be_opened_before_they_are_drawn(tab: Tab, live: Window) -> None:
    waiting: list[Any] = []
    tab.page.route("**/held_out*", lambda route: waiting.append(route))
    page = tab.open(live, "#/run/first")
    while not waiting:
        page.wait_for_timeout(10)
    assert page.get_by_text("More metrics").is_hidden()
    waiting[0].continue_()
    page.get_by_text("More metrics").click()
    page.locator("path.line").first.wait_for()
    page.unroute("**/held_out*")


def test_what_one_opened_stays_open_while_the_run_goes_on(tab: Tab, live: Window) -> None:
    page = tab.open(live, "#/run/first")
    page.get_by_text("More metrics").click()
    page.get_by_text("Run details").click()
    page.get_by_label("lr").focus()
    page.evaluate("scrollTo(0, 300)")
    append(live.runs / "first" / "metrics.jsonl", metrics_row(4))
    page.get_by_text("4 of 5").wait_for()
    page.get_by_text(re.compile("about .* left")).wait_for()
    assert page.locator("details[open]").count() == 2
    assert page.evaluate("[scrollY, document.activeElement.type]") == [300, "checkbox"]


def test_a_step_without_a_value_breaks_the_line(tab: Tab, live: Window) -> None:
    rows = [metrics_row(4) | {"loss": None}, metrics_row(5)]
    append(live.runs / "first" / "metrics.jsonl", *rows)
    page = tab.open(live, "#/run/first")
    line = page.locator("[data-chart=loss] path.line")
    line.wait_for(state="attached")
    assert line.get_attribute("d").count("M") == 2
    assert page.locator("[data-chart=grad_norm] path.line").get_attribute("d").count("M") == 1


def test_curves_appear_with_the_first_step(tab: Tab, live: Window) -> None:
    metrics = live.runs / "first" / "metrics.jsonl"
    metrics.write_text("")
    page = tab.open(live, "#/run/first")
    page.get_by_text("No curves yet: the first step has not ended.").wait_for()
    assert page.locator("[data-chart]").count() == 1  # the first evaluation has ended
    append(metrics, metrics_row(1))
    page.locator("[data-chart=loss] .dot").first.wait_for(state="attached")
    charts = page.locator("[data-chart]").evaluate_all("charts => charts.map(chart => chart.dataset.chart)")
    assert charts[:2] == ["reward_mean", "accuracy"]


def test_new_groups_are_announced_and_nothing_moves(tab: Tab, live: Window) -> None:
    page = tab.open(live, "#/run/first/groups?q=What+is")
    page.get_by_text("1 to 6 of 6 groups").wait_for()
    found = texts(page, ".in-question")
    page.locator("[data-row]").nth(2).focus()
    append(live.runs / "first" / "samples.jsonl", sample(4, 1, "What is new?", ["a", "b"], [0.0, 1.0]))
    page.get_by_role("button", name="1 new group: show").wait_for()
    assert texts(page, ".in-question") == found
    assert page.evaluate("document.activeElement.textContent") == found[2]
    page.get_by_role("button", name="1 new group: show").click()
    page.get_by_text("What is new?").wait_for()


def test_a_lost_server_is_said_and_asked_again(chromium: Any, live: Window) -> None:
    tab = Tab(chromium, WIDE)
    page = tab.open(live, "#/run/first")
    page.get_by_text("3 of 5").wait_for()
    tab.context.route("**/api/**", lambda route: route.abort())
    page.get_by_text("The server does not answer.").wait_for()
    append(live.runs / "first" / "metrics.jsonl", metrics_row(4))
    tab.context.unroute("**/api/**")
    page.get_by_text("4 of 5").wait_for()
    assert not page.locator("#lost").is_visible()
    tab.close(expected="Failed to load resource")
