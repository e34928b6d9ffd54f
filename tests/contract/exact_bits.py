"""A program: the exact trainer's forward pass against vLLM's own CUDA model classes, bit by bit, on a CPU.

    PYTHONPATH=WHEEL:TRITON:. python -m tests.contract.exact_bits FAMILY:DTYPE...

vLLM's Triton kernels (products, norms, log-softmax) run in Triton's interpreter on both sides. Where vLLM calls a
compiled kernel (SiLU, rotary, FlashAttention), both sides call the same torch function. So equal bits prove the same
graph: shapes, fused products, order of residual and norm, padding, tables. They prove nothing about the hardware.
In bfloat16 the trainer runs again with a norm that rounds once more, as transformers' does; those bits must differ.
Imports take most of the time, so they are made once, and each model is compared in a fork. It prints a JSON object on a
line of its own.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

import importlib
import json
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.contract import fake_cuda
from tests.contract.tiny_model import SIZES, write_model

LENGTHS = (23, 40)  # of two packed sequences
CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
IDS = torch.randint(0, SIZES["vocab_size"], (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS])


def main(models: list[str]) -> None:
    """Print where the two agree, for each of `models`."""
    from vllm_patching.batch_invariant.switch import switch_on

    switch_on(os.environ, cpu=False)
    fake_cuda.install()
    widen_bfloat16()
    import_both()
    for model in models:
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            print(json.dumps({"model": model, **told(*model.split(":"))}), flush=True)
            os._exit(0)
        os.waitpid(child, 0)


def import_both() -> None:
    """What every comparison imports."""
    for module in ("vllm.engine.arg_utils", "example_trainer.exact.cuda", "vllm_patching.batch_invariant.cuda"):
        importlib.import_module(module)
    for family in CLASSES:
        importlib.import_module(f"vllm.model_executor.models.{family}")
        importlib.import_module(f"transformers.models.{family}")
    plugins: Any = importlib.import_module("vllm.plugins")
    plugins.load_general_plugins()  # ours among them: the mode's own norm is replaced


def told(family: str, dtype_name: str) -> dict[str, Any]:
    """Where the two agree, or the `error` that was met."""
    try:
        return compared(family, getattr(torch, dtype_name))
    except Exception:  # vLLM's code may raise anything, and the parent reads one answer for each model
        return {"error": traceback.format_exc()}


def compared(family: str, dtype: torch.dtype) -> dict[str, Any]:
    """Where the two agree."""
    with tempfile.TemporaryDirectory() as directory:
        model = write_model(family, Path(directory))
        vllm_hidden, vllm_logits, home = of_vllm(family, directory, model.state_dict(), dtype)
        hidden, logits, kernels = of_trainer(model, dtype)
        planted = of_trainer(model, dtype, rms_norm=rounded_twice)[1] if dtype == torch.bfloat16 else None
    ours, theirs = kernels.log_softmax(logits.float()), home.log_softmax(vllm_logits.float(), -1)
    return {
        "hidden": torch.equal(hidden, vllm_hidden),
        "logits": torch.equal(logits, vllm_logits),
        "logprobs": torch.equal(ours, theirs),
        "largest_difference": (ours - theirs).abs().max().item(),
        "planted_is_found": None if planted is None else not torch.equal(planted, vllm_logits),
    }


def widen_bfloat16() -> None:
    """Triton's interpreter keeps bfloat16 as uint16, and its `dot` multiplies those integers: let it multiply the
    numbers.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    def wide(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle.data
        return (handle.data.astype(np.uint32) << 16).view(np.float32)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        product = np.matmul(wide(a), wide(b), dtype=d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot


# ---- what stands for compiled kernels, on both sides


def silu_and_mul(output: Tensor, x: Tensor) -> None:
    gate, up = x.chunk(2, -1)
    output.copy_(F.silu(gate) * up)


def rotary_embedding(
    positions: Tensor, query: Tensor, key: Tensor | None, head_size: int, table: Tensor, *_: Any, **__: Any
) -> None:
    cos, sin = table[positions][:, None].chunk(2, -1)
    for tensor in (query, key):
        if tensor is not None:
            heads = tensor.view(len(positions), -1, head_size)
            first, second = heads.chunk(2, -1)
            heads.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), -1))


def attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Causal within each sequence; [tokens, heads, head size] in and out."""
    outputs = []
    for parts in zip(query.split(LENGTHS), key.split(LENGTHS), value.split(LENGTHS), strict=True):
        q, k, v = (part.transpose(0, 1)[None] for part in parts)
        result = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        outputs.append(result[0].transpose(0, 1))
    return torch.cat(outputs)


def flash_attention(
    *, q: Tensor, k: Tensor, v: Tensor, seqused_k: Tensor, block_table: Tensor, softmax_scale: float, **_: Any
) -> Tensor:
    """vLLM's function over a paged cache."""
    pages = list(zip(block_table, seqused_k, strict=True))
    keys, values = (torch.cat([cache[row.long()].flatten(0, 1)[:n] for row, n in pages]) for cache in (k, v))
    return attend(q, keys, values, softmax_scale)


class Attention(torch.nn.Module):
    """vLLM's attention layer without its cache."""

    def __init__(self, num_heads: int, head_size: int, scale: float, num_kv_heads: int | None = None, **_: Any) -> None:
        super().__init__()
        self.heads, self.size, self.scale, self.kv_heads = num_heads, head_size, scale, num_kv_heads or num_heads

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        q = query.view(-1, self.heads, self.size)
        k, v = (tensor.view(-1, self.kv_heads, self.size) for tensor in (key, value))
        return attend(q, k, v, self.scale).flatten(1)


class OneRank:
    """A group of one, as which every group of vLLM's parallel state passes."""

    world_size, rank, rank_in_group, first_rank, last_rank = 1, 0, 0, 0, 0
    is_first_rank = is_last_rank = True
    ranks = (0,)
    unique_name = "one"

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        return x

    def gather(self, x: Tensor, dst: int = 0, dim: int = -1) -> Tensor:
        return x


# ---- the two sides


def of_vllm(family: str, directory: str, weights: dict[str, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor, Any]:
    """Hidden states [tokens, d] and logits [tokens, vocabulary] of vLLM's class, and the module of its kernels."""
    from vllm import _custom_ops
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.layers import linear

    engine_args: Any = AsyncEngineArgs
    arguments = engine_args(
        directory,
        max_model_len=256,
        dtype="bfloat16",
        block_size=32,
        attention_backend="FLASH_ATTN",
        enforce_eager=True,
    )
    config = arguments.create_engine_config()
    home: Any = importlib.import_module(linear.linear_batch_invariant.__module__)
    home.num_compute_units = lambda *_, **__: 4
    if hasattr(home, "get_max_shared_memory_bytes"):
        home.get_max_shared_memory_bytes = lambda *_, **__: 232_448
    kernels: Any = _custom_ops
    kernels.rotary_embedding = rotary_embedding
    torch.ops._C.__dict__["silu_and_mul"] = silu_and_mul
    for name in ("_TP", "_PP", "_DP", "_EP", "_DCP", "_PCP", "_WORLD", "_INNER_DP_WORLD"):
        if hasattr(parallel_state, name):
            setattr(parallel_state, name, OneRank())
    module: Any = importlib.import_module(f"vllm.model_executor.models.{family}")
    module.Attention = Attention
    torch.set_default_dtype(dtype)
    with torch.no_grad(), set_current_vllm_config(config):
        model = getattr(module, CLASSES[family])(vllm_config=config)
        model.load_weights(weights.items())
        model.logits_processor.head_dtype = None
        with set_forward_context(None, config):
            hidden = model(IDS, POSITIONS, None)
            logits = model.compute_logits(hidden)
    torch.set_default_dtype(torch.float32)
    return hidden, logits, home


def of_trainer(model: Any, dtype: torch.dtype, **instead: Any) -> tuple[Tensor, Tensor, Any]:
    """The same of ours, and its kernels, with others `instead`."""
    from dataclasses import replace

    from example_trainer.exact import cuda
    from example_trainer.model.packed_attention import PACKED_SDPA
    from vllm_patching.batch_invariant.cuda import vllm_kernels

    kernels = vllm_kernels(model.config, dtype, torch.device("cpu"))
    kernels = replace(kernels, write_silu_and_mul=silu_and_mul, flash_attention=flash_attention, **instead)
    cuda.exchange(model, kernels, dtype)
    model.config._attn_implementation = PACKED_SDPA
    with torch.no_grad():
        hidden = model.model(
            input_ids=IDS[None], position_ids=POSITIONS[None], packed_lengths=LENGTHS, use_cache=False
        ).last_hidden_state
        return hidden[0], model.lm_head(hidden)[0], kernels


def rounded_twice(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMS norm as transformers has it: rounded before the weight, and after."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)).to(x.dtype)


if __name__ == "__main__":
    main(sys.argv[1:])
