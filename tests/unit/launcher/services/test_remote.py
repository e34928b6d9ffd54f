"""A service on another machine, by services/remote_client.py and remote_agent.py; the remote command runs here."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from atropos_launcher.services import remote_agent
from atropos_launcher.services.remote_agent import FIRST_S

pytestmark = pytest.mark.services

ROOT = Path(__file__).parents[4]
LOCAL = "env MACHINE={host}"  # runs what follows it, as ssh and srun do
SILENCE_S = 2
SLEEPER = [sys.executable, "-c", "import time; print('asleep', flush=True); time.sleep(60)"]


def near_end(folder: Path, command: list[str], *flags: str, remote: str = LOCAL, patch: str = "pass") -> list[str]:
    module = "import sys; from atropos_launcher.services import remote_client"
    start = f"{module}; {patch}; sys.exit(remote_client.main(sys.argv[1:]))"
    own = ["--host", "gpu02", "--name", "vllm-2", "--remote-command", remote, "--silence-s", str(SILENCE_S)]
    return [sys.executable, "-u", "-c", start, *own, "--folder", str(folder / "run"), *flags, "--", *command]


def run(words: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(words, capture_output=True, text=True, timeout=60, env=environment)


def begun(words: list[str], log: Path) -> tuple["subprocess.Popen[bytes]", psutil.Process]:
    """The near end, and the service once it writes."""
    with log.open("wb") as output:
        near = subprocess.Popen(words, stdout=output, env={**os.environ, "PYTHONPATH": str(ROOT)})
    deadline = time.monotonic() + 30
    while "asleep" not in log.read_text():
        assert time.monotonic() < deadline, log.read_text()
        assert near.poll() is None, log.read_text()
        time.sleep(0.05)
    (service,) = (
        each for each in psutil.Process(near.pid).children(recursive=True) if "time.sleep(60)" in each.cmdline()[-1]
    )
    return near, service


def test_a_remote_command_that_cannot_be_started_is_one_line(tmp_path: Path) -> None:
    done = run(near_end(tmp_path, ["true"], remote="no-such-program {host}"))
    assert done.returncode == 1
    assert done.stdout.splitlines()[1:] == [
        "vllm-2: error: cannot start it on gpu02: no-such-program: No such file or directory"
    ]
    assert done.stderr == ""


def test_what_the_service_writes_arrives_with_its_exit_status(tmp_path: Path) -> None:
    code = "import os, sys; print(os.environ['MACHINE'], os.environ['VLLM_API_KEY'], os.environ['MINE']); sys.exit(3)"
    done = run(
        near_end(tmp_path, [sys.executable, "-c", code], "--variables", "MINE"), VLLM_API_KEY="secret", MINE="own"
    )
    assert done.returncode == 3
    lines = done.stdout.splitlines()
    wait = f"waiting at most {FIRST_S:.0f} s for a sign of life"
    assert lines[0].startswith(f"Starting vllm-2 on gpu02, {wait}: env MACHINE=gpu02 ")
    assert lines[1].startswith("Running vllm-2 on ")
    assert lines[2:] == ["gpu02 secret own"]
    assert "\0" not in done.stdout


def test_files_are_sent_and_a_service_that_a_signal_ended_says_so(tmp_path: Path) -> None:
    (tmp_path / "trainer.yaml").write_text("lr: 1\n")
    code = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    words = near_end(tmp_path, [sys.executable, "-c", code], "--file", str(tmp_path / "trainer.yaml"))
    assert run(words).returncode == 128 + signal.SIGKILL


def test_no_secret_is_in_a_process_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATROPOS_API_TOKEN", "a-secret-token")
    near, service = begun(near_end(tmp_path, SLEEPER), tmp_path / "log")
    with near:
        family = [psutil.Process(near.pid), *psutil.Process(near.pid).children(recursive=True)]
        assert service.environ()["ATROPOS_API_TOKEN"] == "a-secret-token"
        assert not any("a-secret-token" in word for each in family for word in each.cmdline())
        near.terminate()


@pytest.mark.parametrize(
    ("number", "within_s"), [(signal.SIGKILL, 5), (signal.SIGTERM, 5), (signal.SIGSTOP, SILENCE_S + 4)]
)
def test_the_service_ends_when_the_launcher_does_or_is_silent(number: int, within_s: float, tmp_path: Path) -> None:
    near, service = begun(near_end(tmp_path, SLEEPER), tmp_path / "log")
    with near:
        try:
            near.send_signal(number)
            service.wait(within_s)
        finally:
            near.kill()


def test_the_service_ends_when_a_silent_launcher_has_let_its_output_fill_up(tmp_path: Path) -> None:
    """As where the near end is stopped: it neither reads nor writes."""
    endless = "import os, time; os.write(2, b'asleep ' * 10_000_000); time.sleep(60)"
    job = {
        **{"name": "vllm-2", "command": [sys.executable, "-c", endless], "environment": {}, "cores": []},
        **{"files": {}, "sees": {}, "folder": str(tmp_path), "directory": str(tmp_path), "silence_s": SILENCE_S},
    }
    words = [sys.executable, "-I", "-S", remote_agent.__file__]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as far:
        assert far.stdin is not None
        try:
            far.stdin.write(json.dumps(job).encode() + b"\n")
            far.stdin.flush()
            assert far.wait(SILENCE_S + 10) == 128 + signal.SIGTERM
        finally:
            far.kill()


def test_a_machine_without_a_sign_of_life_is_named_with_the_remedy(tmp_path: Path) -> None:
    done = run(near_end(tmp_path, SLEEPER, remote="sh -c 'sleep 60' {host}", patch="remote_client.FIRST_S = 1"))
    assert done.returncode == 1
    assert "vllm-2: error: no sign of life for 2 s from gpu02, " in done.stdout
    assert "check that gpu02 is up, and that `sh -c 'sleep 60' gpu02 true` works" in done.stdout


def test_a_remote_command_that_fails_at_once_is_not_waited_for(tmp_path: Path) -> None:
    done = run(near_end(tmp_path, SLEEPER, remote="sh -c 'echo no route to host; exit 255' {host}"))
    assert done.returncode == 1
    assert "no route to host" in done.stdout
    assert "vllm-2: error: the remote command ended without a sign of life from gpu02, 0 s after" in done.stdout


def test_a_far_end_that_stops_is_noticed(tmp_path: Path) -> None:
    near, service = begun(near_end(tmp_path, SLEEPER), tmp_path / "log")
    with near:
        far = psutil.Process(service.ppid())
        far.suspend()
        assert near.wait(SILENCE_S + 5) == 1
        service.wait(5)  # the kernel ends it with the far end, which is the remote command's process here
    assert "no sign of life for 2 s from gpu02" in (tmp_path / "log").read_text()


def test_what_must_be_shared_is_looked_for_before_anything_starts(tmp_path: Path) -> None:
    witness = tmp_path / "run.json"
    witness.write_text(json.dumps({"starts": [1]}))
    own = [sys.executable, "-c", "print('started')"]
    assert "started" in run(near_end(tmp_path, own, "--sees", str(witness), "share it")).stdout
    other = "remote_client.remote_agent.digest_of = lambda path: 'of another file'"
    done = run(near_end(tmp_path, own, "--sees", str(witness), "share it", patch=other))
    assert done.returncode == 2
    assert f"the launcher's {witness} is not on " in done.stdout
    assert "share it" in done.stdout
    assert "started" not in done.stdout
