import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from atroposlib.api.server import create_app
from tests.unit.api.support import command, wait_until_healthy


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The journal of an API."""
    return tmp_path / "groups.db"


@pytest.fixture
def client() -> Iterator[TestClient]:
    """A client of an empty API; an exception in a handler fails the test."""
    with TestClient(create_app()) as opened:
        yield opened


@pytest.fixture
def process() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A served API on a free port, and its URL from the first line of its log."""
    served = subprocess.Popen(command("--port", "0"), stderr=subprocess.PIPE, text=True)
    assert served.stderr is not None
    line = served.stderr.readline()
    url = line.split("listens on ")[1].strip()
    try:
        wait_until_healthy(url, served)
        yield served, url
    finally:
        served.kill()
        served.communicate()
