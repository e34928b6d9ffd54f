from collections.abc import Iterator

import pytest
from fastapi.testclient import TestClient

from atroposlib.api.server import create_app


@pytest.fixture
def client() -> Iterator[TestClient]:
    """A client of an empty API; an exception in a handler fails the test."""
    with TestClient(create_app()) as opened:
        yield opened
