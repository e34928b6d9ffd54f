"""One GRPO step of this trainer with shared prefixes against without, with the memory that it frees kept or given back,
or by its own kernels: same batch, model and threads, one run. trainer_step_trl.py compares it with TRL's.

    python benchmarks/trainer_step.py [--model DIR] [--groups-file runs/NAME/samples.jsonl]
    python benchmarks/trainer_step.py --freed-memory --only questions [--kernels bfloat16]
    python benchmarks/trainer_step.py --kernels torch,onednn,bfloat16

A step is everything from sampled sequences to updated weights: batching, forward, loss, backward, gradient clipping,
fused AdamW. Each arm is its own process. All have their model in memory at the same time and take turns, so that a
noisy machine disturbs all alike. The tables show the process's CPU time beside wall time: on a busy machine it is the
steadier of the two. The first step of each arm is a warm-up, from which loss and gradient norm must agree: all do the
same work.
"""

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LR = 1e-6
CLIP = 0.2
Settings = dict[str, Any]
# groups, answers, tokens of a prompt, of whole sequences: the shapes of the quickstart's first batch, and a long prompt
SHARED: dict[str, tuple[int, int, tuple[int, int], tuple[int, int]]] = {
    "prefixes of 8 questions of 17 tokens, 8 answers each": (8, 8, (17, 17), (20, 41)),
    "prefixes of a prompt of 1,000 tokens, 8 answers of 100": (1, 8, (1000, 1000), (1100, 1100)),
    "prefixes of a prompt of 17 tokens, 4 answers of 1,000": (1, 4, (17, 17), (1017, 1017)),
}


