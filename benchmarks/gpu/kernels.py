"""First contact, piece by piece: does each compiled library that the kit brings run on this GPU, and does each CUDA
facility that the product relies on behave as it was read? One JSON line per experiment; exit status 1 if one fails.
"""

import importlib
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

HAS_GPU = torch.cuda.is_available()


def libraries() -> dict[str, Any]:
    """Every library loads: its symbols are this PyTorch's."""
    names = "_C_stable_libtorch _moe_C_stable_libtorch _flashmla_C cumem_allocator vllm_flash_attn._vllm_fa3_C".split()
    found = {}
    for name in names:
        try:
            importlib.import_module(f"vllm.{name}")
            found[name] = "ok"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    assert HAS_GPU is False or set(found.values()) == {"ok"}, found
    return found


def elementwise() -> dict[str, Any]:
    """Norm, activation, rotary embedding and the writing of the cache, by vLLM's kernels, against torch."""
    from vllm import _custom_ops as ops

    x = torch.randn(37, 1024, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(1024, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(x)
    ops.rms_norm(out, x, weight, 1e-6)
    wide = x.float()
    expected = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * weight.float()
    norm = _relative(out, expected)
    half = torch.empty(37, 512, device="cuda", dtype=torch.bfloat16)
    torch.ops._C.silu_and_mul(half, x)
    gate, up = wide.chunk(2, -1)
    silu = _relative(half, torch.nn.functional.silu(gate) * up)
    assert norm < 1e-2, norm
    assert silu < 1e-2, silu
    return {"rms_norm": norm, "silu_and_mul": silu}


def attention() -> dict[str, Any]:
    """FlashAttention 3 over pages, by the function that vLLM calls: prefill and decoding, heads of 64 and 128."""
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_flash_attn_version

    worst, version = {}, get_flash_attn_version()
    for size in (64, 128):
        for block in (16, 32):
            for lengths, contexts in (((33, 70, 5), (33, 70, 5)), ((1, 1, 1), (300, 17, 90)), ((9, 1, 40), (100, 64, 40))):
                for splits in (0, 1):
                    worst[f"{size}/{block}/{lengths}/{splits}"] = _attend(flash_attn_varlen_func, version, size, block, lengths, contexts, splits)
    assert max(worst.values()) < 2e-2, worst
    return {"version": version, "cases": len(worst), "worst": max(worst.values())}


def _attend(function: Any, version: Any, size: int, block: int, lengths: Any, contexts: Any, splits: int) -> float:
    heads, kv = 16, 8
    pages = [(context + block - 1) // block for context in contexts]
    table = torch.zeros(len(pages), max(pages), dtype=torch.int32, device="cuda")
    order, at = torch.randperm(sum(pages), device="cuda").int(), 0
    for row, count in enumerate(pages):
        table[row, :count] = order[at : at + count]
        at += count
    keys, values = (torch.randn(sum(pages), block, kv, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    query = torch.randn(sum(lengths), heads, size, device="cuda", dtype=torch.bfloat16)
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
    out = function(
        q=query, k=keys, v=values, cu_seqlens_q=starts, seqused_k=torch.tensor(contexts, dtype=torch.int32, device="cuda"),
        max_seqlen_q=max(lengths), max_seqlen_k=max(contexts), softmax_scale=size**-0.5, causal=True, window_size=[-1, -1],
        softcap=0.0, block_table=table, num_splits=splits, fa_version=version,
    )  # fmt: skip
    worst = 0.0
    for row, (length, context) in enumerate(zip(lengths, contexts)):
        own = table[row, : pages[row]].long()
        k, v = (cache[own].flatten(0, 1)[:context].float().repeat_interleave(heads // kv, 1) for cache in (keys, values))
        q = query[starts[row] : starts[row + 1]].float()
        scores = torch.einsum("qhd,khd->hqk", q, k) * size**-0.5
        mask = torch.arange(context, device="cuda")[None] > torch.arange(context - length, context, device="cuda")[:, None]
        expected = torch.einsum("hqk,khd->qhd", scores.masked_fill(mask, float("-inf")).softmax(-1), v)
        worst = max(worst, _relative(out[starts[row] : starts[row + 1]], expected))
    return worst


def invariant() -> dict[str, Any]:
    """vLLM's batch-invariant product: a row's bits alone and among others, and that Triton finds a C compiler."""
    from vllm.model_executor.layers import batch_invariant

    product = getattr(batch_invariant, "linear_batch_invariant", None) or batch_invariant.matmul_persistent
    x, weight = torch.randn(300, 1024, device="cuda", dtype=torch.bfloat16), torch.randn(3072, 1024, device="cuda", dtype=torch.bfloat16)
    given = weight if "linear" in product.__name__ else weight.t()
    whole = product(x, given)
    start = time.perf_counter()
    differ = sum(not torch.equal(product(x[at : at + 1].contiguous(), given), whole[at : at + 1]) for at in range(0, 300, 30))
    torch.cuda.synchronize()
    assert differ == 0, f"{differ} of 10 rows differ"
    return {"function": product.__name__, "relative": _relative(whole, x.float() @ weight.float().t()), "ms": round(100 * (time.perf_counter() - start), 2)}


def row_bits() -> dict[str, Any]:
    """Words of one row that change with the rows beside it, for each kernel of the exact mode: alone, and in groups of
    7, against all at once. Of attention: a sequence's queries one by one behind their context, as decoding computes
    them, against all at once, as prefill does; with the longest query told as it is, and as 2.
    """
    from transformers import Qwen3Config

    from vllm_patching.batch_invariant.cuda import vllm_kernels

    def differing(whole: torch.Tensor, part: Callable[[slice], torch.Tensor]) -> int:
        rows = [*(slice(at, at + 1) for at in range(0, len(whole), 17)), *(slice(at, at + 7) for at in range(0, len(whole) - 7, 41))]
        return sum(int((part(each).view(torch.int16 if whole.dtype == torch.bfloat16 else torch.int32) != whole[each].view(torch.int16 if whole.dtype == torch.bfloat16 else torch.int32)).sum()) for each in rows)

    found: dict[str, Any] = {}
    device = torch.device("cuda", 0)
    for heads, kv, size in ((4, 2, 32), (9, 3, 64), (16, 8, 128)):
        hidden = heads * size
        config = Qwen3Config(hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=kv, head_dim=size, rope_parameters={"rope_theta": 1e6, "rope_type": "default"}, max_position_embeddings=4096)
        kernels = vllm_kernels(config, torch.bfloat16, device)
        x = torch.randn(300, hidden, device=device, dtype=torch.bfloat16)
        for name, out in (("qkv", (heads + 2 * kv) * size), ("down", 264), ("head", 1024)):
            weight = torch.randn(out, hidden, device=device, dtype=torch.bfloat16)
            found[f"{size}/linear {name}"] = differing(kernels.linear(x, weight, None), lambda rows: kernels.linear(x[rows].contiguous(), weight, None))
        wide = torch.randn(300, 264, device=device, dtype=torch.bfloat16)
        narrow = torch.randn(hidden, 264, device=device, dtype=torch.bfloat16)
        found[f"{size}/linear 264"] = differing(kernels.linear(wide, narrow, None), lambda rows: kernels.linear(wide[rows].contiguous(), narrow, None))
        ones = torch.rand(hidden, device=device, dtype=torch.bfloat16)
        found[f"{size}/norm"] = differing(kernels.rms_norm(x, ones, 1e-6), lambda rows: kernels.rms_norm(x[rows].contiguous(), ones, 1e-6))
        found[f"{size}/silu"] = differing(kernels.silu_and_mul(x), lambda rows: kernels.silu_and_mul(x[rows].contiguous()))
        logits = torch.randn(300, 1000, device=device)
        found[f"{size}/log_softmax"] = differing(kernels.log_softmax(logits), lambda rows: kernels.log_softmax(logits[rows].contiguous()))
        query = torch.randn(300, heads, size, device=device, dtype=torch.bfloat16)
        key, value = (torch.randn(300, kv, size, device=device, dtype=torch.bfloat16) for _ in range(2))
        places = torch.arange(300, device=device)
        rotated = kernels.rotate(places, query, key)[0]
        found[f"{size}/rotate"] = differing(rotated, lambda rows: kernels.rotate(places[rows], query[rows], key[rows])[0])
        for told in (1, 2):
            of = replace(kernels, flash_attention=lambda told=told, **given: kernels.flash_attention(**given | {"max_seqlen_q": max(told, int(given["cu_seqlens_q"].diff().max()))}))
            whole = of.attention(query, key, value, (300,), size**-0.5)
            bad = []
            for at in range(0, 300, 3):
                alone = of.attention(query[at : at + 1], key[: at + 1], value[: at + 1], (1,), size**-0.5, contexts=(at + 1,))
                if not torch.equal(alone[0], whole[at]):
                    bad.append(at + 1)
            found[f"{size}/attention, longest query {told}"] = {"contexts that differ": len(bad), "of": 100, "first": bad[:3]}
            later = of.attention(query[200:], key, value, (100,), size**-0.5, contexts=(300,))
            found[f"{size}/attention of a chunk, {told}"] = int((later.view(torch.int16) != whole[200:].view(torch.int16)).sum())
            pair = of.attention(torch.cat([query[:1], query]), torch.cat([key[:1], key]), torch.cat([value[:1], value]), (1, 300), size**-0.5)
            found[f"{size}/attention beside another, {told}"] = int((pair[1:].view(torch.int16) != whole.view(torch.int16)).sum())
    wrong = [name for name, count in found.items() if (count if isinstance(count, int) else count["contexts that differ"]) and not name.endswith(" 1")]
    assert not wrong, found
    return found


def _writes(ipc: Any, queue: Any) -> None:
    try:
        from vllm_patching.memory import cuda_ipc

        start = time.perf_counter()
        buffer = cuda_ipc.open_handle(ipc)
        opened = time.perf_counter() - start
        buffer.view(torch.int32)[:1000].fill_(7)
        torch.cuda.synchronize()
        queue.put({"open_ms": round(opened * 1e3, 1), "device": str(buffer.device), "free_gb": round(torch.cuda.mem_get_info()[0] / 1e9, 2)})
    except Exception as error:
        queue.put({"error": f"{type(error).__name__}: {error}"})


def cuda_ipc() -> dict[str, Any]:
    """An allocation of 1.2 GB shared with a second process by the product's own code: a word written there is seen here;
    no second GB is taken; a graph that was captured here reads what was written there.
    """
    from vllm_patching.memory import cuda_ipc as product

    torch.empty(1 << 20, device="cuda")  # an earlier allocation: the arena is not the first
    buffer = torch.zeros(1_200_000_000, dtype=torch.uint8, device="cuda")
    seen = torch.zeros(1000, dtype=torch.int32, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        seen.copy_(buffer.view(torch.int32)[:1000])
    assert product.refusal(buffer) is None, product.refusal(buffer)
    before = torch.cuda.mem_get_info()[0]
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=_writes, args=(product.export(buffer), queue))
    child.start()
    told = queue.get(timeout=90)
    child.join(30)
    assert "error" not in told, told
    graph.replay()
    torch.cuda.synchronize()
    assert seen.eq(7).all(), "the captured graph does not read what the other process wrote"
    return told | {"free_before_gb": round(before / 1e9, 2), "exit": child.exitcode}


def expandable() -> dict[str, Any]:
    """With expandable segments the product must refuse to share, by name."""
    code = (
        "import torch\nfrom vllm_patching.memory import cuda_ipc\n"
        "print(cuda_ipc.refusal(torch.zeros(100_000_000, dtype=torch.uint8, device='cuda')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=90,
        env=os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "PYTORCH_ALLOC_CONF": "expandable_segments:True"},
    )  # fmt: skip
    assert "expandable segment" in done.stdout, done.stdout + done.stderr[-500:]
    return {"refusal": done.stdout.strip()}


def one_rank_of_nccl() -> dict[str, Any]:
    """The process group of a trainer of one rank in bfloat16, and an FSDP2 module over it: gradients against plain ones."""
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    store = dist.FileStore(tempfile.mktemp(), 1)
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    start = time.perf_counter()
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1, device_id=device)
    mesh = dist.device_mesh.init_device_mesh("cuda", (1,), mesh_dim_names=("shard",))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 16)).cuda()
    x = torch.randn(64, 256, device="cuda")
    model(x).square().mean().backward()
    plain = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    model.set_gradient_divide_factor(1.0)
    model.set_force_sum_reduction_for_comms(True)
    model(x).float().square().mean().backward()
    worst = max(_relative(parameter.grad.full_tensor(), grad) for parameter, grad in zip(model.parameters(), plain))
    took = time.perf_counter() - start
    dist.destroy_process_group()
    assert worst < 5e-2, worst
    return {"relative": worst, "seconds": round(took, 2)}


def pinned() -> dict[str, Any]:
    """Page-locked memory as --bridge-staging host takes it, and how fast it reaches the GPU."""
    from vllm_patching.memory.host_buffer import HostBuffer

    start = time.perf_counter()
    host = HostBuffer(2_000_000_000, torch.device("cuda", 0))
    made = time.perf_counter() - start
    target = torch.empty(2_000_000_000, dtype=torch.uint8, device="cuda")
    target.copy_(host.tensor, non_blocking=True)
    torch.cuda.synchronize()
    start = time.perf_counter()
    target.copy_(host.tensor, non_blocking=True)
    torch.cuda.synchronize()
    return {"is_pinned": host.tensor.is_pinned(), "made_s": round(made, 2), "gb_per_s": round(2 / (time.perf_counter() - start), 1)}


def ceilings() -> dict[str, Any]:
    """The two rates by which the rest is judged."""
    one, other = (torch.empty(4 << 30, dtype=torch.uint8, device="cuda") for _ in range(2))
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def seconds(work: Callable[[], Any], times: int = 10) -> float:
        for _ in range(3):
            work()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(times):
            work()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / times

    return {"copy_gb_per_s": round(2 * one.numel() / seconds(lambda: other.copy_(one)) / 1e9), "bf16_tflops": round(2 * 8192**3 / seconds(lambda: a @ b) / 1e12)}


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return round(float((found.float() - expected.float()).norm() / expected.float().norm()), 6)


ON_GPU = (ceilings, elementwise, attention, invariant, row_bits, cuda_ipc, expandable, one_rank_of_nccl, pinned)


def main() -> int:
    failed, only = 0, sys.argv[1:]
    for experiment in (libraries, *(ON_GPU if HAS_GPU else ())):
        if only and experiment.__name__ not in only and "--rehearse" not in only:
            continue
        start = time.perf_counter()
        line: dict[str, Any] = {"experiment": experiment.__name__, "passed": True}
        try:
            line["found"] = experiment()
        except Exception as error:
            failed += 1
            line |= {"passed": False, "why": f"{type(error).__name__}: {error}"[:6000]}
        line["seconds"] = round(time.perf_counter() - start, 2)
        print("@" + json.dumps(line), flush=True)
        if HAS_GPU:
            torch.cuda.empty_cache()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
