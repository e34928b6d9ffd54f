"""What an agent says of its ranks, and the exit status that tells a cause from its consequences."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from example_trainer.ranks.agent import explain
from example_trainer.ranks.place import LOST
from tests.serving import free_port

ROOT = Path(__file__).parents[4]


def failures(*statuses: int) -> dict[int, ProcessFailure]:
    found = {rank: ProcessFailure(rank, 100 + rank, status, "") for rank, status in enumerate(statuses)}
    for failure in found.values():
        failure.timestamp = failure.local_rank
    return found


def test_ranks_that_only_miss_another_leave_the_explanation_to_its_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert explain(failures(LOST, LOST), "gpu02") == LOST
    assert capsys.readouterr().err == ""


def test_a_killed_rank_is_named_with_its_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert explain(failures(LOST, -signal.SIGKILL), "gpu02") == 1
    assert capsys.readouterr().err == (
        "grpo: error: trainer rank 1 on gpu02 was ended by SIGKILL (by the kernel, if memory ran out), pid 101\n"
    )


def test_an_error_that_a_rank_has_printed_keeps_its_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert explain(failures(LOST, 2), "gpu02") == 2
    assert capsys.readouterr().err == ""


@pytest.mark.slow
@pytest.mark.services
def test_machines_with_other_numbers_of_ranks_meet_and_add() -> None:
    """As nodes with other numbers of GPUs do."""
    port, agents = free_port(), []
    for machine, count in enumerate((2, 1)):
        words = ["--nnodes", "2", "--node-rank", str(machine), "--nproc-per-node", str(count)]
        words += ["--master-addr", "127.0.0.1", "--master-port", str(port), "--local-addr", "127.0.0.1"]
        words += ["--rdzv-conf", "timeout=100", "--module", "tests.integration.machine_child"]
        command = [sys.executable, "-u", "-m", "example_trainer.ranks.agent", *words]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        agents.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment))
    try:
        said = [agent.communicate(timeout=200)[0].decode() for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], said
    assert all(f"rank {rank} of 3: sum 6" in said[0] for rank in (0, 1)), said
    assert "rank 2 of 3: sum 6" in said[1], said
