"""The shell library that starts, watches and ends services, with small dummy services on loopback."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.services

ROOT = Path(__file__).resolve().parents[3]
PRELUDE = f"""
set -euo pipefail
source {ROOT}/scripts/lib/common.sh
source {ROOT}/scripts/lib/services.sh
"""
WEB = f"{sys.executable} -u -m http.server --bind 127.0.0.1"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
)
FAMILY = "import subprocess, time; subprocess.Popen(['sleep', '60']); time.sleep(60)"
EXITED_ON_SIGINT = 130


def start_shell(script: str, *arguments: object) -> subprocess.Popen[str]:
    """A launcher that runs `script` with the library; its own session, so that a signal meant for it reaches nothing
    else.
    """
    return subprocess.Popen(
        ["bash", "-c", PRELUDE + script, "launcher", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def shell(script: str, *arguments: object, timeout: float = 60) -> tuple[int, str]:
    """Exit status and output of `script`."""
    process = start_shell(script, *arguments)
    output, _ = process.communicate(timeout=timeout)
    return process.returncode, output


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def runs(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def wait_until(condition, deadline_s: float = 15) -> None:  # type: ignore[no-untyped-def]
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "not so within the deadline"
        time.sleep(0.05)


def record(run: Path, name: str, key: str) -> str:
    lines = (run / "pids" / name).read_text().splitlines()
    return next(line.removeprefix(f"{key}=") for line in lines if line.startswith(f"{key}="))


def await_record(run: Path, name: str) -> int:
    """The pid of a service once it has been recorded."""
    wait_until((run / "pids" / name).exists)
    return int(record(run, name, "pid"))


def test_monitor_shows_followed_lines_and_ends_well_when_the_named_services_do(tmp_path: Path) -> None:
    port = free_port()
    status, output = shell(
        f"""own_run $1
        start_service web $1/web.log {WEB} {port}
        await_http web http://127.0.0.1:{port}/ 20
        follow trainer $1/work.log 'Step [0-9]+/'
        start_service work $1/work.log bash -c '
          echo "INFO Step 1/2 | reward 0.5"; echo noise; printf Step; sleep 1; echo " 2/2 | late"'
        monitor 10 work
        """,
        tmp_path,
    )
    assert status == 0, output
    assert "trainer Step 1/2 | reward 0.5" in output
    assert "trainer Step 2/2 | late" in output
    assert "noise" not in output
    assert "INFO" not in output
    assert not listens(port)
    assert not (tmp_path / "pids").exists()


def test_a_killed_service_ends_the_others_and_is_named_with_its_log(tmp_path: Path) -> None:
    port = free_port()
    launcher = start_shell(
        f"""own_run $1
        start_service web $1/web.log {WEB} {port}
        start_service work $1/work.log bash -c 'echo the last word; exec sleep 60'
        monitor 10 work""",
        tmp_path,
    )
    work = await_record(tmp_path, "work")
    wait_until(lambda: listens(port))
    killed = time.monotonic()
    os.kill(work, signal.SIGKILL)
    output, _ = launcher.communicate(timeout=20)
    assert time.monotonic() - killed < 10
    assert launcher.returncode == 1
    assert "work (pid" in output
    assert "died: killed by signal KILL" in output
    assert "the last word" in output
    assert not listens(port)


def test_a_service_that_fails_at_once_is_not_waited_for(tmp_path: Path) -> None:
    started = time.monotonic()
    status, output = shell(
        """own_run $1
        start_service broken $1/broken.log bash -c 'echo no such model; exit 3'
        await_http broken http://127.0.0.1:9/health 50""",
        tmp_path,
    )
    assert status == 1
    assert "died: exit status 3" in output
    assert "no such model" in output
    assert time.monotonic() - started < 10


def test_waiting_ends_at_its_deadline_and_says_for_whom(tmp_path: Path) -> None:
    status, output = shell(
        "own_run $1; start_service mute $1/mute.log sleep 60; await_http mute http://127.0.0.1:9/health 1", tmp_path
    )
    assert status == 1
    assert "Waiting for mute at http://127.0.0.1:9/health, at most 1 s" in output
    assert "mute did not answer at http://127.0.0.1:9/health within 1 s" in output


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, EXITED_ON_SIGINT), (signal.SIGTERM, 143)])
def test_a_signal_to_the_launcher_ends_its_services(tmp_path: Path, number: signal.Signals, expected: int) -> None:
    launcher = start_shell(
        f'own_run $1; start_service family $1/f.log {sys.executable} -c "$2"; monitor 10 family', tmp_path, FAMILY
    )
    family = await_record(tmp_path, "family")
    wait_until(lambda: len(group_of(family)) == 2)
    members = group_of(family)
    launcher.send_signal(number)
    launcher.communicate(timeout=10)
    assert launcher.returncode == expected
    assert not any(runs(pid) for pid in members)


