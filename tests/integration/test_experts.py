"""A mixture of experts on real vLLM (CPU): two trainer ranks train it by broadcast, and vLLM reads files with experts
apart.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3MoeConfig

from tests.integration.conftest import Server, save_tiny_model, start_server, stop_server
from tests.integration.test_bridge import PARITY, sync_and_probe
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


def digests(server: Server) -> Any:
    return server.request("GET", "/v1/bridge/digest").json()["ranks"]


@pytest.mark.timeout(600)
def test_ranks_train_experts_and_vllm_reads_the_files_that_they_write(qwen3_moe: Server, tmp_path: Path) -> None:
    start = digests(qwen3_moe)
    status, said = train(qwen3_moe, tmp_path, ["example_trainer/grpo.py"])
    assert status == 0, said[-3000:]
    assert said.count("Parity: vLLM's and the trainer's log-probabilities") == 2  # at the start, and after an update
    assert qwen3_moe.status()["policy_version"] == 2
    trained = digests(qwen3_moe)
    changed = {new["name"] for old, new in zip(start[0], trained[0], strict=True) if old != new}
    assert {
        f"model.layers.0.mlp.{name}" for name in ("gate.weight", "experts.gate_up_proj", "experts.down_proj")
    } <= changed

    for path, expected in ((qwen3_moe.model, start), (str(tmp_path / "save" / "final_model"), trained)):
        assert qwen3_moe.request("POST", "/reload_weights", json={"path": path}).status_code == 200
        assert digests(qwen3_moe) == expected
    assert sync_and_probe(qwen3_moe) <= PARITY
