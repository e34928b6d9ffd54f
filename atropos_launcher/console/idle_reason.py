"""Asks the batching API why no step is being done; the supervisor's `watch`.

A thread asks every few seconds. After half a minute without a step it emits an event with the reason, and then one per
minute. While the trainer works on a batch, the first event comes after three minutes; while services start, which the
launcher's own lines about them tell, after two.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from atropos_launcher.services.events import Event, Quiet
from atropos_launcher.services.health import answers
from atropos_launcher.services.records import Records

if TYPE_CHECKING:  # loads an HTTP client
    from atroposlib.wire.batching import Activity

ASK_EVERY_S = 5.0
FIRST_S = 30.0
START_S = 120.0  # until the trainer has registered
TRAINING_S = 180.0
EVERY_S = 60.0

Ask = Callable[[], "Activity"]  # raises NotYet or ApiRefused


class Diagnosis:
    """Finds what there is to tell since the last call. `health` gives the addresses at which other services are to
    answer now, by name, and `records` the processes of the run.
    """

    def __init__(
        self,
        api_url: str,
        token: str | None = None,
        health: Callable[[], Mapping[str, str]] = dict,
        ask: Ask | None = None,
        records: Records | None = None,
    ) -> None:
        self._records = records
        self._api_url = api_url
        self._token = token
        self._health = health
        self._ask = ask
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._quiet = Silence()
        self._has_trainer = False  # or had one

    def __call__(self) -> Iterable[Event]:
        """Returns at once. The first call begins to ask."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="diagnosis", daemon=True)
            self._thread.start()
        while not self._events.empty():
            yield self._events.get()

    def close(self) -> None:
        """Ask no more."""
        self._ended.set()

    def _run(self) -> None:
        ask = self._ask or asking(self._api_url, self._token)
        while not self._ended.is_set():
            self.look(ask)
            self._ended.wait(ASK_EVERY_S)

    def look(self, ask: Ask) -> None:
        """Ask once, and leave an event if it is time for one."""
        from atroposlib.clients.activity import explain, is_silent, is_training
        from atroposlib.clients.batching_api import ApiRefused, ApiUnreachable

        patient = False
        try:
            activity = ask()
        except (ApiUnreachable, ApiRefused) as error:
            if not self._quiet.has_begun:  # it starts
                return
            lines = [f"the batching API at {self._api_url} does not answer ({error})"]
            steps = self._quiet.steps
        else:
            lines, steps = explain(activity), activity.trained_steps
            patient = is_training(activity) and not is_silent(activity) and (activity.asked_s or 0.0) < TRAINING_S
            self._has_trainer |= activity.trainer
        if (for_s := self._quiet.lasts(steps, patient, FIRST_S if self._has_trainer else START_S)) is None:
            return
        lines += [
            f"{record.name} is stopped (SIGSTOP, or Ctrl-Z): `kill -CONT -- -{record.pid}` continues it"
            for record in (self._records.services() if self._records is not None else [])
            if record.is_stopped
        ]
        silent = [(name, url) for name, url in self._health().items() if not answers(url)]
        lines += [f"{name} does not answer at {url}: see its log" for name, url in silent]
        self._events.put(Quiet(for_s, tuple(lines)))


class Silence:
    """Measures how long no step has been reported, and when it is time to say so. `now` is the clock, in seconds."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self.has_begun = False
        self.steps: object = None
        self._since = self._told = 0.0

    def lasts(self, steps: object, patient: bool = False, first_s: float = FIRST_S) -> float | None:
        """Seconds without a step, if a line about it is due now, the first after `first_s`; `steps` is what the API
        reports about steps. None if not due, and for `patient`.
        """
        now = self._now()
        if not self.has_begun or steps != self.steps:
            self.has_begun, self.steps, self._since, self._told = True, steps, now, 0.0
        for_s = now - self._since
        due_s = self._told + EVERY_S if self._told else first_s
        if patient or for_s < due_s:
            return None
        self._told = for_s
        return for_s


def asking(url: str, token: str | None) -> Ask:
    """Asks the batching API there."""
    from atroposlib.clients.batching_api import BatchingApi
    from atroposlib.wire.routes import ACTIVITY

    api = BatchingApi(url, token)
    return lambda: api.call(ACTIVITY)
