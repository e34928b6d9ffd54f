"""One trainer rank for each of vLLM's, over its memory: one process's trajectory, and nothing leaves that memory."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from example_trainer.model.loading import ModelError
from example_trainer.weights.by_rank import expect_device
from tests.unit.trainer.fakes import model_folder
from tests.unit.trainer.model.test_tensor_parallel import expect_agreement
from tests.unit.trainer.rank_runs import Job, Runs, largest_difference, running_jobs

pytestmark = [pytest.mark.services, pytest.mark.slow, pytest.mark.timeout(600)]

FAMILIES = {"llama": True, "qwen2": False, "qwen3": True}  # whether head and embedding are tied
ONE_HEAD = [f"one head {family}" for family in FAMILIES]  # which both of vLLM's ranks hold
SINGLE: dict[str, Any] = {"tp_size": 2, "weight_bridge_mode": "shared_vllm", "single_copy": True}
STEPS = {"llama": 6, "qwen2": 6, "qwen3": 20} | dict.fromkeys(ONE_HEAD, 6)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    folder = tmp_path_factory.mktemp("single")
    plain = {"micro_batch_tokens": 20, "dual_clip": 0, "share_prefixes": False}

    def model(name: str, family: str, tied: bool, **changes: Any) -> str:
        changes = {"vocab_size": 128, "initializer_range": 0.1} | changes
        return model_folder(folder / "models" / name, family=family, tie_word_embeddings=tied, **changes)

    jobs = {}
    for name in STEPS:
        family = name.split()[-1]
        tied, changes = FAMILIES[family], {"num_key_value_heads": 1} if name in ONE_HEAD else {}
        own, other = (model(f"{name} {seed}", family, tied, seed=seed, **changes) for seed in (0, 1))
        more = {"chunk_rows": 5, "arenas": other}
        jobs[f"{name} one"] = Job(own, 1, STEPS[name], plain, {"chunk_rows": 5})
        jobs[f"{name} two"] = Job(own, 2, STEPS[name], plain | SINGLE, more)
    padded = model("padded", "llama", True, vocab_size=100)
    jobs["fails alone"] = Job(own, 2, 0, plain | SINGLE, {"fails_alone": True, "shown": False})
    jobs["padded"] = Job(padded, 2, 1, plain | SINGLE, {"arenas": padded, "shown": False})
    with running_jobs(jobs, folder) as runs:
        yield runs


@pytest.mark.rotating
@pytest.mark.parametrize("name", STEPS)
def test_ranks_over_vllms_memory_agree_with_one_process(done: Runs, name: str) -> None:
    expect_agreement(done[f"{name} one"], done[f"{name} two"])


@pytest.mark.rotating
@pytest.mark.parametrize("name", STEPS)
def test_every_parameter_stays_in_vllms_memory_which_holds_what_was_trained(done: Runs, name: str) -> None:
    two = done[f"{name} two"]
    inside, count = two.results["inside"]
    assert inside == count == len(two.tensors())
    assert largest_difference(two.tensors("served.safetensors"), two.tensors()) == 0
    assert largest_difference(two.tensors("served.safetensors"), two.tensors("start/model.safetensors")) > 1e-3


def test_an_update_that_fails_on_rank_0_alone_before_its_first_write_is_never_served(done: Runs) -> None:
    """The other rank has made it, so vLLM's ranks hold different versions: it is left while paused, and refuses."""
    told = json.loads((done["fails alone"].folder / "told.json").read_text())
    assert told == [["pause", 0], ["resume", 0], ["pause", 1], ["close"]]


@pytest.mark.parametrize(
    ("trainer", "remedy"),
    [
        ("cpu", "give the trainer --device cuda"),
        ("cuda:1", "give both the same GPUs in CUDA_VISIBLE_DEVICES, in the same order"),
    ],
)
def test_another_device_than_vllms_is_refused_with_the_remedy(trainer: str, remedy: str) -> None:
    with pytest.raises(ModelError, match=f"^vLLM's rank 0 is on cuda:0, and trainer rank 0 on {trainer}: {remedy}$"):
        expect_device(0, torch.device("cuda:0"), torch.device(trainer))
    expect_device(0, torch.device("cuda:0"), torch.device("cuda", 0))


def test_a_vocabulary_that_vllm_pads_is_refused_with_the_remedy(done: Runs) -> None:
    assert (
        "model.embed_tokens.weight [100, 32], from 0 on; the trainer's rank would hold [50, 32]" in done["padded"].error
    )
    assert "train with one process (--tp-size 1)" in done["padded"].error
