"""The watch over vLLM's engine process, on an engine that answers, falls silent, comes back and dies as it is told."""

import asyncio
import signal

import httpx
import pytest
from fastapi import FastAPI

from tests.waiting import until
from vllm_patching.compat import vllm_engine
from vllm_patching.http import engine_watch
from vllm_patching.http.engine_watch import EngineWatch
from vllm_patching.http.gate import Unavailable

ROUTES = ("/generate", "/v1/completions", "/v1/bridge/session/s/heartbeat", "/v1/bridge/commit")


class FakeEngine:
    """vLLM's engine client, as far as the watch asks it."""

    def __init__(self) -> None:
        self.errored = False
        self.answers = asyncio.Event()
        self.answers.set()
        self.broken = False
        self.output_handler: asyncio.Task[None] | None = None

    def shutdown(self, timeout: float | None = None) -> None:
        """Ends, as vLLM's engine does when the server has a signal."""
        self.errored = True

    async def is_paused(self) -> bool:
        await self.answers.wait()
        if self.broken:
            raise RuntimeError("Call to is_scheduler_paused method failed")
        return False


@pytest.fixture(autouse=True)
def ended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The signals that the watch sent to end the server."""
    signals: list[int] = []
    monkeypatch.setattr(engine_watch, "ASK_EVERY_S", 0.01)
    monkeypatch.setattr(engine_watch, "LAST_WORDS_S", 0.05)
    monkeypatch.setattr("signal.raise_signal", signals.append)
    return signals


def client_of(watch: EngineWatch) -> httpx.AsyncClient:
    app = FastAPI()
    app.add_middleware(Unavailable, why=watch.why_not)
    for path in (*ROUTES, "/tokenize"):
        app.post(path)(lambda: {"served": True})
    for path in ("/health", "/metrics"):
        app.get(path)(lambda: {"served": True})
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server")


async def test_a_silent_engine_is_503_with_the_reason_until_it_answers_again() -> None:
    watch, engine = EngineWatch(), FakeEngine()
    client = client_of(watch)
    assert (await client.get("/health")).status_code == 200
    watch.start(engine, deadline_s=0.1)
    assert (await client.get("/health")).status_code == 200
    engine.answers.clear()
    await until(lambda: watch.reason is not None)
    health = await client.get("/health")
    assert health.status_code == 503
    assert "has not answered for 0.1 s (--engine-deadline-s)" in health.json()["error"]["message"]
    for path in ROUTES:
        assert (await client.post(path)).json()["error"]["message"] == health.json()["error"]["message"], path
    assert (await client.get("/metrics")).status_code == 200
    assert (await client.post("/tokenize")).status_code == 200
    engine.answers.set()
    await until(lambda: watch.reason is None)
    assert (await client.get("/health")).status_code == 200
    assert (await client.post("/generate")).status_code == 200


async def test_an_answer_within_the_deadline_and_an_error_are_signs_of_life() -> None:
    watch, engine = EngineWatch(), FakeEngine()
    engine.broken = True
    watch.start(engine, deadline_s=5)
    for _ in range(10):
        engine.answers.clear()
        await asyncio.sleep(0.02)
        engine.answers.set()
        assert watch.reason is None


async def test_a_dead_engine_is_503_at_once_and_the_server_ends_a_while_later(ended: list[int]) -> None:
    watch, engine = EngineWatch(), FakeEngine()
    watch.start(engine, deadline_s=300)
    engine.answers.clear()
    await asyncio.sleep(0.05)
    engine.errored = True
    health = await client_of(watch).get("/health")
    assert health.status_code == 503
    assert "engine has died" in health.json()["error"]["message"]
    await until(lambda: ended == [signal.SIGTERM])


@pytest.mark.parametrize(("drain_s", "reads_on"), [(0.0, False), (None, False), (5.0, True)])
async def test_an_engine_that_ends_with_its_server_has_not_died(
    ended: list[int], caplog: pytest.LogCaptureFixture, drain_s: float | None, reads_on: bool
) -> None:
    watch, engine = EngineWatch(), FakeEngine()
    engine.output_handler = reader = asyncio.create_task(asyncio.sleep(60))
    watch.start(engine, deadline_s=300)
    await asyncio.to_thread(engine.shutdown, timeout=drain_s)
    assert watch._task is not None
    await watch._task
    health = await client_of(watch).get("/health")
    assert (health.status_code, health.json()["error"]["message"]) == (503, "this vLLM server is ending")
    assert reader.cancelled() is not reads_on
    assert (ended, caplog.text) == ([], "")
    reader.cancel()


@pytest.mark.parametrize("name", ["process_input_sockets", "process_output_sockets"])
def test_an_engine_ends_with_the_thread_that_reads_or_answers(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    from queue import Queue
    from types import SimpleNamespace

    from vllm.v1.engine.core import EngineCoreProc, EngineCoreRequestType

    for each in ("process_input_sockets", "process_output_sockets"):  # put back after the test
        monkeypatch.setattr(EngineCoreProc, each, getattr(EngineCoreProc, each))
    vllm_engine.end_engine_with_its_threads()
    core = SimpleNamespace(input_queue=Queue())  # without the rest either thread fails in its first lines
    getattr(EngineCoreProc, name)(core, ["tcp://nowhere"], None, b"")
    assert core.input_queue.get_nowait()[0] == EngineCoreRequestType.EXECUTOR_FAILED
