"""A service of the supervisor, through all its starts: its process, its record, its log, and whether it answers."""

import os
import signal
import time
from pathlib import Path

from atropos_launcher.service import Service
from atropos_launcher.services.health import HealthWatch
from atropos_launcher.services.records import Record, Records
from atroposlib.logs import RUN
from atroposlib.processes.child_group import ChildGroup
from atroposlib.processes.groups import Group
from atroposlib.processes.log_files import Follower


class Child:
    """A service, through all its starts. `health` is there while it is awaited; `deaths` are those in a row. One that
    has a health address `has_served` once that has answered, any other and one that is optional from its first start.
    """

    def __init__(self, service: Service, log: Path) -> None:
        self.service = service
        self.log = log
        self.follower = Follower(log)
        self.record: Record | None = None
        self.process: ChildGroup | None = None
        self.health: HealthWatch | None = None
        self.started = self.told = 0.0
        self.deaths = 0
        self.restart_at: float | None = None
        self.misses_since: float | None = None  # when it ended, because of another service as it says
        self.has_ended = False
        self.is_awaited = service.health is not None and not service.optional
        self.has_served = not self.is_awaited

    def start(self, records: Records) -> int:
        """Start the process, and return its pid. It runs once its record is written."""

        def record(group: Group) -> None:
            self.record = Record.of(self.service.name, group.pid, self.service.health or "")
            records.write(self.record)

        self.restart_at = None
        self.process = ChildGroup(
            [*self.service.command, *(self.service.again if self.deaths else ())],
            self.log,
            {**os.environ, RUN: self.log.parent.name, **self.service.environment},
            die_with=signal.SIGTERM,
            cores=self.service.cores,
            ready=record,
        )
        self.started = self.told = time.monotonic()
        if self.is_awaited and self.service.health is not None:
            self.health = HealthWatch(self.service.health)
        return self.process.pid

    def status(self) -> int | None:
        """Return how the leader ended, negative for a signal; None while it runs. It stays a zombie."""
        assert self.process is not None
        return self.process.status()

    def stop_asking(self) -> None:
        if self.health is not None:
            self.health.stop()
            self.health = None

    def reap(self) -> None:
        """Once its group is gone, or is about to be."""
        if self.process is not None:
            self.process.reap()
