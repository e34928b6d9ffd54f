"""docs/security.md names tests that exist: a promise whose test was renamed or removed is a promise that nothing
holds.
"""

import re
from pathlib import Path

TESTS = Path(__file__).parents[2]
PROMISES = (TESTS.parent / "docs/security.md").read_text().split("## What is promised")[1]


def test_every_promise_names_a_test_that_exists() -> None:
    rows = [line for line in PROMISES.splitlines() if line.startswith("| ") and not line.startswith("| promise")]
    assert len(rows) > 30
    for row in rows:
        named = re.findall(r"`((?:unit|integration)/[\w/]+\.py)(?:::(\w+))?`", row.rpartition(" | ")[2])
        assert named, row
        for file, test in named:
            found = re.findall(r"^(?:async )?def (test_\w+)\(", (TESTS / file).read_text(), re.MULTILINE)
            assert test in found if test else found, f"{file}::{test}"
