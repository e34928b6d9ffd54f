"""The CUDA side of the exact trainer without a GPU: plain torch functions stand where vLLM's kernels do.

Shown is the arithmetic around the kernels: what they are given, in which order, and each backward pass. That their
bits are vLLM's is for scripts/gpu_check.sh, on a GPU.
"""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from packaging.version import Version
from torch import Tensor
from transformers import PreTrainedModel

from example_trainer.data.batching import make_batch
from example_trainer.data.packing import MicroBatch, micro_batches
from example_trainer.exact import check, cuda
from example_trainer.exact import model as exact_model
from example_trainer.exact.functions import Kernel, PackedAttention
from example_trainer.model.policy import Policy, accumulate_gradients, token_logprobs, trained_hidden
from tests.unit.trainer.fakes import VOCAB, as_records, gradient_of, item, tiny_model
from vllm_patching import version
from vllm_patching.batch_invariant import kernels
from vllm_patching.batch_invariant.attention import BLOCK
from vllm_patching.batch_invariant.cuda import CudaKernels, vllm_kernels
from vllm_patching.batch_invariant.switch import NotInvariant

FAMILIES = ("llama", "qwen2", "qwen3")
SHAPE: dict[str, Any] = dict(
    hidden_size=128,
    head_dim=32,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=96,
    initializer_range=0.1,
)


