"""The Python files of a package's wheel, out of the package index into a cache, without the 300 MB of kernels beside
them.

    index page ──▶ URL of the wheel ──▶ ranges of bytes (zip directory, spans with .py files) ──▶ CACHE/NAME-VERSION

Called by `releases.py`. A directory that is there is whole: it is filled under another name and renamed. Wheels on an
index never change, so it never expires. Without an index, put a wheel into the cache yourself.
"""

import html
import io
import os
import re
import shutil
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast
from urllib.parse import unquote, urldefrag, urljoin

import httpx
from packaging.tags import sys_tags
from packaging.utils import parse_wheel_filename
from packaging.version import Version

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "atropos/contract"
INDEX = os.environ.get("PIP_INDEX_URL") or "https://pypi.org/simple"
BLOCK = 2 << 20  # bytes asked for at a time: less than most compiled libraries, which are skipped
TIMEOUT_S = 60.0


class NoWheel(RuntimeError):
    """A wheel that cannot be had; the message says from where and what to do."""


@dataclass(frozen=True)
class Unpacked:
    """A directory for PYTHONPATH, and what it took to get it: zeros where it was cached."""

    path: Path
    downloaded: int = 0  # bytes
    seconds: float = 0.0


def unpacked(name: str, version: str, wanted: Callable[[str], bool]) -> Unpacked:
    """The files of `name`'s wheel for this machine whose path is `wanted`, and its metadata. Raises NoWheel."""
    directory = CACHE / f"{name}-{version}"
    if directory.is_dir():
        return Unpacked(directory)
    start = time.monotonic()
    CACHE.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{name}-{version}.", dir=CACHE))
    try:
        local = next(iter(sorted(CACHE.glob(f"{name}-{version}-*.whl"))), None)
        downloaded = _unpack(local.open("rb"), partial, wanted) if local else _download(name, version, partial, wanted)
        try:
            partial.rename(directory)
        except OSError:  # another test was faster
            if not directory.is_dir():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Unpacked(directory, downloaded, time.monotonic() - start)


def offered(name: str) -> list[Version]:
    """The releases of `name` that the index has for this machine and Python, the oldest first. Raises NoWheel."""
    with _index(name) as (_, wheels):
        return sorted({version for version in wheels.values() if not version.is_prerelease})


def _download(name: str, version: str, into: Path, wanted: Callable[[str], bool]) -> int:
    with _index(name, version) as (client, wheels):
        found = next((link for link, each in wheels.items() if each == Version(version)), None)
        if found is None:
            newest = ", ".join(map(str, sorted(set(wheels.values()))[-5:])) or "none"
            raise NoWheel(
                f"{INDEX} has no {name} {version} for this machine and Python; the newest that it has are {newest}"
            )
        remote = RangeFile(client, found)
        _unpack(cast(IO[bytes], io.BufferedReader(remote, BLOCK)), into, wanted)
        return remote.downloaded


@contextmanager
def _index(name: str, version: str = "") -> Iterator[tuple[httpx.Client, dict[str, Version]]]:
    """A client, and the URLs of the wheels of `name` that this Python can use, out of an index page (PEP 503)."""
    page = f"{INDEX.rstrip('/')}/{name}/"
    try:
        with httpx.Client(timeout=TIMEOUT_S, follow_redirects=True) as client:
            answer = client.get(page, headers={"accept": "text/html"}).raise_for_status()
            yield client, _wheels(answer.text, str(answer.url))
    except (httpx.HTTPError, zipfile.BadZipFile) as error:
        raise NoWheel(
            f"{name} {version} cannot be read from {httpx.URL(page).host} ({type(error).__name__}: {error}): set"
            f" PIP_INDEX_URL to an index that can be reached, or put the wheel into {CACHE}"
        ) from error


def _wheels(page: str, base: str) -> dict[str, Version]:
    links = [urldefrag(urljoin(base, html.unescape(link))).url for link in re.findall(r'href="([^"]+)"', page)]
    wheels = {link: parse_wheel_filename(unquote(link.rpartition("/")[2])) for link in links if link.endswith(".whl")}
    here = set(sys_tags())
    return {link: found for link, (_, found, _, tags) in wheels.items() if tags & here}


def _unpack(file: IO[bytes], into: Path, wanted: Callable[[str], bool]) -> int:
    with file, zipfile.ZipFile(file) as wheel:
        members = [each for each in wheel.infolist() if ".dist-info/" in each.filename or wanted(each.filename)]
        for member in sorted(members, key=lambda each: each.header_offset):
            wheel.extract(member, into)
    return 0


class RangeFile(io.RawIOBase):
    """A file on a web server, read by ranges of bytes. Raises NoWheel where the server sends whole files only."""

    def __init__(self, client: httpx.Client, url: str) -> None:
        self._client, self._url, self._position = client, url, 0
        self.downloaded = 0
        first = self._range("bytes=0-0")
        self._size = int(first.headers["content-range"].rpartition("/")[2])

    def _range(self, asked: str) -> httpx.Response:
        answer = self._client.get(self._url, headers={"range": asked, "accept-encoding": "identity"})
        answer.raise_for_status()
        if answer.status_code != httpx.codes.PARTIAL_CONTENT:
            raise NoWheel(f"{answer.url.host} sends no parts of files: put {self._url} into {CACHE}")
        self.downloaded += len(answer.content)
        return answer

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        end = min(self._position + len(buffer), self._size)
        if self._position >= end:
            return 0
        content = self._range(f"bytes={self._position}-{end - 1}").content
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)
