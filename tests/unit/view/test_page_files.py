"""The files of the window's page: their size, the contrasts of its colours, and that no text can become markup."""

import re
from itertools import pairwise

import pytest

from atroposlib.view.server import PAGE
from atroposlib.wire.metric_words import CHARTS, METRIC_WORDS
from example_trainer.loop.timeline import READ
from example_trainer.output.metrics import ROW_KEYS

COLOUR = r"(?:--|\.)([\w-]+)(?:, \.none)?(?: \{ --heat)?: light-dark\((#\w{6}), (#\w{6})\)"
INK = r"(?m)^([.\w, ]+) \{ color: light-dark\((#\w{6}), (#\w{6})\); \}$"  # of tokens far from the page's colour
LIMIT = 80_000  # bytes of script and style, as written


def test_script_and_style_stay_small() -> None:
    sizes = {path.name: path.stat().st_size for path in PAGE.iterdir() if path.suffix in (".js", ".css")}
    assert len(sizes) >= 10
    assert sum(sizes.values()) <= LIMIT, sizes
    longest = max(len(line) for name in sizes for line in (PAGE / name).read_text().splitlines())
    assert longest <= 250  # written for readers, not minified


def luminance(colour: str) -> float:
    """Of sRGB, by WCAG 2."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_contrasts_are_those_of_wcag_aa(theme: int) -> None:
    style = (PAGE / "view.css").read_text()
    colours = {name: both[theme] for name, *both in re.findall(COLOUR, style)}
    surfaces = ["page", "card"]
    pairs = [(text, surface) for text in ("text", "muted", "link", "good", "bad", "warn") for surface in surfaces]
    pairs += [("card", "link")]  # a pressed button
    heat = [name for name in colours if re.fullmatch(r"[hv]\d|same|right|partly|wrong", name)]
    assert len(heat) == 15
    ink = {name: both[theme] for names, *both in re.findall(INK, style) for name in re.findall(r"\w+", names)}
    assert set(ink) == {"h5", "h6", "h7"}
    colours |= {f"ink of {name}": colour for name, colour in ink.items()}
    pairs += [(f"ink of {name}" if name in ink else "text", name) for name in heat]
    drawn = [(colour, "card") for colour in ("c1", "c3")] + [("edge", surface) for surface in surfaces]
    found = {pair: contrast(colours[pair[0]], colours[pair[1]]) for pair in [*pairs, *drawn]}
    assert [(pair, found[pair]) for pair in pairs if found[pair] < 4.5] == []
    assert [(pair, found[pair]) for pair in drawn if found[pair] < 3] == []


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_neighbouring_shades_of_tokens_can_be_told_apart(theme: int) -> None:
    style = (PAGE / "view.css").read_text()
    colours = {name: both[theme] for name, *both in re.findall(COLOUR, style)}
    shades = [colours[name] for name in ("card", *(f"h{number}" for number in range(1, 8)))]
    brightness = [luminance(shade) for shade in shades]
    assert brightness == sorted(brightness, reverse=theme == 0)  # away from the page's colour
    steps = [contrast(one, other) for one, other in pairwise(shades)]
    assert min(steps[1:]) >= 1.2, steps
    assert steps[0] >= 1.05


def test_every_metric_that_the_window_names_is_documented_and_charts_are_of_columns() -> None:
    documented = set(re.findall(r"`([\w/]+)`", (PAGE.parents[2] / "docs/run_directory.md").read_text()))
    named = [name for group in METRIC_WORDS.values() for name in group]
    assert len(named) == len(set(named))
    assert set(named) <= documented
    assert READ.keys() <= set(named)  # what the timeline adds
    assert set(ROW_KEYS) - {"step", "policy_version"} <= set(named)  # what the trainer writes first
    computed = {"throughput", "logprob_diff", "staleness"}
    drawn = {key for chart in CHARTS for key in (chart.key, *chart.keys.values())}
    assert drawn - computed <= set(named)


def test_text_of_a_run_never_becomes_markup() -> None:
    page = "".join(path.read_text() for path in PAGE.glob("*.js"))
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|eval\(|new Function", page)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", page)
    html = (PAGE / "view.html").read_text()
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script>", html)
