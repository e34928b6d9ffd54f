"""Wheels out of a package index: parts of one that are wanted, and a message that names the remedy for the rest."""

import io
import zipfile
from pathlib import Path

import httpx
import pytest

from tests.contract import wheels

NAME = "thing-1.0-py3-none-any.whl"


def wheel() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("thing/code.py", "x = 1\n")
        file.writestr("thing/kernels.so", bytes(3 * wheels.BLOCK))
        file.writestr("thing/more.py", "y = 2\n")
        file.writestr("thing-1.0.dist-info/METADATA", "Name: thing\n")
    return buffer.getvalue()


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """An index with one wheel; `ranges` is whether it sends parts of files."""
    settings, content = {"ranges": True}, wheel()

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/simple/thing/":
            return httpx.Response(200, text=f'<a href="../files/{NAME}#sha256=0">{NAME}</a>')
        if request.url.path.endswith(NAME) and settings["ranges"]:
            start, end = (int(each) for each in request.headers["range"].removeprefix("bytes=").split("-"))
            part = content[start : end + 1]
            return httpx.Response(206, content=part, headers={"content-range": f"bytes {start}-{end}/{len(content)}"})
        return httpx.Response(200 if request.url.path.endswith(NAME) else 404, content=content)

    client = httpx.Client
    monkeypatch.setattr(httpx, "Client", lambda **named: client(transport=httpx.MockTransport(answer), **named))
    monkeypatch.setattr(wheels, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(wheels, "INDEX", "https://index.test/simple/")
    return settings


def is_python(path: str) -> bool:
    return path.endswith(".py")


def files(found: wheels.Unpacked) -> set[str]:
    return {str(path.relative_to(found.path)) for path in found.path.rglob("*") if path.is_file()}


def test_only_what_is_wanted_is_downloaded_and_once(index: dict[str, bool]) -> None:
    found = wheels.unpacked("thing", "1.0", is_python)
    assert files(found) == {"thing/code.py", "thing/more.py", "thing-1.0.dist-info/METADATA"}
    assert 0 < found.downloaded < 3 * wheels.BLOCK  # less than the library alone
    assert wheels.unpacked("thing", "1.0", is_python) == wheels.Unpacked(found.path)


def test_a_wheel_in_the_cache_needs_no_index(index: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels, "INDEX", "https://index.test/nowhere")
    wheels.CACHE.mkdir()
    (wheels.CACHE / NAME).write_bytes(wheel())
    assert "thing/code.py" in files(wheels.unpacked("thing", "1.0", is_python))


def test_a_release_that_is_not_there_is_named_beside_those_that_are(index: dict[str, bool]) -> None:
    with pytest.raises(wheels.NoWheel, match=r"has no thing 2\.0 .*the newest that it has are 1\.0"):
        wheels.unpacked("thing", "2.0", is_python)


def test_an_index_that_cannot_be_reached_fails_with_the_remedy(
    index: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wheels, "INDEX", "https://index.test/nowhere")
    with pytest.raises(wheels.NoWheel, match=r"set PIP_INDEX_URL to an index .* or put the wheel into"):
        wheels.unpacked("thing", "1.0", is_python)
    assert not list(wheels.CACHE.iterdir())


def test_a_server_without_ranges_fails_with_the_remedy(index: dict[str, bool]) -> None:
    index["ranges"] = False
    with pytest.raises(wheels.NoWheel, match=rf"index\.test sends no parts of files: put https://.*{NAME} into"):
        wheels.unpacked("thing", "1.0", is_python)
