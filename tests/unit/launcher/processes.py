"""Small services on loopback, a launcher that runs them, and what tests ask about processes."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[3]
FAMILY = "import subprocess, time; subprocess.Popen(['sleep', '60']); time.sleep(60)"
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
PYTHON_PATH = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}

Plan = dict[str, Any]


def service(name: str, *command: str, **fields: object) -> Plan:
    return {"name": name, "command": command, **fields}


def python(name: str, source: str, **fields: object) -> Plan:
    return service(name, sys.executable, "-u", "-c", source, **fields)


def sleeper(name: str = "sleeper", **fields: object) -> Plan:
    return service(name, "sleep", "60", **fields)


def web(port: int, name: str = "web", **fields: object) -> Plan:
    command = [sys.executable, "-u", "-m", "http.server", "--bind", "127.0.0.1", str(port)]
    return service(name, *command, health=f"http://127.0.0.1:{port}/", start_limit_s=40, **fields)


def launch(run: Path, *services: Plan, before: Sequence[str] = (), **limits: float) -> subprocess.Popen[str]:
    """A launcher in a session of its own, so that a signal meant for it reaches nothing else; behind the words
    `before`.
    """
    return subprocess.Popen(
        [
            *before,
            sys.executable,
            str(Path(__file__).with_name("launch.py")),
            str(run),
            json.dumps({"services": services, "limits": limits}),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=PYTHON_PATH,
        cwd=ROOT,
    )


def launched(run: Path, *services: Plan, before: Sequence[str] = (), **limits: float) -> tuple[int, str]:
    """Exit status and output of a launcher that ends by itself."""
    process = launch(run, *services, before=before, **limits)
    output, _ = process.communicate(timeout=60)
    return process.returncode, output


def atropos(*words: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The command, in a session of its own."""
    return subprocess.run(
        [sys.executable, "-m", "atropos_launcher", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        start_new_session=True,
        env=PYTHON_PATH,
        cwd=cwd,
    )


def record(run: Path, name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run / "pids" / name).read_text())
    return content


def await_record(run: Path, name: str) -> int:
    """The pid of a service once it has been recorded."""
    wait_until((run / "pids" / name).exists)
    return int(record(run, name)["pid"])


def says(log: Path, text: str) -> bool:
    """Whether the log is there, with this in it."""
    return log.exists() and text in log.read_text()


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def stat_fields(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def lives(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    fields = stat_fields(pid)
    return bool(fields) and fields[0] not in "ZX"


def group_of(leader: int) -> list[int]:
    """Live processes of the leader's group."""
    pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return [pid for pid in pids if (fields := stat_fields(pid)) and int(fields[2]) == leader and fields[0] not in "ZX"]


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
