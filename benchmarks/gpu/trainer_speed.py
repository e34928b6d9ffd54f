"""Steps of the trainer on this GPU: tokens per second, share of the peak rate (MFU), memory against the plan; or TRL's.

    python -m benchmarks.gpu.trainer_speed --model 0.6B [--shape 2k] [--exact] [--arm trl]
        [--variant '{"micro_batch_tokens": 8192}' ...] [--profile]

Random tokens and weights; a step is everything from sequences to updated weights. One JSON line per arm: for each
variant of the settings that need no loading, in one process.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.trainer_step import make_items
from benchmarks.trainer_step_trl import trl_arm

PEAK = 989e12  # bfloat16 products of an H100 or H200, dense, by its data sheet
STEPS = 2
CUDA = torch.cuda.is_available()
# groups, answers, tokens of a prompt, of whole sequences
SHAPES: dict[str, tuple[int, int, tuple[int, int], tuple[int, int]]] = {
    "short": (16, 8, (50, 80), (200, 600)),
    "2k": (2, 8, (50, 80), (2048, 2048)),
    "4k": (1, 8, (50, 80), (4000, 4000)),
    "tiny": (2, 4, (5, 8), (10, 20)),
}


def batch(vocabulary: int, shape: str) -> list[dict[str, Any]]:
    items = make_items(vocabulary, *SHAPES[shape])
    for group in items:
        prompt = group["prompt_tokens"]
        group["inference_logprobs"] = [[1.0] * prompt + [-math.log(vocabulary)] * (len(t) - prompt) for t in group["tokens"]]
    return items


def ours(model: str, items: list[dict[str, Any]], exact: bool, variants: list[dict[str, Any]], profile: bool) -> None:
    import msgspec

    from atroposlib.wire.batching import ScoredData
    from example_trainer import packed_attention
    from example_trainer.batching import make_batch
    from example_trainer.config import TrainerConfig
    from example_trainer.fused_norms import fuse_norms
    from example_trainer.learner import Learner
    from example_trainer.memory import planned
    from example_trainer.parallel import compute_dtype, join

    varlen = packed_attention.varlen_attn
    longest = max(len(tokens) for group in items for tokens in group["tokens"])
    settings = {"model_name": model, "weight_bridge_mode": "shared_vllm", "use_shared_memory": True, "seq_len": max(1024, longest), "lr": 1e-6}
    settings |= {"batch_invariant": exact}
    config = TrainerConfig.model_validate(settings)
    device = torch.device("cuda", 0) if CUDA else torch.device("cpu")
    ranks = join(config, device)
    learner = Learner(config, device, ranks)
    try:
        config = learner.settled()
        start = time.perf_counter()
        learner.load(model)
        learner.begin("")
        load_s = round(time.perf_counter() - start, 1)
        given = [msgspec.convert({k: v for k, v in item.items() if k != "prompt_tokens"}, ScoredData) for item in items]
        settled = learner._config

        def step(count: int | None = None) -> tuple[float, Any, float]:
            if CUDA:
                torch.cuda.synchronize()
            start = time.perf_counter()
            sequences = make_batch(given, seq_len=config.seq_len, policy_version=0).sequences[:count]
            figures = learner.gradients(sequences, float(sum(each.trained_tokens for each in sequences)))
            norm = learner.clip()
            learner.update(1e-6)
            if CUDA:
                torch.cuda.synchronize()
            return time.perf_counter() - start, figures, norm

        for nth, variant in enumerate(variants):
            known = dict(variant)
            torch.set_float32_matmul_precision("high" if known.pop("tf32", True) and not exact else "highest")
            packed_attention.varlen_attn = varlen if known.pop("varlen", True) else None
            if known.pop("norms", False):
                fuse_norms(learner.trained.model)
            learner._config = settled.model_copy(update=known)
            found: dict[str, Any] = {"arm": "ours", "exact": exact, "variant": variant, "offload": config.offload, "load_s": load_s}
            found["dtype"] = str(compute_dtype(config, device))
            try:
                warm_up_s, figures, norm = step()
                if CUDA:
                    torch.cuda.reset_peak_memory_stats()
                seconds = [step()[0] for _ in range(STEPS)]
                found |= {"loss": figures["loss"], "grad_norm": norm, "warm_up_s": round(warm_up_s, 2), "steps_s": [round(each, 3) for each in seconds]}
                found |= rates(model, items, statistics.median(seconds))
                plan = planned(learner._config, device, ranks)
                found["planned_gb"] = round(plan.need / 1e9, 2)
            except torch.OutOfMemoryError as error:
                found["error"] = str(error)[:200]
                torch.cuda.empty_cache()
            print("@" + json.dumps(found), flush=True)
            if profile and CUDA and "error" not in found and nth == len(variants) - 1:
                kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
                with torch.profiler.profile(activities=kinds) as profiler:
                    took, _, _ = step(4)
                print(f"profile of {variant}, 4 sequences, {took:.3f} s", flush=True)
                averages = profiler.key_averages()
                for by in ("self_cuda_time_total", "self_cpu_time_total"):
                    print(averages.table(sort_by=by, row_limit=30, max_name_column_width=70), flush=True)
    finally:
        ranks.leave()


def trl(model: str, items: list[dict[str, Any]], checkpointing: bool) -> dict[str, Any]:
    """The arm of benchmarks/trainer_step_trl.py, on the GPU."""
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        (work / "model").symlink_to(Path(model).resolve())
        (work / "items.json").write_text(json.dumps(items))
        (work / "steps").write_text("step\n" * (STEPS + 1))
        sys.stdin = (work / "steps").open()
        settings = {"use_cpu": not CUDA} | ({} if checkpointing else {"gradient_checkpointing": False})
        trl_arm(work, torch.get_num_threads(), settings, tell=lambda **values: lines.append(values))
    seconds = [line["seconds"] for line in lines[1:]]
    found = {"arm": "TRL" + ("" if checkpointing else " without checkpointing"), "loss": lines[0]["loss"], "grad_norm": lines[0]["grad_norm"]}
    return found | {"steps_s": [round(each, 3) for each in seconds]} | rates(model, items, statistics.median(seconds))


def rates(model: str, items: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """By 6 operations per weight and token, and attention's, of whole sequences: sharing prefixes saves some of them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model)
    with torch.device("meta"):
        weights = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
    lengths = [len(tokens) for group in items for tokens in group["tokens"]]
    width = config.num_attention_heads * config.head_dim
    # a causal score takes half of 4 x width operations, and the backward pass twice as many again: 6 in all
    operations = 6 * weights * sum(lengths) + 6 * config.num_hidden_layers * width * sum(length**2 for length in lengths)
    found = {"weights": weights, "tokens": sum(lengths), "tokens_per_s": round(sum(lengths) / seconds), "mfu": round(operations / seconds / PEAK, 4)}
    if CUDA:
        found["peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
        found["reserved_gb"] = round(torch.cuda.max_memory_reserved() / 1e9, 2)
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--arm", choices=("ours", "trl"), default="ours")
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="short")
    parser.add_argument("--variant", type=json.loads, action="append")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--rehearse", action="store_true")
    asked = parser.parse_args()
    size = "tiny" if asked.rehearse else asked.model
    folder = Path(os.environ["WORK"]) / "models" / size
    if not (folder / "config.json").is_file():
        folder.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, str(Path(__file__).with_name("random_model.py")), size, str(folder)], check=True)
    items = batch(json.loads((folder / "config.json").read_text())["vocab_size"], "tiny" if asked.rehearse else asked.shape)
    if asked.arm == "ours":
        ours(str(folder), items, asked.exact, asked.variant or [{}], asked.profile)
    else:
        for checkpointing in (True, False):
            try:
                found = trl(str(folder), items, checkpointing)
            except torch.OutOfMemoryError as error:
                found = {"arm": "TRL", "checkpointing": checkpointing, "error": str(error)[:150]}
            print("@" + json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
