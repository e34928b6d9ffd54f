"""One GRPO step of this trainer against one of TRL's GRPOTrainer, or with shared prefixes against without: same batch,
model, threads and precision, one run.

    python benchmarks/trainer_step.py [--model DIR] [--steps 5] [--threads 2]
    python benchmarks/trainer_step.py --kernels torch,onednn,bfloat16    this trainer alone, by its own kernels
    python benchmarks/trainer_step.py --only prefixes [--groups-file runs/NAME/samples.jsonl]

A step is everything from sampled sequences to updated weights: batching, forward, loss, backward, gradient clipping,
fused AdamW. Each arm is its own process. Both have their model in memory at the same time and take turns, so that a
noisy machine disturbs both alike. The tables show the process's CPU time beside wall time: on a busy machine it is the
steadier of the two. TRL goes into a virtual environment of its own in a cache directory, layered on this one's PyTorch
and transformers. The first step of each arm is a warm-up, from which loss and gradient norm must agree: both do the
same work.
"""

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TRL_VERSION = "1.16.0"
LR = 1e-6
CLIP = 0.2
TEMPERATURE = 1.0
Settings = dict[str, Any]
# groups, answers, tokens of a prompt, of whole sequences: the shapes of the quickstart's first batch, and a long prompt
SHARED: dict[str, tuple[int, int, tuple[int, int], tuple[int, int]]] = {
    "prefixes of 8 questions of 17 tokens, 8 answers each": (8, 8, (17, 17), (20, 41)),
    "prefixes of a prompt of 1,000 tokens, 8 answers of 100": (1, 8, (1000, 1000), (1100, 1100)),
}
TRL_SETTINGS: dict[str, Settings] = {
    "TRL, its defaults in float32": {"per_device_train_batch_size": 8, "gradient_checkpointing": True},
    "TRL, no checkpointing, 8 per micro-batch": {"per_device_train_batch_size": 8, "gradient_checkpointing": False},
    "TRL, no checkpointing, 4 per micro-batch": {"per_device_train_batch_size": 4, "gradient_checkpointing": False},
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


def answer(**values: Any) -> None:
    """Tell the parent."""
    print("@" + json.dumps(values), flush=True)


def our_arm(work: Path, threads: int, settings: Settings) -> None:
    """This trainer's step, by the functions that its loop calls."""
    import msgspec
    import torch

    from atroposlib.wire.batching import ScoredData
    from example_trainer.batching import make_batch
    from example_trainer.config import LossSettings, TrainerConfig
    from example_trainer.kernels import use_kernels
    from example_trainer.model import load_model
    from example_trainer.optimizer import clip_gradients, make_optimizer, update
    from example_trainer.packing import micro_batches
    from example_trainer.policy import Policy
    from example_trainer.step import batch_gradients

    torch.set_num_threads(threads)
    config = TrainerConfig.model_validate({"model_name": str(work / "model"), "lr": LR, "clip_eps": CLIP} | settings)
    device = torch.device("cpu")
    model = load_model(config.model_name, device)
    if config.kernels != "auto":
        use_kernels(model, config.kernels)
    optimizer = make_optimizer(model.parameters(), config)
    items = msgspec.json.decode((work / "items.json").read_bytes(), type=list[ScoredData])
    loss = LossSettings(clip_eps=CLIP)
    for _ in sys.stdin:
        start, cpu = time.perf_counter(), time.process_time()
        batch = make_batch(items, seq_len=config.seq_len, policy_version=0)
        figures = batch_gradients(
            Policy(model),
            micro_batches(batch.sequences, config.micro_batch_tokens, device, share=config.share_prefixes),
            loss,
            chunk_mb=config.logits_chunk_mb,
        )
        grad_norm = clip_gradients(optimizer, config.max_grad_norm)
        update(optimizer)
        answer(
            seconds=time.perf_counter() - start,
            cpu_seconds=time.process_time() - cpu,
            loss=figures["loss"],
            grad_norm=grad_norm,
        )


def prepare_logprobs(work: Path, threads: int) -> None:
    """Fill `inference_logprobs` with the model's own log-probabilities plus noise, as a sampler's would be."""
    import msgspec
    import torch

    from atroposlib.wire.batching import ScoredData
    from example_trainer.batching import make_batch
    from example_trainer.model import load_model
    from example_trainer.packing import micro_batches
    from example_trainer.policy import Policy, token_logprobs

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


def trl_arm(work: Path, threads: int, settings: Settings) -> None:
    """GRPOTrainer.train() with generation and scoring replaced by the given batch; steps are timed between its own
    callbacks.
    """
    import numpy as np
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(threads)
    items = json.loads((work / "items.json").read_text())
    sequences = [(group, index) for group in items for index in range(len(group["tokens"]))]

    def padded(rows: list[list[Any]], value: float, dtype: torch.dtype, left: bool) -> torch.Tensor:
        width = max(len(row) for row in rows)
        return torch.tensor(
            [[value] * (width - len(row)) + row if left else row + [value] * (width - len(row)) for row in rows],
            dtype=dtype,
        )

    def generated() -> dict[str, torch.Tensor]:
        prompts = [group["tokens"][i][: group["prompt_tokens"]] for group, i in sequences]
        completions = [group["tokens"][i][group["prompt_tokens"] :] for group, i in sequences]
        logprobs = [group["inference_logprobs"][i][group["prompt_tokens"] :] for group, i in sequences]
        advantages = [
            (group["scores"][i] - np.mean(group["scores"])) / (np.std(group["scores"]) + 1e-4) for group, i in sequences
        ]
        return {
            "prompt_ids": padded(prompts, 0, torch.long, left=True),
            "prompt_mask": padded([[1] * len(row) for row in prompts], 0, torch.long, left=True),
            "completion_ids": padded(completions, 0, torch.long, left=False),
            "completion_mask": padded([[1] * len(row) for row in completions], 0, torch.long, left=False),
            "old_per_token_logps": padded(logprobs, 0.0, torch.float32, left=False),
            "advantages": torch.tensor(advantages, dtype=torch.float32),
            "num_items_in_batch": torch.tensor(float(sum(len(row) for row in completions))),
        }

    class GivenBatch(GRPOTrainer):  # type: ignore[misc]
        def _generate_and_score_completions(self, inputs: Any) -> dict[str, torch.Tensor]:
            return generated()

    class Turns(TrainerCallback):
        start = cpu = seconds = cpu_seconds = 0.0

        def on_step_begin(self, args: Any, state: Any, control: Any, **other: Any) -> None:
            if not sys.stdin.readline():
                control.should_training_stop = True
            self.start, self.cpu = time.perf_counter(), time.process_time()

        def on_step_end(self, args: Any, state: Any, control: Any, **other: Any) -> None:
            self.seconds, self.cpu_seconds = time.perf_counter() - self.start, time.process_time() - self.cpu

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **other: Any) -> None:
            if logs and "grad_norm" in logs:
                answer(
                    seconds=self.seconds, cpu_seconds=self.cpu_seconds, loss=logs["loss"], grad_norm=logs["grad_norm"]
                )

    tokenizer = AutoTokenizer.from_pretrained(work / "model") if (work / "model" / "tokenizer.json").exists() else None
    micro = settings["per_device_train_batch_size"]
    args = GRPOConfig(
        output_dir=str(work / "trl"),
        use_cpu=True,
        bf16=settings.get("bf16", False),
        gradient_checkpointing=settings["gradient_checkpointing"],
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=len(sequences) // micro,
        num_generations=len(items[0]["tokens"]),
        learning_rate=LR,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        max_grad_norm=1.0,
        temperature=TEMPERATURE,
        epsilon=CLIP,
        beta=0.0,
        max_steps=1000,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = GivenBatch(
        model=AutoModelForCausalLM.from_pretrained(work / "model", dtype=torch.float32),
        reward_funcs=[lambda **given: [0.0] * len(given["prompts"])],
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["question"] * 1000}),
        processing_class=tokenizer or PreTrainedTokenizerFast.from_pretrained(work / "model"),
        callbacks=[Turns()],
    )
    trainer.train()


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


