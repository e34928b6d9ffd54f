"""benchmarks/peers: what is metered, how results are told, and that our own arms do their work."""

import json
import re
import subprocess
import sys
import sysconfig
import textwrap
import zipfile
from contextlib import nullcontext
from pathlib import Path

import pytest

from benchmarks.api_throughput import Settings as Groups
from benchmarks.api_throughput import make_groups
from benchmarks.peers import __main__ as peers
from benchmarks.peers.arms.episodes import scores_of
from benchmarks.peers.arms.quickstart import best
from benchmarks.peers.comparison import Arm, Comparison, Goal
from benchmarks.peers.comparisons import COMPARISONS, HELD_OUT, questions
from benchmarks.peers.environment import folder_of, layered_python
from benchmarks.peers.metering import ArmFailed, metered
from benchmarks.peers.table import Result, table
from tests.waiting import wait_until

ROOT = Path(__file__).parents[3]
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")  # of benchmarks/peers/arms/trl_loop.py
SPINNING = """
    import os, sys, time
    there, here = os.pipe()
    def spin(seconds):
        held = bytearray(80_000_000)
        held[::4096] = b"1" * len(held[::4096])
        while time.process_time() < seconds: pass
        return held
    if os.fork() == 0:
        os.setsid()       # a daemon: in no process group of ours, and nobody waits for it
        if os.fork() == 0:
            held = spin(1.0)
            os.write(here, b"1")
            time.sleep(3)
        os._exit(0)
    os.wait()
    held = spin(1.0)
    os.read(there, 1)     # from here on both hold their memory, long enough for several samples on a busy machine
    time.sleep(3)
    print('@{"rate": 2.5}')
"""


def program(text: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(text)]


def result(arm: str, run: int, **metrics: float) -> Result:
    return Result(
        comparison="a",
        arm=arm,
        run=run,
        when="2026-11-27",
        commit="c",
        processor="p",
        load=0.5,
        packages=["peer==1"],
        metrics=metrics,
    )


@pytest.mark.services
@pytest.mark.slow
def test_cpu_and_memory_of_a_daemon_count(tmp_path: Path) -> None:
    done = metered(program(SPINNING), tmp_path / "log", 60)
    assert done.metrics == {"rate": 2.5}
    assert 1.9 < done.cpu_s < 4
    assert 0.16 < done.peak_gb < 0.4
    assert done.wall_s > 2.5


@pytest.mark.services
def test_what_a_command_leaves_is_ended(tmp_path: Path) -> None:
    left = "import subprocess, sys; p = subprocess.Popen(['sleep', '60'], start_new_session=True); print('@{}', p.pid)"
    with pytest.raises(json.JSONDecodeError):
        metered(program(left), tmp_path / "log", 60)
    pid = int((tmp_path / "log").read_text().split()[-1])
    assert not Path(f"/proc/{pid}").exists()


ASLEEP = """
    import sys
    from contextlib import nullcontext
    from benchmarks.peers import __main__ as peers
    from benchmarks.peers.comparison import Arm, Comparison
    text = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    arm = Arm("arm", [sys.executable, "-c", text], 60)
    peers.COMPARISONS["asleep"] = Comparison((), lambda work: nullcontext([arm]))
    peers.main(["--peers", "asleep", "--out", sys.argv[1], "--model", "."])
"""


@pytest.mark.services
def test_a_command_that_is_ended_ends_its_arm(tmp_path: Path) -> None:
    log = tmp_path / "peers-asleep-arm-1.log"
    command = [*program(ASLEEP), str(tmp_path / "peers.jsonl")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, cwd=ROOT) as running:
        wait_until(lambda: log.exists() and log.read_text().endswith("\n"), 60)
        pid = int(log.read_text())
        running.terminate()
        assert running.stderr is not None
        assert b"peers: interrupted" in running.stderr.read()
    assert running.returncode == 130
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.services
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("raise SystemExit(3)", "exit status 3"),
        ("print('no metrics')", "no metrics"),
        ("import time; time.sleep(60)", "took over 1 s"),
    ],
)
def test_a_failed_arm_names_its_log(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ArmFailed, match=words) as error:
        metered(program(text), tmp_path / "the.log", 1)
    assert "the.log" in str(error.value)


def test_the_questions_of_trl_have_results_that_its_reward_compares() -> None:
    asked = questions()
    assert len(asked["held_out"]) == HELD_OUT
    assert not {each["question"] for each in asked["train"]} & {each["question"] for each in asked["held_out"]}
    assert all(NUMBER.fullmatch(each["result"]) for part in asked.values() for each in part)
    assert {"question": "What is 4 * 5?", "result": "20"} in asked["train"]


