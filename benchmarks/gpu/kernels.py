"""Whether each compiled library of vLLM runs on this GPU, and each CUDA facility that the product relies on behaves as
its documentation says.

    python -m benchmarks.gpu.kernels [EXPERIMENT...]

Prints one JSON line behind an @ for each experiment. The exit status is 1 if one fails. --rehearse, on a CPU, loads the
libraries alone.
"""

import argparse
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
from functools import partial
from typing import Any

import torch

from vllm_patching.batch_invariant.cuda import CudaKernels, longest_query

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if HAS_GPU else torch.device("cpu")  # where a test has kernels of its own


def libraries() -> dict[str, Any]:
    """Load every library, and so show that its symbols are this PyTorch's."""
    names = "_C_stable_libtorch _moe_C_stable_libtorch _flashmla_C cumem_allocator vllm_flash_attn._vllm_fa3_C".split()
    found = {}
    for name in names:
        try:
            importlib.import_module(f"vllm.{name}")
            found[name] = "ok"
        except (ImportError, OSError, RuntimeError) as error:  # a symbol, a library below it, a registration
            found[name] = f"{type(error).__name__}: {error}"
    assert HAS_GPU is False or set(found.values()) == {"ok"}, found
    return found


def elementwise() -> dict[str, Any]:
    """Compare norm and activation by vLLM's kernels with torch's."""
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
    """Compare FlashAttention over pages, by the function that vLLM calls, with torch: prefill and decoding, heads of 64
    and 128.
    """
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_flash_attn_version

    version: Any = get_flash_attn_version()
    batches = (((33, 70, 5), (33, 70, 5)), ((1, 1, 1), (300, 17, 90)), ((9, 1, 40), (100, 64, 40)))
    worst = {
        f"{size}/{block}/{lengths}/{splits}": _attend(
            partial(flash_attn_varlen_func, num_splits=splits, fa_version=version), size, block, lengths, contexts
        )
        for size in (64, 128)
        for block in (16, 32)
        for lengths, contexts in batches
        for splits in (0, 1)
    }
    assert max(worst.values()) < 2e-2, worst
    return {"version": version, "cases": len(worst), "worst": max(worst.values())}