def trl_python(folder: Path) -> Path:
    """The Python of a virtual environment with TRL, layered on this one; made on first use."""
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        print(f"Installing trl=={TRL_VERSION} into {folder}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        site = subprocess.run(
            [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            check=True,
            capture_output=True,
            text=True,
        )
        (Path(site.stdout.strip()) / "layered.pth").write_text(sysconfig.get_path("purelib") + "\n")
        subprocess.run([str(python), "-m", "pip", "install", "-q", "--no-deps", f"trl=={TRL_VERSION}"], check=True)
        (folder / "ready").touch()
    return python


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


def cpu_name() -> str:
    """The processor as the kernel calls it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def interleaved(arms: list[Arm], steps: int) -> Iterator[tuple[Arm, dict[str, float]]]:
    """One warm-up round, then `steps` rounds, each arm in turn."""
    for _ in range(steps + 1):
        for arm in arms:
            yield arm, arm.step()


def compare_sharing(name: str, work: Path, options: argparse.Namespace) -> None:
    """Print how much faster a step is with shared prefixes than without, taking turns. Exits if losses disagree."""
    this, common = str(Path(__file__).resolve()), ["--work", str(work), "--threads", str(options.threads)]
    arms = []
    for label, share in (("shared", True), ("each sequence whole", False)):
        settings = json.dumps({"share_prefixes": share})
        command = [sys.executable, this, "--arm", "ours", "--settings", settings, *common]
        arms.append(Arm(label, command, work / f"{share}.log"))
    try:
        steps = list(interleaved(arms, options.steps))
    finally:
        for arm in arms:
            arm.close()
    results = {arm.name: [result for ran, result in steps if ran is arm] for arm in arms}
    shared, whole = results.values()
    for key in ("loss", "grad_norm"):
        print(f"  {key} at the first step: shared {shared[0][key]:.6f}, each whole {whole[0][key]:.6f}")
        if abs(shared[0][key] - whole[0][key]) > 1e-3 * max(1e-2, abs(whole[0][key])):
            raise SystemExit(f"{name}: {key} differs, the arms do not do the same work")
    for label, rows in results.items():
        each = " ".join(f"{row['seconds']:.2f} ({row['cpu_seconds']:.2f})" for row in rows[1:])
        print(f"  {label}: steps {each} s (CPU s)")
    by_wall = statistics.median(b["seconds"] / a["seconds"] for a, b in zip(shared[1:], whole[1:], strict=True))
    by_cpu = min(row["cpu_seconds"] for row in whole[1:]) / min(row["cpu_seconds"] for row in shared[1:])
    print(f"  {by_wall:.2f} x by the median of pairs' wall time, {by_cpu:.2f} x by least CPU time", flush=True)


def share_prefixes(vocabulary: int, work: Path, options: argparse.Namespace) -> None:
    """Compare each batch of SHARED that --only leaves, and that of --groups-file."""
    for name, shape in SHARED.items():
        if not options.only or options.only in name:
            (work / "items.json").write_text(json.dumps(make_items(vocabulary, *shape)))
            run_arm("prepare", str(work), options.threads)
            print(f"{name}:", flush=True)
            compare_sharing(name, work, options)
    if options.groups_file is not None:
        groups = [json.loads(line) for line in options.groups_file.read_text().splitlines()]
        trained = [group for group in groups if len(set(group["scores"])) > 1]
        (work / "items.json").write_text(json.dumps(trained))
        print(f"prefixes of {len(trained)} groups of {len(groups)} in {options.groups_file}:", flush=True)
        compare_sharing("groups", work, options)


def run_arm(arm: str, work: str, threads: int) -> None:
    """One that only prepares."""
    this = str(Path(__file__).resolve())
    command = [sys.executable, this, "--arm", arm, "--work", work, "--threads", str(threads)]
    subprocess.run(command, check=True)


def compare(
    name: str, settings: Settings, work: Path, options: argparse.Namespace, tokens: int
) -> tuple[float, float, float]:
    """Median tokens/s of ours and of TRL with `settings`, taking turns, and their ratio by least CPU time. Exits if
    the losses disagree.
    """
    this = str(Path(__file__).resolve())
    common = ["--work", str(work), "--threads", str(options.threads)]
    arms = [
        Arm("ours", [sys.executable, this, "--arm", "ours", *common], work / "ours.log"),
        Arm(
            name,
            [str(trl_python(options.trl_venv)), this, "--arm", "trl", "--settings", json.dumps(settings), *common],
            work / "trl.log",
        ),
    ]
    seconds: dict[str, list[float]] = {arm.name: [] for arm in arms}
    cpu_seconds: dict[str, list[float]] = {arm.name: [] for arm in arms}
    first: dict[str, dict[str, float]] = {}
    try:
        for arm, result in interleaved(arms, options.steps):
            if arm.name not in first:
                first[arm.name] = result
            else:
                seconds[arm.name].append(result["seconds"])
                cpu_seconds[arm.name].append(result["cpu_seconds"])
    finally:
        for arm in arms:
            arm.close()
    for figure in ("loss", "grad_norm"):
        ours, theirs = (first[arm.name][figure] for arm in arms)
        print(f"  {figure} at the first step: ours {ours:.6f}, TRL {theirs:.6f}")
        if abs(ours - theirs) > options.agreement * max(1e-2, abs(theirs)):
            raise SystemExit(f"{name}: {figure} differs, the arms do not do the same work")
    for arm in arms:
        times = seconds[arm.name]
        each = " ".join(f"{value:.2f}" for value in times)
        cpu = min(cpu_seconds[arm.name])
        print(
            f"  {arm.name}: steps {each} s; median {statistics.median(times):.2f}, least CPU time {cpu:.2f} s",
            flush=True,
        )
    medians = [tokens / statistics.median(seconds[arm.name]) for arm in arms]
    return medians[0], medians[1], min(cpu_seconds[name]) / min(cpu_seconds["ours"])


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
    """Run all comparisons, or one arm when started by the parent."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="directory of the model; default is a random one of SmolLM2-135M's shape")
    parser.add_argument("--steps", type=int, default=4, help="timed steps of each arm in each comparison")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="default: all cores")
    parser.add_argument("--groups", type=int, default=4, help="prompts of the batch (default: %(default)s)")
    parser.add_argument("--group-size", type=int, default=8, help="answers to each (default: %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, nargs=2, default=(50, 80), metavar=("MIN", "MAX"))
    parser.add_argument("--sequence-tokens", type=int, nargs=2, default=(100, 250), metavar=("MIN", "MAX"))
    parser.add_argument(
        "--trl-venv", type=Path, default=Path(tempfile.gettempdir()) / f"atropos-bench-trl-{TRL_VERSION}"
    )
    parser.add_argument("--kernels", default="torch", help="compare these of ours instead, such as torch,onednn")
    parser.add_argument("--only", help="comparisons whose name contains this; prefixes: with sharing against without")
    parser.add_argument(
        "--groups-file",
        type=Path,
        help="samples.jsonl of a run: its groups with prefixes shared or not, without those whose scores are equal",
    )
    parser.add_argument(
        "--bf16", action="store_true", help="also TRL under bfloat16 autocast, which is its default where supported"
    )
    parser.add_argument(
        "--agreement",
        type=float,
        default=2e-2,
        help="relative difference allowed between the arms' first loss and gradient norm",
    )
    parser.add_argument("--arm", choices=("ours", "trl", "prepare"), help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--settings", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arm == "ours":
        return our_arm(options.work, options.threads, (options.settings or {}) | {"kernels": options.kernels})
    if options.arm == "prepare":
        return prepare_logprobs(options.work, options.threads)
    if options.arm == "trl":
        return trl_arm(options.work, options.threads, options.settings)

    settings = dict(TRL_SETTINGS)
    if options.bf16:
        settings["TRL, bfloat16 autocast, no checkpointing, 4 a micro-batch"] = {
            "per_device_train_batch_size": 4,
            "gradient_checkpointing": False,
            "bf16": True,
        }
    with tempfile.TemporaryDirectory(prefix="trainer-step-") as folder:
        work = Path(folder)
        vocabulary = prepare_model(options.model, work)
        print(f"{cpu_name()}, {options.threads} threads", flush=True)
        if "," not in options.kernels:
            share_prefixes(vocabulary, work, options)
        settings = {name: value for name, value in settings.items() if not options.only or options.only in name}
        if not settings:
            return None
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
        sequences = options.groups * options.group_size
        print(f"{sequences} sequences, {tokens} tokens", flush=True)
        if "," in options.kernels:
            return compare_kernels(options.kernels.split(","), work, options)
        for name, setting in settings.items():
            print(f"{name}:", flush=True)
            ours, theirs, by_cpu = compare(name, setting, work, options, tokens)
            ratios = f"{ours / theirs:.2f} x by median wall time, {by_cpu:.2f} x by least CPU time"
            print(f"  ours {ours:.0f} tokens/s, TRL {theirs:.0f} tokens/s: {ratios}", flush=True)


if __name__ == "__main__":
    main()
