"""CPU cores by name, and each rank's share of them."""

import os
from collections.abc import Iterator

import pytest
import torch

from example_trainer import before_torch
from example_trainer.errors import TrainerError
from example_trainer.grpo import prepare_torch
from example_trainer.ranks.place import VARIABLE, Place
from example_trainer.settings.config import TrainerConfig
from example_trainer.settings.cpu_cores import distinct, expect_cores, parse_cores, shared_out, shown_cores


@pytest.mark.parametrize(("text", "cores"), [("0", (0,)), ("0-3,8", (0, 1, 2, 3, 8)), ("8, 0-1", (0, 1, 8))])
def test_a_set_is_written_as_the_kernel_writes_it(text: str, cores: tuple[int, ...]) -> None:
    assert parse_cores(text) == cores
    assert parse_cores(shown_cores(cores)) == cores


def test_ranges_are_short() -> None:
    assert shown_cores([8, 0, 1, 2, 3, 5]) == "0-3,5,8"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' names no CPU cores; write e.g. 0-3,8"),
        ("two", "'two' names no CPU cores"),
        ("-1", "'-1' names no CPU cores"),
        ("3-1", "the range 3-1 ends before it begins; write 1-3"),
        ("0-2,2", "core 2 is named twice"),
    ],
)
def test_what_is_no_set_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        parse_cores(text)


def test_shares_are_even() -> None:
    assert shared_out((0, 1, 4, 5), 2, "2 ranks") == [(0, 1), (4, 5)]
    assert distinct([4, 0]) == (0, 4)
    with pytest.raises(ValueError, match=r"3 CPU cores \(0-2\) for 2 ranks: give 2 or 4"):
        shared_out((0, 1, 2), 2, "2 ranks")
    with pytest.raises(ValueError, match=r"1 CPU core \(0\) for 2 ranks: give 2"):
        shared_out((0,), 2, "2 ranks")


def test_a_core_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(ValueError, match="CPU core 9 cannot be used here; available cores are 0-1"):
        expect_cores((0, 9), {0, 1})


# --- the trainer's --cores ------------------------------------------------------------------------------------------


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, set[int]]]:
    """A process that may use the cores 0 to 7, without changing this one."""
    state = {"cores": set(range(8))}
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(state["cores"]))
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: state.update(cores=set(cores)))
    before = torch.get_num_threads()
    yield state
    torch.set_num_threads(before)


def config(**settings: object) -> TrainerConfig:
    return TrainerConfig.model_validate({"model_name": "m", "device": "cpu", **settings})


def test_a_trainer_of_one_process_takes_all(kernel: dict[str, set[int]]) -> None:
    before_torch.take_cores(config(cores="2-4"), Place(), 0)
    assert kernel["cores"] == {2, 3, 4}
    prepare_torch(config(cores="2-4"))
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize(("rank", "share"), [(0, {2, 3}), (1, {6, 7})])
def test_each_rank_takes_its_share_and_a_thread_per_core(
    kernel: dict[str, set[int]], monkeypatch: pytest.MonkeyPatch, rank: int, share: set[int]
) -> None:
    asked = config(cores="2,3,6,7")
    before_torch.take_cores(asked, Place(rank, 2, rank, 2), 0)
    assert kernel["cores"] == share
    monkeypatch.setenv(VARIABLE, f"{rank} 2 5 6 7")
    prepare_torch(asked)
    assert torch.get_num_threads() == 2


def test_the_parent_of_ranks_keeps_all_for_them(kernel: dict[str, set[int]]) -> None:
    before_torch.take_cores(config(cores="0-3"), Place(), 2)
    assert kernel["cores"] == {0, 1, 2, 3}


def test_without_the_flag_nothing_is_pinned(kernel: dict[str, set[int]]) -> None:
    before_torch.take_cores(config(), Place(1, 2, 1, 2), 0)
    assert kernel["cores"] == set(range(8))


@pytest.mark.parametrize(
    ("cores", "ranks", "message"),
    [
        ("7-8", 0, "--cores 7-8: CPU core 8 cannot be used here; available cores are 0-7"),
        ("0-2", 2, r"--cores 0-2: 3 CPU cores \(0-2\) for 2 trainer ranks on this machine: give 2 or 4"),
    ],
)
def test_cores_that_cannot_be_had_are_refused_before_a_rank_starts(
    kernel: dict[str, set[int]], cores: str, ranks: int, message: str
) -> None:
    with pytest.raises(TrainerError, match=message):
        before_torch.take_cores(config(cores=cores), Place(), ranks)
    assert kernel["cores"] == set(range(8))


def test_a_mistyped_set_is_refused_with_the_configuration() -> None:
    with pytest.raises(ValueError, match="'0-' names no CPU cores"):
        config(cores="0-")
