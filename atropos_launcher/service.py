"""One process of a run as the supervisor starts it. `plan/services.py` makes these from a run file."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from example_trainer.settings.cpu_cores import Cores

NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,63}")  # of its log and its record, so no path
TRAINER = "trainer"
AGENTS = "agent-endpoint"
_TRAINERS = re.compile(rf"{TRAINER}(-[1-9]\d*)?")
LAUNCHER = "launcher"  # the name of the launcher's own record


@dataclass(frozen=True)
class Service:
    """Describes what runs, and what its end means. Its output is appended to NAME.log in the run's directory."""

    name: str  # api, vllm, trainer, or the environment's name
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)  # added to the launcher's own
    health: str | None = None  # the address that answers 200 once it is up: http://HOST:PORT/PATH
    start_limit_s: float = 60.0  # from its start until then
    may_end: bool = False  # with status 0: the trainer and the environments
    again: tuple[str, ...] = ()  # added to its command when it is started again
    restarts: int = 0  # how many deaths in a row it is started again after; none before its health address has answered
    cores: Cores = ()  # that it may run on; all where there are none
    host: str = ""  # another machine, which it runs on
    missing_another: int | None = None  # the exit status by which it says that another service has gone
    optional: bool = False  # the run continues without it: nothing waits for it, and its end ends nothing

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name) or self.name == LAUNCHER:
            raise ValueError(f"a service's name is at most 64 letters, digits, '.', '_' and '-', not {self.name!r}")


def trainer_name(number: int) -> str:
    """`trainer` on the machine of rank 0, then `trainer-2`, ...: of its service and its log."""
    return TRAINER if number == 0 else f"{TRAINER}-{number + 1}"


def is_trainer(service: str) -> bool:
    """Return whether a service of that name is the trainer, or its ranks on another machine."""
    return _TRAINERS.fullmatch(service) is not None
