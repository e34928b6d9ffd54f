"""What an agent says of its ranks, and the exit status that tells a cause from its consequences."""

import signal

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from example_trainer.ranks.agent import explain
from example_trainer.ranks.place import LOST


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
