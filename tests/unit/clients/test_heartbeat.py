import logging
import threading
from collections.abc import Iterator

import pytest

from atroposlib.clients.heartbeat import Heartbeat


class Lost(Exception):
    """What a beat raises that does not arrive."""


@pytest.fixture
def beats() -> Iterator[tuple[Heartbeat, threading.Event, threading.Event]]:
    """A heartbeat whose beats fail while the first event is set; each sets the second."""
    fails, beaten = threading.Event(), threading.Event()

    def beat() -> None:
        beaten.set()
        if fails.is_set():
            raise Lost("connection refused")

    heartbeat = Heartbeat("http://peer", beat, 0.001, Lost)
    yield heartbeat, fails, beaten
    heartbeat.stop()


def two_beats(beaten: threading.Event) -> None:
    """Return when a whole beat has passed."""
    for _ in range(2):
        beaten.clear()
        assert beaten.wait(30)


def test_it_beats_from_start_to_stop(beats: tuple[Heartbeat, threading.Event, threading.Event]) -> None:
    heartbeat, _, beaten = beats
    assert not beaten.is_set()
    heartbeat.start()
    heartbeat.start()
    two_beats(beaten)
    heartbeat.stop()
    beaten.clear()
    assert heartbeat._thread is not None
    assert not heartbeat._thread.is_alive()
    assert not beaten.is_set()


def test_what_fails_is_known_until_a_beat_arrives_and_logged_once(
    beats: tuple[Heartbeat, threading.Event, threading.Event], caplog: pytest.LogCaptureFixture
) -> None:
    heartbeat, fails, beaten = beats
    caplog.set_level(logging.WARNING)
    fails.set()
    heartbeat.start()
    two_beats(beaten)
    two_beats(beaten)
    assert heartbeat.lost == "connection refused"
    assert caplog.messages == ["Heartbeat to http://peer failed: connection refused"]
    fails.clear()
    two_beats(beaten)
    assert heartbeat.lost is None


def test_stopping_one_that_never_began_is_nothing() -> None:
    Heartbeat("http://peer", lambda: None, 1.0, Lost).stop()
