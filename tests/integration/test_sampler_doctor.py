"""The sampler doctor on real vLLM servers: a stock one with an adapter, and ours before and after an update."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from atroposlib.testing.tiny_tokenizer import save_tiny_tokenizer
from sampler_doctor.report import Row
from sampler_doctor.rows.catalogue import CHECKS, LORA, STALE
from sampler_doctor.run import Doctor
from sampler_doctor.settings import SamplerConfig
from tests.integration.conftest import API_KEY, SHAPE, Server, save_tiny_model, start_server, stop_server
from tests.unit.sampler_doctor.tiny import save_adapter

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1500)]

ADAPTER = "tuned"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, large enough that distributions are not flat."""
    config = LlamaConfig(**SHAPE | {"vocab_size": 258}, tie_word_embeddings=False, initializer_range=0.1)
    return save_tiny_model(tmp_path_factory.mktemp("doctor") / "model", config)


@pytest.fixture(scope="module")
def other(model: Path) -> Path:
    """The same with noise."""
    folder = model.with_name("other")
    changed = AutoModelForCausalLM.from_pretrained(model)
    torch.manual_seed(1)
    with torch.no_grad():
        for weights in changed.parameters():
            weights.add_(0.03 * torch.randn_like(weights))
    changed.save_pretrained(folder)
    return save_tiny_tokenizer(folder)


@pytest.fixture(scope="module")
def adapter(model: Path) -> Path:
    return save_adapter(model.with_name("adapter"), model)


@pytest.fixture(scope="module")
def stock(model: Path, adapter: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    lora = ["--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"{ADAPTER}={adapter}"]
    flags = [*lora, "--enforce-eager", "--dtype", "float32"]  # by itself it computes in bfloat16, whatever is saved
    server = start_server(model, tmp_path_factory.mktemp("stock"), *flags, stock=True)
    yield server
    stop_server(server)


@pytest.fixture(scope="module")
def ours(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = start_server(model, tmp_path_factory.mktemp("ours"))
    yield server
    stop_server(server)


def rows_of(server: Server, **fields: object) -> list[Row]:
    given = {"sampler": server.url, "model": server.model, "api_key": API_KEY, "sampler_dtype": "float32"}
    return list(Doctor(SamplerConfig.model_validate(given | fields)).rows())


def of_result(result: str, rows: list[Row]) -> list[str]:
    return [f"{row.name}: {row.figure} (limit {row.limit})" for row in rows if row.result == result]


def test_no_row_fails_on_a_stock_server_with_an_adapter(stock: Server, adapter: Path) -> None:
    rows = rows_of(stock, adapter=f"{ADAPTER}={adapter}")
    assert of_result("fails", rows) == []
    assert of_result("not offered", rows) == []
    assert {row.name: row.result for row in rows}[LORA] == "ok"
    assert len(of_result("ok", rows)) == len(CHECKS)  # with LoRA, and without `double BOS`: this tokenizer has no BOS


def test_an_adapter_that_is_not_the_served_one_is_found(stock: Server, model: Path) -> None:
    wrong = save_adapter(model.with_name("wrong"), model, alpha=24)
    (row,) = rows_of(stock, adapter=f"{ADAPTER}={wrong}", rows=(LORA,))
    assert row.result == "fails"


def test_an_update_that_did_not_happen_is_found(ours: Server, other: Path) -> None:
    before, after = rows_of(ours, update=str(other), after="true", rows=("distribution",))
    assert (before.result, after.result) == ("ok", "fails")


def test_no_row_fails_on_our_server_before_and_after_an_update(ours: Server, other: Path) -> None:
    rows = rows_of(ours, update=str(other))
    assert of_result("fails", rows) == []
    assert [(row.name, row.after) for row in rows if row.name == STALE] == [(STALE, "/reload_weights")]
    for after in ("", "/reload_weights"):
        found = {row.name: row.result for row in rows if row.after == after}
        assert found["distribution"] == found["decode"] == found["batch"] == found["sampling"] == "ok"
    assert {row.result for row in rows if row.name == STALE} == {"ok"}