def group_of(leader: int) -> list[int]:
    """Live processes of the leader's group."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[2]) == leader and fields[0] not in "ZX":
            found.append(int(stat.parent.name))
    return found


@pytest.mark.slow
def test_a_service_deaf_to_term_is_killed_after_the_grace(tmp_path: Path) -> None:
    launcher = start_shell(
        f'own_run $1; start_service deaf $1/deaf.log {sys.executable} -c "$2"; monitor 10 deaf', tmp_path, STUBBORN
    )
    deaf = await_record(tmp_path, "deaf")
    log = tmp_path / "deaf.log"
    wait_until(lambda: log.exists() and "deaf" in log.read_text())
    started = time.monotonic()
    launcher.send_signal(signal.SIGTERM)
    output, _ = launcher.communicate(timeout=50)
    # 5 s of grace, and what a loaded machine takes; the service itself sleeps for 60 s
    assert time.monotonic() - started < 40
    assert "Killed after 5 s without an end: deaf" in output
    assert not runs(deaf)


def test_stopping_twice_is_as_good_as_once(tmp_path: Path) -> None:
    status, output = shell(
        "own_run $1; start_service sleeper $1/s.log sleep 60; stop_services; stop_services", tmp_path
    )
    assert status == 0, output
    assert "No such file" not in output, output


def test_a_killed_launcher_takes_its_services_along(tmp_path: Path) -> None:
    launcher = start_shell("own_run $1; start_service sleeper $1/s.log sleep 60; monitor 10 sleeper", tmp_path)
    sleeper = await_record(tmp_path, "sleeper")
    wait_until(lambda: group_of(sleeper) == [sleeper])
    launcher.kill()
    launcher.communicate(timeout=10)
    wait_until(lambda: not runs(sleeper))


def test_a_recycled_pid_is_not_hit(tmp_path: Path) -> None:
    bystander = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        (tmp_path / "pids").mkdir()
        (tmp_path / "pids" / "old").write_text(
            f"name=old\npid={bystander.pid}\nstart=1\nboot={boot}\nlog=o.log\nurl=\ncommand=x\n"
        )
        status, output = shell("use_run $1; stop_services", tmp_path)
        assert status == 0, output
        assert bystander.poll() is None
        assert "Ending" not in output
    finally:
        bystander.kill()
        bystander.wait()


def test_stop_ends_children_whose_leader_was_killed(tmp_path: Path) -> None:
    launcher = start_shell(
        f'own_run $1; start_service family $1/f.log {sys.executable} -c "$2"; monitor 10 family', tmp_path, FAMILY
    )
    leader = await_record(tmp_path, "family")
    wait_until(lambda: len(group_of(leader)) == 2)
    child = next(pid for pid in group_of(leader) if pid != leader)
    os.kill(leader, signal.SIGKILL)
    launcher.communicate(timeout=15)
    assert launcher.returncode == 1
    assert not runs(child)


def test_shared_memory_of_a_killed_service_is_removed(tmp_path: Path) -> None:
    name = f"atropos-test-{os.getpid()}"
    script = (
        f"import mmap, os, time\nfd = os.open('/dev/shm/{name}', os.O_CREAT | os.O_RDWR, 0o600); os.ftruncate(fd,"
        " 4096); held = mmap.mmap(fd, 4096)\nprint('mapped', flush=True); time.sleep(60)"
    )
    launcher = start_shell(
        f'own_run $1; start_service holder $1/h.log {sys.executable} -c "$2"; sleep 1; monitor 10 holder',
        tmp_path,
        script,
    )
    holder = await_record(tmp_path, "holder")
    wait_until(lambda: "mapped" in (tmp_path / "h.log").read_text())
    wait_until(
        lambda: (tmp_path / "pids/shared.memory").exists() and name in (tmp_path / "pids/shared.memory").read_text()
    )
    os.kill(holder, signal.SIGKILL)
    launcher.communicate(timeout=15)
    assert not Path(f"/dev/shm/{name}").exists()


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def stop(run: Path) -> subprocess.CompletedProcess[str]:
    """scripts/stop.sh of a run directory, in a session of its own so that a signal to its group reaches nothing
    else.
    """
    return subprocess.run(
        [ROOT / "scripts/stop.sh", run], capture_output=True, text=True, timeout=30, check=False, start_new_session=True
    )


@pytest.mark.parametrize(
    "forged", ["name alone", "another boot", "another inode", "outside of /dev/shm", "a way out of it", "a link"]
)
def test_a_file_that_no_service_had_open_is_not_removed(tmp_path: Path, forged: str) -> None:
    mine = tmp_path / "thesis.txt" if "out" in forged else Path(f"/dev/shm/atropos-test-{os.getpid()}-forged")
    if forged == "a link":
        mine.symlink_to(tmp_path / "thesis.txt")
    else:
        mine.write_text("mine")
    named = f"/dev/shm/../..{mine}" if forged == "a way out of it" else str(mine)
    boot, inode = boot_id(), mine.lstat().st_ino
    lines = {
        "name alone": named,
        "another boot": f"{'0' * 36} {inode} {named}",
        "another inode": f"{boot} {inode + 1} {named}",
    }
    (tmp_path / "run/pids").mkdir(parents=True)
    (tmp_path / "run/pids/shared.memory").write_text(lines.get(forged, f"{boot} {inode} {named}") + "\n")
    try:
        done = stop(tmp_path / "run")
        assert done.returncode == 0, done.stderr
        assert mine.is_symlink() or mine.read_text() == "mine"
    finally:
        mine.unlink()


@pytest.mark.parametrize("pid", ["0", "1", "-1", "00", "1 2", "$(touch /tmp/x)", "0x10", "", "99999999999999"])
def test_a_record_without_a_process_s_number_signals_nobody(tmp_path: Path, pid: str) -> None:
    (tmp_path / "pids").mkdir()
    (tmp_path / "pids/odd").write_text(f"name=odd\npid={pid}\nstart=0\nboot={boot_id()}\nlog=o.log\nurl=\ncommand=x\n")
    done = stop(tmp_path)
    assert done.returncode == 1
    assert f"pids/odd: pid={pid} was not written by a launcher; remove it by hand" in done.stderr


@pytest.mark.parametrize("name", ["shared.memory.new", "shared.memory", "api", ".api.new"])
def test_a_link_among_the_records_is_not_followed(tmp_path: Path, name: str) -> None:
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "run/pids").mkdir(parents=True)
    (tmp_path / "run/pids" / name).symlink_to(tmp_path / "precious")
    done = stop(tmp_path / "run")
    assert done.returncode == 1
    assert "was not written by a launcher" in done.stderr
    assert (tmp_path / "precious").read_text() == "mine"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize("name", ["api", "launcher", "shared.memory"])
def test_another_users_records_are_refused(tmp_path: Path, name: str) -> None:
    sleeper = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        start = Path(f"/proc/{sleeper.pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
        lines = f"name=api\npid={sleeper.pid}\nstart={start}\nboot={boot_id()}\nlog=o.log\nurl=\ncommand=x\n"
        (tmp_path / "pids").mkdir()
        (tmp_path / "pids" / name).write_text(lines)
        os.chown(tmp_path / "pids" / name, 65534, 65534)
        done = stop(tmp_path)
        assert done.returncode == 1
        assert f"pids/{name} was not written by a launcher" in done.stderr
        assert sleeper.poll() is None
    finally:
        sleeper.kill()
        sleeper.wait()


def test_a_run_whose_name_holds_a_newline_leads_to_no_other_directory(tmp_path: Path) -> None:
    (tmp_path / "runs/good/pids").mkdir(parents=True)
    (tmp_path / f"runs/evil\n{str(tmp_path).replace('/', '_')}/pids").mkdir(parents=True)
    status, output = shell('recorded_runs "$1/runs"', tmp_path)
    assert status == 0
    assert output.splitlines() == [f"{tmp_path}/runs/good"]


def test_a_link_in_place_of_the_records_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/thesis.txt").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/pids").symlink_to(tmp_path / "elsewhere")
    assert stop(tmp_path / "run").returncode == 1
    assert (tmp_path / "elsewhere/thesis.txt").read_text() == "mine"


def test_what_a_received_run_holds_does_not_reach_the_terminal_raw(tmp_path: Path) -> None:
    run = tmp_path / "run\x1b[2J"
    (run / "pids").mkdir(parents=True)
    log = run / "api.log"
    log.write_bytes(b"Groups: \xe2\x9c\x93 \x1b]0;owned\x07\x9b31m\xc2\x9b31m end\n")
    (run / "pids/api").write_text(f"name=api\npid=99999\nstart=1\nboot=x\nlog={log}\nurl=\ncommand=x\n")
    shown = subprocess.run([ROOT / "scripts/status.sh", run], capture_output=True, timeout=30, check=False)
    assert shown.returncode == 0, shown.stderr
    assert "Groups: \u2713 ]0;owned31m31m end" in shown.stdout.decode()
    (run / "pids/e\x1b[31mvil").write_text("pid=7\n")
    refused = stop(run)
    assert refused.returncode == 1
    assert "\x1b" not in shown.stdout.decode() + refused.stdout + refused.stderr


def test_a_taken_port_is_refused_with_its_holder_and_passed_over_otherwise() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        status, output = shell("require_free_port --api-port $1", port)
        assert status == 1
        assert f"--api-port {port} is taken by" in output
        assert f"(pid {os.getpid()})" in output
        status, output = shell("free_port $1", port)
        assert status == 0
        assert int(output) > port
    assert shell("free_port $1", port)[1].strip() == str(port)


def test_a_service_that_outlives_the_others_is_given_a_limit(tmp_path: Path) -> None:
    status, output = shell(
        "own_run $1; start_service short $1/a.log true; start_service long $1/b.log sleep 60; monitor 1 short long",
        tmp_path,
    )
    assert status == 1
    assert "long still runs 1 s after the others ended" in output


def test_stop_script_ends_the_launcher_and_its_services(tmp_path: Path) -> None:
    launcher = start_shell("own_run $1; start_service sleeper $1/s.log sleep 60; monitor 10 sleeper", tmp_path)
    sleeper = await_record(tmp_path, "sleeper")
    wait_until(lambda: group_of(sleeper) == [sleeper])
    shown = subprocess.run(
        [ROOT / "scripts/status.sh", tmp_path], capture_output=True, text=True, timeout=20, check=True
    ).stdout
    assert "sleeper" in shown
    assert f"pid {sleeper}" in shown
    assert "running" in shown
    stopped = subprocess.run(
        [ROOT / "scripts/stop.sh", tmp_path], capture_output=True, text=True, timeout=20, check=False
    )
    assert stopped.returncode == 0, stopped.stderr
    launcher.communicate(timeout=10)
    assert not runs(sleeper)
    assert not (tmp_path / "pids").exists()


def test_status_tells_healthy_from_mute_and_dead(tmp_path: Path) -> None:
    port = free_port()
    launcher = start_shell(
        f"""use_run $1
        start_service web $1/web.log {WEB} {port}
        start_service mute $1/mute.log sleep 60
        start_service gone $1/gone.log true
        record_url mute http://127.0.0.1:9/health
        await_http() {{ record_url "$1" "$2"; until http_ok "$2"; do sleep 0.1; done; }}
        await_http web http://127.0.0.1:{port}/
        touch $1/ready; sleep 30""",
        tmp_path,
    )
    try:
        wait_until((tmp_path / "ready").exists)
        shown = subprocess.run(
            [ROOT / "scripts/status.sh", tmp_path], capture_output=True, text=True, timeout=20, check=True
        ).stdout
        lines = {line.split()[0]: line for line in shown.splitlines()[1:]}
        assert f"port {port}" in lines["web"]
        assert "healthy" in lines["web"]
        assert "GET /" in lines["web"]
        assert "no answer" in lines["mute"]
        assert "dead" in lines["gone"]
    finally:
        subprocess.run([ROOT / "scripts/stop.sh", tmp_path], capture_output=True, timeout=20, check=True)
        launcher.kill()
        launcher.communicate()


@pytest.mark.parametrize("script", sorted(path.name for path in (ROOT / "scripts").glob("*.sh")))
def test_every_script_explains_itself(script: str) -> None:
    shown = subprocess.run(
        [ROOT / "scripts" / script, "--help"], capture_output=True, text=True, timeout=20, check=True
    ).stdout
    assert shown.startswith(f"Usage: scripts/{script}")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["quickstart.sh", "--stepz", "3"], "unknown flag --stepz; did you mean --steps?"),
        (["quickstart.sh", "--steps", "0"], "--steps expects a whole number of at least 1, got '0'"),
        (["quickstart.sh", "--steps"], "--steps expects a value"),
        (["quickstart.sh", "--dataset", "mmlu"], "--dataset expects arithmetic or gsm8k, got 'mmlu'"),
        (["quickstart.sh", "--dataset-path", "/nowhere.jsonl"], "--dataset-path /nowhere.jsonl does not exist"),
        (["quickstart.sh", "--model", "/nowhere"], "--model /nowhere has no config.json"),
        (["quickstart.sh", "--run-name", "../x"], "--run-name takes letters"),
        (["quickstart.sh", "--vllm-port=99999"], "--vllm-port expects a port from 1 to 65535, got '99999'"),
        (["setup.sh", "--gpus"], "unknown flag --gpus; did you mean --gpu?"),
        (["stop.sh", "/nowhere"], "no such run folder: /nowhere"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_status_2(command: list[str], message: str) -> None:
    done = subprocess.run(
        [ROOT / "scripts" / command[0], *command[1:]], capture_output=True, text=True, timeout=20, check=False
    )
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_port_that_a_starting_vllm_claims_is_taken_before_anything_listens_on_it() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with socket.socket(socket.AF_UNIX) as claim:
        claim.bind(f"\0atropos-vllm-127.0.0.1:{port}")
        status, output = shell("require_free_port --vllm-port $1", port)
        assert status == 1
        assert f"--vllm-port {port} is taken by" in output
        assert f"(pid {os.getpid()})" in output
        assert int(shell("free_port $1", port)[1]) > port
    assert shell("free_port $1", port)[1].strip() == str(port)
