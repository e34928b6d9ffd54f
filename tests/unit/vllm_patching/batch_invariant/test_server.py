"""What a batch-invariant vLLM server is told, refuses and computes otherwise, on its own classes: on CUDA without a
GPU, and with AMX.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding, RotaryEmbeddingBase
from vllm.model_executor.layers.rotary_embedding.linear_scaling_rope import LinearScalingRotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.yarn_scaling_rope import YaRNScalingRotaryEmbedding
from vllm.v1.attention.backends import cpu_attn

from example_trainer.vllm_api_server import _with_defaults
from vllm_patching.batch_invariant import kernels, switch
from vllm_patching.batch_invariant.attention import BLOCK
from vllm_patching.compat import vllm_kernels


def test_the_launcher_chooses_what_the_trainer_can_match(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATROPOS_BATCH_INVARIANT", "1")
    words = " ".join(_with_defaults(["--model", "m"], cpu=False))
    assert f"--dtype bfloat16 --block-size {BLOCK} --attention-backend FLASH_ATTN --enforce-eager" in words
    monkeypatch.delenv("ATROPOS_BATCH_INVARIANT")
    assert "--block-size" not in _with_defaults(["--model", "m"], cpu=False)


def configuration(**changes: Any) -> Any:
    settings = {
        "dtype": torch.bfloat16,
        "backend": "FLASH_ATTN",
        "version": None,
        "mode": 0,
        "block_size": BLOCK,
        "cascade": False,
        "v2": False,
    } | changes
    return SimpleNamespace(
        model_config=SimpleNamespace(dtype=settings["dtype"], disable_cascade_attn=not settings["cascade"]),
        attention_config=SimpleNamespace(
            backend=SimpleNamespace(name=settings["backend"]), flash_attn_version=settings["version"]
        ),
        compilation_config=SimpleNamespace(mode=settings["mode"]),
        cache_config=SimpleNamespace(block_size=settings["block_size"]),
        use_v2_model_runner=settings["v2"],
    )


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"dtype": torch.float32}, "--dtype torch.float32 on CUDA: give bfloat16"),
        ({"backend": "FLASHINFER"}, "--attention-backend FLASHINFER on CUDA: give FLASH_ATTN"),
        ({"version": 2}, "FlashAttention 2 by hand"),
        ({"mode": 3}, "torch.compile: give --enforce-eager"),
        ({"block_size": 16}, f"--block-size 16 on CUDA: give {BLOCK}"),
        ({"cascade": True}, "cascade attention"),
        ({"v2": True}, "vLLM's second model runner on CUDA: set VLLM_USE_V2_MODEL_RUNNER=0"),
        ({}, None),
    ],
)
def test_settings_that_the_trainer_cannot_match_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], refused: str | None
) -> None:
    monkeypatch.setattr(vllm_kernels, "current_platform", SimpleNamespace(is_cuda=lambda: True))
    assert vllm_kernels.why_not_exact_on_cuda(configuration(**changes), BLOCK) == refused
    monkeypatch.setattr(vllm_kernels, "current_platform", SimpleNamespace(is_cuda=lambda: False))
    assert vllm_kernels.why_not_exact_on_cuda(configuration(**changes), BLOCK) == "GPUs that are not NVIDIA's"


@pytest.mark.parametrize("apart", [False, True])
def test_query_and_key_are_rotated_wherever_they_lie(monkeypatch: pytest.MonkeyPatch, apart: bool) -> None:
    for rotary in (RotaryEmbeddingBase, LinearScalingRotaryEmbedding, YaRNScalingRotaryEmbedding):
        monkeypatch.setattr(rotary, "_compute_cos_sin_cache", rotary._compute_cos_sin_cache)
    monkeypatch.setattr(RotaryEmbedding, "forward_cpu", RotaryEmbedding.forward_cpu)
    vllm_kernels.replace_rotary(kernels.rotary_table, kernels.rotate)
    torch.manual_seed(0)
    product, table, positions = (
        torch.randn(5, 4 * 64 + 2 * 64 + 2 * 64),
        torch.randn(100, 64),
        torch.tensor([3, 0, 99, 4, 4]),
    )
    query, key, value = product.split([256, 128, 128], -1)
    expected = [x.reshape(5, -1, 64).clone() for x in (query, key)]
    for x in expected:
        kernels.rotate(x, *table[positions][:, None].chunk(2, -1))
    before = value.clone()
    if apart:
        query, key = query.clone(), key.clone()
    module = SimpleNamespace(cos_sin_cache=table, head_size=64)
    rotated = RotaryEmbedding.forward_cpu(module, positions, query, key)  # type: ignore[arg-type]
    assert all(x is not None and torch.equal(x.view(5, -1, 64), y) for x, y in zip(rotated, expected, strict=True))
    assert torch.equal(value, before)


def test_the_residual_is_added_and_rounded_before_the_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        RMSNorm, "forward_cuda", lambda self, x, residual=None: ("norm", x) if residual is None else "fused"
    )
    vllm_kernels.add_before_norm()
    x, residual = torch.randn(2, 3, 8, dtype=torch.bfloat16)
    (name, normed), total = RMSNorm.forward_cuda(None, x, residual)  # type: ignore[arg-type]
    assert name == "norm"
    assert torch.equal(normed, x + residual)
    assert torch.equal(total, x + residual)
    assert RMSNorm.forward_cuda(None, x) == ("norm", x)  # type: ignore[arg-type]


def test_a_process_is_batch_invariant_whole_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in {**switch.CPU_VARIABLES, **switch.CUDA_VARIABLES}:
        monkeypatch.delenv(name, raising=False)
    assert not switch.is_on()
    for variables in (switch.CPU_VARIABLES, switch.CUDA_VARIABLES):
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            assert switch.is_on()
            patch.delenv(list(variables)[-1])
            with pytest.raises(switch.NotInvariant, match="--batch-invariant, which sets all of them"):
                switch.is_on()


def test_half_precision_attention_on_cpus_takes_the_vector_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        cpu_attn,
        "_get_attn_isa",
        lambda dtype, block_size, head_size=None: "amx" if dtype == torch.bfloat16 else "vec16",
    )
    vllm_kernels.attend_without_amx()
    assert cpu_attn._get_attn_isa(torch.bfloat16, 32, 64) == "vec"
    assert cpu_attn._get_attn_isa(torch.float32, 32, head_size=48) == "vec16"
