"""Events of a run's services, as the supervisor emits them. A console turns them into text."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from signal import Signals


@dataclass(frozen=True)
class Started:
    service: str
    pid: int
    log: Path


@dataclass(frozen=True)
class Waiting:
    """The service has a health address, which does not answer yet."""

    service: str
    url: str
    limit_s: float
    log: Path


@dataclass(frozen=True)
class StillWaiting:
    """Every half minute."""

    service: str
    url: str
    left_s: float


@dataclass(frozen=True)
class Up:
    """The health address answered 200."""

    service: str
    after_s: float


@dataclass(frozen=True)
class NotUp:
    """The health address did not answer in time; the run ends."""

    service: str
    url: str
    limit_s: float
    log: Path
    last_lines: tuple[str, ...]


@dataclass(frozen=True)
class Ended:
    """With status 0, as it may."""

    service: str


@dataclass(frozen=True)
class Died:
    """The run ends unless the service is started again in `restart_in_s`."""

    service: str
    pid: int
    how: str  # "exit status 1", "killed by signal KILL"
    log: Path
    last_lines: tuple[str, ...]
    restart_in_s: float | None
    host: str = ""  # another machine, which it ran on


@dataclass(frozen=True)
class Lost:
    """An optional service died and is not started again."""

    service: str
    how: str  # as in Died
    log: Path


@dataclass(frozen=True)
class Restarted:
    service: str
    pid: int
    attempt: int
    attempts: int


@dataclass(frozen=True)
class Outlived:
    """These still run `limit_s` after the first of those that may end; the run ends."""

    services: tuple[str, ...]
    limit_s: float
    log: Path  # of the first of them
    last_lines: tuple[str, ...]


@dataclass(frozen=True)
class LogLine:
    """A service has written a line to its log."""

    service: str
    text: str


@dataclass(frozen=True)
class Quiet:
    """No step has been reported for so long; `lines` say why."""

    for_s: float
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Scaled:
    """What has become of `atropos scale`, in a sentence."""

    text: str


@dataclass(frozen=True)
class Interrupted:
    """A signal asks the launcher to end the run."""

    signal: Signals


@dataclass(frozen=True)
class Ending:
    """TERM has been sent to these."""

    services: tuple[str, ...]
    limit_s: float


@dataclass(frozen=True)
class Killed:
    """KILL has been sent to these, which TERM did not end."""

    services: tuple[str, ...]
    after_s: float


@dataclass(frozen=True)
class StillThere:
    """Processes that even KILL did not end: the kernel holds them."""

    services: tuple[str, ...]


Event = (
    Started
    | Waiting
    | StillWaiting
    | Up
    | NotUp
    | Ended
    | Died
    | Lost
    | Restarted
    | Outlived
    | LogLine
    | Quiet
    | Scaled
    | Interrupted
    | Ending
    | Killed
    | StillThere
)
Listener = Callable[[Event], None]
