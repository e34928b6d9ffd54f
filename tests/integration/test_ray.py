"""Services that Ray starts: on a cluster of this machine, and on two nodes that are network namespaces. What is lost
is named, and nothing runs on: a cut cable, a killed launcher; a node that comes late is waited for.
"""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.integration.conftest import REPOSITORY
from tests.integration.namespaces import Host, entering, tied

SILENCE_S = 6
START_S = 90.0
PORT = 6379
RAY = str(Path(sys.executable).with_name("ray"))
SECRET = f"secret-{uuid.uuid4().hex}"
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "PYTHONPATH": str(REPOSITORY),
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": uuid.uuid4().hex * 2,
}


def program(text: str) -> list[str]:
    return [sys.executable, "-uc", text]


@dataclass
class Launched:
    """A launcher that runs; its services have `mark` in their command lines."""

    process: subprocess.Popen[bytes]
    output: Path
    run: Path
    mark: str

    @property
    def said(self) -> str:
        return self.output.read_text(errors="replace")

    def says(self, text: str, file: Path | None = None) -> None:
        deadline = time.monotonic() + START_S
        while text not in (said := (file or self.output).read_text() if (file or self.output).exists() else ""):
            assert self.process.poll() is None, self.said[-4000:]
            assert time.monotonic() < deadline, said[-4000:] + self.said[-4000:]
            time.sleep(0.1)

    def ends(self, status: int, within_s: float = START_S) -> None:
        assert self.process.wait(within_s) == status, self.said[-4000:]

    def expect_all_gone(self, within_s: float) -> None:
        deadline = time.monotonic() + within_s
        while left := marked(self.mark):
            assert time.monotonic() < deadline, [each.cmdline() for each in left]
            time.sleep(0.2)


def marked(mark: str) -> list[psutil.Process]:
    """The processes that have `mark` as the last word of their command line, as services here have."""
    found = []
    for each in psutil.process_iter():
        try:
            if each.cmdline()[-1:] == [mark] and "remote_client" not in " ".join(each.cmdline()):
                found.append(each)
        except psutil.Error:
            continue
    return found


@contextmanager
def launched(folder: Path, namespace: str | None, services: list[str], **plan: object) -> Iterator[Launched]:
    mark = f"mark-{uuid.uuid4().hex[:8]}"
    words = {f"service-{number}": [*program(text), mark] for number, text in enumerate(services, start=1)}
    text = json.dumps({"silence_s": SILENCE_S, "services": words, **plan})
    script = str(Path(__file__).with_name("ray_launch.py"))
    run, output = folder / mark, folder / f"{mark}.txt"
    with output.open("wb") as log:
        process = subprocess.Popen(
            entering(namespace, tied([sys.executable, script, str(run), text], "TERM")),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **QUIET, "OWN_SECRET": SECRET},
            cwd=folder,
        )
    try:
        yield Launched(process, output, run, mark)
    finally:
        process.kill()
        process.wait()
        for each in marked(mark):
            each.kill()


@contextmanager
def node(host: Host, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    """Ray on one of the two hosts, for as long as the block runs. All of its processes are in one session."""
    words = [RAY, "start", "--block", f"--node-ip-address={host.address}", "--num-cpus=2", "--num-gpus=0", *flags]
    words += ["--object-store-memory=80000000"]
    process = subprocess.Popen(
        entering(host.namespace, tied(words, "TERM")),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **QUIET},
        start_new_session=True,
    )
    tree = psutil.Process(process.pid)
    try:
        yield process
    finally:
        family = [*tree.children(recursive=True), tree] if tree.is_running() else []
        for each in family:
            with_no_error_if_gone(each)
        process.wait()


def with_no_error_if_gone(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return


@pytest.fixture  # a new one each: a cluster believes for a while that a killed node lives
def head(hosts: tuple[Host, Host]) -> Iterator[Host]:
    with node(hosts[0], "--head", f"--port={PORT}", "--include-dashboard=false"):
        deadline = time.monotonic() + START_S
        probe = entering(hosts[0].namespace, [RAY, "health-check", f"--address={hosts[0].address}:{PORT}"])
        while subprocess.run(probe, capture_output=True, env={**os.environ, **QUIET}).returncode != 0:
            assert time.monotonic() < deadline
        yield hosts[0]


@pytest.fixture
def far(hosts: tuple[Host, Host]) -> Iterator[Host]:
    yield hosts[1]
    hosts[1].set_cable("up")


WAITS = "import time; print('up', flush=True); time.sleep(600)"


@pytest.mark.slow
@pytest.mark.services
def test_a_cluster_of_this_machine_runs_a_service_and_keeps_no_secret_of_it(tmp_path: Path) -> None:
    text = "import os; print('got', len(os.environ['OWN_SECRET']), 'OMP_NUM_THREADS' in os.environ)"
    with launched(tmp_path, None, [text], address="local") as run:
        run.ends(0)
        assert f"got {len(SECRET)} {'OMP_NUM_THREADS' in os.environ}" in (run.run / "service-1.log").read_text()
        run.expect_all_gone(5)
    logs = Path("/tmp/ray/session_latest").resolve()
    files = [path for path in logs.rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]


@pytest.mark.slow
@pytest.mark.services
@pytest.mark.parametrize(
    ("plan", "why"),
    [
        ({"CPU": 999}, "and this run needs 999 there"),
        ({"model": "/no/such/model"}, "lacks the model /no/such/model: copy it there to the same path"),
    ],
)
def test_what_a_node_lacks_is_said_in_one_line_before_anything_starts(
    plan: dict[str, object], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # of a cluster that this one has nothing to do with
    with launched(tmp_path, None, [WAITS], address="local", **plan) as run:
        run.ends(2)
        (line,) = run.said.splitlines()
        assert line.startswith("ray_launch: error: --ray: node 127.0.0.1 ")
        assert why in line
        assert not run.run.exists()


@pytest.mark.slow
@pytest.mark.services
def test_a_late_node_is_waited_for_and_a_cut_cable_ends_the_run_on_both_sides(
    head: Host, far: Host, tmp_path: Path
) -> None:
    with launched(tmp_path, head.namespace, [WAITS, WAITS], address=f"{head.address}:{PORT}", nodes=2) as run:
        run.says("for 2 Ray nodes; 1 there")
        with node(far, f"--address={head.address}:{PORT}"):
            for number in (1, 2):
                run.says("up", run.run / f"service-{number}.log")
            far.set_cable("down")
            run.ends(1, within_s=SILENCE_S + 40)
            assert f"no sign of life for {SILENCE_S} s from {far.address}" in run.said, run.said
            assert f"service-2 on {far.address} (pid" in run.said
            run.expect_all_gone(SILENCE_S + 30)


@pytest.mark.slow
@pytest.mark.services
def test_services_of_a_killed_launcher_end_on_every_node(head: Host, far: Host, tmp_path: Path) -> None:
    address = f"{head.address}:{PORT}"
    with (
        node(far, f"--address={address}"),
        launched(tmp_path, head.namespace, [WAITS, WAITS], address=address, nodes=2) as run,
    ):
        for number in (1, 2):
            run.says("up", run.run / f"service-{number}.log")
        run.process.send_signal(signal.SIGKILL)
        run.expect_all_gone(SILENCE_S + 20)