class PlainKernels:
    """CudaKernels in torch's own functions, of any precision; remembers the shape of every weight that is
    multiplied.
    """

    def __init__(self, config: Any) -> None:
        self.table = kernels.rotary_table(config, 512)
        self.weights: set[tuple[int, ...]] = set()

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        self.weights.add(tuple(weight.shape))
        return F.linear(x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weight, epsilon)

    def silu_and_mul(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        return x[..., :half] * x[..., half:] / (1 + torch.exp(-x[..., :half]))

    def rotary_table(self) -> Tensor:
        return self.table

    def rotate(self, positions: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        wide = torch.promote_types(tensors[0].dtype, torch.float32)
        angles = torch.complex(*self.table[positions].to(wide)[:, None].chunk(2, -1))
        turned = [torch.complex(*tensor.to(wide).chunk(2, -1)) * angles for tensor in tensors]
        return tuple(torch.cat((pair.real, pair.imag), -1).to(tensors[0].dtype) for pair in turned)

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        lengths: tuple[int, ...],
        scale: float,
        contexts: tuple[int, ...] | None = None,
    ) -> Tensor:
        pieces = zip(
            query.split(lengths), key.split(contexts or lengths), value.split(contexts or lengths), strict=True
        )
        return torch.cat([causal(q, k, v, scale) for q, k, v in pieces])


def causal(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Attention of one sequence, or of its last tokens, [T, heads, d], written out."""
    key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], 1) for tensor in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1 + len(key) - len(query))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -torch.inf).softmax(-1), value)


def exchanged(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> tuple[PreTrainedModel, PlainKernels]:
    model = tiny_model(family, **SHAPE | changes)
    plain = PlainKernels(model.config)
    cuda.exchange(model, plain, dtype)
    model.set_attn_implementation(exact_model.EXACT_ATTENTION)
    return model, plain


def packed_row(longest: int = 60, share: bool = False) -> MicroBatch:
    items = [item([1.0, 0.0], seed=5, longest=longest)]
    sequences = make_batch(as_records(items), seq_len=2048, policy_version=0).sequences
    (row,) = micro_batches(sequences, 10_000, torch.device("cpu"), share=share)
    return row


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("share", [False, True], ids=["packed", "shared prefixes"])
def test_log_probabilities_and_gradients_are_those_of_the_model_in_float64(family: str, share: bool) -> None:
    model, _ = exchanged(family)
    reference = tiny_model(family, **SHAPE).double()
    row, computed = packed_row(), packed_row(share=share)
    found = token_logprobs(Policy(model), computed, 8)
    accumulate_gradients(
        Policy(model), computed, lambda logprobs, entropy, chunk: (logprobs * row.advantages[chunk]).mean(), 8
    )

    logits = torch.cat([reference(input_ids=piece[None]).logits[0] for piece in row.input_ids[0].split(row.lengths)])[
        row.rows
    ]
    expected = logits.log_softmax(-1).gather(1, row.targets[:, None])[:, 0]
    (expected * row.advantages.double()).mean().backward()
    assert torch.allclose(found.double(), expected, atol=1e-5)
    gradient = torch.cat([gradient_of(parameter).flatten().double() for parameter in model.parameters()])
    golden = torch.cat([gradient_of(parameter).flatten() for parameter in reference.parameters()])
    assert (gradient - golden).norm() / golden.norm() < 1e-5


def test_the_padding_tokens_embedding_has_a_gradient_on_a_gpu_too() -> None:
    row = packed_row()
    padding = int(row.input_ids[0, 1])  # of the prompt, as in chat templates
    model, _ = exchanged("llama", pad_token_id=padding)
    assert model.get_input_embeddings().padding_idx == padding  # the exact forward does not ask for it
    accumulate_gradients(Policy(model), row, lambda logprobs, entropy, chunk: logprobs.sum(), 8)
    assert gradient_of(model.get_input_embeddings().get_parameter("weight"))[padding].any()


@pytest.mark.parametrize("family", FAMILIES)
def test_products_are_as_wide_as_those_of_vllm(family: str) -> None:
    model, plain = exchanged(family)
    token_logprobs(Policy(model), packed_row(), 8)
    head = (VOCAB + 63) // 64 * 64
    assert plain.weights == {((4 + 2 + 2) * 32, 128), (128, 4 * 32), (2 * 96, 128), (128, 96), (head, 128)}
    assert model.get_output_embeddings()(torch.ones(3, 128)).shape == (3, VOCAB)


def test_bfloat16_is_computed_and_float32_masters_get_the_gradients() -> None:
    model, _ = exchanged("qwen3", torch.bfloat16)
    row, reference = packed_row(), tiny_model("qwen3", **SHAPE)
    assert trained_hidden(model, row).dtype == torch.bfloat16
    for each in (model, reference):
        each_row = row if each is model else packed_row()
        accumulate_gradients(
            Policy(each), each_row, lambda logprobs, entropy, chunk: (logprobs * row.advantages[chunk]).mean(), 8
        )
    assert all(parameter.dtype == gradient_of(parameter).dtype == torch.float32 for parameter in model.parameters())
    found = torch.cat([gradient_of(parameter).flatten() for parameter in model.parameters()])
    golden = torch.cat([gradient_of(parameter).flatten() for parameter in reference.parameters()])
    assert torch.cosine_similarity(found, golden, dim=0) > 0.99


CONFIG = tiny_model("llama", **SHAPE).config
PLAIN = PlainKernels(CONFIG)
POSITIONS = torch.tensor([0, 1, 2, 0, 1, 400])
# name: kernel, formula, shapes of its inputs
FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any], list[tuple[int, ...]]]] = {
    "silu_and_mul": (PLAIN.silu_and_mul, cuda._silu_and_mul, [(6, 32)]),
    "rotate": (
        lambda *tensors: PLAIN.rotate(POSITIONS, *tensors),
        lambda *tensors: cuda._rotate(PLAIN.table, POSITIONS, *tensors),
        [(6, 4, 32), (6, 2, 32)],
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_backward_pass_is_that_of_float64(name: str) -> None:
    kernel, formula, shapes = FUNCTIONS[name]
    torch.manual_seed(0)
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    outputs = Kernel.apply(kernel, formula, *inputs)
    doubles = [tensor.detach().double().requires_grad_() for tensor in inputs]
    expected = kernel(*doubles)
    assert_same_gradients(outputs, inputs, expected, doubles)


def test_the_backward_pass_of_the_norm_is_that_of_float64() -> None:
    torch.manual_seed(0)
    module = SimpleNamespace(weight=torch.randn(32, requires_grad=True), variance_epsilon=1e-5)
    x = torch.randn(6, 32, requires_grad=True)
    found = cuda._norm(PLAIN, module, x)
    doubles = [tensor.detach().double().requires_grad_() for tensor in (x, module.weight)]
    assert_same_gradients(found, [x, module.weight], PLAIN.rms_norm(doubles[0], doubles[1], 1e-5), doubles)


@pytest.mark.parametrize("parents", [None, (-1, 0, 1), (-1, 0, 0)])
def test_the_backward_pass_of_attention_is_that_of_float64(parents: tuple[int, ...] | None) -> None:
    torch.manual_seed(0)
    lengths, scale = (5, 1, 9), 0.2
    inputs = [torch.randn(heads, sum(lengths), 32, requires_grad=True) for heads in (4, 2, 2)]
    found = PackedAttention.apply(PLAIN.attention, *inputs, lengths, scale, parents)
    doubles = [tensor.detach().double().requires_grad_() for tensor in inputs]
    query, key, value = (tensor.transpose(0, 1) for tensor in doubles)
    first, second, third = torch.arange(15).split(lengths)
    seen = [first, second, third] if parents is None else [first, torch.arange(6), torch.arange(15)]
    if parents == (-1, 0, 0):
        seen[2] = torch.cat([first, third])
    pieces = zip(query.split(lengths), seen, strict=True)
    expected = torch.cat([causal(own, key[places], value[places], scale) for own, places in pieces])
    assert_same_gradients(found, inputs, expected, doubles)


def assert_same_gradients(found: Any, inputs: list[Tensor], expected: Any, doubles: list[Tensor]) -> None:
    found, expected = ((value,) if isinstance(value, Tensor) else tuple(value) for value in (found, expected))
    weights = [torch.randn_like(output) for output in found]
    gradients = torch.autograd.grad(found, inputs, weights)
    golden = torch.autograd.grad(expected, doubles, [weight.double() for weight in weights])
    for output, right in zip(found, expected, strict=True):
        assert torch.allclose(output.double(), right, atol=1e-5)
    for gradient, right in zip(gradients, golden, strict=True):
        assert (gradient.double() - right).norm() / right.norm() < 1e-6


def flash_attention(
    *, q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, seqused_k: Tensor, block_table: Tensor, **other: Any
) -> Tensor:
    """FlashAttention over pages as vLLM calls it: [blocks, page, key heads, d]; each sequence's queries are its last
    tokens.
    """
    assert other["num_splits"] == 1
    assert other["causal"]
    assert other["fa_version"] == 3
    assert other["max_seqlen_k"] == int(seqused_k.max())
    assert other["max_seqlen_q"] == int(cu_seqlens_q.diff().max())
    outputs = []
    for sequence, length in enumerate(seqused_k.tolist()):
        start, end = cu_seqlens_q[sequence : sequence + 2].tolist()
        keys, values = (cache[block_table[sequence].long()].flatten(0, 1)[:length] for cache in (k, v))
        outputs.append(causal(q[start:end], keys, values, other["softmax_scale"]))
    return torch.cat(outputs)


def test_the_kernels_get_what_vllm_gives_them() -> None:
    def silu_and_mul(output: Tensor, x: Tensor) -> None:
        output.copy_(PLAIN.silu_and_mul(x))

    def rotate_in_place(positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        for flat in (query, key):  # [N, heads * d]
            flat.copy_(PLAIN.rotate(positions, flat.unflatten(-1, (-1, 32)))[0].flatten(1))
        return query, key

    rotary = SimpleNamespace(forward_cuda=rotate_in_place, cos_sin_cache=PLAIN.table)
    found = CudaKernels(
        linear=F.linear,
        rms_norm=PLAIN.rms_norm,
        log_softmax=partial(torch.log_softmax, dim=-1),
        write_silu_and_mul=silu_and_mul,
        rotary=rotary,
        flash_attention=flash_attention,
        flash_attention_version=3,
    )
    torch.manual_seed(0)
    lengths = (BLOCK + 3, 1, BLOCK, 2 * BLOCK + 1)
    query, key, value = (torch.randn(sum(lengths), heads, 32) for heads in (4, 2, 2))
    assert torch.equal(
        found.attention(query, key, value, lengths, 0.2), PLAIN.attention(query, key, value, lengths, 0.2)
    )
    contexts = tuple(length + more for length, more in zip(lengths, (0, BLOCK, 5, 1), strict=True))
    key, value = (torch.randn(sum(contexts), 2, 32) for _ in range(2))
    assert torch.equal(
        found.attention(query, key, value, lengths, 0.2, contexts),
        PLAIN.attention(query, key, value, lengths, 0.2, contexts),
    )
    x = torch.randn(5, 64)
    assert torch.equal(found.silu_and_mul(x), PLAIN.silu_and_mul(x))
    positions = torch.arange(sum(lengths)) % 400
    key = torch.randn(sum(lengths), 2, 32)
    before = query.clone(), key.clone()
    rotated = found.rotate(positions, query, key)
    assert all(torch.equal(one, other) for one, other in zip(rotated, PLAIN.rotate(positions, *before), strict=True))
    assert torch.equal(query, before[0])
    assert torch.equal(key, before[1])


def test_log_softmax_is_the_modes_kernel_while_it_is_overridden() -> None:
    logits = torch.randn(3, 10)
    expected = logits.log_softmax(-1)
    library = cuda.override_log_softmax(SimpleNamespace(log_softmax=lambda x: x * 0 + 7), "CPU")
    try:
        assert torch.equal(logits.log_softmax(-1), torch.full((3, 10), 7.0))
    finally:
        library._destroy()
    assert torch.equal(logits.log_softmax(-1), expected)


def on_cuda(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> PreTrainedModel:
    """A model that says it is on a GPU, with plain functions for vLLM's."""
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    monkeypatch.setattr(exact_model, "vllm_kernels", lambda config, dtype, device: PlainKernels(config))
    monkeypatch.setattr(exact_model, "_overrides", ["taken"])
    return model


def test_a_model_on_a_gpu_computes_with_the_kernels_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    model = on_cuda(tiny_model("qwen2", **SHAPE), monkeypatch)
    exact_model.make_exact(model, torch.bfloat16)
    assert model.model.layers[0].mlp.forward.func is cuda._mlp
    assert model.config._attn_implementation == exact_model.EXACT_ATTENTION  # which asks for no masks


def test_what_is_not_covered_on_a_gpu_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    model = on_cuda(tiny_model(), monkeypatch)
    with pytest.raises(
        NotInvariant, match="does not cover float32 on CUDA, where vLLM's exact attention takes bfloat16"
    ):
        exact_model.make_exact(model, torch.float32)
    with pytest.raises(NotInvariant, match="does not cover tensor parallelism over 2 ranks; on cuda at most 1"):
        exact_model.make_exact(model, torch.bfloat16, tp_size=2)
    model.lm_head = torch.nn.Bilinear(1, 1, 1)
    with pytest.raises(NotInvariant, match="does not cover layers of type Bilinear"):
        exact_model.make_exact(model, torch.bfloat16)
    with pytest.raises(NotInvariant, match="does not cover training on meta; covered are cpu and cuda"):
        exact_model.make_exact(torch.nn.Module.to(tiny_model("qwen3"), "meta"), torch.bfloat16)


def test_truncated_sampling_is_refused_on_a_gpu_by_name() -> None:
    group = item([1.0, 0.0], generation_params={"top_p": 0.9})
    batch = make_batch(as_records([group]), seq_len=2048, policy_version=0)
    with pytest.raises(
        check.NotExact, match=r"step 3: .* top-p and top-k on CUDA, and a sequence came with top_p 0.9, top_k 0"
    ):
        check._refuse_truncation(batch, 3)


def test_a_vllm_that_was_not_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ATROPOS_BATCH_INVARIANT", "VLLM_BATCH_INVARIANT", "VLLM_USE_V2_MODEL_RUNNER"):
        monkeypatch.setenv(name, "0" if "V2" in name else "1")
    monkeypatch.setattr(version, "VERSION", Version("0.25.1"))
    with pytest.raises(NotInvariant, match=r"vLLM cannot be used here: vLLM 0.25.1 is outside the supported 0.26"):
        vllm_kernels(CONFIG, torch.bfloat16, torch.device("cuda"))
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(NotInvariant, match="VLLM_USE_V2_MODEL_RUNNER=1 contradicts --batch-invariant"):
        vllm_kernels(CONFIG, torch.bfloat16, torch.device("cuda"))
