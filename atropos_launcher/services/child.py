"""A service of the supervisor, through all its starts: its process, its record, its log, and whether it answers."""

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from atropos_launcher.service import Service
from atropos_launcher.services.health import HealthWatch
from atropos_launcher.services.records import Record, Records
from atroposlib.files import open_regular
from atroposlib.logs import RUN
from atroposlib.processes import exec_child
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
        self.process: subprocess.Popen[bytes] | None = None
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
        with open_regular(self.log, "ab") as output:
            process = subprocess.Popen(
                # without what PYTHON variables and site-packages would load: it is only there to exec
                exec_child.words(signal.SIGTERM, self.service.command, self.service.cores),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, RUN: self.log.parent.name, **self.service.environment},
                start_new_session=True,
            )
        self.process, self.restart_at = process, None
        self.record = Record.of(self.service.name, process.pid, self.service.health or "")
        records.write(self.record)
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin:  # killed already; the supervisor will see that
            process.stdin.write(b"\n")
        self.started = self.told = time.monotonic()
        if self.is_awaited and self.service.health is not None:
            self.health = HealthWatch(self.service.health)
        return process.pid

    def status(self) -> int | None:
        """Return how the leader ended, negative for a signal; None while it runs. It stays a zombie."""
        assert self.process is not None
        ended = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def stop_asking(self) -> None:
        if self.health is not None:
            self.health.stop()
            self.health = None

    def reap(self) -> None:
        """Once its group is gone, or is about to be."""
        if self.process is not None:
            if self.process.stdin is not None:
                self.process.stdin.close()
            self.process.poll()


def describe(status: int) -> str:
    """`exit status 1`, `killed by signal KILL`."""
    if status >= 0:
        return f"exit status {status}"
    names = {number.value: number.name.removeprefix("SIG") for number in signal.Signals}
    return f"killed by signal {names.get(-status, -status)}"  # those for programs' own use have no names