def make_items(
    vocabulary: int, groups: int, group_size: int, prompt: tuple[int, int], total: tuple[int, int]
) -> list[dict[str, Any]]:
    """Groups that share a prompt, with whole lengths spread evenly over `total`; half of each group is rewarded."""
    generator = random.Random(0)
    count = groups * group_size
    lengths = [total[0] + (total[1] - total[0]) * index // (count - 1) for index in range(count)]
    generator.shuffle(lengths)
    items = []
    for group in range(groups):
        question = [generator.randrange(vocabulary) for _ in range(generator.randint(*prompt))]
        answers = [
            [generator.randrange(vocabulary) for _ in range(length - len(question))]
            for length in lengths[group * group_size : (group + 1) * group_size]
        ]
        items.append(
            {
                "tokens": [question + answer for answer in answers],
                "masks": [[-100] * len(question) + answer for answer in answers],
                "scores": [float(index % 2) for index in range(group_size)],
                "prompt_tokens": len(question),
            }
        )
    return items


# --- arms: each waits for a line on stdin, does one step, answers one JSON line -------------------------------------


def answer(**values: object) -> None:
    """Tell the parent."""
    print("@" + json.dumps(values), flush=True)


def our_arm(work: Path, threads: int, settings: Settings) -> None:
    """This trainer's step, by the functions that its loop calls."""
    import msgspec
    import torch

    from atroposlib.processes.malloc import keep_freed_memory
    from atroposlib.wire.batching import ScoredData
    from example_trainer.data.batching import make_batch
    from example_trainer.data.packing import micro_batches
    from example_trainer.loss.batch_gradients import batch_gradients
    from example_trainer.model.cpu_kernels import kernels_of_run, use_kernels
    from example_trainer.model.loading import load_model
    from example_trainer.model.policy import Policy
    from example_trainer.optim.optimizer import clip_gradients, make_optimizer, update
    from example_trainer.ranks.ranks import Ranks
    from example_trainer.settings.config import TrainerConfig
    from example_trainer.settings.loss import LossSettings

    torch.set_num_threads(threads)
    keeps = settings.pop("keeps_memory", True)
    config = TrainerConfig.model_validate({"model_name": str(work / "model"), "lr": LR, "clip_eps": CLIP} | settings)
    device = torch.device("cpu")
    model = load_model(config.model_name, device)
    use_kernels(model, kernels_of_run(config, model, device, Ranks(), None))
    optimizer = make_optimizer(model.parameters(), config)
    if keeps:
        keep_freed_memory()
    items = msgspec.json.decode((work / "items.json").read_bytes(), type=list[ScoredData])
    loss = LossSettings(clip_eps=CLIP)
    for _ in sys.stdin:
        start, cpu = time.perf_counter(), time.process_time()
        batch = make_batch(items, seq_len=config.seq_len, policy_version=0)
        figures = batch_gradients(
            Policy(model),
            micro_batches(batch.sequences, config.pass_tokens, device, share=config.shares_prefixes),
            loss,
            chunk_mb=config.logits_mb,
        )
        grad_norm = clip_gradients(optimizer, config.max_grad_norm)
        update(optimizer)
        answer(
            seconds=time.perf_counter() - start,
            cpu_seconds=time.process_time() - cpu,
            loss=figures["loss"].value,
            grad_norm=grad_norm,
            peak_gb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
        )


def prepare_logprobs(work: Path, threads: int) -> None:
    """Fill `inference_logprobs` with the model's own log-probabilities plus noise, as a sampler's would be."""
    import msgspec
    import torch

    from atroposlib.wire.batching import ScoredData
    from example_trainer.data.batching import make_batch
    from example_trainer.data.packing import micro_batches
    from example_trainer.model.loading import load_model
    from example_trainer.model.policy import Policy, token_logprobs

    torch.set_num_threads(threads)
    items = json.loads((work / "items.json").read_text())
    model = load_model(str(work / "model"), torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    for group in items:
        group["inference_logprobs"] = [
            [1.0] * group["prompt_tokens"] + [-1.0] * (len(t) - group["prompt_tokens"]) for t in group["tokens"]
        ]
        batch = make_batch([msgspec.convert(group, ScoredData)], seq_len=10**6, policy_version=0)
        for row, sequence in zip(group["inference_logprobs"], batch.sequences, strict=True):
            (micro,) = micro_batches([sequence], 1, torch.device("cpu"))
            logprobs = token_logprobs(Policy(model), micro, 128)
            noise = 0.05 * torch.randn(len(logprobs), generator=generator)
            row[group["prompt_tokens"] :] = (logprobs + noise).clamp(max=0).tolist()
    (work / "items.json").write_text(json.dumps(items))


# --- parent ---------------------------------------------------------------------------------------------------------


class Arm:
    """A worker process that does one step when asked."""

    def __init__(self, name: str, command: list[str], log: Path) -> None:
        self.name = name
        self.log = log
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log.open("w"), text=True
        )

    def step(self) -> dict[str, float]:
        """Seconds, loss and gradient norm of one step."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("@"):
                result: dict[str, float] = json.loads(line[1:])
                return result
        raise SystemExit(f"{self.name} ended early:\n{self.log.read_text()[-3000:]}")

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


def prepare_model(model: str | None, work: Path) -> int:
    """Put the model, or a random one of SmolLM2-135M's shape, at `work/model`; its vocabulary size."""
    from transformers import AutoConfig

    if model is not None:
        (work / "model").symlink_to(Path(model).resolve())
    else:
        from transformers import LlamaConfig, LlamaForCausalLM

        shape = LlamaConfig(
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            tie_word_embeddings=True,
        )
        LlamaForCausalLM(shape).save_pretrained(work / "model")
    vocabulary: int = AutoConfig.from_pretrained(work / "model").vocab_size
    return vocabulary


def interleaved(arms: list[Arm], steps: int) -> Iterator[tuple[Arm, dict[str, float]]]:
    """One warm-up round, then `steps` rounds, each arm in turn."""
    for _ in range(steps + 1):
        for arm in arms:
            yield arm, arm.step()


SHARING = {"shared": {"share_prefixes": True}, "each sequence whole": {"share_prefixes": False}}
FREED = {"kept": {"keeps_memory": True}, "given back": {"keeps_memory": False}}


def compare_two(name: str, work: Path, options: argparse.Namespace) -> None:
    """Print how much faster a step is with the first settings than with the second, taking turns. Exits if losses
    disagree.
    """
    this, common = str(Path(__file__).resolve()), ["--work", str(work), "--threads", str(options.threads)]
    arms = []
    for label, settings in (FREED if options.freed_memory else SHARING).items():
        command = [sys.executable, this, "--arm", "ours", "--settings", json.dumps(settings), *common]
        arms.append(Arm(label, [*command, "--kernels", options.kernels], work / f"{label}.log"))
    try:
        steps = list(interleaved(arms, options.steps))
    finally:
        for arm in arms:
            arm.close()
    results = {arm.name: [result for ran, result in steps if ran is arm] for arm in arms}
    first, second = results.values()
    tolerance = options.agreement if options.kernels == "bfloat16" else 1e-3
    for key in ("loss", "grad_norm"):
        shown = ", ".join(f"{label} {rows[0][key]:.6f}" for label, rows in results.items())
        print(f"  {key} at the first step: {shown}")
        if abs(first[0][key] - second[0][key]) > tolerance * max(1e-2, abs(second[0][key])):
            raise SystemExit(f"{name}: {key} differs, the arms do not do the same work")
    for label, rows in results.items():
        each = " ".join(f"{row['seconds']:.2f} ({row['cpu_seconds']:.2f})" for row in rows[1:])
        print(f"  {label}: steps {each} s (CPU s), {rows[-1]['peak_gb']:.2f} GB at the peak")
    by_wall = statistics.median(b["seconds"] / a["seconds"] for a, b in zip(first[1:], second[1:], strict=True))
    by_cpu = min(row["cpu_seconds"] for row in second[1:]) / min(row["cpu_seconds"] for row in first[1:])
    print(f"  {by_wall:.2f} x by the median of pairs' wall time, {by_cpu:.2f} x by least CPU time", flush=True)


def compare_batches(vocabulary: int, work: Path, options: argparse.Namespace) -> None:
    """Compare on each batch of SHARED that --only leaves, and that of --groups-file."""
    for name, shape in SHARED.items():
        if not options.only or options.only in name:
            (work / "items.json").write_text(json.dumps(make_items(vocabulary, *shape)))
            run_arm("prepare", str(work), options.threads)
            print(f"{name}:", flush=True)
            compare_two(name, work, options)
    if options.groups_file is not None:
        groups = [json.loads(line) for line in options.groups_file.read_text().splitlines()]
        trained = [group for group in groups if len(set(group["scores"])) > 1]
        (work / "items.json").write_text(json.dumps(trained))
        print(f"prefixes of {len(trained)} groups of {len(groups)} in {options.groups_file}:", flush=True)
        compare_two("groups", work, options)


def run_arm(arm: str, work: str, threads: int) -> None:
    """One that only prepares."""
    this = str(Path(__file__).resolve())
    command = [sys.executable, this, "--arm", arm, "--work", work, "--threads", str(threads)]
    subprocess.run(command, check=True)


def compare_kernels(names: list[str], work: Path, options: argparse.Namespace) -> None:
    """Print the steps of each of `names`, taking turns, and how many times as fast as the first each is, step by step.
    Exits if a gradient is another.
    """
    this = str(Path(__file__).resolve())
    common = ["--work", str(work), "--threads", str(options.threads)]
    arms = [
        Arm(name, [sys.executable, this, "--arm", "ours", "--kernels", name, *common], work / f"{name}.log")
        for name in names
    ]
    results: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    try:
        for arm, result in interleaved(arms, options.steps):
            results[arm.name].append(result)
    finally:
        for arm in arms:
            arm.close()
    of_first = results[names[0]]
    for name, steps in results.items():
        loss, norm = steps[0]["loss"], steps[0]["grad_norm"]
        print(f"{name}: first loss {loss:.6f}, gradient norm {norm:.6f}")
        if abs(norm - of_first[0]["grad_norm"]) > options.agreement * of_first[0]["grad_norm"]:
            raise SystemExit(f"{name}: the gradient norm differs, the arms do not do the same work")
        for metric in ("seconds", "cpu_seconds"):
            each = " ".join(f"{step[metric]:.2f}" for step in steps[1:])
            ratios = [first[metric] / step[metric] for first, step in zip(of_first[1:], steps[1:], strict=True)]
            print(f"  {metric}: {each}; {statistics.median(ratios):.2f} x {names[0]}", flush=True)


def main() -> None:
    """Run what is asked for, or one arm when started by the parent."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--model", help="directory of the model; default is a random one of SmolLM2-135M's shape")
    parser.add_argument("--steps", type=int, default=4, help="timed steps of each arm in each comparison")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="default: all cores")
    parser.add_argument("--kernels", default="torch", help="kernels; several, such as torch,onednn, are compared")
    parser.add_argument(
        "--freed-memory", action="store_true", help="compare memory that is kept once it is free with memory given back"
    )
    parser.add_argument("--groups", type=int, default=4, help="prompts of the kernels' batch (default: %(default)s)")
    parser.add_argument("--group-size", type=int, default=8, help="answers to each (default: %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, nargs=2, default=(50, 80), metavar=("MIN", "MAX"))
    parser.add_argument("--sequence-tokens", type=int, nargs=2, default=(100, 250), metavar=("MIN", "MAX"))
    parser.add_argument("--only", help="batches whose name contains this, such as questions or 1,000")
    parser.add_argument(
        "--groups-file",
        type=Path,
        help="samples.jsonl of a run: its groups with prefixes shared or not, without those whose scores are equal",
    )
    parser.add_argument(
        "--agreement",
        type=float,
        default=2e-2,
        help="relative difference allowed between the arms' first gradient norms",
    )
    parser.add_argument("--arm", choices=("ours", "prepare"), help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--settings", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.freed_memory and "," in options.kernels:
        parser.error("--freed-memory takes one of --kernels")
    if options.arm == "ours":
        return our_arm(options.work, options.threads, {"kernels": options.kernels} | (options.settings or {}))
    if options.arm == "prepare":
        return prepare_logprobs(options.work, options.threads)

    from atropos_launcher.placement.this_machine import processor

    with tempfile.TemporaryDirectory(prefix="trainer-step-") as folder:
        work = Path(folder)
        vocabulary = prepare_model(options.model, work)
        print(f"{processor()}, {options.threads} threads", flush=True)
        if "," not in options.kernels:
            return compare_batches(vocabulary, work, options)
        items = make_items(
            vocabulary,
            options.groups,
            options.group_size,
            options.prompt_tokens,
            options.sequence_tokens,
        )
        (work / "items.json").write_text(json.dumps(items))
        run_arm("prepare", folder, options.threads)
        tokens = sum(len(sequence) for group in items for sequence in group["tokens"])
        print(f"{options.groups * options.group_size} sequences, {tokens} tokens", flush=True)
        compare_kernels(options.kernels.split(","), work, options)


if __name__ == "__main__":
    main()
