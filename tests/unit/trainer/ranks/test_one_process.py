"""One process in float32 trains as it did before there were several ranks: bit for bit where the recorded machine's
kernels run, and up to the rounding of float32 elsewhere.
"""

import hashlib
import platform
from pathlib import Path
from typing import Any

import pytest
import torch

from example_trainer import grpo
from example_trainer.model.cpu_kernels import processor
from tests.unit.trainer.fakes import FakeApi, RecordingBridge, item, model_folder, serve
from tests.unit.trainer.whole_runs import config, rows, weights

# loss and gradient norm of each step, and the digest of the weights after them, by commit 18bf317 (oneDNN: 0501767)
GOLDEN: dict[str, tuple[dict[str, Any], list[tuple[str, str]], str]] = {
    "llama": (
        {},
        [
            ("0x1.75d4de304d487p-2", "0x1.f80c2a0000000p+0"),
            ("0x1.f35bbcf3cf3cfp-3", "0x1.5e708e0000000p+0"),
            ("0x1.2639d1dc47712p-1", "0x1.a4ebfe0000000p+1"),
        ],
        "8655b142af38600e",
    ),
    "llama with shared prefixes": (
        {"share_prefixes": True},
        [
            ("0x1.75d4de304d487p-2", "0x1.f80c2a0000000p+0"),
            ("0x1.f35bc00000000p-3", "0x1.5e708a0000000p+0"),
            ("0x1.2639d4d653595p-1", "0x1.a4ec000000000p+1"),
        ],
        "f51f5686193e5666",
    ),
    "llama by oneDNN": (
        {"kernels": "onednn"},
        [
            ("0x1.8b66a1cfb2b79p+1", "0x1.0eafc40000000p+7"),
            ("0x1.c2f7bcf3cf3cfp-3", "0x1.28db0c0000000p+2"),
            ("0x1.1df6e9aca6b2ap-1", "0x1.531cd20000000p+4"),
        ],
        "9b4661932b281132",
    ),
    "qwen3": (
        {"kl_coef": 0.05, "entropy_coef": 0.01},
        [
            ("0x1.68eb21cfb2b79p-2", "0x1.667f7c0000000p+1"),
            ("0x1.620dc92492492p-3", "0x1.611a780000000p+0"),
            ("0x1.ea305f417d05fp-2", "0x1.edd2da0000000p+1"),
        ],
        "9dc945ee047d1e00",
    ),
}
RECORDED = ("AVX512", "2.13.0+cpu", "AMD EPYC")
SIZES = {"llama by oneDNN": {"hidden_size": 256, "intermediate_size": 704}}  # else both kernels round alike
ONEDNN = "26 2 AMD EPYC 1"  # whose caches oneDNN divides its products by, too


def kernels() -> tuple[str, str, str]:
    """What float32 sums depend on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if platform.system() == "Linux" else []
    model = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "")
    return torch.backends.cpu.get_cpu_capability(), torch.__version__, model.strip()


@pytest.mark.parametrize("name", GOLDEN)
def test_one_process_trains_as_it_always_did(name: str, tmp_path: Path) -> None:
    settings, steps, digest = GOLDEN[name]
    family = name.split()[0]
    model = model_folder(
        tmp_path / "model", family=family, tie_word_embeddings=True, initializer_range=0.1, **SIZES.get(name, {})
    )
    api = FakeApi(
        lambda n: [item([1.0, 0.0, 0.0, 1.0], seed=10 * n), item([0.0, 2.0, 0.5], seed=10 * n + 1, longest=20)]
    )
    threads = torch.get_num_threads()
    try:
        with serve(api) as url:
            run: dict[str, Any] = dict(weight_bridge_mode="none", device="cpu", threads=1, kernels="torch")
            run |= dict(training_steps=3, batch_size=7, micro_batch_tokens=40, lr=1e-3, warmup_steps=0)
            run |= dict(dual_clip=0)  # these random log-probabilities have ratios beyond any bound
            run |= dict(logits_chunk_mb=1, share_prefixes=False)
            grpo.run(config(model, tmp_path, url, **run | settings), RecordingBridge())
    finally:
        torch.set_num_threads(threads)
    found = [(row["loss"], row["grad_norm"]) for row in rows(tmp_path)]
    golden = [(float.fromhex(loss), float.fromhex(norm)) for loss, norm in steps]
    assert found == [pytest.approx(pair, rel=1e-4) for pair in golden]
    if kernels() == RECORDED and ("oneDNN" not in name or processor() == ONEDNN):
        assert found == golden
        trained = weights(tmp_path / "checkpoints" / "final_model")
        content = b"".join(trained[name].numpy().tobytes() for name in sorted(trained))
        assert hashlib.sha256(content).hexdigest()[:16] == digest
