"""The far end of a service on another machine: a script that needs nothing but Python and the files beside it.

    remote_client.py ──stdin──▶ one line of JSON: what to run; then a newline a second: the launcher lives
              ◀─stdout── what the service writes; and a line with NUL a second: this machine lives

It ends the service when no sign of life comes: the launcher has ended, was killed, or cannot be reached. So nothing
runs on when the cable is cut. Its exit status is the service's, 128 + N for one that signal N has ended.
"""

import hashlib
import json
import os
import select
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

if __name__ == "__main__":  # with -I and -S: behind the standard library
    sys.path.append(str(Path(__file__).parents[2]))

from atroposlib.processes.child_group import ChildGroup, StillRunning

FIRST_S = 60.0  # for the line of JSON
SHARED_S = 5.0  # until what another machine has written is seen here
GRACE_S = 10.0  # from TERM to KILL
BEAT_S = 1.0
BEAT = b"\0\n"  # a line, because srun passes lines on
REFUSED = 2


def main() -> int:
    """Run what stdin asks for. Returns the exit status."""
    os.write(1, BEAT)  # the machine is reached
    job = read_job()
    if why := prepare(job):
        print(f"{job['name']}: error: {why}", flush=True)
        return REFUSED
    # the kernel ends the service with us
    child = ChildGroup(
        job["command"], None, {**os.environ, **job["environment"]}, die_with=signal.SIGTERM, cores=job["cores"]
    )

    def pass_on(number: int, frame: FrameType | None) -> None:
        child.group.signal(signal.SIGTERM)

    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, pass_on)
    print(
        f"Running {job['name']} on {os.uname().nodename} (pid {child.pid}); it ends when the launcher is silent for"
        f" {job['silence_s']:g} s",
        flush=True,
    )
    if silent := watch(child, job["silence_s"]):
        with suppress(OSError):  # where nobody reads
            write(f"{job['name']}: ending it, because {silent}\n".encode())
    try:
        child.stop(GRACE_S)
    except StillRunning as error:
        with suppress(OSError):
            write(f"{job['name']}: error: {error}\n".encode())
        return 1
    status = child.status()
    assert status is not None
    return status if status >= 0 else 128 - status


def read_job() -> dict[str, Any]:
    """The first line of stdin. Exits where none comes."""
    deadline, line = time.monotonic() + FIRST_S, b""
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([0], [], [], max(0.0, deadline - time.monotonic()))
        byte = os.read(0, 1) if ready else b""
        if not byte:
            raise SystemExit(
                f"remote_agent: error: no job on stdin within {FIRST_S:.0f} s; remote_client.py starts this program"
            )
        line += byte
    job: dict[str, Any] = json.loads(line)
    return job


def prepare(job: dict[str, Any]) -> str:
    """Make the run's directory and its files. Returns why the service cannot run here, if it cannot."""
    folder = Path(job["folder"])
    for path, (digest, remedy) in job["sees"].items():
        deadline = time.monotonic() + SHARED_S
        while digest_of(path) != digest:
            if time.monotonic() > deadline:
                return f"the launcher's {path} is not on {os.uname().nodename}: {remedy}"
            os.write(1, BEAT)
            time.sleep(0.5)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # as atroposlib/files.py makes the first machine's
        for path, text in job["files"].items():
            file = Path(path)
            if not file.is_file() or file.read_bytes() != text.encode():
                file.write_bytes(text.encode())
        os.chdir(job["directory"] if Path(job["directory"]).is_dir() else folder)
    except OSError as error:
        return f"cannot write {folder} on {os.uname().nodename}: {error.strerror}; make it writable, or choose --runs"
    return ""


def digest_of(path: str) -> str:
    """SHA-256 of a file; nothing where there is none."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return ""


def write(text: bytes) -> None:
    """Write to stdout, unless that would block: the service shares it, and may have filled it for a launcher that no
    longer reads. It stays blocking, since the service would inherit O_NONBLOCK. Raises OSError where nobody reads.
    """
    if select.select([], [1], [], 0)[1]:
        os.write(1, text)


def watch(child: ChildGroup, silence_s: float) -> str:
    """Until the service has ended: an empty text; or why it has to."""
    heard = beat = time.monotonic()
    while child.status() is None:
        now = time.monotonic()
        if now >= beat:
            beat = now + BEAT_S
            try:
                write(BEAT)
            except OSError as error:
                return f"nobody reads its output: {error.strerror}"
        if now - heard > silence_s:
            return f"the launcher has been silent for {silence_s:g} s"
        if select.select([0], [], [], BEAT_S / 4)[0]:
            if not os.read(0, 4096):
                return "the launcher has let it go"
            heard = now
    return ""


if __name__ == "__main__":
    sys.exit(main())
