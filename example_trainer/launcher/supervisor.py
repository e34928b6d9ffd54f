"""Starts, awaits, watches, restarts and ends the services of a run.

with Supervisor(run_dir, services, listener) as supervisor:
    status = supervisor.run()
"""

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from example_trainer.launcher.events import Listener
from example_trainer.launcher.service import Service


class Supervisor:
    """Owns the run's directory from `__enter__` to `__exit__`, which ends every service in every case."""

    def __init__(self, run_dir: Path, services: Sequence[Service], tell: Listener) -> None:
        self.run_dir = run_dir
        self.services = tuple(services)
        self._tell = tell

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        raise NotImplementedError

    def run(self) -> int:
        """Start all services and watch them until those that may end have ended. Returns the exit status of the
        launcher: 0; 1 after a death; 130, 143 or 129 after Ctrl-C, TERM or HUP.
        """
        raise NotImplementedError