def _attend(
    function: Callable[..., torch.Tensor], size: int, block: int, lengths: tuple[int, ...], contexts: tuple[int, ...]
) -> float:
    """The largest relative error of a sequence."""
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
        q=query,
        k=keys,
        v=values,
        cu_seqlens_q=starts,
        seqused_k=torch.tensor(contexts, dtype=torch.int32, device="cuda"),
        max_seqlen_q=max(lengths),
        max_seqlen_k=max(contexts),
        softmax_scale=size**-0.5,
        causal=True,
        window_size=[-1, -1],
        softcap=0.0,
        block_table=table,
    )
    worst = 0.0
    for row, (length, context) in enumerate(zip(lengths, contexts, strict=True)):
        own = table[row, : pages[row]].long()
        k, v = (
            cache[own].flatten(0, 1)[:context].float().repeat_interleave(heads // kv, 1) for cache in (keys, values)
        )
        q = query[starts[row] : starts[row + 1]].float()
        scores = torch.einsum("qhd,khd->hqk", q, k) * size**-0.5
        last = torch.arange(context - length, context, device="cuda")
        mask = torch.arange(context, device="cuda")[None] > last[:, None]
        expected = torch.einsum("hqk,khd->qhd", scores.masked_fill(mask, float("-inf")).softmax(-1), v)
        worst = max(worst, _relative(out[starts[row] : starts[row + 1]], expected))
    return worst


def invariant() -> dict[str, Any]:
    """Compare a row's bits alone and among others, by vLLM's batch-invariant product, for which Triton compiles C."""
    batch_invariant = importlib.import_module("vllm.model_executor.layers.batch_invariant")
    product = getattr(batch_invariant, "linear_batch_invariant", None) or batch_invariant.matmul_persistent
    x, weight = (torch.randn(rows, 1024, device="cuda", dtype=torch.bfloat16) for rows in (300, 3072))
    given = weight if "linear" in product.__name__ else weight.t()
    whole = product(x, given)
    start = time.perf_counter()
    rows = [slice(at, at + 1) for at in range(0, 300, 30)]
    differ = sum(not torch.equal(product(x[row].contiguous(), given), whole[row]) for row in rows)
    torch.cuda.synchronize()
    milliseconds = round(1000 * (time.perf_counter() - start) / len(rows), 2)
    assert differ == 0, f"{differ} of {len(rows)} rows differ"
    expected = x.float() @ weight.float().t()
    return {"function": product.__name__, "relative": _relative(whole, expected), "ms": milliseconds}


def row_bits() -> dict[str, Any]:
    """Count the words of a row that change with the rows beside it, for each kernel of the exact mode. None may, but of
    attention that is told the true length of the longest query, 1 in decoding: that is why longest_query exists.
    """
    from transformers import Qwen3Config

    from vllm_patching.batch_invariant.cuda import vllm_kernels

    found: dict[str, Any] = {}
    for heads, kv, size in ((4, 2, 32), (9, 3, 64), (16, 8, 128)):
        config = Qwen3Config(
            hidden_size=heads * size,
            num_attention_heads=heads,
            num_key_value_heads=kv,
            head_dim=size,
            rope_parameters={"rope_theta": 1e6, "rope_type": "default"},
            max_position_embeddings=4096,
        )
        kernels = vllm_kernels(config, torch.bfloat16, DEVICE)
        of_size = _bits_of_rows(kernels, heads, kv, size) | _bits_of_attention(kernels, heads, kv, size)
        found |= {f"{size}/{name}": count for name, count in of_size.items()}
    assert not (wrong := _not_exact(found)), f"{', '.join(wrong)}: {found}"
    return found


def _bits_of_rows(kernels: CudaKernels, heads: int, kv: int, size: int) -> dict[str, int]:
    """Words that change, by kernel."""
    hidden = heads * size

    def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE, dtype=dtype)

    def linear(inside: int, outside: int) -> int:
        weight = random(outside, inside)
        return _changed_words(lambda rows: kernels.linear(rows, weight, None), random(300, inside))

    scale = random(hidden)
    query, key = random(300, heads, size), random(300, kv, size)
    return {
        "linear qkv": linear(hidden, (heads + 2 * kv) * size),
        "linear down": linear(hidden, 264),
        "linear head": linear(hidden, 1024),
        "linear 264": linear(264, hidden),
        "norm": _changed_words(lambda rows: kernels.rms_norm(rows, scale, 1e-6), random(300, hidden)),
        "silu": _changed_words(kernels.silu_and_mul, random(300, hidden)),
        "log_softmax": _changed_words(kernels.log_softmax, random(300, 1000, dtype=torch.float32)),
        "rotate": _changed_words(
            lambda *given: kernels.rotate(*given)[0], torch.arange(300, device=DEVICE), query, key
        ),
    }


def _bits_of_attention(kernels: CudaKernels, heads: int, kv: int, size: int) -> dict[str, Any]:
    """A sequence's queries one by one behind their context, as decoding computes them, against all at once, as prefill
    does; then in a chunk, and beside another sequence. Once the kernel is told the true longest query, and once what
    the product tells it.
    """
    query, key, value = (
        torch.randn(300, count, size, device=DEVICE, dtype=torch.bfloat16) for count in (heads, kv, kv)
    )
    scale = size**-0.5
    found: dict[str, Any] = {}
    truthful = replace(kernels, flash_attention=partial(_told_the_truth, kernels.flash_attention))
    for told, each in ((1, truthful), (longest_query(1, size), kernels)):
        whole = each.attention(query, key, value, (300,), scale)
        differing = []
        for end in range(1, 301, 3):
            row = each.attention(query[end - 1 : end], key[:end], value[:end], (1,), scale, contexts=(end,))
            if _differing_words(row[0], whole[end - 1]):
                differing.append(end)
        decoded = {"contexts that differ": len(differing), "of": 100, "first": differing[:3]}
        later = each.attention(query[200:], key, value, (100,), scale, contexts=(300,))
        two_queries, two_keys, two_values = (torch.cat([tensor[:1], tensor]) for tensor in (query, key, value))
        beside = each.attention(two_queries, two_keys, two_values, (1, 300), scale)
        found[f"attention, longest query {told}"] = decoded
        found[f"attention of a chunk, {told}"] = _differing_words(later, whole[200:])
        found[f"attention beside another, {told}"] = _differing_words(beside[1:], whole)
    return found


