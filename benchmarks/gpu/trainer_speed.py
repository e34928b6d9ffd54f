"""Measures steps of the trainer, or of TRL, on this GPU: tokens per second, share of the peak rate (MFU), and memory
beside the plan.

    python -m benchmarks.gpu.trainer_speed --model 0.6B [--shape 2k] [--exact] [--arm trl]
        [--variant '{"micro_batch_tokens": 8192}' ...] [--profile]

Tokens and weights are random; a step is everything from sequences to updated weights. Prints one JSON line behind an @
for each variant of the settings, in one process. A variant has settings of the trainer that need no loading, and three
switches: tf32 (TensorFloat-32 for products of float32), varlen (one attention call for all sequences of a pass) and
norms (fused norms). What it leaves out is as the product sets it.
"""

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.random_model import SHAPES, ensure_random_model, work_folder
from benchmarks.trainer_step import make_items
from benchmarks.trainer_step_trl import trl_arm

PEAK = 989e12  # bfloat16 products of an H100 or H200, dense, by its data sheet
STEPS = 2
LR = 1e-6
PROFILED = 4  # sequences
PROFILE_ROWS = 30
CUDA = torch.cuda.is_available()
# groups, answers, tokens of a prompt, of whole sequences
BATCHES: dict[str, tuple[int, int, tuple[int, int], tuple[int, int]]] = {
    "short": (16, 8, (50, 80), (200, 600)),
    "2k": (2, 8, (50, 80), (2048, 2048)),
    "4k": (1, 8, (50, 80), (4000, 4000)),
    "tiny": (2, 4, (5, 8), (10, 20)),
}
SWITCHES = ("tf32", "varlen", "norms")
Items = list[dict[str, Any]]
Found = dict[str, Any]


def batch(vocabulary: int, shape: str) -> Items:
    """Groups as a sampler of uniform tokens would send them."""
    items = make_items(vocabulary, *BATCHES[shape])
    for group in items:
        prompt, logprob = group["prompt_tokens"], -math.log(vocabulary)
        group["inference_logprobs"] = [[1.0] * prompt + [logprob] * (len(row) - prompt) for row in group["tokens"]]
    return items


class Ours:
    """A trainer of one rank with its model loaded, as the product's process makes it."""

    def __init__(self, model: str, items: Items, exact: bool) -> None:
        import msgspec

        from atroposlib.wire.batching import ScoredData
        from example_trainer.grpo import prepare_torch
        from example_trainer.loop.learner import Learner
        from example_trainer.model import packed_attention
        from example_trainer.model.fused_norms import plain_norms
        from example_trainer.ranks.ranks import join
        from example_trainer.settings.config import TrainerConfig

        longest = max(len(tokens) for group in items for tokens in group["tokens"])
        settings = {"model_name": model, "weight_bridge_mode": "shared_vllm", "use_shared_memory": True, "lr": LR}
        settings |= {"seq_len": max(1024, longest), "batch_invariant": exact}
        config = TrainerConfig.model_validate(settings)
        self.model, self.items, self.exact = model, items, exact
        self.device = prepare_torch(config)
        self.ranks = join(config, self.device)
        self.learner = Learner(config, self.device, self.ranks)
        self.learner.resolve("")
        start = time.perf_counter()
        self.learner.load(model)
        self.learner.begin("")
        self.load_s = round(time.perf_counter() - start, 1)
        self.settled = self.learner.config
        self.takes_varlen = packed_attention._takes_varlen
        self.precision = torch.get_float32_matmul_precision()
        self.has_fused_norms = any("forward" in vars(norm) for norm in plain_norms(self.learner.trained.model))
        self.groups = [
            msgspec.convert({name: each for name, each in item.items() if name != "prompt_tokens"}, ScoredData)
            for item in items
        ]

    def apply(self, variant: Found) -> None:
        """Set what the variant names, and the rest as the product has set it."""
        from example_trainer.model import packed_attention
        from example_trainer.model.fused_norms import fuse_norms

        precision = {True: "high", False: "highest", None: self.precision}[variant.get("tf32")]
        torch.set_float32_matmul_precision(precision)
        one_call = self.takes_varlen if variant.get("varlen", True) else lambda query: False
        setattr(packed_attention, "_takes_varlen", one_call)  # noqa: B010
        unfuse_norms(self.learner.trained.model)
        if variant.get("norms", self.has_fused_norms):
            fuse_norms(self.learner.trained.model)
        own = {name: value for name, value in variant.items() if name not in SWITCHES}
        self.learner.config = self.settled.model_copy(update=own)

    def step(self, count: int | None = None) -> tuple[float, float | None, float]:
        """One update on the first `count` sequences: seconds, loss, norm of the gradient."""
        from example_trainer.data.batching import make_batch

        synchronize()
        start = time.perf_counter()
        sequences = make_batch(self.groups, seq_len=self.settled.seq_len, policy_version=0).sequences[:count]
        divisor = float(sum(each.trained_tokens for each in sequences))
        metrics = self.learner.gradients(sequences, divisor)
        norm = self.learner.clip()
        self.learner.update(LR)
        synchronize()
        return time.perf_counter() - start, metrics["loss"].value, norm

    def measured(self, variant: Found) -> Found:
        """Some steps with a variant of the settings."""
        from example_trainer.model.memory_check import planned
        from example_trainer.ranks.ranks import compute_dtype

        self.apply(variant)
        dtype = str(compute_dtype(self.settled, self.device))
        found = {"arm": "ours", "exact": self.exact, "variant": variant, "offload": self.settled.offload}
        found |= {"load_s": self.load_s, "dtype": dtype}
        try:
            warm_up_s, loss, norm = self.step()
            if CUDA:
                torch.cuda.reset_peak_memory_stats()
            seconds = [self.step()[0] for _ in range(STEPS)]
        except torch.OutOfMemoryError as error:
            self.learner.discard()
            torch.cuda.empty_cache()
            return found | {"error": str(error)[:200]}
        found |= {"loss": loss, "grad_norm": norm, "warm_up_s": round(warm_up_s, 2)}
        found |= {"steps_s": [round(each, 3) for each in seconds]}
        found |= rates(self.model, self.items, statistics.median(seconds))
        plan = planned(self.learner.config, self.device, self.ranks)
        return found | {"planned_gb": round(plan.need / 1e9, 2)}

    def profile(self) -> None:
        """Print where the time of a short step with the last variant goes."""
        kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=kinds) as profiler:
            took, *_ = self.step(PROFILED)
        print(f"profile of the last variant, {PROFILED} sequences, {took:.3f} s", flush=True)
        averages = profiler.key_averages()
        for by in ("self_cuda_time_total", "self_cpu_time_total"):
            print(averages.table(sort_by=by, row_limit=PROFILE_ROWS, max_name_column_width=70), flush=True)


