"""What the launcher reports while no step is done."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from atropos_launcher.console import idle_reason
from atropos_launcher.console.idle_reason import Diagnosis, Silence, asking
from atropos_launcher.service import Service
from atropos_launcher.services.event_text import text
from atropos_launcher.services.events import Event, Quiet, Started
from atropos_launcher.services.records import Record
from atropos_launcher.services.supervisor import Supervisor
from atroposlib.clients.batching_api import ApiUnreachable
from atroposlib.testing.fake_inference_server import FakeInferenceServer
from atroposlib.testing.tiny_tokenizer import save_tiny_tokenizer
from atroposlib.wire.batching import Activity
from tests.client import http
from tests.unit.api.support import registration
from tests.unit.trainer.whole_runs import real_api
from tests.waiting import Clock, until

ROOT = Path(__file__).parents[4]

URL = "http://127.0.0.1:9/health"


def told(steps: list[int], every_s: float = 10.0, patient_s: float = 0.0) -> list[tuple[float, float]]:
    """When something is said, and for how long no step was done, if the API reports these steps."""
    clock = Clock()
    silence = Silence(clock)
    found = []
    for step in steps:
        for_s = silence.lasts(step, clock.now < patient_s)
        if for_s is not None:
            found.append((clock.now, for_s))
        clock.now += every_s
    return found


def test_it_is_told_within_a_minute_and_each_minute_from_then_on() -> None:
    assert told([0] * 18) == [(30.0, 30.0), (90.0, 90.0), (150.0, 150.0)]


def test_a_step_ends_the_silence() -> None:
    assert told([0] * 5 + [1] * 5 + list(range(2, 10))) == [(30.0, 30.0), (80.0, 30.0)]
    assert told([0] * 30, patient_s=180.0)[:2] == [(180.0, 180.0), (240.0, 240.0)]


@pytest.mark.usefixtures("soon")
def test_a_trainer_that_works_on_its_batch_is_given_three_minutes() -> None:
    watch = Diagnosis("http://api")
    for asked_s in (20.0, 179.0, 181.0):
        watch.look(lambda: Activity(True, trainer_heard_s=1.0, asked_s=asked_s, num_steps=2))  # noqa: B023
    watch._ended.set()
    (event,) = watch()
    assert isinstance(event, Quiet)
    assert "for 181 s" in event.lines[0]


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle_reason, "FIRST_S", 0.0)
    monkeypatch.setattr(idle_reason, "START_S", 0.0)
    monkeypatch.setattr(idle_reason, "ASK_EVERY_S", 0.05)


@pytest.mark.usefixtures("soon")
def test_an_api_that_goes_away_and_a_vllm_that_does_not_answer_are_named() -> None:
    answers: list[Activity] = [Activity(False)]

    def ask() -> Activity:
        if not answers:
            raise ApiUnreachable("connection refused")
        return answers.pop()

    health = {"vllm": URL}
    watch = Diagnosis("http://api", health=lambda: health)
    watch.look(ask)
    watch._quiet._told = -1e9  # as after a minute
    health.clear()  # it was ended on purpose
    watch.look(ask)
    watch._ended.set()
    first, second = watch()
    assert isinstance(first, Quiet)
    assert isinstance(second, Quiet)
    assert first.lines[0].startswith("no trainer has registered")
    assert first.lines[1] == f"vllm does not answer at {URL}: see its log"
    assert second.lines == ("the batching API at http://api does not answer (connection refused)",)


@pytest.mark.usefixtures("soon")
def test_an_api_that_only_starts_is_no_news() -> None:
    def ask() -> Activity:
        raise ApiUnreachable("connection refused")

    watch = Diagnosis("http://api")
    watch.look(ask)
    watch._ended.set()
    assert list(watch()) == []


@pytest.mark.services
@pytest.mark.usefixtures("soon")
def test_the_supervisor_tells_what_a_real_api_says(tmp_path: Path) -> None:
    events: list[Event] = []
    with real_api() as url:
        watch = Diagnosis(url)
        service = Service("trainer", ("sleep", "3"), may_end=True)
        with Supervisor(tmp_path, [service], events.append, watch=watch) as supervisor:
            assert supervisor.run() == 0
        watch.close()
        assert asking(url, None)().trainer is False
    assert isinstance(events[0], Started)
    assert any(isinstance(event, Quiet) and "no trainer has registered" in event.lines[0] for event in events)


def test_a_start_is_no_alarm_until_it_has_taken_two_minutes() -> None:
    watch = Diagnosis("http://api")
    watch._quiet = Silence(now=iter([0.0, 31.0, 119.0, 120.0]).__next__)
    for _ in range(4):
        watch.look(lambda: Activity(False))
    watch._ended.set()
    assert [event.for_s for event in watch() if isinstance(event, Quiet)] == [120.0]
    watch = Diagnosis("http://api")
    watch._quiet = Silence(now=iter([0.0, 20.0, 31.0]).__next__)
    for trainer in (False, True, False):  # it has been there, and is gone
        watch.look(lambda: Activity(trainer))  # noqa: B023
    watch._ended.set()
    assert [event.for_s for event in watch() if isinstance(event, Quiet)] == [31.0]


def test_a_stopped_process_is_named() -> None:
    record = SimpleNamespace(name="env", pid=4711, is_stopped=True)
    running = SimpleNamespace(name="api", pid=4712, is_stopped=False)
    records: Any = SimpleNamespace(services=lambda: [record, running])
    watch = Diagnosis("http://api", records=records)
    watch._quiet = Silence(now=iter([0.0, 31.0]).__next__)
    for _ in range(2):
        watch.look(lambda: Activity(True, trainer_heard_s=1.0, asked_s=1.0))
    event = watch._events.get_nowait()
    assert watch._events.empty()
    assert isinstance(event, Quiet)
    assert event.lines[-1] == "env is stopped (SIGSTOP, or Ctrl-Z): `kill -CONT -- -4711` continues it"


@pytest.mark.services
def test_a_record_knows_that_its_process_is_stopped() -> None:
    child = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        record = Record.of("env", child.pid)
        assert not record.is_stopped
        os.killpg(child.pid, signal.SIGSTOP)
        deadline = time.monotonic() + 5
        while not record.is_stopped and time.monotonic() < deadline:
            time.sleep(0.01)
        assert record.is_stopped
    finally:
        child.kill()
        child.wait()
    assert not record.is_stopped


@pytest.mark.services
@pytest.mark.slow
async def test_the_console_names_an_environment_that_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atroposlib.clients.activity.SILENT_S", 2.0)
    tokenizer = save_tiny_tokenizer(tmp_path / "tokenizer")
    async with FakeInferenceServer(lambda prompt: "1") as server:
        with real_api() as url:
            flags = [
                "--env.rollout_server_url",
                url,
                "--env.tokenizer_name",
                str(tokenizer),
                "--env.use_wandb",
                "false",
            ]
            flags += ["--openai.base_url", server.base_url, "--openai.model_name", server.model_name]
            environment = await asyncio.create_subprocess_exec(
                *(sys.executable, "environments/template_server.py", "serve", *flags),
                cwd=ROOT,
                start_new_session=True,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            try:
                ask = asking(url, None)
                http.post(f"{url}/register", json=registration(8), timeout=10).raise_for_status()
                http.get(f"{url}/batch", timeout=10).raise_for_status()  # environments may join
                await until(lambda: bool(ask().environments), 60)
                os.killpg(environment.pid, signal.SIGSTOP)
                await until(lambda: (ask().environments[0].heard_s or 0.0) > 3.0, 30)
                record = SimpleNamespace(name="env", pid=environment.pid, is_stopped=True)
                records: Any = SimpleNamespace(services=lambda: [record])
                watch = Diagnosis(url, records=records)
                watch._quiet = Silence(now=iter([0.0, 31.0]).__next__)
                for _ in range(2):
                    await asyncio.to_thread(watch.look, ask)
            finally:
                os.killpg(environment.pid, signal.SIGKILL)
                await environment.wait()
    said = text(watch._events.get_nowait())
    assert "has been silent for 3 s" in said or "has been silent for 4 s" in said
    assert f"env is stopped (SIGSTOP, or Ctrl-Z): `kill -CONT -- -{environment.pid}` continues it" in said
