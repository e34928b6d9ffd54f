"""One GRPO step of this trainer beside one of TRL's GRPOTrainer: same batch, model, threads and precision, in turns.

    python -m benchmarks.trainer_step_trl --model ~/.cache/atropos/SmolLM2-135M-Instruct
    python -m benchmarks.trainer_step_trl --batch answers      4 prompts with longer answers

Per precision there are three processes: this trainer with its defaults, TRL with its defaults, and TRL without gradient
checkpointing. TRL's default precision is bfloat16 autocast over float32 weights; beside it this trainer multiplies in
bfloat16 (--kernels bfloat16). Then all train in float32. A step is everything from sampled sequences to updated
weights, and nothing is generated or scored. All processes have their model in memory and take turns, in an order that
alternates, so that a noisy machine disturbs them alike. The first step of each is a warm-up: its loss and gradient norm
must agree, which shows that all do the same work.

TRL goes into a virtual environment of its own, layered on this one's PyTorch and transformers
(`benchmarks/peers/environment.py`).
"""

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from atropos_launcher.placement.this_machine import processor
from benchmarks.peers.environment import folder_of, layered_python
from benchmarks.trainer_step import (
    CLIP,
    LR,
    SHARED,
    Arm,
    Settings,
    answer,
    make_items,
    prepare_model,
    run_arm,
)

ROOT = Path(__file__).resolve().parents[1]
TRL_VERSION = "1.16.0"
# settings of this trainer and of TRL, and how far apart the first losses and gradient norms may be, relatively
PRECISIONS: dict[str, tuple[Settings, Settings, float]] = {
    "float32": ({"kernels": "auto"}, {"bf16": False}, 1e-3),
    "bfloat16": ({"kernels": "bfloat16"}, {}, 0.1),
}
TRL_ARMS: dict[str, Settings] = {
    "TRL, its defaults": {},
    "TRL without checkpointing": {"gradient_checkpointing": False},
}
# groups, answers, tokens of a prompt, of whole sequences
BATCHES: dict[str, tuple[int, int, tuple[int, int], tuple[int, int]]] = {
    "quickstart": next(iter(SHARED.values())),
    "answers": (4, 8, (50, 80), (100, 250)),
}
Steps = list[dict[str, float]]


def trl_arm(work: Path, threads: int, settings: Settings, tell: Callable[..., None] = answer) -> None:
    """GRPOTrainer.train() with generation and scoring replaced by the given batch; steps are timed between its own
    callbacks, and told.
    """
    import numpy as np
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, PreTrainedTokenizerFast, TrainerCallback
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
        def _generate_and_score_completions(self, inputs: object) -> dict[str, torch.Tensor]:
            return {name: tensor.to(self.accelerator.device) for name, tensor in generated().items()}

    class Turns(TrainerCallback):
        start = cpu = seconds = cpu_seconds = 0.0

        def on_step_begin(self, args: Any, state: Any, control: Any, **other: Any) -> None:
            if not sys.stdin.readline():
                control.should_training_stop = True
            self.start, self.cpu = time.perf_counter(), time.process_time()

        def on_step_end(self, args: object, state: object, control: object, **other: object) -> None:
            self.seconds, self.cpu_seconds = time.perf_counter() - self.start, time.process_time() - self.cpu

        def on_log(
            self, args: object, state: object, control: object, logs: dict[str, Any] | None = None, **other: object
        ) -> None:
            if logs and "grad_norm" in logs:
                tell(
                    seconds=self.seconds,
                    cpu_seconds=self.cpu_seconds,
                    loss=logs["loss"],
                    grad_norm=logs["grad_norm"],
                    peak_gb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
                )

    # What is not named here is TRL's default, 8 sequences per micro-batch and fused AdamW among it.
    args = GRPOConfig(
        output_dir=str(work / "trl"),
        num_generations=len(items[0]["tokens"]),
        gradient_accumulation_steps=len(sequences) // 8,
        learning_rate=LR,
        lr_scheduler_type="constant",
        epsilon=CLIP,
        max_steps=1000,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **{"use_cpu": True, **settings},
    )
    assert (args.per_device_train_batch_size, args.loss_type, args.beta) == (8, "dapo", 0.0)
    print(f"bf16={args.bf16} gradient_checkpointing={args.gradient_checkpointing} optim={args.optim}", file=sys.stderr)
    tokenizer = AutoTokenizer.from_pretrained(work / "model") if (work / "model" / "tokenizer.json").exists() else None
    trainer = GivenBatch(
        model=str(work / "model"),
        reward_funcs=[lambda **given: [0.0] * len(given["prompts"])],
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["question"] * 1000}),
        processing_class=tokenizer or PreTrainedTokenizerFast.from_pretrained(work / "model"),
        callbacks=[Turns()],
    )
    trainer.train()


