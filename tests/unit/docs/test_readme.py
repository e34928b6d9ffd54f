"""The README fits two screens, and what a package index shows of it has no link into the checkout."""

import math
import re
import runpy
from pathlib import Path

import pytest
import setuptools

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text()


def test_it_fits_two_screens_of_fifty_lines() -> None:
    assert len(README.split()) < 600
    assert sum(max(1, math.ceil(len(line) / 120)) for line in README.splitlines()) <= 100


def test_it_begins_with_the_commands_that_train_and_test() -> None:
    assert re.findall(r"^```bash\n(.*?)```", README, re.MULTILINE | re.DOTALL)[:2] == [
        "scripts/quickstart.sh\n",
        "scripts/test.sh\n",
    ]


def test_an_index_gets_no_link_and_no_image_of_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setuptools, "setup", lambda **arguments: None)
    monkeypatch.setattr("sys.argv", ["setup.py"])
    shown = runpy.run_path(str(ROOT / "setup.py"))["for_an_index"](
        "![a picture](docs/images/x.png)\n\n[run files](docs/run_files.md), [there](https://example.org)\n"
    )
    assert shown == "run files (docs/run_files.md), [there](https://example.org)\n"
