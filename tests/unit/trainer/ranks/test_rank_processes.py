"""Which rank a process is, how many there are to start, and what of it no child inherits. Loads no torch."""

import os
from typing import Any

import pytest

from atroposlib.config import resolve_config
from example_trainer.errors import TrainerError
from example_trainer.ranks import place as rank_processes
from example_trainer.ranks.place import (
    CHOSEN,
    RANK_VARIABLES,
    VARIABLE,
    Place,
    own_environment,
    ranks_to_start,
    without_ranks,
)
from example_trainer.settings.bridges import Broadcast
from example_trainer.settings.config import TrainerConfig

OF_TORCHRUN = {
    **dict.fromkeys(RANK_VARIABLES, "1"),
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "OMP_NUM_THREADS": "1",
}
CHOSE = {"GLOO_SOCKET_IFNAME": "lo", CHOSEN: "1"}
OWN = {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "0,1"}


@pytest.fixture(autouse=True)
def no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*OF_TORCHRUN, *CHOSE, VARIABLE):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two GPUs, and a PyTorch that can use them."""
    names = ["0", "1"]
    monkeypatch.setattr(rank_processes, "visible_gpus", lambda environ: names)
    monkeypatch.setattr("importlib.metadata.version", lambda package: "2.13.0")
    return names


def config(**settings: Any) -> TrainerConfig:
    return TrainerConfig(**{"model_name": "m", "weight_bridge_mode": "none"} | settings)


def test_a_process_by_itself_is_the_only_rank() -> None:
    assert Place.of_this_process() == Place()


def test_a_rank_of_torchrun_knows_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in OF_TORCHRUN.items():
        monkeypatch.setenv(name, value)
    place = Place.of_this_process()
    assert (place.rank, place.size, place.local_rank, place.local_size) == (3, 4, 1, 2)
    assert not place.is_on_one_machine


def test_a_stray_world_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(TrainerError, match="WORLD_SIZE is 8 but RANK is not set: start the"):
        Place.of_this_process()


def test_a_child_of_a_rank_inherits_nothing_that_makes_it_one() -> None:
    assert without_ranks({**OF_TORCHRUN, **CHOSE, **OWN}) == OWN
    assert without_ranks({VARIABLE: "0 2 5 6 7", **CHOSE, **OWN}) == OWN


def test_a_child_keeps_what_the_user_has_set() -> None:
    mine = {**OWN, "MASTER_ADDR": "10.0.0.1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    assert without_ranks(mine) == mine
    mine = {"OMP_NUM_THREADS": "4", "GLOO_SOCKET_IFNAME": "eth0"}
    assert without_ranks({**OF_TORCHRUN, **OWN, **mine}) == {**OWN, **mine}


def test_the_port_where_ranks_meet_is_not_the_bridges() -> None:
    flags = ["--model-name", "m", "--weight-bridge-mode", "shared_vllm", "--use-shared-memory"]

    def port(environ: dict[str, str]) -> int:
        resolved, _ = resolve_config(TrainerConfig, flags, prog="grpo", env=own_environment(environ))
        return resolved.mode(Broadcast).master_port

    assert port({**os.environ, **OF_TORCHRUN}) == 0
    assert port({"MASTER_PORT": "29500"}) == 29500


def test_auto_is_one_rank_per_gpu_and_one_on_a_cpu(gpus: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert ranks_to_start(config()) == ranks_to_start(config(device="cuda")) == 2
    assert ranks_to_start(config(device="cpu")) == ranks_to_start(config(device="cuda:1")) == 0
    assert ranks_to_start(config(batch_invariant=True)) == 0
    assert ranks_to_start(config(weight_bridge_mode="shared_vllm", single_copy=True)) == 0
    assert ranks_to_start(config(trainer_ranks=1)) == 0
    monkeypatch.setattr("importlib.metadata.version", lambda package: "2.13.0+cpu")
    assert ranks_to_start(config()) == 0
    assert ranks_to_start(config(trainer_ranks=4)) == 4


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"trainer_ranks": 3}, "3 trainer ranks on this machine, but 2 visible GPUs: give as many ranks as GPUs"),
        (
            {"trainer_ranks": 4, "device": "cpu", "fsdp_size": 3},
            "--fsdp-size 3 does not divide .* one of 1, 2, 4",
        ),
        ({"trainer_ranks": 2, "device": "cuda:1"}, "--device cuda:1 is one GPU, but this trainer has 2 ranks"),
        ({"trainer_ranks": 2, "batch_invariant": True}, "--batch-invariant trains on one device"),
        (
            {"trainer_ranks": 2, "weight_bridge_mode": "shared_vllm", "single_copy": True},
            "--single-copy trains in vLLM's own memory, with one trainer rank or one per vLLM rank,",
        ),
        (
            {"trainer_ranks": 2, "device": "cpu", "optimizer": "adafactor"},
            "--optimizer adafactor updates whole tensors",
        ),
    ],
)
def test_more_ranks_than_can_be_are_refused_before_any_starts(
    gpus: list[str], settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(TrainerError, match=says):
        ranks_to_start(config(**settings))