def make_arms(precision: str, work: Path, options: argparse.Namespace) -> list[Arm]:
    """This trainer and TRL's arms, started."""
    ours, theirs, _ = PRECISIONS[precision]
    common = ["--work", str(work), "--threads", str(options.threads), "--settings"]
    programs = {"ours": [sys.executable, "-m", "benchmarks.trainer_step", "--arm", "ours", *common, json.dumps(ours)]}
    python = str(layered_python(options.trl_venv, [f"trl=={TRL_VERSION}"]))
    for name, settings in TRL_ARMS.items():
        module = [python, "-m", "benchmarks.trainer_step_trl", "--arm", "trl"]
        programs[name] = [*module, *common, json.dumps(theirs | settings)]
    return [Arm(name, command, work / f"{precision}-{nth}.log") for nth, (name, command) in enumerate(programs.items())]


def measured(precision: str, work: Path, options: argparse.Namespace) -> dict[str, Steps]:
    """A warm-up and --steps timed steps of each arm; the order turns around from round to round."""
    arms = make_arms(precision, work, options)
    steps: dict[str, Steps] = {arm.name: [] for arm in arms}
    try:
        for nth in range(options.steps + 1):
            for arm in arms[:: 1 if nth % 2 == 0 else -1]:
                steps[arm.name].append(arm.step())
    finally:
        for arm in arms:
            arm.close()
    return steps


def report(steps: dict[str, Steps], agreement: float) -> None:
    """Print each arm's steps, and how many times as long as ours each of TRL's takes. Exits if the first losses or
    gradient norms disagree.
    """
    ours = steps["ours"]
    for name, rows in steps.items():
        first, timed = rows[0], rows[1:]
        each = " ".join(f"{row['seconds']:.2f} ({row['cpu_seconds']:.2f})" for row in timed)
        print(f"  {name}: steps {each} s (CPU s); peak memory {max(row['peak_gb'] for row in rows):.1f} GB")
        print(f"    at the first step: loss {first['loss']:.6f}, gradient norm {first['grad_norm']:.6f}", flush=True)
        for metric in ("loss", "grad_norm"):
            if abs(first[metric] - ours[0][metric]) > agreement * max(1e-2, abs(ours[0][metric])):
                raise SystemExit(f"{name}: {metric} differs from ours, {ours[0][metric]:.6f}: not the same work")
    for name in TRL_ARMS:
        by_cpu, by_wall = (
            statistics.median(row[metric] for row in steps[name][1:])
            / statistics.median(row[metric] for row in ours[1:])
            for metric in ("cpu_seconds", "seconds")
        )
        print(f"  {name} / ours: {by_cpu:.2f} by CPU seconds, {by_wall:.2f} by wall time (medians)", flush=True)


def main() -> None:
    """Compare, or be one arm when started by the parent."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="directory of the model; default is a random one of SmolLM2-135M's shape")
    parser.add_argument("--batch", choices=tuple(BATCHES), default="quickstart", help="default: the quickstart's first")
    parser.add_argument("--precisions", nargs="+", choices=tuple(PRECISIONS), default=tuple(PRECISIONS))
    parser.add_argument("--steps", type=int, default=4, help="timed steps of each arm (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="default: all cores")
    parser.add_argument("--trl-venv", type=Path, default=folder_of("trl", [f"trl=={TRL_VERSION}"]))
    parser.add_argument("--arm", choices=("trl",), help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--settings", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arm == "trl":
        return trl_arm(options.work, options.threads, options.settings)
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory(prefix="trainer-step-") as folder:
        work = Path(folder)
        items = make_items(prepare_model(options.model, work), *BATCHES[options.batch])
        (work / "items.json").write_text(json.dumps(items))
        run_arm("prepare", folder, options.threads)
        lengths = [len(sequence) for group in items for sequence in group["tokens"]]
        print(f"{processor()}, {options.threads} threads; {len(lengths)} sequences, {sum(lengths)} tokens", flush=True)
        for precision in options.precisions:
            print(f"{precision}:", flush=True)
            report(measured(precision, work, options), PRECISIONS[precision][2])


if __name__ == "__main__":
    main()