def unfuse_norms(model: torch.nn.Module) -> None:
    """Give each norm its class's own forward again."""
    from example_trainer.model.fused_norms import plain_norms

    for norm in plain_norms(model):
        vars(norm).pop("forward", None)


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if CUDA:
        torch.cuda.synchronize()


def ours(model: str, items: Items, exact: bool, variants: Sequence[Found], profile: bool) -> None:
    """Print the line of each variant, and the profile of the last."""
    trainer = Ours(model, items, exact)
    try:
        for variant in variants:
            found = trainer.measured(variant)
            print("@" + json.dumps(found), flush=True)
        if profile and CUDA and "error" not in found:
            trainer.profile()
    finally:
        trainer.ranks.leave()


def trl(model: str, items: Items, checkpointing: bool) -> Found:
    """The arm of benchmarks/trainer_step_trl.py, on the GPU."""
    lines: list[Found] = []
    arm = "TRL" if checkpointing else "TRL without checkpointing"
    settings = {"use_cpu": not CUDA} | ({} if checkpointing else {"gradient_checkpointing": False})
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        (work / "model").symlink_to(Path(model).resolve())
        (work / "items.json").write_text(json.dumps(items))
        (work / "steps").write_text("step\n" * (STEPS + 1))
        with (work / "steps").open() as sys.stdin:  # by which it is told to take one
            try:
                trl_arm(work, torch.get_num_threads(), settings, tell=lambda **values: lines.append(values))
            except torch.OutOfMemoryError as error:
                return {"arm": arm, "error": str(error)[:150]}
    first, *timed = lines
    seconds = [line["seconds"] for line in timed]
    found = {"arm": arm, "loss": first["loss"], "grad_norm": first["grad_norm"]}
    return found | {"steps_s": [round(each, 3) for each in seconds]} | rates(model, items, statistics.median(seconds))


def rates(model: str, items: Items, seconds: float) -> Found:
    """Rates by 6 operations per weight and token, and attention's, of whole sequences: sharing prefixes saves some."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model)
    with torch.device("meta"):
        weights = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
    lengths = [len(tokens) for group in items for tokens in group["tokens"]]
    width = config.num_attention_heads * config.head_dim
    # a causal score takes half of 4 x width operations, and the backward pass twice as many again: 6 in all
    attention = 6 * config.num_hidden_layers * width * sum(length**2 for length in lengths)
    operations = 6 * weights * sum(lengths) + attention
    found = {"weights": weights, "tokens": sum(lengths), "tokens_per_s": round(sum(lengths) / seconds)}
    found |= {"mfu": round(operations / seconds / PEAK, 4)}
    if CUDA:
        found["peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
        found["reserved_gb"] = round(torch.cuda.max_memory_reserved() / 1e9, 2)
    return found


def parser() -> argparse.ArgumentParser:
    command = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("--model", required=True, choices=tuple(SHAPES))
    command.add_argument("--arm", choices=("ours", "trl"), default="ours")
    command.add_argument("--exact", action="store_true", help="as a bit-exact run computes")
    command.add_argument("--shape", choices=tuple(BATCHES), default="short", help="of the batch")
    command.add_argument("--variant", type=json.loads, action="append", metavar="JSON")
    command.add_argument("--profile", action="store_true", help="of a short step, with the last variant")
    command.add_argument("--rehearse", action="store_true", help="with a tiny model and batch")
    return command


def main() -> int:
    asked = parser().parse_args()
    size, shape = ("tiny", "tiny") if asked.rehearse else (asked.model, asked.shape)
    folder = ensure_random_model(size, work_folder())
    items = batch(json.loads((folder / "config.json").read_text())["vocab_size"], shape)
    if asked.arm == "ours":
        ours(str(folder), items, asked.exact, asked.variant or [{}], asked.profile)
        return 0
    for checkpointing in (True, False):
        print("@" + json.dumps(trl(str(folder), items, checkpointing)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
