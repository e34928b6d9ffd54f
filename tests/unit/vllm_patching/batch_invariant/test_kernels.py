"""The shared arithmetic gives a row the same bits in every batch, and means what it says."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, MixtralConfig, Qwen3MoeConfig
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from vllm_patching.batch_invariant import coverage, hooks, kernels
from vllm_patching.batch_invariant.attention import packed_attention
from vllm_patching.batch_invariant.cuda import longest_query
from vllm_patching.batch_invariant.self_check import check_weight, packing_is_exact
from vllm_patching.batch_invariant.switch import NotInvariant, switch_on
from vllm_patching.memory import packed

ROWS = [1, 2, 3, 7, 8, 9, 16, 33, 64, 100]


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "out"), [(576, 960), (1536, 576), (96, 33)])
def test_linear_gives_a_row_the_same_bits_in_every_batch(
    threads: None, width: int, out: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(100, width).to(dtype), torch.randn(out, width).to(dtype), torch.randn(out).to(dtype)
    alone = torch.cat([kernels.linear(row[None], weight, bias) for row in x])
    for count in ROWS:
        assert torch.equal(kernels.linear(x[-count:], weight, bias), alone[-count:]), count
    assert torch.equal(kernels.linear(x, weight[: out // 3], bias[: out // 3]), alone[:, : out // 3])
    exact = x.double() @ weight.double().T + bias.double()
    assert (alone.double() - exact).norm() / exact.norm() < (1e-6 if dtype == torch.float32 else 3e-3)


@pytest.mark.services
@pytest.mark.parametrize("instructions", ["AVX512_CORE", "AVX2"])
def test_a_processor_with_fewer_instructions_is_exact_too(instructions: str) -> None:
    code = "import torch; from vllm_patching.batch_invariant.self_check import check_weight; "
    code += "[check_weight(torch.empty(out, width)) for out, width in ((960, 576), (576, 1536), (33, 96))]"
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": instructions, "ATEN_CPU_CAPABILITY": instructions[:6].lower()}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=60)


def test_a_large_weight_is_widened_in_parts_to_the_same_bits(threads: None) -> None:
    torch.manual_seed(0)
    out = 2 * kernels.WIDENED_OUTPUTS + 100
    x, weight, bias = torch.randn(3, 64).bfloat16(), torch.randn(out, 64).bfloat16(), torch.randn(out).bfloat16()
    for b in (bias, None):
        whole = kernels.linear(x.float(), weight.float(), None if b is None else b.float()).bfloat16()
        assert torch.equal(kernels.linear(x, weight, b), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "out"), [(576, 960), (1536, 576), (96, 33), (64, kernels.WIDENED_OUTPUTS + 100)])
def test_packed_weights_give_the_bits_that_the_self_check_says(
    threads: None, width: int, out: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(100, width).to(dtype), torch.randn(out, width).to(dtype), torch.randn(out).to(dtype)
    by_copy = hooks.pack(weight.clone())
    same = all(torch.equal(by_copy(x[:count], weight, bias), kernels.linear(x[:count], weight, bias)) for count in ROWS)
    assert same == packing_is_exact(weight, hooks.pack)


def test_row_parallel_linear_sums_the_ranks_shares() -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(5, 64), torch.randn(7, 64), torch.randn(7)
    first = kernels.linear(x[:, :32], weight[:, :32].contiguous(), bias)
    assert torch.equal(
        kernels.row_parallel_linear(x, weight, bias, 2), first + kernels.linear(x[:, 32:], weight[:, 32:].contiguous())
    )


@pytest.mark.parametrize("width", [7, 16, 703, 1536])
def test_silu_and_norm_do_not_depend_on_place_or_batch(threads: None, width: int) -> None:
    torch.manual_seed(0)
    x, weight = 3 * torch.randn(64, 2 * width), torch.randn(width)
    alone = torch.cat([kernels.silu(row[None]) for row in x])
    assert torch.equal(kernels.silu(x[:, 3 : 3 + width]), alone[:, 3 : 3 + width])
    assert torch.allclose(alone, F.silu(x), atol=1e-6)
    rows = x[:, :width]
    normed = torch.cat([kernels.rms_norm(row[None], weight, 1e-5) for row in rows])
    assert torch.equal(kernels.rms_norm(rows, weight, 1e-5), normed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_has_the_bits_of_transformers(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, angles = torch.randn(7, 3, 32).to(dtype), torch.randn(7, 1, 16)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    whole = [torch.cat((half, half), -1)[:, 0][None] for half in (cos, sin)]
    expected, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], *whole)
    kernels.rotate(x, cos, sin)
    assert torch.equal(x, expected[0].transpose(0, 1))


def test_rotary_table_is_the_formula() -> None:
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=2, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}
    )
    angles = torch.arange(50)[:, None] / 10000.0 ** (torch.arange(0, 32, 2) / 32)
    assert torch.allclose(kernels.rotary_table(config, 50), torch.cat((angles.cos(), angles.sin()), -1), atol=1e-5)


def test_tiles_open_and_close_at_absolute_multiples() -> None:
    # request 0: positions 5..19 (15 queries); request 1: a decode at position 30; request 2: 8..15
    starts = torch.tensor([0, 15, 16, 24], dtype=torch.int32)
    ends = torch.tensor([20, 31, 16], dtype=torch.int32)
    offsets, closes, table = kernels.tile_queries(starts, ends, torch.tensor([[0], [1], [2]]))
    assert offsets.tolist() == [0, 3, 11, 15, 16, 24]
    assert closes.tolist() == [8, 16, 20, 31, 16]
    assert table[:, 0].tolist() == [0, 0, 0, 1, 2]


@pytest.mark.parametrize("heads", [(4, 2, 32), (9, 3, 64), (2, 1, 128)])
def test_attention_of_a_sequence_does_not_depend_on_its_neighbours(heads: tuple[int, int, int]) -> None:
    query_heads, key_heads, size = heads
    torch.manual_seed(0)
    lengths = (700, 1, 33, 260)
    query, key, value = (torch.randn(sum(lengths), count, size) for count in (query_heads, key_heads, key_heads))
    packed = packed_attention(query, key, value, lengths, 0.2).split(lengths)
    pieces = zip(query.split(lengths), key.split(lengths), value.split(lengths), packed, strict=True)
    for q, k, v, found in pieces:
        assert torch.equal(packed_attention(q, k, v, (len(q),), 0.2), found)
        prefix = (len(q) + 1) // 2
        assert torch.equal(packed_attention(q[:prefix], k[:prefix], v[:prefix], (prefix,), 0.2), found[:prefix])
        q, k, v = (each.transpose(0, 1)[None] for each in (q, k, v))
        expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.2, enable_gqa=True)
        assert torch.allclose(found, expected[0].transpose(0, 1), atol=1e-5)


def test_a_machine_whose_products_depend_on_the_batch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    onednn = kernels._onednn_linear

    def rounds_large_batches_otherwise(
        rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return onednn(rows, weight, bias) * (1 + 1e-6 * (len(rows) > 16))

    monkeypatch.setattr(kernels, "_onednn_linear", rounds_large_batches_otherwise)
    with pytest.raises(
        NotInvariant,
        match=r"weight \[21, 45\] depend on the batch: 1 rows, 2 rows, .*\(oneDNN of PyTorch .*use fewer threads",
    ):
        check_weight(torch.empty(21, 45))


def test_packing_is_left_out_on_a_machine_where_it_changes_bits() -> None:
    def copied(weight: torch.Tensor) -> packed.Product:
        return lambda x, _, bias: kernels.linear(x, weight.clone(), bias)

    assert packing_is_exact(torch.empty(22, 45), copied)
    assert not packing_is_exact(torch.empty(22, 45), lambda weight: copied(weight * (1 + 1e-6)))


def test_switching_on_refuses_what_contradicts_it() -> None:
    environment: dict[str, str] = {}
    switch_on(environment, cpu=True)
    assert environment == {"ATROPOS_BATCH_INVARIANT": "1", "VLLM_CPU_ATTN_SPLIT_KV": "0"}
    with pytest.raises(NotInvariant, match="VLLM_CPU_ATTN_SPLIT_KV=1 contradicts --batch-invariant"):
        switch_on({"VLLM_CPU_ATTN_SPLIT_KV": "1"}, cpu=True)
    with pytest.raises(NotInvariant, match="unset it"):
        switch_on({"VLLM_BATCH_INVARIANT": "1"}, cpu=True)


@pytest.mark.parametrize(
    ("tokens", "head_size", "told"), [(1, 32, 2), (1, 128, 2), (1, 64, 65), (64, 64, 65), (500, 64, 500), (7, 96, 7)]
)
def test_flash_attention_never_hears_of_a_query_so_short_that_it_takes_other_tiles(
    tokens: int, head_size: int, told: int
) -> None:
    assert longest_query(tokens, head_size) == told


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("renormalize", [True, False])
def test_a_token_has_the_same_experts_shares_and_sum_alone_and_among_others(
    dtype: torch.dtype, renormalize: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(33, 64, generator=generator).to(dtype)
    gate = (torch.randn(8, 64, generator=generator) / 4).to(dtype)
    w13 = (torch.randn(8, 2 * 48, 64, generator=generator) / 8).to(dtype)
    w2 = (torch.randn(8, 64, 48, generator=generator) / 8).to(dtype)

    def computed(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shares, chosen = kernels.route(kernels.linear(rows, gate), 3, renormalize)
        return shares, chosen, kernels.experts(rows, w13, w2, shares, chosen)

    together = computed(x)
    for count in (1, 2, 7, 16):
        for whole, part in zip(together, computed(x[:count]), strict=True):
            assert torch.equal(whole[:count], part), count
    for whole, part in zip(together, computed(x.flip(0)), strict=True):
        assert torch.equal(whole.flip(0), part)
    shares, chosen, output = together
    if renormalize:
        assert torch.allclose(shares.sum(-1), torch.ones(33))
    wide, inner, down = x.double(), w13.double(), w2.double()
    each = torch.stack(
        [
            (F.silu(wide @ inner[expert, :48].t()) * (wide @ inner[expert, 48:].t())) @ down[expert].t()
            for expert in range(8)
        ]
    )  # [experts, tokens, width]
    expected = (torch.zeros(33, 8).scatter(1, chosen, shares).t()[..., None] * each).sum(0)
    assert torch.allclose(output.double(), expected, atol=0.05 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_of_experts_compute_parts_that_add_up(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(9, 64, generator=generator).to(dtype)
    w13 = (torch.randn(4, 2 * 48, 64, generator=generator) / 8).to(dtype)
    w2 = (torch.randn(4, 64, 48, generator=generator) / 8).to(dtype)
    shares, chosen = kernels.route(torch.randn(9, 4, generator=generator), 2, True)
    of_ranks = [  # as vLLM holds them: each rank's rows of gate and up, its columns of down
        kernels.experts(
            x,
            torch.cat([w13[:, own], w13[:, 48 + own.start : 48 + own.stop]], 1),
            w2[:, :, own].contiguous(),
            shares,
            chosen,
        )
        for own in (slice(0, 24), slice(24, 48))
    ]
    assert torch.equal(kernels.experts(x, w13, w2, shares, chosen, ranks=2), of_ranks[0] + of_ranks[1])


def test_experts_are_covered_on_a_cpu_and_refused_by_name_on_a_gpu() -> None:
    config = Qwen3MoeConfig()
    assert coverage.why_not_exact(config, tp_size=2) is None
    refused = "model type 'qwen3_moe'; covered on cuda are llama, qwen2, qwen3"
    assert coverage.why_not_exact(config, device="cuda") == refused
    assert "covered on cpu" in (coverage.why_not_exact(MixtralConfig()) or "")
