"""The memory table: what is shared, what is private, and the refusal with figures."""

import pytest
import torch

from example_trainer.config import TrainerConfig
from example_trainer.errors import TrainerError
from example_trainer.memory import check_memory, memory_table, needs
from example_trainer.modes import SingleCopy

CPU = torch.device("cpu")


def private_bytes(dtype: torch.dtype, **flags: object) -> int:
    """Per weight, for a million of them, logits apart."""
    config = TrainerConfig(model_name="m", logits_chunk_mb=1, **flags)  # type: ignore[arg-type]
    weights = [torch.empty(1_000_000, dtype=dtype, device="meta")]
    lines = needs(weights, config, reference=config.kl_coef > 0)
    return sum(line.nbytes for line in lines if not line.shared and not line.what.startswith("logits")) // 1_000_000


def test_bytes_a_weight() -> None:
    assert private_bytes(torch.float32) == 4 + 8
    assert private_bytes(torch.bfloat16) == 4 + 4 + 8
    assert private_bytes(torch.bfloat16, bridge=SingleCopy(bf16_update="stochastic")) == 2 + 8
    assert private_bytes(torch.float32, optimizer="adafactor") == 4
    assert private_bytes(torch.float32, kl_coef=0.1) == 4 + 8 + 4


def test_table_tells_shared_from_private_and_what_does_not_fit_is_refused() -> None:
    config = TrainerConfig(model_name="m", logits_chunk_mb=1)
    lines = needs([torch.empty(1_000_000, device="meta")], config, reference=False)
    table = memory_table(lines, CPU, 20_000_000)
    assert "vLLM's own" in table
    assert "4.0 MB  shared" in table
    assert "of 20 MB free" in table
    check_memory(lines, CPU, 20_000_000)
    with pytest.raises(TrainerError, match=r"needs 15 MB on cpu .* 10 MB are free \(6 MB too little\)"):
        check_memory(lines, CPU, 10_000_000)
