"""The supervisor starts, watches, restarts and ends services: small ones on loopback, under a launcher of its own."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from atropos_launcher.service import Service
from atropos_launcher.services.supervisor import Supervisor
from atroposlib.processes import exec_child
from tests.serving import free_port
from tests.unit.launcher.processes import (
    DEAF,
    FAMILY,
    atropos,
    await_record,
    group_of,
    launch,
    launched,
    listens,
    lives,
    python,
    says,
    service,
    sleeper,
    web,
)
from tests.waiting import wait_until

pytestmark = pytest.mark.services


def bash(name: str, script: str, **fields: object) -> dict[str, object]:
    return service(name, "bash", "-c", script, **fields)


def test_a_run_shows_the_lines_asked_for_and_ends_well_when_the_services_that_may_end_do(tmp_path: Path) -> None:
    port = free_port()
    steps = "echo 'INFO Step 1/2 | reward 0.5'; echo noise; printf Step; sleep 1; echo ' 2/2 | late'"
    status, output = launched(
        tmp_path,
        web(port),
        bash("trainer", steps, may_end=True),
        bash("mine", "echo Held-out accuracy 3", may_end=True),
    )
    assert status == 0, output
    assert " trainer Step 1/2 | reward 0.5" in output
    assert " trainer Step 2/2 | late" in output
    assert " mine Held-out accuracy 3" in output
    assert "noise" not in output
    assert "INFO" not in output
    assert "Started web (pid " in output
    assert not listens(port)
    assert not (tmp_path / "pids").exists()


def test_services_start_at_once_and_each_is_announced_with_its_deadline_and_its_arrival(tmp_path: Path) -> None:
    first, second = free_port(), free_port()
    status, output = launched(tmp_path, web(first, "one"), web(second, "two"), bash("work", "sleep 3", may_end=True))
    assert status == 0, output
    assert f"Waiting for one at http://127.0.0.1:{first}/, at most 40 s (log {tmp_path}/one.log)" in output
    assert output.index("Started work") < output.index("one is up after")
    assert "two is up after" in output


def test_a_killed_service_ends_the_others_and_is_named_with_its_log(tmp_path: Path) -> None:
    port = free_port()
    launcher = launch(tmp_path, web(port), bash("work", "echo the last word; exec sleep 60", may_end=True))
    work = await_record(tmp_path, "work")
    wait_until(lambda: listens(port) and "last word" in (tmp_path / "work.log").read_text())
    killed = time.monotonic()
    os.kill(work, signal.SIGKILL)
    output, _ = launcher.communicate(timeout=40)
    assert time.monotonic() - killed < 10
    assert launcher.returncode == 1
    assert f"work (pid {work}) died: killed by signal KILL. Last lines of {tmp_path}/work.log:" in output
    assert "    the last word" in output
    assert not listens(port)


def test_a_service_that_fails_at_once_is_not_waited_for(tmp_path: Path) -> None:
    health = "http://127.0.0.1:9/health"
    broken = bash("broken", "echo no such model; exit 3", health=health, start_limit_s=50, restarts=3)
    started = time.monotonic()
    status, output = launched(tmp_path, broken)
    assert status == 1
    assert "died: exit status 3" in output
    assert "no such model" in output
    assert "Restarting broken" not in output  # it has never served
    assert time.monotonic() - started < 20


def test_a_command_that_does_not_exist_is_named(tmp_path: Path) -> None:
    status, output = launched(tmp_path, service("odd", "/nowhere/python"))
    assert status == 1
    assert "cannot start /nowhere/python: No such file or directory" in output


def test_waiting_ends_at_its_deadline_and_says_for_whom(tmp_path: Path) -> None:
    status, output = launched(tmp_path, sleeper("mute", health="http://127.0.0.1:9/health", start_limit_s=1))
    assert status == 1
    assert "Waiting for mute at http://127.0.0.1:9/health, at most 1 s" in output
    assert "mute did not answer at http://127.0.0.1:9/health within 1 s" in output


def test_a_service_that_must_not_end_has_died_even_with_status_0(tmp_path: Path) -> None:
    status, output = launched(tmp_path, service("api", "true"), sleeper("work", may_end=True))
    assert status == 1
    assert "died: exit status 0" in output


@pytest.mark.parametrize("command", [("false",), ("/nowhere/python",)])
def test_an_optional_service_is_not_waited_for_and_its_end_ends_nothing(tmp_path: Path, command: list[str]) -> None:
    window = service("view", *command, optional=True, health="http://127.0.0.1:9/health")
    status, output = launched(tmp_path, bash("work", "sleep 1", may_end=True), window)
    assert status == 0, output
    assert "Waiting for view" not in output
    assert re.search(r"view died: exit status [0-9]+\. The run continues without it \(log .*view.log\)", output)


def test_an_optional_service_that_cannot_be_started_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "view.log").symlink_to("/dev/null")
    status, output = launched(tmp_path, bash("work", "sleep 1", may_end=True), service("view", "true", optional=True))
    assert status == 0, output
    assert "The run continues without it" in output
    assert "Started view" not in output


def test_an_optional_service_that_runs_is_ended_with_the_run(tmp_path: Path) -> None:
    port = free_port()
    status, output = launched(tmp_path, bash("work", "sleep 3", may_end=True), web(port, "view", optional=True))
    assert status == 0, output
    assert not listens(port)


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_to_the_launcher_ends_its_services(tmp_path: Path, number: signal.Signals, expected: int) -> None:
    launcher = launch(tmp_path, python("family", FAMILY))
    family = await_record(tmp_path, "family")
    wait_until(lambda: len(group_of(family)) == 2)
    members = group_of(family)
    launcher.send_signal(number)
    output, _ = launcher.communicate(timeout=20)
    assert launcher.returncode == expected
    assert f"Interrupted by {number.name}" in output
    assert not any(lives(pid) for pid in members)
    assert not (tmp_path / "pids").exists()


def test_a_signal_that_was_ignored_stays_ignored(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        launcher = launch(tmp_path, bash("work", "sleep 2", may_end=True))
        await_record(tmp_path, "work")
        launcher.send_signal(signal.SIGHUP)
        launcher.communicate(timeout=30)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert launcher.returncode == 0


@pytest.mark.slow
def test_a_service_deaf_to_term_is_killed_after_the_grace(tmp_path: Path) -> None:
    launcher = launch(tmp_path, python("deaf", DEAF))
    deaf = await_record(tmp_path, "deaf")
    wait_until(lambda: "deaf" in (tmp_path / "deaf.log").read_text())
    started = time.monotonic()
    launcher.send_signal(signal.SIGTERM)
    output, _ = launcher.communicate(timeout=50)
    # 5 s of grace, and what a loaded machine takes; the service itself sleeps for 60 s
    assert time.monotonic() - started < 40
    assert "Ending deaf (at most 7 s)" in output
    assert "Killed, still running after 5 s: deaf" in output
    assert not lives(deaf)


def test_a_killed_launcher_takes_its_services_along(tmp_path: Path) -> None:
    launcher = launch(tmp_path, sleeper())
    pid = await_record(tmp_path, "sleeper")
    wait_until(lambda: group_of(pid) == [pid])
    launcher.kill()
    launcher.communicate(timeout=10)
    wait_until(lambda: not lives(pid))


def test_children_whose_leader_was_killed_are_ended(tmp_path: Path) -> None:
    launcher = launch(tmp_path, python("family", FAMILY))
    leader = await_record(tmp_path, "family")
    wait_until(lambda: len(group_of(leader)) == 2)
    child = next(pid for pid in group_of(leader) if pid != leader)
    os.kill(leader, signal.SIGKILL)
    launcher.communicate(timeout=30)
    assert launcher.returncode == 1
    assert not lives(child)


def test_shared_memory_of_a_killed_service_is_removed(tmp_path: Path) -> None:
    name, own = f"atropos-test-{os.getpid()}", Path(f"/dev/shm/atropos-test-{os.getpid()}-own")
    own.write_bytes(bytes(4096))  # the user's, before the run: as weights that are kept there
    source = (
        f"import mmap, os, time\nown = mmap.mmap(os.open('{own}', os.O_RDWR), 4096)\n"
        f"fd = os.open('/dev/shm/{name}', os.O_CREAT | os.O_RDWR, 0o600); os.ftruncate(fd,"
        " 4096); held = mmap.mmap(fd, 4096)\ntime.sleep(60)"
    )
    launcher = launch(tmp_path, python("holder", source))
    holder = await_record(tmp_path, "holder")
    notes = tmp_path / "pids/.shared"
    wait_until(lambda: notes.exists() and name in notes.read_text())
    os.kill(holder, signal.SIGKILL)
    launcher.communicate(timeout=30)
    assert not Path(f"/dev/shm/{name}").exists()
    assert own.exists()
    own.unlink()


def test_a_service_that_outlives_the_others_is_given_a_limit(tmp_path: Path) -> None:
    status, output = launched(tmp_path, service("short", "true", may_end=True), sleeper("long", may_end=True), last_s=1)
    assert status == 1
    assert "Still running 1 s after the others ended: long" in output


def test_who_ends_with_the_others_has_not_outlived_them(tmp_path: Path) -> None:
    status, output = launched(tmp_path, service("only", "true", may_end=True), last_s=-1)
    assert status == 0, output


def test_a_service_with_restarts_is_started_again_after_a_pause_that_grows(tmp_path: Path) -> None:
    script = f"echo start >>{tmp_path}/starts; exit 7"
    status, output = launched(tmp_path, bash("env", script, may_end=True, restarts=2), sleeper("api"), pause_s=0.5)
    assert status == 1
    assert (tmp_path / "starts").read_text().count("start") == 3
    assert output.count("died: exit status 7") == 3
    assert output.index("restart 1 of 2") < output.index("restart 2 of 2")
    assert not (tmp_path / "pids").exists()


def test_a_service_is_started_again_with_the_words_for_that(tmp_path: Path) -> None:
    script = f'echo "$@." >>{tmp_path}/words; exit 7'
    env = service("env", "bash", "-c", script, "env", "--port 1", may_end=True, restarts=2, again=("--await-sync",))
    launched(tmp_path, env, sleeper("api"), pause_s=0.1)
    assert (tmp_path / "words").read_text().splitlines() == ["--port 1.", *["--port 1 --await-sync."] * 2]


def test_a_service_that_wants_another_setting_is_not_started_again(tmp_path: Path) -> None:
    env = bash("env", f"echo start >>{tmp_path}/starts; exit 2", may_end=True, restarts=3)
    status, output = launched(tmp_path, env, sleeper("api"), pause_s=0.1)
    assert status == 1
    assert (tmp_path / "starts").read_text().count("start") == 1
    assert "env (pid " in output
    assert "died: exit status 2" in output
    assert "Restarted" not in output


def test_a_run_goes_on_with_a_restarted_service_and_a_fresh_process_has_its_record(tmp_path: Path) -> None:
    # the first start leaves a child behind, which is ended too; the second one ends well
    script = f"if [ -e {tmp_path}/again ]; then sleep 1; exit 0; fi; touch {tmp_path}/again; sleep 60 & exit 7"
    launcher = launch(tmp_path, bash("env", script, may_end=True, restarts=3), sleeper("api"), pause_s=0.1)
    first = await_record(tmp_path, "env")
    output, _ = launcher.communicate(timeout=30)
    assert launcher.returncode == 0, output
    assert output.count("Restarted env (pid ") == 1
    assert f"Restarted env (pid {first})" not in output
    assert group_of(first) == []


def test_a_server_that_has_served_is_started_again(tmp_path: Path) -> None:
    port = free_port()
    launcher = launch(tmp_path, web(port, restarts=1), sleeper("work", may_end=True), pause_s=0.1)
    first, log = await_record(tmp_path, "web"), tmp_path / "launcher.log"
    wait_until(lambda: says(log, "web is up"))
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: "Restarted web" in log.read_text())
    assert await_record(tmp_path, "web") != first
    wait_until(lambda: log.read_text().count("Waiting for web") == 2)
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=20)


def test_a_signal_during_the_pause_before_a_restart_ends_the_run(tmp_path: Path) -> None:
    launcher = launch(tmp_path, service("env", "false", may_end=True, restarts=1), sleeper("api"), pause_s=50)
    wait_until(lambda: (tmp_path / "pids/env").exists())
    time.sleep(1)
    launcher.send_signal(signal.SIGTERM)
    launcher.communicate(timeout=20)
    assert launcher.returncode == 143


def test_a_console_that_is_gone_ends_the_run_with_all_its_services(tmp_path: Path) -> None:
    launcher = launch(tmp_path, sleeper(), bash("trainer", "sleep 1; while true; do echo Step 1/2; sleep 0.2; done"))
    pid = await_record(tmp_path, "sleeper")
    assert launcher.stdout is not None
    launcher.stdout.close()
    launcher.wait(timeout=30)
    assert launcher.returncode == 128 + signal.SIGPIPE
    assert not lives(pid)
    assert not (tmp_path / "pids").exists()


def test_two_launchers_of_one_run_are_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    first = launch(tmp_path, sleeper("work"))
    pid = await_record(tmp_path, "work")
    status, output = launched(tmp_path, sleeper("other"))
    assert status != 0
    assert f"is in use by its launcher (pid {first.pid})" in output
    assert lives(pid)
    assert not (tmp_path / "other.log").exists()
    first.terminate()
    first.communicate(timeout=20)
    assert first.returncode == 143


def test_of_launchers_that_start_at_once_one_has_the_run(tmp_path: Path) -> None:
    racers = [launch(tmp_path, sleeper()) for _ in range(4)]
    wait_until(lambda: sum(racer.poll() is not None for racer in racers) == 3)
    for racer in racers:
        racer.terminate()
    outputs = [racer.communicate(timeout=60)[0] for racer in racers]
    assert sorted(racer.returncode for racer in racers) == [1, 1, 1, 143], outputs
    assert sum("is in use by" in output for output in outputs) == 3


def test_launchers_of_two_runs_do_not_know_each_other(tmp_path: Path) -> None:
    one = launch(tmp_path / "one", sleeper())
    two = launch(tmp_path / "two", sleeper())
    pids = [await_record(tmp_path / name, "sleeper") for name in ("one", "two")]
    one.send_signal(signal.SIGTERM)
    one.communicate(timeout=20)
    assert not lives(pids[0])
    assert lives(pids[1])
    two.send_signal(signal.SIGTERM)
    two.communicate(timeout=20)
    assert two.returncode == 143


def test_a_launcher_ends_what_a_killed_one_has_left_in_the_same_run(tmp_path: Path) -> None:
    killed = launch(tmp_path, python("deaf", DEAF))
    deaf = await_record(tmp_path, "deaf")
    wait_until(lambda: "deaf" in (tmp_path / "deaf.log").read_text())
    killed.kill()
    killed.communicate(timeout=10)
    assert lives(deaf)
    status, output = launched(tmp_path, service("work", "true", may_end=True))
    assert status == 0, output
    assert not lives(deaf)


@pytest.mark.rotating
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_service_survives_a_launcher_that_is_ended_at_any_moment_of_its_start(
    tmp_path: Path, number: signal.Signals
) -> None:
    """From before Python runs our first line until all services have started. After KILL, `atropos stop` ends the
    rest.
    """
    services = [python(f"family-{n}", FAMILY) for n in range(4)]
    start_s = time_to_start(tmp_path / "whole", services)
    silent = 0
    for index in range(20):
        run = tmp_path / str(index)
        launcher = launch(run, *services)
        time.sleep(start_s * index / 14)
        launcher.send_signal(number)
        output, _ = launcher.communicate(timeout=30)
        if number == signal.SIGTERM:
            claimed = "Started" in output or "Interrupted" in output
            silent += launcher.returncode == -signal.SIGTERM
            assert launcher.returncode == (143 if claimed else -signal.SIGTERM), output
            assert ("Interrupted by SIGTERM" in output) == claimed, output
            assert not (run / "pids").exists()
        elif run.exists():
            assert atropos("stop", run).returncode == 0
        wait_until(lambda run=run: not processes_that_name(run))  # type: ignore[misc]
    assert silent < 20  # not every signal came before there was a supervisor


def time_to_start(run: Path, services: list[dict[str, object]]) -> float:
    """Seconds from the launcher's start until its last service is recorded."""
    started = time.monotonic()
    launcher = launch(run, *services)
    await_record(run, str(services[-1]["name"]))
    seconds = time.monotonic() - started
    launcher.terminate()
    launcher.communicate(timeout=30)
    return seconds


