"""The far end of a service that Ray places: an actor with the service as its child, in a process group of its own.

    ray_client.py ──start(job)──▶ ServiceActor ──▶ the service
                  ──read(offset), several times a second──▶
                  ◀── what the service has written since, and its exit status

A `read` is also a sign of life: without one for `silence_s` seconds the actor ends the service, and Ray ends the actor
with the process that made it. The job travels in a call, of which Ray keeps no copy. The class is sent by value, and
its imports wait, because the Python of a node's Ray need not have Atropos.
"""

import hashlib
import json
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

SHARED_S = 5.0  # until what another machine has written is seen here
GRACE_S = 10.0  # from TERM to KILL
MOST = 1 << 20  # bytes of the log in one answer
MADE_BY_RAY = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")  # for the actor, which computes nothing


class ServiceActor:
    """Runs one service. The methods are called in the main thread, with whose end the kernel ends the service."""

    def start(self, packages: str, text: bytes) -> str:
        """Start the job that ray_client.py wrote. Returns why it cannot run here, if it cannot."""
        sys.path.append(packages)
        from atroposlib.processes.child_group import ChildGroup

        job = json.loads(text)
        if why := prepare(job):
            return why
        own = {name: value for name, value in os.environ.items() if name[:4] != "RAY_" and name not in MADE_BY_RAY}
        self._folder = tempfile.TemporaryDirectory(prefix="atropos-")
        self._log = Path(self._folder.name) / "log"
        self._child = ChildGroup(
            job["command"], self._log, {**own, **job["environment"]}, die_with=signal.SIGTERM, cores=job["cores"]
        )
        self._lock = threading.Lock()
        self._heard = time.monotonic()
        threading.Thread(target=self._watch, args=(job["silence_s"],), daemon=True).start()
        return ""

    def read(self, offset: int) -> tuple[bytes, int | None]:
        """What the service has written from `offset` on, at most 1 MiB; its status once all is read."""
        self._heard = time.monotonic()
        with self._lock:
            status = self._child.status()  # first: what it wrote before its end is in the file
        with self._log.open("rb") as log:
            log.seek(offset)
            text = log.read(MOST)
        return text, None if len(text) == MOST else status

    def stop(self) -> None:
        """End the service and all that it has started. Raises StillRunning."""
        with self._lock:
            self._child.stop(GRACE_S)

    def _watch(self, silence_s: float) -> None:
        while time.monotonic() - self._heard <= silence_s:
            time.sleep(min(1.0, silence_s / 4))
        self.stop()


def prepare(job: dict[str, Any]) -> str:
    """Make the run's directory and its files. Returns why the service cannot run here, if it cannot."""
    folder = Path(job["folder"])
    for path, (digest, remedy) in job["sees"].items():
        deadline = time.monotonic() + SHARED_S
        while digest_of(path) != digest:
            if time.monotonic() > deadline:
                return f"the launcher's {path} is not on {os.uname().nodename}: {remedy}"
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
