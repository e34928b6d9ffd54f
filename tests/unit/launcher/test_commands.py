"""`atropos status`, `stop` and `logs`, and the command line that they stand on."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from atropos_launcher.cli import COMMANDS
from atropos_launcher.runs import latest_run
from atroposlib.processes.log_files import Follower, last_lines, last_word
from tests.serving import free_port
from tests.unit.launcher.processes import (
    PYTHON_PATH,
    atropos,
    await_record,
    group_of,
    launch,
    launched,
    lives,
    says,
    service,
    sleeper,
    web,
)
from tests.waiting import wait_until

pytestmark = pytest.mark.services


def ended_run(run: Path, done: int, total: int) -> Path:
    run.mkdir(parents=True)
    (run / "trainer.log").write_text(f"Step {done}/{total}\n")
    (run / "trainer.yaml").write_text(f"model_name: x\ntraining_steps: {total}\n")
    rows = [{"step": step, "reward_mean": 0.5} for step in range(1, done + 1)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluations: list[dict[str, float | None]] = [
        {"policy_version": 0, "accuracy": 0.1},
        {"policy_version": 5, "accuracy": 0.96875},
    ]
    evaluations.append({"policy_version": done, "accuracy": None})
    (run / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in evaluations))
    return run


def test_stop_ends_the_launcher_and_its_services(tmp_path: Path) -> None:
    launcher = launch(tmp_path, sleeper())
    pid = await_record(tmp_path, "sleeper")
    wait_until(lambda: group_of(pid) == [pid])
    shown = atropos("status", tmp_path).stdout
    assert f"  sleeper pid {pid}" in shown
    assert "running" in shown
    stopped = atropos("stop", tmp_path)
    assert stopped.returncode == 0, stopped.stderr
    assert f"Ending the launcher of {tmp_path} (pid {launcher.pid}), which ends its services" in stopped.stdout
    assert f"Everything of {tmp_path} has ended" in stopped.stdout
    output, _ = launcher.communicate(timeout=10)
    assert launcher.returncode == 143
    assert "Interrupted by SIGTERM" in output
    assert not lives(pid)
    assert not (tmp_path / "pids").exists()


@pytest.mark.rotating
@pytest.mark.slow
def test_stop_ends_a_frozen_launcher(tmp_path: Path) -> None:
    launcher = launch(tmp_path, sleeper())
    pid = await_record(tmp_path, "sleeper")
    launcher.send_signal(signal.SIGSTOP)
    stopped = atropos("stop", tmp_path)
    assert stopped.returncode == 0, stopped.stderr
    assert "Killed the launcher, still running after 15 s" in stopped.stdout
    launcher.communicate(timeout=10)
    assert not lives(pid)
    assert not (tmp_path / "pids").exists()


def test_stopping_twice_is_as_good_as_once(tmp_path: Path) -> None:
    launcher = launch(tmp_path, sleeper())
    await_record(tmp_path, "sleeper")
    stops = [
        subprocess.Popen(
            [sys.executable, "-m", "atropos_launcher", "stop", tmp_path],
            env=PYTHON_PATH,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    errors = [stop.communicate(timeout=40)[1] for stop in stops]
    assert [stop.returncode for stop in stops] == [0, 0], errors
    launcher.communicate(timeout=10)
    again = atropos("stop", tmp_path)
    assert again.returncode == 0
    assert "has no services recorded: it ended by itself or never ran" in again.stdout


def test_several_runs_are_stopped_by_name_or_all(tmp_path: Path) -> None:
    launchers = [launch(tmp_path / "runs" / name, sleeper()) for name in ("one", "two")]
    for name in ("one", "two"):
        await_record(tmp_path / "runs" / name, "sleeper")
    unclear = atropos("stop", cwd=tmp_path)
    assert unclear.returncode == 2
    assert "several runs have services; name one, or --all:" in unclear.stderr
    assert atropos("stop", "one", cwd=tmp_path).returncode == 0
    launchers[0].communicate(timeout=10)
    assert launchers[1].poll() is None
    assert atropos("stop", "--all", cwd=tmp_path).returncode == 0
    launchers[1].communicate(timeout=10)
    assert "No run has services" in atropos("stop", "--all", cwd=tmp_path).stdout


def test_status_tells_healthy_from_mute_and_dead(tmp_path: Path) -> None:
    port = free_port()
    mute = sleeper("mute", health="http://127.0.0.1:9/health", start_limit_s=60)
    launcher = launch(tmp_path, web(port), mute, service("gone", "false", restarts=1), pause_s=60)
    try:
        wait_until(lambda: says(tmp_path / "launcher.log", "web is up"))
        lines = {line.split()[0]: line for line in atropos("status", tmp_path).stdout.splitlines()[1:]}
        assert f"port {port}" in lines["web"]
        assert "healthy" in lines["web"]
        assert "Serving HTTP" in lines["web"]  # the last line that tells something: its access lines do not
        assert "no answer" in lines["mute"]
        assert "dead" in lines["gone"]
    finally:
        assert atropos("stop", tmp_path).returncode == 0
        launcher.communicate(timeout=10)


def test_status_says_what_came_of_runs_that_have_ended(tmp_path: Path) -> None:
    ended_run(tmp_path / "runs/good", 20, 20)
    ended_run(tmp_path / "runs/short", 7, 20)
    ended_run(tmp_path / "runs/none", 0, 20)
    (ended_run(tmp_path / "runs/flat", 9, 20) / "run.json").write_text('{"starts": [], "held_out": {}}')
    shown = atropos("status", cwd=tmp_path).stdout
    assert "runs/good  finished: 20/20 steps, 96.9 %" in shown
    assert "runs/flat  finished: 9/20 steps, 96.9 %" in shown, "--stop-when-flat ended it"
    assert "runs/short  ended after 7/20 steps, 96.9 %" in shown
    assert "runs/none  ended before its first step" in shown
    assert atropos("status", "good", cwd=tmp_path).stdout == "runs/good  finished: 20/20 steps, 96.9 %\n"


def test_status_says_why_a_run_ended_before_its_time(tmp_path: Path) -> None:
    dead = ended_run(tmp_path / "runs/dead", 7, 20)
    assert launched(dead, service("vllm", "false"))[0] == 1
    stopped = tmp_path / "runs/stopped"
    launcher = launch(stopped, sleeper())
    await_record(stopped, "sleeper")
    wait_until(lambda: says(stopped / "launcher.log", "Started sleeper"))
    launcher.terminate()
    launcher.communicate(timeout=20)
    shown = atropos("status", cwd=tmp_path).stdout
    assert re.search(r"runs/dead  ended after 7/20 steps, 96.9 %: vllm \(pid \d+\) died: exit status 1\n", shown)
    assert "runs/stopped  ended before its first step: Interrupted by SIGTERM\n" in shown
    assert launched(dead, service("work", "true", may_end=True))[0] == 0
    assert atropos("status", dead).stdout.endswith("ended after 7/20 steps, 96.9 %\n")


def test_status_tells_an_evaluation_from_a_run_without_a_step(tmp_path: Path) -> None:
    for name, log in (("whole", ""), ("cut", "2026-11-29 10:06:31 ERROR   [launcher] Interrupted by SIGTERM\n")):
        run = tmp_path / "runs" / name
        run.mkdir(parents=True)
        (run / "run.yaml").write_text("steps: 20\n")
        (run / "launcher.log").write_text(log)
    shown = atropos("status", cwd=tmp_path).stdout
    assert "runs/whole  evaluation, finished\n" in shown
    assert "runs/cut  evaluation that ended: Interrupted by SIGTERM\n" in shown


def test_status_shows_how_far_a_running_run_is(tmp_path: Path) -> None:
    ended_run(tmp_path / "runs/mine", 7, 20)
    launcher = launch(tmp_path / "runs/mine", sleeper())
    await_record(tmp_path / "runs/mine", "sleeper")
    assert atropos("status", cwd=tmp_path).stdout.startswith("runs/mine  7/20 steps, 96.9 %\n  sleeper pid")
    assert atropos("stop", cwd=tmp_path).returncode == 0
    launcher.communicate(timeout=10)


def test_a_run_that_is_refused_keeps_no_other_from_being_shown_or_ended(tmp_path: Path) -> None:
    (tmp_path / "runs/odd/pids").mkdir(parents=True)
    (tmp_path / "runs/odd/pids/api").write_text("{}")
    launcher = launch(tmp_path / "runs/mine", sleeper())
    pid = await_record(tmp_path / "runs/mine", "sleeper")
    shown = atropos("status", cwd=tmp_path)
    assert f"sleeper pid {pid}" in shown.stdout
    assert "runs/odd  runs/odd/pids/api was not written by a launcher" in shown.stdout
    stopped = atropos("stop", "--all", cwd=tmp_path)
    assert stopped.returncode == 1
    assert "runs/odd/pids/api was not written by a launcher" in stopped.stderr
    launcher.communicate(timeout=20)
    assert launcher.returncode == 143


def test_only_the_newest_ended_runs_are_listed(tmp_path: Path) -> None:
    for number in range(12):
        run = ended_run(tmp_path / f"runs/run-{number:02}", 1, 1)
        os.utime(run, (number, number))
    lines = atropos("status", cwd=tmp_path).stdout.splitlines()
    assert [line.split()[0] for line in lines[:10]] == [f"runs/run-{number:02}" for number in range(11, 1, -1)]
    assert lines[10] == "... and 2 older runs in runs"


def test_the_newest_run_is_the_one_that_was_started_last(tmp_path: Path) -> None:
    for started, name in enumerate(("old", "new")):
        run = ended_run(tmp_path / "runs" / name, 1, 1)
        (run / "run.yaml").write_text("steps: 1\n")
        os.utime(run / "run.yaml", (started, started))
        os.utime(run, (9 - started, 9 - started))  # a plot of the old one, or a note, came later
    assert latest_run(tmp_path / "runs").name == "new"
    assert [line.split()[0] for line in atropos("status", cwd=tmp_path).stdout.splitlines()] == ["runs/new", "runs/old"]


def test_logs_shows_the_last_lines_of_every_service_or_of_one(tmp_path: Path) -> None:
    run = tmp_path / "runs/mine"
    run.mkdir(parents=True)
    (run / "api.log").write_text("".join(f"api {n}\n" for n in range(30)))
    (run / "trainer.log").write_text("trainer 1\n")
    lines = atropos("logs", cwd=tmp_path).stdout.splitlines()
    assert len(lines) == 21
    assert lines[0] == "api     | api 10"
    assert lines[-1] == "trainer | trainer 1"
    assert atropos("logs", "trainer", cwd=tmp_path).stdout == "trainer | trainer 1\n"
    assert atropos("logs", "mine", "api", "-n", "1", cwd=tmp_path).stdout == "api | api 29\n"
    assert atropos("logs", run, "-n", "0").stdout == ""
    unknown = atropos("logs", "vllm", cwd=tmp_path)
    assert unknown.returncode == 2
    assert "vllm is neither a run nor a service of runs/mine, which has api trainer" in unknown.stderr


def test_logs_follows_until_the_run_ends(tmp_path: Path) -> None:
    run = tmp_path / "runs/mine"
    launcher = launch(run, service("work", "bash", "-c", "echo one; sleep 3; echo two; printf three", may_end=True))
    await_record(run, "work")
    wait_until(lambda: "one" in (run / "work.log").read_text())
    followed = atropos("logs", "-f", cwd=tmp_path).stdout.splitlines()
    assert [line for line in followed if line.startswith("work")] == [
        "work     | one",
        "work     | two",
        "work     | three",
    ]
    assert "[launcher] Started work (pid " in followed[0]
    assert "work has ended" in "".join(followed)
    launcher.communicate(timeout=20)


def test_a_log_is_read_from_its_end_without_access_lines(tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    log.write_text('ready\n10% \r20%\n127.0.0.1 - - [x] "GET /health HTTP/1.1" 200 -\n\n')
    assert last_word(log) == "20%"
    assert last_lines(log, 3) == ("10% ", "20%", '127.0.0.1 - - [x] "GET /health HTTP/1.1" 200 -')
    (tmp_path / "link").symlink_to(log)
    assert last_lines(tmp_path / "link", 3) == ()
    log.write_text("x" * 200_000 + "\nend\n")
    assert last_lines(log, 1) == ("end",)


def test_a_follower_gives_whole_lines_only_until_the_end(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("old\n")
    follower = Follower(log)
    with log.open("a") as file:
        for written, seen in (("one\ntw", ["one"]), ("o", []), ("\n\nthree", ["two"])):
            file.write(written)
            file.flush()
            assert list(follower.new_lines()) == seen
    assert list(follower.rest()) == ["three"]


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_help_of_a_command_loads_nothing_that_takes_long(command: str) -> None:
    words = [sys.executable, "-X", "importtime", "-m", "atropos_launcher", command, "--help"]
    shown = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    assert shown.stdout.startswith(f"usage: atropos {command}")
    loaded = {line.rpartition("|")[2].strip() for line in shown.stderr.splitlines()}
    assert "argparse" in loaded
    assert not loaded & {"torch", "transformers", "vllm", "numpy", "aiohttp", "fastapi", "ray"}


def test_every_command_is_in_the_overview() -> None:
    shown = atropos("--help").stdout
    assert all(f"\n  {name} " in shown for name in COMMANDS)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["statsu"], "atropos: error: unknown command 'statsu'; did you mean status?"),
        (["stop", "--al"], "atropos stop: error: unknown flag --al; did you mean --all?"),
        (["stop", "/nowhere"], "atropos stop: error: no such run:"),
        (["stop", "--all", "x"], "atropos stop: error: either x or --all"),
        (["status", "a", "b"], "atropos status: error: unexpected argument 'b'"),
        (["logs", "-n", "x"], "atropos logs: error: argument -n/--lines: expects a whole number, got 'x'"),
        (["env" + 2000 * "x"], "xxx' (--help lists all)"),
        (["logs", "a", "b", "c"], "atropos logs: error: RUN and SERVICE only, got a b c"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_status_2(tmp_path: Path, words: list[str], message: str) -> None:
    done = atropos(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr) < 1100
    assert len(done.stderr.splitlines()) == 1


def test_a_name_that_resembles_a_run_is_told_it(tmp_path: Path) -> None:
    (tmp_path / "runs/first").mkdir(parents=True)
    done = atropos("status", "frist", cwd=tmp_path)
    assert done.stderr.endswith("neither runs/frist nor frist is a directory; did you mean first?\n")
    assert "did you mean" not in atropos("status", "other", cwd=tmp_path).stderr


def test_a_command_that_is_ended_by_term_says_so(tmp_path: Path) -> None:
    launcher = launch(tmp_path / "runs/mine", sleeper())
    await_record(tmp_path / "runs/mine", "sleeper")
    command = [sys.executable, "-u", "-m", "atropos_launcher", "logs", "-f", "-n", "1", "mine"]
    follower = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=PYTHON_PATH, cwd=tmp_path)
    time.sleep(2)
    follower.terminate()
    assert "ended by SIGTERM" in follower.communicate(timeout=10)[1]
    assert follower.returncode == 143
    launcher.terminate()
    launcher.communicate(timeout=20)
