"""Layers of a pass on CPUs. RMSNorm: the C++ kernels give what operations of torch give, which compute what the kernels
do not cover. Attention: called directly.
"""

from typing import Any

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.layernorm import RMSNorm

from vllm_patching.compat import vllm_kernels, vllm_layers

pytestmark = pytest.mark.services  # vLLM asks the machine for its cores

WIDTH = 192


@pytest.fixture(autouse=True)
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RMSNorm, "forward_cpu", RMSNorm.forward_cpu)
    vllm_kernels.fuse_norm()


def layer(width: int = WIDTH, **settings: Any) -> RMSNorm:
    with set_current_vllm_config(VllmConfig()):
        norm = RMSNorm(width, eps=1e-5, **settings)
    torch.nn.init.uniform_(norm.weight)
    return norm


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, WIDTH), (3, 4, WIDTH)])
def test_the_kernels_give_what_torch_gives(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    norm = layer(dtype=dtype)
    near: dict[str, Any] = {"rtol": 1e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
    x, residual = rows(*shape, dtype=dtype), rows(*shape, dtype=dtype).flip(0)
    torch.testing.assert_close(norm.forward_cpu(x), norm.forward_native(x), **near)
    expected = norm.forward_native(x.clone(), residual.clone())
    torch.testing.assert_close(norm.forward_cpu(x.clone(), residual.clone()), expected, **near)


def test_queries_that_lie_beside_keys_are_normed_as_if_they_lay_alone() -> None:
    norm = layer(64)
    heads = rows(6, 320)[:, 64:256].unflatten(1, (3, 64))
    torch.testing.assert_close(norm.forward_cpu(heads), norm.forward_native(heads))


@pytest.mark.parametrize(
    "settings", [{"width": 72}, {"var_hidden_size": 64}, {"dtype": torch.bfloat16}], ids=lambda each: next(iter(each))
)
def test_what_the_kernels_do_not_cover_is_computed_by_torch(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    norm = layer(**settings)
    x = rows(4, norm.weight.shape[0])
    expected = norm.forward_native(x)
    monkeypatch.setattr(torch.ops._C, "rms_norm", None)
    torch.testing.assert_close(norm.forward_cpu(x), expected)


def test_attention_of_an_eager_model_is_called_directly() -> None:
    attention, other = torch.nn.Identity(), torch.nn.Identity()
    vars(attention)["use_direct_call"] = False
    vllm_layers.call_attention_directly(torch.nn.Sequential(torch.nn.Sequential(attention), other))
    assert bool(attention.use_direct_call)
    assert not hasattr(other, "use_direct_call")
