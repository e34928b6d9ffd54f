"""Where the seconds of each step go: the trainer's phases, and how long the samplers were busy meanwhile.

    with timeline.phase("sync"):              the console, metrics.jsonl and /metrics get their seconds from here, and a
        ...                                   profiler of PyTorch shows the phases by the same names

A phase may run inside another, which does not count those seconds then: --overlap computes while it waits for samples,
and a bridge makes the optimizer's updates where the weights may change.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Literal

import msgspec
from torch.profiler import record_function

from atroposlib.wire.bridge import ServerActivity
from atroposlib.wire.step_seconds import StepSeconds
from example_trainer.bridges.base import BridgeError, TellsActivity
from example_trainer.output.metrics import Row

Phase = Literal[
    "sampling",  # waiting for a batch
    "overlap",  # forward and backward of groups whose batch is not whole yet
    "forward and backward",
    "optimizer",
    "sync",
    "report",
    "evaluation",  # waiting for it
    "save",
]
TRAINING: tuple[Phase, ...] = ("overlap", "forward and backward", "optimizer")
STEP: tuple[Phase, ...] = ("sampling", *TRAINING, "sync", "report")  # fetch to sync
READ = {  # column of a row -> what it sums over the servers
    "prompt_tokens": "prompt_tokens",
    "prompt_tokens_cached": "cached_tokens",
    "tokens_read_again": "tokens_again",
}


Look = dict[TellsActivity, ServerActivity]


class Timeline:
    """The seconds of each step, which begins where the last one ended. `clients` are the run's vLLM servers, of which
    some may join or leave.
    """

    def __init__(self, clients: Sequence[TellsActivity], now: Callable[[], float] = time.monotonic) -> None:
        self.clients = list(clients)
        self._now = now
        self._began = now()
        self._looks: list[Look | None] = []  # at each server, since the end of the last step
        self._seconds: defaultdict[Phase, float] = defaultdict(float)  # of this step
        self._open: list[Phase] = []  # the innermost is the last
        self._counted = 0.0  # the time up to which the seconds are counted

    def begin(self) -> None:
        """The first step begins."""
        self._began, self._looks = self._now(), [self._activity()]

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """Count the seconds of what runs inside, and name it in a profiler's trace."""
        self._count()
        self._open.append(name)
        try:
            with record_function(name):
                yield
        finally:
            self._count()
            self._open.pop()

    def look(self) -> None:
        """Ask the servers before one is started again, since it then counts from 0."""
        self._looks.append(self._activity())

    def row(self) -> Row:
        """A step ends. The sampler's seconds are means over its servers, and null where a server does not tell."""
        now, last, seconds = self._now(), self._activity(), self._seconds
        elapsed_s = now - self._began
        looks = [look for look in (*self._looks, last) if look is not None]
        train_s = self._sum(TRAINING)
        step = StepSeconds(
            step_s=self._sum(STEP), generate_s=seconds["sampling"], train_s=train_s, eval_wait_s=seconds["evaluation"]
        )
        row: dict[str, float | None] = {
            "early_s": seconds["overlap"],
            **msgspec.structs.asdict(step),
            "trainer_busy_s": train_s,
            "trainer_idle_s": max(0.0, elapsed_s - train_s),
            "sampler_busy_s": None,
            "sampler_idle_s": None,
            **dict.fromkeys(READ),
        }
        if len(looks) == len(self._looks) + 1:  # each was answered
            spent = ServerActivity(0.0)
            for before, after in pairwise(looks):
                for client in before.keys() & after.keys():
                    _add(spent, before[client], after[client])
            row["sampler_busy_s"] = busy = spent.generating_s / len(self.clients)
            row["sampler_idle_s"] = max(0.0, elapsed_s - busy)
            row |= {column: getattr(spent, field) for column, field in READ.items()}
        self._began, self._looks, self._seconds = now, [last], defaultdict(float)
        return row

    def _count(self) -> None:
        """Add the seconds since the last call to the innermost phase."""
        now = self._now()
        if self._open:
            self._seconds[self._open[-1]] += now - self._counted
        self._counted = now

    def _sum(self, phases: Sequence[Phase]) -> float:
        return sum((self._seconds[phase] for phase in phases), 0.0)

    def _activity(self) -> Look | None:
        try:
            return {client: client.activity() for client in self.clients}
        except BridgeError:  # an older server, or another kind: the bridge notices one that is gone
            return None


def _add(spent: ServerActivity, old: ServerActivity, new: ServerActivity) -> None:
    """Add what a server has done between two looks; one that was started again counts from 0."""
    restarted = new.generating_s < old.generating_s
    for name in ("generating_s", *READ.values()):
        value = getattr(new, name) - (0 if restarted else getattr(old, name))
        setattr(spent, name, getattr(spent, name) + value)
