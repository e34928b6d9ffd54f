"""A run with two real vLLM servers: both are trained, each service runs on its cores, and a server that is killed comes
back.
"""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from atropos_launcher.services.records import Records
from tests.integration.launched import Run, launch, processes_of

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

LONG = [
    *("--steps", "5000", "--trainer.checkpoint_interval", "0"),
    *("--env.steps_per_eval", "0", "--env.eval_at_start", "false"),
]
CORES = sorted(os.sched_getaffinity(0))
START_S, BACK_S = 600.0, 600.0


def command(run: Run, *words: str, limit_s: float = 60.0) -> str:
    """What `atropos WORDS`, about the run, has printed."""
    done = launch(*words, str(run.folder), cwd=run.runs, timeout_s=limit_s)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def run(llama_folder: Path, tmp_path: Path) -> Iterator[Run]:
    first, last = CORES[0], CORES[-1]
    layout = (
        *("--layout.cores.vllm", f"[[{first}], [{last}]]" if first < last else "auto"),
        *("--layout.cores.trainer", f"[{last}]", "--layout.cores.environments", f"[{first}]"),
    )
    found = Run(llama_folder, tmp_path, "two_servers", *LONG, *layout)
    yield found
    found.end()


def test_both_are_trained_and_one_that_is_killed_comes_back(run: Run) -> None:
    run.wait_until(lambda: len(run.rows()) > 0, START_S)
    assert run.rows()[0]["servers"] == 2

    pids = {name: record.pid for name, record in Records(run.folder).read().items()}
    assert {"api", "vllm-1", "vllm-2", "trainer", "env"} <= pids.keys()
    status = command(run, "status")
    assert all(f"  {name} " in status for name in ("vllm-1", "vllm-2"))
    assert status.count("healthy") == 4  # and the batching API and the page
    assert all((run.folder / f"{name}.log").stat().st_size for name in ("vllm-1", "vllm-2"))
    (start,) = json.loads((run.folder / "run.json").read_text())["starts"]
    urls = {start["services"][name]["url"] for name in ("vllm-1", "vllm-2")}
    assert len(urls) == 2

    first, last = CORES[0], CORES[-1]
    placed = {"vllm-1": {first}, "vllm-2": {last}} if first < last else {}
    for name, cores in (placed | {"trainer": {last}, "env": {first}, "api": {*CORES}}).items():
        assert os.sched_getaffinity(pids[name]) == cores, name
    sampled = [(run.folder / f"{name}.log").read_text().count("POST /") for name in ("vllm-1", "vllm-2")]
    assert min(sampled) > 0, sampled

    os.kill(pids["vllm-2"], signal.SIGKILL)
    run.wait_until(lambda: run.rows()[-1]["servers"] == 1, BACK_S)
    run.wait_until(lambda: run.rows()[-1]["servers"] == 2, BACK_S)
    said = run.output
    assert f"vllm-2 (pid {pids['vllm-2']}) died: killed by signal KILL." in said
    assert "Restarted vllm-2 (pid " in said

    run.launcher.kill()
    run.launcher.wait()
    command(run, "stop")
    assert processes_of(run.name) == []