def wheel_of_a_peer(folder: Path) -> Path:
    """A package of one module that imports one of ours' dependencies."""
    path = folder / "peer_of_ours-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("peer_of_ours.py", "import msgspec\n")
        wheel.writestr(
            "peer_of_ours-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: peer-of-ours\nVersion: 1.0\n"
        )
        wheel.writestr(
            "peer_of_ours-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr("peer_of_ours-1.0.dist-info/RECORD", "")
    return path


@pytest.mark.services
@pytest.mark.slow
def test_an_environment_is_layered_on_this_one_and_made_once(tmp_path: Path) -> None:
    wheel = wheel_of_a_peer(tmp_path)
    python = layered_python(tmp_path / "env", [str(wheel)])
    ask = "import peer_of_ours, torch; print(peer_of_ours.__file__, torch.__file__)"
    shown = subprocess.run([python, "-c", ask], capture_output=True, text=True, cwd="/").stdout.split()
    assert shown[0].startswith(str(tmp_path / "env"))
    assert shown[1].startswith(sysconfig.get_path("purelib"))
    wheel.unlink()
    assert layered_python(tmp_path / "env", [str(wheel)]) == python


def test_another_version_has_another_environment(tmp_path: Path) -> None:
    assert folder_of("peer", ["a==1"], tmp_path) != folder_of("peer", ["a==2"], tmp_path)
    for comparison in COMPARISONS.values():
        assert all(package.count("==") == 1 for package in comparison.packages)


def test_another_checkout_has_another_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = folder_of("peer", ["a==1"], tmp_path)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: "/elsewhere/site-packages")
    assert folder_of("peer", ["a==1"], tmp_path) != here


def test_the_table_has_medians_ranges_and_goals() -> None:
    results = [result("ours", run, rate=rate, cpu_s=1.0) for run, rate in enumerate((9.0, 30.0, 12.0))]
    results += [result("peer", 1, rate=4.0, cpu_s=2.5)]
    goals = (Goal("rate", "ours", "peer", 3), Goal("cpu_s", "ours", "peer", 3, less=True), Goal("x", "ours", "peer", 2))
    shown = table(results, goals)
    assert "| ours | 3 | 12 (9 to 30) | 1 (1 to 1) |" in shown
    assert "| peer | 1 | 4 | 2.5 |" in shown
    assert "rate: ours beside peer, goal 3 x: 3.00 x, reached" in shown
    assert "cpu_s: ours beside peer, goal 3 x: 2.50 x, missed" in shown
    assert "x: ours beside peer, goal 2 x: not measured" in shown


def test_goals_name_arms_and_a_metric_that_was_not_reached_is_none() -> None:
    shown = table([result("ours", 1, rate=1.0), result("peer", 1, other=2.0)], ())
    assert "| ours | 1 | 1 | none |" in shown


def test_results_are_appended_one_by_one_and_read_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "results.jsonl"
    for run in (1, 2):
        peers.append(path, result("ours", run, rate=float(run)))
    assert [each.run for each in peers.read(path)] == [1, 2]
    path.write_text(path.read_text().replace('"comparison":"a"', '"comparison":"trl"'))
    peers.main(["--report", "--peers", "trl", "--out", str(path)])
    assert "| ours | 2 | 1.5 (1 to 2) |" in capsys.readouterr().out


@pytest.mark.services
def test_the_same_command_goes_on_behind_a_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arms = [Arm(name, program("print('@{}')"), 60) for name in ("ours", "theirs")]
    monkeypatch.setitem(COMPARISONS, "a", Comparison((), lambda work: nullcontext(arms)))
    path = tmp_path / "results.jsonl"
    peers.append(path, result("ours", 1, rate=1.0))
    for _ in range(2):
        peers.main(["--peers", "a", "--runs", "2", "--out", str(path), "--model", "."])
    assert [(each.arm, each.run) for each in peers.read(path)] == [
        ("ours", 1),
        ("theirs", 1),
        ("ours", 2),
        ("theirs", 2),
    ]


def test_an_unknown_peer_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        peers.main(["--peers", "nobody", "--out", str(tmp_path / "r.jsonl")])
    assert "--peers nobody is unknown; choose of transfer_queue" in capsys.readouterr().err


@pytest.mark.services
@pytest.mark.slow
def test_the_arm_of_the_batching_api_gets_every_group_back(tmp_path: Path) -> None:
    bodies = make_groups(Groups(groups=8, sequences=2, tokens=8))
    (tmp_path / "groups.json").write_bytes(b"[" + b",".join(bodies) + b"]")
    command = [sys.executable, "-m", "benchmarks.peers.arms.batching_api", str(tmp_path), "4", str(tmp_path / "j.db")]
    done = metered(command, tmp_path / "log", 120, {"PYTHONPATH": str(ROOT)})
    assert done.metrics["put_per_s"] > done.metrics["groups_per_s"] > 0
    assert (tmp_path / "j.db").stat().st_size > 0


def test_scores_of_groups_and_of_traces_are_read() -> None:
    assert scores_of({"scores": [1.0, 0.0]}) == [1.0, 0.0]
    rewards = {"is_right": {"score": 1.0}, "short": {"score": 0.5, "weight": 0.5}}
    assert scores_of({"traces": [{"rewards": rewards}]}) == [1.25]
    with pytest.raises(SystemExit, match="an episode failed: no uv"):
        scores_of({"traces": [{"rewards": {}, "errors": [{"type": "HarnessError", "message": "no uv"}]}]})


def test_a_line_that_is_being_written_is_no_evaluation_yet(tmp_path: Path) -> None:
    path = tmp_path / "evaluations.jsonl"
    assert best(path) == 0
    path.write_text('{"accuracy": 0.5, "policy_version": 5}\n{"accuracy": 0.9')
    assert best(path) == 0.5
