"""How long trainer and sampler were busy in each step, and how long idle: what --overlap is there to change."""

import time
from collections.abc import Callable, Sequence
from itertools import pairwise

from example_trainer.bridges.base import BridgeError
from example_trainer.bridges.vllm_client import VllmClient
from example_trainer.output.metrics import Row


class Timeline:
    """The seconds of each step, which begins where the last one ended. `clients` are the run's vLLM servers."""

    def __init__(self, clients: Sequence[VllmClient], now: Callable[[], float] = time.monotonic) -> None:
        self._clients = clients
        self._now = now
        self._began = now()
        self._looks: list[list[float] | None] = []  # what each server had generated, since the end of the last step

    def begin(self) -> None:
        """The first step begins."""
        self._began, self._looks = self._now(), [self._generating()]

    def look(self) -> None:
        """Ask the servers before one is started again, since it then counts from 0."""
        self._looks.append(self._generating())

    def row(self, trainer_busy_s: float) -> Row:
        """A step ends, in which the trainer computed for so long. The sampler's are means over its servers, and null
        where a server does not tell.
        """
        now, last = self._now(), self._generating()
        step_s = now - self._began
        looks = [look for look in (*self._looks, last) if look is not None]
        row: dict[str, float | None] = {
            "trainer_busy_s": trainer_busy_s,
            "trainer_idle_s": max(0.0, step_s - trainer_busy_s),
            "sampler_busy_s": None,
            "sampler_idle_s": None,
        }
        if len(looks) == len(self._looks) + 1:  # each was answered
            spent = [
                new - old if new >= old else new  # a server that was started again counts from 0
                for before, after in pairwise(looks)
                for old, new in zip(before, after, strict=True)
            ]
            row["sampler_busy_s"] = busy = sum(spent) / len(self._clients)
            row["sampler_idle_s"] = max(0.0, step_s - busy)
        self._began, self._looks = now, [last]
        return row

    def _generating(self) -> list[float] | None:
        try:
            return [client.generating_s() for client in self._clients]
        except BridgeError:  # an older server, or another kind: the bridge notices one that is gone
            return None
