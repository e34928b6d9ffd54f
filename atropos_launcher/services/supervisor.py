"""Starts, awaits, watches, restarts and ends the services of a run.

    with Supervisor(run_dir, services, tell) as supervisor:
        status = supervisor.run()

                 ┌ INT, TERM, HUP ──────────────────────────────────────────────▶ 130, 143, 129 ┐
    start all ───┼ a health address is silent too long, a service dies once too often ──▶ 1 ────┼──▶ end all
                 └ all that may end have ended with status 0 ────────────────────▶ 0 ───────────┘

- All start at once. Each waits for the services that it needs.
- Every service leads a session of its own, and is recorded before it runs (exec_child.py, records.py): when a launcher
  is killed, the kernel sends its services TERM, and `atropos stop` ends those that ignore it.
- A signal only sets a flag, so it is safe at any moment; the flag is checked several times a second.
- The leader of a group that we started stays unreaped until the group is gone: until then the kernel gives its number
  to nobody else.
"""

import errno
import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from atropos_launcher.service import LAUNCHER, Service
from atropos_launcher.services.child import Child
from atropos_launcher.services.events import (
    Died,
    Ended,
    Ending,
    Event,
    Interrupted,
    Listener,
    LogLine,
    Lost,
    NotUp,
    Outlived,
    Restarted,
    Started,
    StillThere,
    StillWaiting,
    Up,
    Waiting,
)
from atropos_launcher.services.health import HealthWatch
from atropos_launcher.services.oom import OomKills
from atropos_launcher.services.records import Record, Records
from atropos_launcher.services.run_log import RunLog
from atropos_launcher.services.shared_memory import SharedMemory
from atropos_launcher.services.stop_services import GRACE_S, end, end_leftovers
from atroposlib.errors import WRONG_USE, AtroposError, reading
from atroposlib.processes.exit_words import exit_words
from atroposlib.processes.groups import KILL_S, end_groups
from atroposlib.processes.log_files import last_lines

POLL_S = 0.2
NOTE_EVERY_S = 5.0  # shared memory
STILL_EVERY_S = 30.0
LINES_SHOWN = 20
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class CannotStart(AtroposError):
    """The run's directory or a service's log cannot be written."""


@dataclass(frozen=True)
class Limits:
    """Sets how patient the supervisor is."""

    last_s: float = 300.0  # for the others, once the first of those that may end has
    pause_s: float = 2.0  # before the first restart; three times as long before each next one
    steady_s: float = 600.0  # a service that ran so long has its restarts again
    no_space_s: float = 600.0  # for somebody to free space on a full disk, before the run ends
    no_space_pause_s: float = 10.0  # before the next try
    blame_s: float = 20.0  # for the service to end that another one, which has ended, misses