def processes_that_name(run: Path) -> list[int]:
    """Whatever has this run's directory among its open files: launcher, services and their children."""
    found = []
    for link in Path("/proc").glob("[0-9]*/fd/1"):
        try:
            if os.readlink(link).startswith(f"{run}/"):
                found.append(int(link.parts[2]))
        except OSError:
            continue
    return found


def test_a_launcher_killed_before_it_has_written_a_record_leaves_no_service(tmp_path: Path) -> None:
    """What it starts waits for the record (exec_child.py)."""
    script = (
        "import os, subprocess, sys\n"
        "command = [sys.executable, sys.argv[1], str(os.getpid()), '15', '', 'touch', sys.argv[2]]\n"
        "print(subprocess.Popen(command, stdin=subprocess.PIPE).pid, flush=True); os.kill(os.getpid(), 9)"
    )
    command = [sys.executable, "-c", script, exec_child.__file__, str(tmp_path / "ran")]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=30, check=False)
    wait_until(lambda: not lives(int(done.stdout)))
    assert not (tmp_path / "ran").exists()


def test_a_service_that_misses_another_leaves_the_blame_to_it(tmp_path: Path) -> None:
    misses = bash("trainer", "exit 70", may_end=True, missing_another=70)
    cause = bash("trainer-2", "sleep 1; echo the cause; exit 1", may_end=True, missing_another=70, host="gpu02")
    status, output = launched(tmp_path / "both", misses, cause)
    assert status == 1
    assert "trainer-2 on gpu02 (pid " in output
    assert "the cause" in output
    assert output.count("died:") == 1
    status, output = launched(tmp_path / "alone", misses, sleeper(may_end=True), blame_s=1)
    assert status == 1
    assert "died: exit status 70" in output


def test_the_addresses_are_those_of_services_that_are_to_run(tmp_path: Path) -> None:
    services = [Service("vllm", ("true",), health="http://a/health"), Service("trainer", ("true",))]
    supervisor = Supervisor(tmp_path, services, lambda event: None)
    assert supervisor.health == {"vllm": "http://a/health"}
    supervisor.retire("vllm")
    assert supervisor.health == {}
