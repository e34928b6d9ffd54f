"""`atropos scale` on real vLLM: servers join a run and leave it while its trainer goes on, and no group is lost."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from atropos_launcher.services.records import Records
from tests.integration.launched import Run
from tests.integration.test_two_servers import BACK_S, LONG, START_S, command

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(2400)]


@pytest.fixture
def run(llama_folder: Path, tmp_path: Path) -> Iterator[Run]:
    # on a core of its own: a server that wakes all the time keeps its core from one that loads
    last = max(os.sched_getaffinity(0))
    found = Run(llama_folder, tmp_path, "arithmetic", *LONG, "--layout.cores.vllm", f"[{last}]")
    yield found
    found.end()


def test_servers_join_one_dies_and_others_leave_and_each_group_is_trained(run: Run) -> None:
    run.wait_until(lambda: len(run.rows()) >= 3, START_S)
    assert run.rows()[-1]["servers"] == 1
    said = command(run, "scale", "vllm", "2", limit_s=START_S)
    assert said.splitlines()[-1] == "vllm-2 serves the policy"
    assert run.rows()[-1]["servers"] == 2
    said = command(run, "scale", "vllm", "3", limit_s=START_S)
    assert said.splitlines()[-1] == "vllm-3 serves the policy"
    for name in ("vllm-2", "vllm-3"):
        log = run.folder / f"{name}.log"
        run.wait_until(lambda log=log: "POST /" in log.read_text(), 60)  # type: ignore[misc]

    os.kill(Records(run.folder).read()["vllm"].pid, signal.SIGKILL)
    run.wait_until(lambda: run.rows()[-1]["servers"] == 2, BACK_S)
    run.wait_until(lambda: run.rows()[-1]["servers"] == 3, BACK_S)

    said = command(run, "scale", "vllm", "1", limit_s=START_S)
    assert said.splitlines()[-2:] == [
        "vllm-2 gets no new requests, and ends once it has answered (at most 600 s)",
        "vllm-2 has left",
    ]
    assert {"vllm-2", "vllm-3"}.isdisjoint(Records(run.folder).read())
    steps = len(run.rows())
    run.wait_until(lambda: len(run.rows()) >= steps + 5, 120)
    assert run.rows()[-1]["servers"] == 1

    rows = run.rows()
    assert [row["step"] for row in rows] == [*range(1, len(rows) + 1)]  # the trainer never started again
    assert {row["rejected_groups"] for row in rows} == {0}
    assert {row["failed_rollouts"] for row in rows} == {0}
