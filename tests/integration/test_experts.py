"""A mixture of experts on real vLLM (CPU), on one rank or split over two: two trainer ranks train it by broadcast, vLLM
reads files with experts apart, and a single copy shares stacked experts.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import MixtralConfig, Qwen3MoeConfig

from tests.integration.conftest import Server, save_tiny_model, start_server, stop_server
from tests.integration.test_bridge import PARITY, finish, start_child, sync_and_probe
from tests.integration.test_trainer_ranks import train

SIZES: dict[str, Any] = dict(
    vocab_size=512,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    initializer_range=0.1,  # wide enough that experts are chosen by their tokens, and rounding changes no choice
)


@pytest.fixture(scope="module")
def qwen3_moe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One rank, with a dense layer; vLLM pads its experts' width of 40 for its kernel."""
    more: dict[str, Any] = {"head_dim": 32}
    config = Qwen3MoeConfig(
        **SIZES,
        **more,
        intermediate_size=128,
        moe_intermediate_size=40,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        mlp_only_layers=[1],
    )
    server = start_server(save_tiny_model(tmp_path_factory.mktemp("model"), config), tmp_path_factory.mktemp("vllm"))
    yield server
    stop_server(server)


@pytest.fixture(scope="module")
def mixtral_tp2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two ranks, each with a width of 32 of each expert, which the kernel takes as it is."""
    more: dict[str, Any] = {"head_dim": 32}
    config = MixtralConfig(**SIZES, **more, intermediate_size=64, num_local_experts=8, num_experts_per_tok=2)
    model = save_tiny_model(tmp_path_factory.mktemp("model"), config)
    server = start_server(model, tmp_path_factory.mktemp("vllm"), "--tensor-parallel-size", "2")
    yield server
    stop_server(server)


def digests(server: Server) -> Any:
    return server.request("GET", "/v1/bridge/digest").json()["ranks"]


def check_training_and_files(server: Server, folder: Path) -> None:
    start = digests(server)
    status, said = train(server, folder, ["example_trainer/grpo.py"])
    assert status == 0, said[-3000:]
    assert said.count("Parity: vLLM's and the trainer's log-probabilities") == 2  # at the start, and after an update
    assert server.status()["policy_version"] == 2
    trained = digests(server)
    changed = {new["name"] for old, new in zip(start[0], trained[0], strict=True) if old != new}
    assert {
        f"model.layers.0.mlp.{name}" for name in ("gate.weight", "experts.gate_up_proj", "experts.down_proj")
    } <= changed

    for path, expected in ((server.model, start), (str(folder / "save" / "final_model"), trained)):
        assert server.request("POST", "/reload_weights", json={"path": path}).status_code == 200
        assert digests(server) == expected


@pytest.mark.rotating
@pytest.mark.timeout(600)
def test_ranks_train_experts_and_vllm_reads_the_files_that_they_write(qwen3_moe: Server, tmp_path: Path) -> None:
    check_training_and_files(qwen3_moe, tmp_path)
    assert sync_and_probe(qwen3_moe) <= PARITY


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_two_vllm_ranks_take_their_rows_of_each_expert(mixtral_tp2: Server, tmp_path: Path) -> None:
    check_training_and_files(mixtral_tp2, tmp_path)
    assert sync_and_probe(mixtral_tp2) <= PARITY


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_single_copy_trains_the_experts_that_vllm_computes_with(qwen3_moe: Server) -> None:
    code, out, err = finish(start_child(qwen3_moe, "train", child="single_child"))
    assert code == 0, err[-3000:]
    assert out.count("PARITY") == 3
    assert all(float(found.split()[0]) <= PARITY for found in out.split("PARITY ")[1:])


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_experts_in_pieces_are_refused_by_a_single_copy(mixtral_tp2: Server) -> None:
    code, _, err = finish(start_child(mixtral_tp2, "train", child="single_child"))
    assert code != 0
    assert "which single copy cannot train in pieces: start vLLM with --tensor-parallel-size 1" in err
