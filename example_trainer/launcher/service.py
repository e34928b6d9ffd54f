"""One process of a run as the supervisor starts it. `services.py` makes these from a run file."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from example_trainer.cpu_cores import Cores

NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,63}")  # of its log and its record, so no path
LAUNCHER = "launcher"  # the name of the launcher's own record


@dataclass(frozen=True)
class Service:
    """What runs, and what its end means. Its output is appended to NAME.log in the run's directory."""

    name: str  # api, vllm, trainer, or the environment's name
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)  # added to the launcher's own
    health: str | None = None  # the address that answers 200 once it is up: http://HOST:PORT/PATH
    start_limit_s: float = 60.0  # from its start until then
    may_end: bool = False  # with status 0: the trainer and the environments
    restarts: int = 0  # how many deaths in a row it is started again after; none before its health address has answered
    cores: Cores = ()  # that it may run on; all where there are none
    optional: bool = False  # the run continues without it: nothing waits for it, and its end ends nothing

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name) or self.name == LAUNCHER:
            raise ValueError(f"a service's name is at most 64 letters, digits, '.', '_' and '-', not {self.name!r}")
