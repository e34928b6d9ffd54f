"""A service on another machine, as the supervisor holds it here.

    supervisor ──▶ this process ──▶ ssh HOST python services/remote_agent.py ──▶ the service
       log    ◀── what it writes ◀────────────────────────────────┘

`--remote-command` starts a process on the host; nothing else is asked of the machines. Files and variables of the
service travel on stdin, so that no secret is in a process list and no directory has to be shared. Both ends send a sign
of life each second: without one for `--silence-s` this end exits with status 1, and the far end ends the service.
"""

import argparse
import json
import os
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from atropos_launcher.placement.machines import remote_words
from atropos_launcher.services import ray_client, remote_agent

FIRST_S = 60.0  # until the first sign of life
LEAVE_S = 4.0  # for the far end to end the service in order, once we have been asked to end
FORWARDED = ("ATROPOS_", "GLOO_", "HF_", "NCCL_", "OMP_", "TORCH_", "TRANSFORMERS_", "VLLM_")
ALSO = ("PYTHONPATH", "WANDB_API_KEY")


class Asked(BaseException):
    """The supervisor ends the run."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the service and copy its output. Returns its exit status; 1 where the machine cannot be reached."""
    asked = parser().parse_args(argv)
    if asked.ray:
        return ray_client.run(asked, job_of(asked, os.environ))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _ask)
    try:
        return run(asked)
    except Asked:
        return 128 + signal.SIGTERM


def run(asked: argparse.Namespace) -> int:
    """Run the service, and return what `main` returns. Raises Asked when the service is not to start at all."""
    host = asked.host
    entering = remote_words(asked.remote_command, host)
    words = [*entering, sys.executable, "-I", "-S", remote_agent.__file__]
    wait = f"waiting at most {FIRST_S:.0f} s for a sign of life"
    print(f"Starting {asked.name} on {host}, {wait}: {shlex.join(words)}", flush=True)
    started = time.monotonic()
    try:
        job = job_of(asked, os.environ)
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    except OSError as error:
        print(f"{asked.name}: error: cannot start it on {host}: {error.filename}: {error.strerror}", flush=True)
        return 1
    assert process.stdin is not None
    os.set_blocking(process.stdin.fileno(), False)
    try:
        lost = converse(process, job, asked.silence_s)
    except Asked:
        lost = ""
        process.stdin.close()  # the far end ends the service
        _drain(process, LEAVE_S)
    if lost:
        process.kill()
        process.wait()
        print(
            f"{asked.name}: error: {lost} from {host}, {time.monotonic() - started:.0f} s after its start: check that"
            f" {host} is up, and that `{shlex.join(entering)} true` works. What runs there ends by itself after"
            f" {asked.silence_s:g} s",
            flush=True,
        )
        return 1
    status = process.wait()
    return status if status >= 0 else 128 - status


def parser() -> argparse.ArgumentParser:
    """Build the parser of this program, which plan/services.py writes the command line of."""
    arguments = argparse.ArgumentParser(prog="remote", description=__doc__, allow_abbrev=False)
    arguments.add_argument("--host", required=True)
    arguments.add_argument("--name", required=True)
    arguments.add_argument("--remote-command")
    arguments.add_argument("--ray", help="address of the cluster that starts it")
    arguments.add_argument("--group", help="placement group in which Ray starts it")
    arguments.add_argument("--silence-s", type=float, required=True)
    arguments.add_argument("--folder", required=True)
    arguments.add_argument("--variables", default="")
    arguments.add_argument("--cores", default="")
    arguments.add_argument("--file", action="append", default=[])
    arguments.add_argument("--sees", action="append", nargs=2, default=[], metavar=("PATH", "REMEDY"))
    arguments.add_argument("command", nargs="+")
    return arguments


def job_of(asked: argparse.Namespace, environ: Mapping[str, str]) -> bytes:
    """The line of JSON that the far end reads."""
    own = {*filter(None, asked.variables.split(",")), *ALSO}
    job = {
        "name": asked.name,
        "command": asked.command,
        "environment": {name: value for name, value in environ.items() if name in own or name.startswith(FORWARDED)},
        "cores": [int(core) for core in asked.cores.split(",") if core],
        "files": {path: Path(path).read_text(encoding="utf-8") for path in asked.file},
        "sees": {path: (remote_agent.digest_of(path), remedy) for path, remedy in asked.sees},
        "folder": asked.folder,
        "directory": os.getcwd(),
        "silence_s": asked.silence_s,
    }
    return json.dumps(job).encode() + b"\n"


def converse(process: "subprocess.Popen[bytes]", job: bytes, silence_s: float) -> str:
    """Copy what the far end writes until it closes its output: an empty text; or what is missing of it. Raises
    Asked.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    heard, beat, limit_s = time.monotonic(), 0.0, max(FIRST_S, silence_s)
    left, held, reached = job, b"", False
    while True:
        now = time.monotonic()
        if left or now >= beat:
            if not left:
                beat, left = now + remote_agent.BEAT_S, b"\n"
            with suppress(BlockingIOError, BrokenPipeError):
                left = left[os.write(process.stdin.fileno(), left) :]
        if now - heard > limit_s:
            return f"no sign of life for {limit_s:g} s"
        if select.select([process.stdout], [], [], remote_agent.BEAT_S / 4)[0]:
            chunk = os.read(process.stdout.fileno(), 1 << 16)
            if not chunk:
                return "" if reached else "the remote command ended without a sign of life"
            chunk = held + chunk
            if remote_agent.BEAT in chunk:
                limit_s, reached = silence_s, True
            heard, held = now, _copy(chunk)


def _drain(process: "subprocess.Popen[bytes]", seconds: float) -> None:
    assert process.stdout is not None
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0 and select.select([process.stdout], [], [], left)[0]:
        chunk = os.read(process.stdout.fileno(), 1 << 16)
        if not chunk:
            return
        _copy(chunk)
    process.kill()


def _copy(chunk: bytes) -> bytes:
    """Write all but the signs of life. Returns what may be the first half of one."""
    held = remote_agent.BEAT[:1] if chunk.endswith(remote_agent.BEAT[:1]) else b""
    if text := chunk.removesuffix(held).replace(remote_agent.BEAT, b""):
        with suppress(OSError):  # the log's disk is full: the far process must not end for that
            sys.stdout.buffer.write(text)
            sys.stdout.buffer.flush()
    return held


def _ask(number: int, frame: FrameType | None) -> None:
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(each, lambda number, frame: None)
    raise Asked


if __name__ == "__main__":
    sys.exit(main())
