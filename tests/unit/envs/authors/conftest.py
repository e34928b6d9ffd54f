"""A desk for each test, beside one fake inference server."""

import asyncio
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from atroposlib.testing.fake_inference_server import FakeInferenceServer
from atroposlib.testing.tiny_tokenizer import save_tiny_tokenizer
from tests.unit.envs.authors.desk import (
    Desk,
)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Of a fake inference server in a thread, and the directory of its tokenizer."""
    tokenizer = str(save_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))
    loop, found, done = asyncio.new_event_loop(), threading.Event(), asyncio.Event()
    urls = []

    async def serve() -> None:
        async with FakeInferenceServer(lambda prompt: ["a", "bb", "ccc"], tokenizer_folder=tokenizer) as server:
            urls.append(server.base_url)
            found.set()
            await done.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=[serve()])
    thread.start()
    assert found.wait(30)
    yield urls[0], tokenizer
    loop.call_soon_threadsafe(done.set)
    thread.join(30)
    loop.close()


@pytest.fixture
def desk(address: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield Desk(tmp_path, *address)
    for number, handler in handlers.items():
        signal.signal(number, handler)
