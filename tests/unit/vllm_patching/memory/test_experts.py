"""A mixture of experts: which part each rank has, against vLLM's own loaders; and products with packed experts."""

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from tests.unit.vllm_patching.memory.test_mapping import received
from vllm_patching.compat import vllm_layers
from vllm_patching.memory import mapping, packed
from vllm_patching.memory.arena import Arena
from vllm_patching.memory.derived import refusing_derived

EXPERTS, HIDDEN, WIDTH = 4, 64, 24


def routed_experts(tp: int, rank: int = 0, backend: str = "CPU", **parallel: Any) -> Any:
    """vLLM's layer of experts as one rank has it, made without its configuration."""
    layer: Any = vllm_layers.RoutedExperts.__new__(vllm_layers.RoutedExperts)
    nn.Module.__init__(layer)
    for name, shape in {"w13": (EXPERTS, 2 * WIDTH // tp, HIDDEN), "w2": (EXPERTS, HIDDEN, WIDTH // tp)}.items():
        setattr(layer, f"{name}_weight", nn.Parameter(torch.zeros(shape), requires_grad=False))
    ranks = SimpleNamespace(tp_size=tp, tp_rank=rank, use_ep=False, enable_eplb=False)
    ranks.__dict__.update(parallel)
    layer.moe_config = SimpleNamespace(moe_parallel_config=ranks, is_act_and_mul=True, tp_rank=rank, tp_size=tp)
    layer.quant_method = vllm_layers.UnquantizedFusedMoEMethod.__new__(vllm_layers.UnquantizedFusedMoEMethod)
    nn.Module.__init__(layer.quant_method)
    layer.quant_method.unquantized_backend = SimpleNamespace(name=backend)
    layer.activation = SimpleNamespace(name="SILU", value="silu")
    layer.apply_router_weight_on_input = False
    return layer


class Model(nn.Module):
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {}

    def __init__(self, experts: nn.Module, block: str = "mlp") -> None:
        super().__init__()
        self.model = nn.Module()
        setattr(self.model, block, nn.Module())
        layer: Any = getattr(self.model, block)
        layer.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        layer.experts = nn.Module()
        layer.experts.routed_experts = experts


def load(layer: Any, rank: int, gate_up: Tensor, down: Tensor) -> None:
    """Put Hugging Face tensors where vLLM's own loaders put them."""
    for expert in range(EXPERTS):
        gate, up = gate_up[expert].chunk(2)
        layer._load_w13(layer.w13_weight.data[expert], 0, "w1", gate, rank)
        layer._load_w13(layer.w13_weight.data[expert], 0, "w3", up, rank)
        layer._load_w2(layer.w2_weight.data[expert], 1, down[expert], rank)


@pytest.mark.parametrize("block", ["mlp", "block_sparse_moe"])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_broadcast_leaves_every_rank_with_what_vllm_would_have_loaded(tp: int, block: str) -> None:
    torch.manual_seed(0)
    weights = {
        "model.mlp.gate.weight": torch.randn(EXPERTS, HIDDEN),
        "model.mlp.experts.gate_up_proj": torch.randn(EXPERTS, 2 * WIDTH, HIDDEN),
        "model.mlp.experts.down_proj": torch.randn(EXPERTS, HIDDEN, WIDTH),
    }
    _, gate_up, down = weights.values()
    manifests = []
    for rank in range(tp):
        model, expected = Model(routed_experts(tp, rank), block), routed_experts(tp, rank)
        load(expected, rank, gate_up, down)
        shards = mapping.shards_of(model, rank, tp)
        manifests.append(mapping.manifest_of(model, "m", shards, tp))
        assert {tensor.name: tensor.shape for tensor in manifests[-1].tensors} == {
            name: tuple(tensor.shape) for name, tensor in weights.items()
        }
        arena = Arena(model, manifests[-1], shards)
        assert not arena.padded
        arena.commit(received(arena, weights))
        served = getattr(model.model, block)
        assert torch.equal(served.gate.weight, weights["model.mlp.gate.weight"])
        for (name, live), (_, wanted) in zip(
            served.experts.routed_experts.named_parameters(), expected.named_parameters(), strict=True
        ):
            assert torch.equal(live, wanted), name
    assert all(manifest == manifests[0] for manifest in manifests)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"use_ep": True}, "start vLLM without --enable-expert-parallel"),
        ({"backend": "FLASHINFER_CUTLASS"}, "FLASHINFER_CUTLASS kernels .*start vLLM with --moe-backend triton"),
        ({"backend": "FLASHINFER_TRTLLM"}, "FLASHINFER_TRTLLM kernels .*start vLLM with --moe-backend triton"),
    ],
)
def test_experts_that_are_not_as_in_hugging_face_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(
        mapping.UnsupportedModel, match=rf"Model: model.mlp.experts.routed_experts holds experts .*{says}"
    ):
        mapping.shards_of(Model(routed_experts(1, **changes)), 0, 1)


