"""A service that Ray places, as the supervisor holds it here. plan/on_machine.py writes its command line.

    supervisor ──▶ this process ──▶ Ray ──▶ ray_actor.py on the service's node ──▶ the service
       log    ◀── what it writes ◀─────────────────┘

The service's files and variables travel in a call, so that no secret is in a process list or kept by Ray. The process
is a driver of its own, so Ray ends the actor when it ends. Its exit status is the service's, 128 + N for
one that signal N has ended, and 1 with one line where the node or the actor is lost.
"""

import json
import os
import signal
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from atropos_launcher.paths import PACKAGES
from atropos_launcher.placement import ray_cluster
from atropos_launcher.placement.machines import LOOPBACK
from atropos_launcher.services import ray_actor

FIRST_S = 60.0  # for an actor to start; Ray first starts a process for it
LEAVE_S = 8.0  # for the service to end, once we have been asked to end it
POLL_S = 0.2
FORWARDED = ("ATROPOS_", "GLOO_", "HF_", "NCCL_", "OMP_", "TORCH_", "TRANSFORMERS_", "VLLM_")
ALSO = ("PYTHONPATH", "WANDB_API_KEY")
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Lost(Exception):
    """Says how the service was lost."""


class Actor:
    """The actor of one service, asked without being blocked: `ending` is true once the supervisor ends the run."""

    def __init__(self, asked: Namespace) -> None:
        self.ending = False
        self._host = asked.host
        self._ask_signals()
        ray = ray_cluster.join(asked.ray)
        self._ask_signals()  # Ray has a handler of its own for TERM
        ray.cloudpickle.register_pickle_by_value(ray_actor)
        from ray.util import get_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._ray = ray
        where = PlacementGroupSchedulingStrategy(get_placement_group(asked.group))
        self._actor = ray.remote(num_cpus=1)(ray_actor.ServiceActor).options(scheduling_strategy=where).remote()

    def call(self, method: str, *words: object, within_s: float, ended: bool = False) -> Any:
        """Return its answer, or None if the supervisor ends the run first, unless `ended`. Raises Lost."""
        answer = getattr(self._actor, method).remote(*words)
        deadline = time.monotonic() + within_s
        while not self._ray.wait([answer], timeout=POLL_S)[0]:
            if self.ending and not ended:
                return None
            if time.monotonic() > deadline:
                raise Lost(f"no sign of life for {within_s:g} s")
        try:
            return self._ray.get(answer)
        except self._ray.exceptions.RayActorError as error:
            raise Lost(self._why(error)) from None

    def _why(self, error: Exception) -> str:
        alive = {node["NodeManagerAddress"] for node in self._ray.nodes() if node["Alive"]}
        if self._host not in (*alive, LOOPBACK):
            return "Ray says that this node died"
        if isinstance(error, self._ray.exceptions.ActorUnavailableError):
            return "no connection to the service's actor"
        return f"the service's actor died ({str(error).strip().splitlines()[0]})"

    def _ask_signals(self) -> None:
        for number in SIGNALS:
            signal.signal(number, self._end)

    def _end(self, number: int, frame: object) -> None:
        self.ending = True


def parser() -> ArgumentParser:
    """Build the parser of this program."""
    arguments = ArgumentParser(prog="ray_client", description=__doc__, allow_abbrev=False)
    arguments.add_argument("--host", required=True)
    arguments.add_argument("--name", required=True)
    arguments.add_argument("--ray", required=True, help="address of the cluster that starts it")
    arguments.add_argument("--group", required=True, help="placement group in which Ray starts it")
    arguments.add_argument("--silence-s", type=float, required=True)
    arguments.add_argument("--folder", required=True)
    arguments.add_argument("--variables", default="")
    arguments.add_argument("--cores", default="")
    arguments.add_argument("--file", action="append", default=[])
    arguments.add_argument("--sees", action="append", nargs=2, default=[], metavar=("PATH", "REMEDY"))
    arguments.add_argument("command", nargs="+")
    return arguments


def job_of(asked: Namespace, environ: Mapping[str, str]) -> bytes:
    """What ray_actor.py is to run, in JSON."""
    own = {*filter(None, asked.variables.split(",")), *ALSO}
    job = {
        "command": asked.command,
        "environment": {name: value for name, value in environ.items() if name in own or name.startswith(FORWARDED)},
        "cores": [int(core) for core in asked.cores.split(",") if core],
        "files": {path: Path(path).read_text(encoding="utf-8") for path in asked.file},
        "sees": {path: (ray_actor.digest_of(path), remedy) for path, remedy in asked.sees},
        "folder": asked.folder,
        "directory": os.getcwd(),
        "silence_s": asked.silence_s,
    }
    return json.dumps(job).encode()


def main() -> int:
    """Run the service and copy its output. Returns the exit status."""
    asked = parser().parse_args()
    job = job_of(asked, os.environ)
    started = time.monotonic()
    print(f"Starting {asked.name} on {asked.host} by Ray, waiting at most {FIRST_S:.0f} s for its actor", flush=True)
    actor = Actor(asked)
    try:
        why = actor.call("start", str(PACKAGES), job, within_s=max(FIRST_S, asked.silence_s))
        if why:
            print(f"{asked.name}: error: {why}", flush=True)
            return 1
        status = 128 + signal.SIGTERM if actor.ending else follow(actor, asked.silence_s)
    except Lost as lost:
        print(
            f"{asked.name}: error: {lost} from {asked.host}, {time.monotonic() - started:.0f} s after its start: check"
            f" that the node is up (`ray list nodes`) and start Ray there again. What runs there ends by itself within"
            f" {asked.silence_s:g} s",
            flush=True,
        )
        return 1
    return status if status >= 0 else 128 - status


def follow(actor: Actor, silence_s: float) -> int:
    """Copy what the service writes until it has ended, or must. Returns its status. Raises Lost."""
    offset = 0
    while not actor.ending:
        answer = actor.call("read", offset, within_s=silence_s)
        if answer is not None:
            offset, status = copied(answer, offset)
            if status is not None:
                actor.call("stop", within_s=silence_s)  # what it has left
                return status
        time.sleep(POLL_S)
    with suppress(Lost):
        actor.call("stop", within_s=LEAVE_S, ended=True)
        offset, _ = copied(actor.call("read", offset, within_s=LEAVE_S, ended=True), offset)
    return 128 + signal.SIGTERM


def copied(answer: tuple[bytes, int | None], offset: int) -> tuple[int, int | None]:
    """Write the text. Returns the offset behind it, and the status."""
    text, status = answer
    with suppress(OSError):  # the log's disk is full: the far process must not end for that
        sys.stdout.buffer.write(text)
        sys.stdout.buffer.flush()
    return offset + len(text), status


if __name__ == "__main__":
    sys.exit(main())
