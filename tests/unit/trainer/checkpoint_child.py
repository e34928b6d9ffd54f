"""Trainer ranks that learn, save and die as they are told, without API and vLLM.

python -m tests.unit.trainer.checkpoint_child JOBS.json

All ranks of all jobs are forked, one job after the other, from this one process, which has loaded torch once.
"""

import json
import os
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch

import example_trainer.weights.checkpoint as whole
from atroposlib.files import write_whole
from example_trainer.errors import TrainerError
from example_trainer.loop import saves as sharded_checkpoint
from example_trainer.loop.learner import Learner
from example_trainer.loop.saves import Saves
from example_trainer.ranks.ranks import join
from example_trainer.settings.config import TrainerConfig
from example_trainer.weights import shards
from example_trainer.weights.checkpoint import Progress, expect_same_model, find_checkpoint
from example_trainer.weights.written import put_in_place
from tests.unit.trainer.rank_child import sequences

LONGEST_S = 40.0
MOMENTS = ("copy", "writing", "manifest", "rename", "renamed", "pointed")


def die(*_: object) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def die_at(moment: str) -> None:
    """Have this process be killed when a save comes to `moment`."""
    cut = shards._cut

    def half(blocks: list[memoryview]) -> Iterator[memoryview]:
        for count, block in enumerate(cut(blocks)):
            if count == 20:
                die()
            yield block

    def after(act: Callable[..., object]) -> Callable[..., None]:
        def and_die(*given: Any) -> None:
            act(*given)
            die()

        return and_die

    where: dict[str, tuple[Any, str, Any]] = {
        "writing": (shards, "_cut", half),
        "manifest": (sharded_checkpoint, "put_in_place", die),
        "rename": (Path, "rename", die),
        "renamed": (sharded_checkpoint, "put_in_place", after(put_in_place)),
        "pointed": (whole, "write_whole", after(write_whole)),
    }
    if moment == "copy":
        die()
    setattr(*where[moment])


def hurt_at_last_save(hurt: dict[str, Any], saves: int) -> None:
    """At the copy of the last of so many saves."""
    start, count = shards.ShardWriter.start, 0

    def counted(*given: Any) -> None:
        nonlocal count
        count += 1
        if count == saves and "limit" in hurt:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hurt["limit"], resource.RLIM_INFINITY))
        elif count == saves:
            die_at(hurt["kill"])
        start(*given)

    shards.ShardWriter.start = counted  # type: ignore[method-assign, assignment]


def run(job: dict[str, Any], rank: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = TrainerConfig.model_validate({"dist_timeout_s": 20.0, "lr": 1e-3, **job["config"]})
    device = torch.device("cpu")
    if job.get("hurt", {}).get("rank") == rank:
        hurt_at_last_save(job["hurt"], len(job["save"]))
    ranks = join(config, device)
    learner = Learner(config, device, ranks)
    if not ranks.leads:
        ranks.follow(learner)
        learner.close()
        return
    checkpoint = find_checkpoint(config.resume, config.save_path)
    if checkpoint:
        expect_same_model(checkpoint, config)
    learner.load(str(checkpoint or config.model_name))
    learner.begin(str(checkpoint or ""))

    def pause(seconds: float) -> None:
        ranks.check()
        time.sleep(seconds)

    saves = Saves(config, learner, pause)
    said: dict[str, Any]
    try:
        said = learn(job, config, learner, saves)
        saves.leave(None, None, None)
    except TrainerError as error:
        said = {"error": str(error)}
        saves.leave(type(error), error, None)
    print(json.dumps(said), flush=True)
    ranks.leave()


def learn(job: dict[str, Any], config: TrainerConfig, learner: Learner, saves: Saves) -> dict[str, Any]:
    losses: list[float | None] = []
    for step in range(learner.progress.step + 1, job["steps"] + 1):
        losses.append(learner.gradients(*sequences(step))["loss"].value)
        learner.clip()
        learner.update(config.lr)
        if step in job["save"]:
            saves.save(Progress(step, step, step, leases=[step]))
        saves.advance()
    saves.complete()
    if config.ema_decay:
        learner.take_average()
    if job.get("out"):
        learner.trained.write(Path(job["out"]))
    if job.get("taken_back"):  # one more update, undone
        learner.gradients(*sequences(1))
        learner.clip()
        learner.update(config.lr)
        learner.trained.write(Path(job["moved"]))
        learner.load_weights(job["out"])
        learner.trained.write(Path(job["taken_back"]))
    return {"losses": losses, "leases": saves.saved_leases}


def fork(job: dict[str, Any], rank: int, environment: dict[str, str], output: int) -> int:
    """The pid of a rank, whose output goes to the descriptor."""
    if pid := os.fork():
        return pid
    status = 1
    try:
        os.environ |= environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        os.dup2(output, 1)
        run(job, rank)
        status = 0
    except TrainerError as error:
        print(f"rank {rank}: {error}", file=sys.stderr, flush=True)
        status = 70
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def do(job: dict[str, Any]) -> dict[str, Any]:
    """What rank 0 said, and each rank's exit status, negative for a signal."""
    size = job.get("ranks", 1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    environment = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
    }
    reader, writer = os.pipe()
    running = {fork(job, rank, environment, writer): rank for rank in range(size)}
    os.close(writer)
    start, status = time.monotonic(), [0] * size
    while running:
        for pid in list(running):
            ended, how = os.waitpid(pid, os.WNOHANG)
            if ended:
                status[running.pop(pid)] = os.waitstatus_to_exitcode(how)
            elif time.monotonic() - start > LONGEST_S:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    with os.fdopen(reader) as said:
        lines = said.read().splitlines()
    return {"status": status, **(json.loads(lines[-1]) if lines else {})}


def main() -> None:
    jobs = json.loads(Path(sys.argv[1]).read_text())
    results = {name: do(job) for name, job in jobs.items()}
    Path(sys.argv[1]).with_suffix(".results").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