def _told_the_truth(attention: Callable[..., torch.Tensor], **given: Any) -> torch.Tensor:
    longest = int(given["cu_seqlens_q"].diff().max())
    return attention(**given | {"max_seqlen_q": longest})


def _not_exact(found: dict[str, Any]) -> list[str]:
    """Names of what differs and may not."""
    counts = {name: each["contexts that differ"] if isinstance(each, dict) else each for name, each in found.items()}
    return [name for name, count in counts.items() if count and not name.endswith(" 1")]


def _changed_words(kernel: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> int:
    """Words of the output that change where rows are computed alone, and in groups of 7, instead of all at once."""
    whole = kernel(*inputs)
    alone = [slice(at, at + 1) for at in range(0, len(whole), 17)]
    groups = [slice(at, at + 7) for at in range(0, len(whole) - 7, 41)]
    return sum(
        _differing_words(kernel(*(each[rows].contiguous() for each in inputs)), whole[rows])
        for rows in (*alone, *groups)
    )


def _differing_words(one: torch.Tensor, other: torch.Tensor) -> int:
    """Count the elements of two tensors of one dtype that differ in their bits."""
    assert one.dtype == other.dtype, f"{one.dtype} against {other.dtype}"
    word = {2: torch.int16, 4: torch.int32}[one.element_size()]
    return int((one.view(word) != other.view(word)).sum())


def _writes(ipc: Any, queue: Any) -> None:
    """In the second process: open the allocation and write into it."""
    try:
        from vllm_patching.memory import cuda_ipc

        start = time.perf_counter()
        buffer = cuda_ipc.open_handle(ipc)
        opened = round(1e3 * (time.perf_counter() - start), 1)
        buffer.view(torch.int32)[:1000].fill_(7)
        torch.cuda.synchronize()
        free = round(torch.cuda.mem_get_info()[0] / 1e9, 2)
        queue.put({"open_ms": opened, "device": str(buffer.device), "free_gb": free})
    except Exception as error:  # whichever: the first process waits for an answer, and reports it
        queue.put({"error": f"{type(error).__name__}: {error}"})


def cuda_ipc() -> dict[str, Any]:
    """Share an allocation of 1.2 GB with a second process by the product's own code: no second GB is taken, and a graph
    that was captured here reads what was written there.
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
    told: dict[str, Any] = queue.get(timeout=90)
    child.join(30)
    assert "error" not in told, told
    graph.replay()
    torch.cuda.synchronize()
    assert seen.eq(7).all(), "the captured graph does not read what the other process wrote"
    return told | {"free_before_gb": round(before / 1e9, 2), "exit": child.exitcode}


def expandable() -> dict[str, Any]:
    """Expect the product to refuse to share expandable segments, by name."""
    code = (
        "import torch\nfrom vllm_patching.memory import cuda_ipc\n"
        "print(cuda_ipc.refusal(torch.zeros(100_000_000, dtype=torch.uint8, device='cuda')))"
    )
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # of older and newer releases
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=90,
        env=os.environ | dict.fromkeys(names, "expandable_segments:True"),
        check=False,
    )
    assert "expandable segment" in done.stdout, done.stdout + done.stderr[-500:]
    return {"refusal": done.stdout.strip()}


def one_rank_of_nccl() -> dict[str, Any]:
    """Compare the gradients of an FSDP2 module over one rank in bfloat16, as a trainer makes it, with plain ones."""
    import torch.distributed as dist

    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1, device_id=device)
        worst = _sharded_against_plain()
        took = time.perf_counter() - start
        dist.destroy_process_group()
    assert worst < 5e-2, worst
    return {"relative": worst, "seconds": round(took, 2)}


def _sharded_against_plain() -> float:
    """The largest relative difference of a gradient."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cuda", (1,), mesh_dim_names=("shard",))
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 16)).cuda()
    x = torch.randn(64, 256, device="cuda")
    model(x).square().mean().backward()
    plain = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    sharded: Any = fully_shard(model, mesh=mesh, mp_policy=policy)
    sharded.set_gradient_divide_factor(1.0)
    sharded.set_force_sum_reduction_for_comms(True)
    sharded(x).float().square().mean().backward()
    pairs = zip(sharded.parameters(), plain, strict=True)
    return max(_relative(parameter.grad.full_tensor(), gradient) for parameter, gradient in pairs)