class _End(Exception):
    """The run is over, with this status of the launcher."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


class _Signals:
    """Remembers which signal asked first. One that is ignored, as under nohup, stays ignored."""

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self._before = {number: signal.getsignal(number) for number in SIGNALS}

    def install(self) -> None:
        for number, handler in self._before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, self._note)

    def restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.first = self.first or signal.Signals(number)


class Supervisor:
    """Owns the run's directory from `__enter__` to `__exit__`, which ends every service in every case. Use it in the
    main thread. Listeners are called in it too. `watch` is asked several times a second what else there is to tell
    (console/idle_reason.py).
    """

    def __init__(
        self,
        run_dir: Path,
        services: Sequence[Service],
        tell: Listener,
        limits: Limits = Limits(),
        watch: Callable[[], Iterable[Event]] = lambda: (),
    ) -> None:
        names = [service.name for service in services]
        if len({*names}) < len(names):
            raise ValueError(f"two services have the same name: {names}")
        self.run_dir = run_dir
        self._children = [Child(service, run_dir / f"{service.name}.log") for service in services]
        self._listener = tell
        self._log = RunLog(run_dir)
        self._limits = limits
        self._watch = watch
        self._records = Records(run_dir)
        self._memory = SharedMemory(self._records)
        self._signals = _Signals()
        self._oom = OomKills()
        self.out_of_memory = False  # whether a service that ended the run died of it
        self.killed = False  # whether it was killed by a signal that this launcher did not send
        self._first_end: float | None = None
        self._noted = 0.0
        self._no_space_since: float | None = None  # a service cannot be started again on a full disk

    def __enter__(self) -> Self:
        """Claim the run's directory. Raises RunInUse, ForeignRecord and CannotStart, and nothing has changed then."""
        self._signals.install()
        try:
            with reading(f"cannot keep records in {self._records.folder}", CannotStart):
                end_leftovers(self._records, self._memory, self._report)
                self._memory.begin()
                self._records.write(Record.of(LAUNCHER, os.getpid()))
        except BaseException:
            self._records.release()
            self._signals.restore()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            for child in self._children:
                child.stop_asking()
            started = [child.record for child in self._children if child.record is not None]
            end(self._records, started, self._memory, self._report)
            for child in self._children:
                child.reap()
        finally:
            self._signals.restore()

    def run(self) -> int:
        """Start all services and watch them until those that may end have ended. Returns the exit status of the
        launcher: 0; 1 after a death; 130, 143 or 129 after Ctrl-C, TERM or HUP.
        """
        try:
            for child in self._children:
                self._end_if_asked()
                if (pid := self._start(child)) is not None:
                    self._tell(Started(child.service.name, pid, child.log))
                    self._announce_wait(child)
            while not self._is_over():
                self._end_if_asked()
                self._look()
                time.sleep(POLL_S)
            for child in self._children:
                for line in child.follower.rest():
                    self._tell(LogLine(child.service.name, line))
            return 0
        except _End as over:
            return over.status

    def add(self, service: Service) -> None:
        """Start one more service, and watch it like the others. Raises CannotStart."""
        child = Child(service, self.run_dir / f"{service.name}.log")
        if (pid := self._start(child)) is not None:
            self._children.append(child)
            self._tell(Started(service.name, pid, child.log))
            self._announce_wait(child)

    def retire(self, name: str) -> None:
        """End one service, whose end ends nothing else."""
        (child,) = [child for child in self._children if child.service.name == name]
        child.stop_asking()
        self._children.remove(child)
        if child.record is not None:
            self._tell(Ending((name,), GRACE_S + KILL_S))
            left = end_groups([child.record.group], GRACE_S, KILL_S)
            self._tell(StillThere((name,)) if left else Ended(name))
            child.reap()
            self._records.remove(name)

    def watches(self, name: str) -> bool:
        """Return whether a service of that name is there, running or about to be started again."""
        return any(child.service.name == name and not child.has_ended for child in self._children)

    @property
    def health(self) -> dict[str, str]:
        """The addresses at which services that are to run answer, by name. Any thread may ask."""
        running = [child for child in tuple(self._children) if not child.has_ended]
        return {child.service.name: child.service.health for child in running if child.service.health is not None}

    def _start(self, child: Child) -> int | None:
        """Start a service, and return its pid; None if it is optional and cannot be started."""
        service = child.service
        try:
            with reading(f"cannot start {service.name} with log {child.log}", CannotStart):
                return child.start(self._records)
        except CannotStart as error:
            if not service.optional:
                raise
            child.has_ended = True
            self._tell(Lost(service.name, str(error), child.log))
            return None

    def _announce_wait(self, child: Child) -> None:
        service = child.service
        if child.is_awaited and service.health is not None:
            self._tell(Waiting(service.name, service.health, service.start_limit_s, child.log))

    def _look(self) -> None:
        """Handle what has happened since the last look."""
        self._show_lines()
        for child in self._children:
            self._look_at(child)
        for event in self._watch():
            self._tell(event)
        now = time.monotonic()
        left = [child for child in self._mortal() if not child.has_ended]
        if left and self._first_end is not None and now - self._first_end > self._limits.last_s:
            names = tuple(child.service.name for child in left)
            shown = last_lines(left[0].log, LINES_SHOWN)
            self._end(Outlived(names, self._limits.last_s, left[0].log, shown))
        if now - self._noted > NOTE_EVERY_S:
            self._noted = now
            with suppress(OSError):  # a full disk: they stay in memory
                self._memory.note([child.record.group for child in self._children if child.record])

    def _look_at(self, child: Child) -> None:
        if child.has_ended:
            return
        if child.restart_at is not None:
            if time.monotonic() >= child.restart_at:
                self._restart(child)
            return
        status = child.status()
        if status is not None:
            self._see_end(child, status)
        elif child.health is not None:
            self._await(child, child.health)

    def _await(self, child: Child, health: HealthWatch) -> None:
        now, limit_s = time.monotonic(), child.service.start_limit_s
        waited = now - child.started
        name = child.service.name
        if health.is_up:
            child.health = None
            child.has_served = True
            self._tell(Up(name, waited))
        elif waited >= limit_s:
            self._end(NotUp(name, health.url, limit_s, child.log, last_lines(child.log, LINES_SHOWN)))
        elif now - child.told >= STILL_EVERY_S:
            child.told = now
            self._tell(StillWaiting(name, health.url, limit_s - waited))

    def _see_end(self, child: Child, status: int) -> None:
        child.stop_asking()
        service, now = child.service, time.monotonic()
        if status == service.missing_another:
            child.misses_since = child.misses_since or now
            if now - child.misses_since < self._limits.blame_s:
                return  # whom it misses explains more
        if status == 0 and service.may_end:
            child.has_ended = True
            self._first_end = self._first_end or now
            self._tell(Ended(service.name))
            return
        self._show_lines()
        assert child.record is not None
        if now - child.started > self._limits.steady_s:
            child.deaths = 0
        child.deaths += 1
        # what never started, or wants another setting, would not start the next time
        again = child.has_served and child.deaths <= service.restarts and status != WRONG_USE
        pause_s = self._limits.pause_s * 3 ** (child.deaths - 1) if again else None
        shown = last_lines(child.log, LINES_SHOWN)
        how = self._how(status) if not service.host else exit_words(status)
        if service.optional and not again:
            child.has_ended = True
            child.record.group.signal(signal.SIGTERM)  # what it has left
            self._tell(Lost(service.name, how, child.log))
            return
        died = Died(service.name, child.record.pid, how, child.log, shown, pause_s, service.host)
        if pause_s is None:
            self._end(died)
        else:
            child.restart_at = now + pause_s
            child.record.group.signal(signal.SIGTERM)  # what it has left
            self._tell(died)

    def _how(self, status: int) -> str:
        """Describe how a service died; whether the system had no memory left is asked of its counters."""
        counter = self._oom.since_last()
        self.out_of_memory = counter is not None
        if counter is not None:
            return f"{exit_words(status)}: the machine or its control group was out of memory ({counter} rose)"
        self.killed = status == -signal.SIGKILL
        return exit_words(status)

    def _restart(self, child: Child) -> None:
        assert child.record is not None
        if child.record.group.signal(signal.SIGKILL):
            return  # its number stays its group's until the next look
        child.reap()
        try:
            pid = self._start(child)
        except CannotStart as error:
            if not self._awaits_space(child, error):
                raise
            return
        self._no_space_since = None
        if pid is not None:
            self._tell(Restarted(child.service.name, pid, child.deaths, child.service.restarts))
            self._announce_wait(child)

    def _awaits_space(self, child: Child, error: CannotStart) -> bool:
        """Return whether a service that a full disk keeps from starting is tried again, which is told."""
        now = time.monotonic()
        if not (isinstance(error.__cause__, OSError) and error.__cause__.errno in (errno.ENOSPC, errno.EDQUOT)):
            return False
        self._no_space_since = self._no_space_since or now
        if now - self._no_space_since > self._limits.no_space_s:
            return False
        assert child.record is not None
        child.restart_at = now + self._limits.no_space_pause_s
        shown = last_lines(child.log, 1)
        pause_s = self._limits.no_space_pause_s
        self._tell(Died(child.service.name, child.record.pid, str(error), child.log, shown, pause_s))
        return True

    def _mortal(self) -> list[Child]:
        return [child for child in self._children if child.service.may_end]

    def _is_over(self) -> bool:
        mortal = self._mortal()
        return bool(mortal) and all(child.has_ended for child in mortal)

    def _show_lines(self) -> None:
        for child in self._children:
            for line in child.follower.new_lines():
                self._tell(LogLine(child.service.name, line))

    def _end_if_asked(self) -> None:
        if self._signals.first is not None:
            self._tell(Interrupted(self._signals.first))
            raise _End(128 + self._signals.first)

    def _end(self, why: Event) -> None:
        self._tell(why)
        raise _End(1)

    def _report(self, event: Event) -> None:
        self._log(event)
        self._listener(event)

    def _tell(self, event: Event) -> None:
        try:
            self._report(event)
        except OSError:  # nobody reads the console any more, as when a terminal is closed
            raise _End(128 + signal.SIGPIPE) from None
