"""The learning curves that pages show beside a recipe are those of the runs in docs/benchmarks/better_policies/."""

import json
import re
from pathlib import Path

from benchmarks.better_policies import SEEDS, read_finished, report

DOCS = Path(__file__).parents[3] / "docs"
VERSIONS = (10, 20, 30)


def curve(path: Path) -> list[str]:
    """Held-out accuracy at VERSIONS, empty behind the last one, then the last policy's by 256 questions, in percent."""
    run = json.loads(path.read_text())
    asked = {row["policy_version"]: row["accuracy"] for row in run["evaluations"] if row["accuracy"] is not None}
    found = [asked.get(version) for version in VERSIONS] + [run["last"]["final"]["accuracy"]]
    return ["" if accuracy is None else f"{100 * accuracy:.1f}" for accuracy in found]


FOLDER = DOCS / "benchmarks/better_policies"
RUNS = {path.stem: curve(path) for path in sorted(FOLDER.glob("*.json"))}


def test_the_page_of_learning_has_each_run() -> None:
    assert len(RUNS) == sum(map(len, SEEDS.values()))
    assert report(read_finished(FOLDER)) in (DOCS / "benchmarks/learning.md").read_text()


def test_the_quickstart_shows_what_to_expect() -> None:
    rows = re.findall(r"^\| (\d) \| (\d+\.\d .*) \|$", (DOCS / "quickstart.md").read_text(), re.MULTILINE)
    assert len(rows) == 3
    assert [cells.split(" | ") for _, cells in rows] == [RUNS[f"quickstart-{seed}"] for seed, _ in rows]


def test_the_table_of_recipes_has_the_range_of_the_seeds() -> None:
    seeds = [[float(cell) for cell in cells] for name, cells in RUNS.items() if name.startswith("quickstart")]
    assert len(seeds) == 5
    ranges = [f"{min(column):.0f} to {max(column):.0f} %" for column in zip(*seeds, strict=True)]
    said = f"{ranges[0]} at step 10, {ranges[1]} at 20, {ranges[2]} at 30 (five seeds)"
    assert said in (DOCS / "run_files.md").read_text()