def pinned() -> dict[str, Any]:
    """Take page-locked memory as --bridge-staging host does, and measure how fast it reaches the GPU."""
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
    rate = round(2 / (time.perf_counter() - start), 1)
    return {"is_pinned": host.tensor.is_pinned(), "made_s": round(made, 2), "gb_per_s": rate}


def ceilings() -> dict[str, Any]:
    """Measure the two rates by which the rest is judged."""
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

    copied = 2 * one.numel() / seconds(lambda: other.copy_(one))
    multiplied = 2 * 8192**3 / seconds(lambda: a @ b)
    return {"copy_gb_per_s": round(copied / 1e9), "bf16_tflops": round(multiplied / 1e12)}


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return round(float((found.float() - expected.float()).norm() / expected.float().norm()), 6)


ON_CPU = (libraries,)
EXPERIMENTS: dict[str, Callable[[], dict[str, Any]]] = {
    each.__name__: each
    for each in (
        libraries,
        ceilings,
        elementwise,
        attention,
        invariant,
        row_bits,
        cuda_ipc,
        expandable,
        one_rank_of_nccl,
        pinned,
    )
}


def parser() -> argparse.ArgumentParser:
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument(
        "experiments", nargs="*", metavar="EXPERIMENT", help=f"all, or some of {', '.join(EXPERIMENTS)}"
    )
    command.add_argument("--rehearse", action="store_true", help="on a CPU: load the libraries alone")
    return command


def main() -> int:
    command = parser()
    asked = command.parse_args()
    if unknown := set(asked.experiments) - set(EXPERIMENTS):
        command.error(f"no experiment is named {', '.join(sorted(unknown))}: there are {', '.join(EXPERIMENTS)}")
    if not asked.rehearse and not HAS_GPU:
        command.error("PyTorch finds no GPU; --rehearse loads the libraries alone")
    chosen = ON_CPU if asked.rehearse else [EXPERIMENTS[name] for name in asked.experiments or EXPERIMENTS]
    return int(not all([tried(each) for each in chosen]))  # a list: one that fails does not end the rest


def tried(experiment: Callable[[], dict[str, Any]]) -> bool:
    """Run one experiment, print its line, and say whether it passed."""
    start = time.perf_counter()
    line: dict[str, Any] = {"experiment": experiment.__name__, "passed": True}
    try:
        line["found"] = experiment()
    except Exception as error:  # whichever fault it meets is its result, and the others are still worth knowing
        line |= {"passed": False, "why": f"{type(error).__name__}: {error}"[:6000]}
    line["seconds"] = round(time.perf_counter() - start, 2)
    print("@" + json.dumps(line), flush=True)
    if HAS_GPU:
        torch.cuda.empty_cache()
    return bool(line["passed"])


if __name__ == "__main__":
    sys.exit(main())
