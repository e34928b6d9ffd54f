"""Fixtures of the tests of the page."""

from pathlib import Path

import pytest

from tests.unit.view.support import make_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The directory of a short run."""
    return make_run(tmp_path / "r")