def test_the_refusal_comes_before_vllm_rewrites_the_experts() -> None:
    model = Model(routed_experts(1, backend="FLASHINFER_CUTLASS"))
    with pytest.raises(mapping.UnsupportedModel, match="--moe-backend triton"), refusing_derived(model):
        pytest.fail("vLLM has begun to process them")


def test_triton_s_experts_are_as_in_hugging_face() -> None:
    assert mapping.shards_of(Model(routed_experts(1, backend="TRITON")), 0, 1)


# --- products ---------------------------------------------------------------------------------------------------------


def inputs(width: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """x, w13, w2, shares and chosen of 10 tokens, two experts each."""
    torch.manual_seed(0)
    x = torch.randn(10, HIDDEN, dtype=dtype)
    w13 = torch.randn(EXPERTS, 2 * width, HIDDEN, dtype=dtype) / 8
    w2 = torch.randn(EXPERTS, HIDDEN, width, dtype=dtype) / 8
    shares, chosen = torch.rand(10, EXPERTS).softmax(-1).topk(2)
    return x, w13, w2, shares, chosen.int()


def test_the_plain_product_is_transformers_own() -> None:
    x, w13, w2, shares, chosen = inputs(WIDTH)
    config = Qwen3MoeConfig(num_experts=EXPERTS, hidden_size=HIDDEN, moe_intermediate_size=WIDTH)
    experts = Qwen3MoeExperts(config)
    experts.gate_up_proj.data, experts.down_proj.data = w13, w2
    expected = experts(x, chosen.long(), shares)
    assert torch.allclose(packed.plain_experts(x, w13, w2, shares, chosen), expected, atol=1e-6)


@pytest.mark.parametrize("width", [64, 24], ids=["as the kernel has it", "padded for the kernel"])
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
def test_packed_experts_are_packed_again_and_the_parameters_stay_plain(
    monkeypatch: pytest.MonkeyPatch, width: int, dtype: torch.dtype, atol: float
) -> None:
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    kernels: Any = CPUUnquantizedExperts
    for name in ("process_weights_after_loading", "apply"):  # as they were, after the test
        monkeypatch.setattr(kernels, name, getattr(kernels, name))
    vllm_layers.keep_plain_experts()
    vllm_layers.keep_plain_experts()  # vLLM may load several models
    kernel = kernels.__new__(kernels)
    kernel._use_zentorch = False
    kernel.moe_config = SimpleNamespace(intermediate_size_per_partition=width, activation=MoEActivation.SILU)
    kernel.quant_config = SimpleNamespace(w1_bias=None, w2_bias=None)
    x, w13, w2, shares, chosen = inputs(width, dtype)
    layer = SimpleNamespace(w13_weight=w13.clone(), w2_weight=w2.clone())
    kernel.process_weights_after_loading(layer)
    assert torch.equal(layer.w13_weight, w13)
    assert torch.equal(layer.w2_weight, w2)

    def multiplied() -> Tensor:
        found = torch.full_like(x, torch.nan)
        kernel.apply(
            output=found,
            hidden_states=x,
            w1=w13,
            w2=w2,
            topk_weights=shares,
            topk_ids=chosen,
            activation=MoEActivation.SILU,
            global_num_experts=EXPERTS,
            expert_map=None,
            a1q_scale=None,
            a2_scale=None,
            workspace13=None,
            workspace2=None,
            expert_tokens_meta=None,
            apply_router_weight_on_input=False,
        )
        return found

    packed.hold_once(False)
    before = multiplied()
    assert torch.allclose(before, packed.plain_experts(x, w13, w2, shares, chosen), atol=atol)
    w13.mul_(-1)
    assert torch.equal(multiplied(), before)  # so it was the copy that was multiplied
    packed.forget()
    after = multiplied()
    assert not torch.allclose(after, before, atol=atol)
    assert torch.allclose(after, packed.plain_experts(x, w13, w2, shares, chosen), atol=atol)
    packed.hold_once(True)
    assert torch.equal(multiplied(), packed.plain_experts(x, w13, w2, shares, chosen))
    packed.hold_once(False)
