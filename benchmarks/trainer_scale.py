"""GRPO steps of one trainer process against the same steps of several ranks that share the weights (FSDP2).

    python benchmarks/trainer_scale.py [--model DIR] [--steps 3] [--ranks 2]
    python benchmarks/trainer_scale.py --model random --tp-size 2 --only "split" [--ranks 4]      tensor parallelism

Every rank computes with one thread, so the CPU time of all ranks together shows what sharing costs: gathering weights,
summing gradients, and micro-batches that differ from those of one process. The arms take the same made-up batch one
after the other, and the first loss and gradient norm of those in float32 must be those of one process. A `random` model
is a Llama of 27.3 million weights whose sizes two and four ranks divide. After the steps rank 0 walks all weights as a
bridge does, in float32 and cast to bfloat16.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from atropos_launcher.placement.this_machine import processor
from benchmarks.trainer_step import make_items

ALONE = "one process"
ARMS: dict[str, dict[str, Any]] = {
    ALONE: {},
    "gradients summed after each micro-batch": {},
    "gradients summed once per step": {"sync_gradients": "last"},
    "weights kept until the backward pass": {"reshard_after_forward": False},
    "bfloat16 layers": {"compute_dtype": "bfloat16"},
}
SPLIT = "layers split over ranks"  # with --tp-size
RANDOM = "random"  # as --model
BUCKET_BYTES = 16 << 20
AGREEMENT = 1e-4  # relative, of loss and gradient norm in float32: a log-probability differs by up to 4e-5 nats
# between two orders of summing, and the ratio, which no bound limits here, by as much


# --- a rank -----------------------------------------------------------------------------------------------------------


def run_rank(work: Path) -> None:
    """One process of an arm, which torchrun starts where there are several: its CPU seconds and peak memory, and on
    rank 0 what was computed.
    """
    import torch

    from atroposlib.wire.batching import ScoredData
    from example_trainer.data.batching import make_batch
    from example_trainer.loop.learner import Learner
    from example_trainer.ranks.ranks import collective, join
    from example_trainer.settings.config import TrainerConfig

    class Timed(Learner):
        """Notes this rank's CPU time after each update."""

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.cpu: list[float] = []

        @collective
        def update(self, rate: float) -> None:
            super().update(rate)
            self.cpu.append(time.process_time())

    job = json.loads((work / "job.json").read_text())
    torch.set_num_threads(1)
    config, device = TrainerConfig.model_validate(job["config"]), torch.device("cpu")
    ranks = join(config, device)
    learner = Timed(config, device, ranks)
    done: dict[str, Any] = {}
    if ranks.leads:
        learner.load(config.model_name)
        learner.begin("")
        items = [ScoredData(**item) for item in job["items"]]
        batch = make_batch(items, seq_len=config.seq_len, policy_version=0)
        steps = []
        for _ in range(1 + job["steps"]):
            start = time.perf_counter()
            loss = learner.gradients(batch.sequences, batch.loss_divisor)["loss"]
            norm = learner.clip()
            learner.update(config.lr)
            steps.append({"loss": loss, "grad_norm": norm, "wall_s": time.perf_counter() - start})
        done = {"steps": steps, "walks": {dtype: walk(learner, dtype) for dtype in ("float32", "bfloat16")}}
        ranks.leave()
    else:
        ranks.follow(learner)
    cpu = [after - before for before, after in zip(learner.cpu, learner.cpu[1:], strict=False)]
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    (work / f"rank{ranks.rank}.json").write_text(json.dumps({"cpu_s": cpu, "peak_mb": peak_mb, **done}))


def walk(learner: Any, dtype: str) -> float:
    """Seconds in which rank 0 has had every byte of the weights, bucket by bucket; the quickest of three walks."""
    from atroposlib.wire.bridge import Manifest, lay_out

    shapes = {name: tuple(weight.shape) for name, weight in learner.trained.model.named_parameters()}
    tensors = tuple(lay_out([(name, [(name, shape, dtype)]) for name, shape in shapes.items()]))
    manifest = Manifest("", 1, tensors[-1].offset + tensors[-1].nbytes, tensors)
    source = learner.trained.source(manifest)
    taken = []
    for _ in range(3):
        start = time.perf_counter()
        for _ in source.stream(manifest.buckets(BUCKET_BYTES)):
            pass
        taken.append(time.perf_counter() - start)
    return min(taken)


# --- the comparison ---------------------------------------------------------------------------------------------------


def run_arm(name: str, options: argparse.Namespace, items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run one arm, and return what every rank of it wrote."""
    ranks = 1 if name == ALONE else options.ranks
    config = {
        "model_name": options.model,
        "lr": 1e-6,
        "dual_clip": 0.0,  # the made-up log-probabilities make ratios of thousands, and each bound has an edge
        "micro_batch_tokens": options.micro_batch_tokens,
        "seq_len": 4096,
        **ARMS.get(name, {"tp_size": options.tp_size}),
    }
    with tempfile.TemporaryDirectory(prefix="trainer-scale-") as folder:
        work = Path(folder)
        (work / "job.json").write_text(json.dumps({"config": config, "items": items, "steps": options.steps}))
        several = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
        command = [sys.executable, *several, str(Path(__file__).resolve()), "--rank", folder]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
        subprocess.run(command, env=environment, check=True, timeout=options.limit_s)
        return [json.loads((work / f"rank{rank}.json").read_text()) for rank in range(ranks)]


def main() -> None:
    """Print one row per arm."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(Path("~/.cache/atropos/SmolLM2-135M-Instruct").expanduser()))
    parser.add_argument("--steps", type=int, default=3, help="timed steps, after one warm-up")
    parser.add_argument(
        "--ranks", type=int, default=2, help="trainer processes of the arms with several (default: %(default)s)"
    )
    parser.add_argument("--tp-size", type=int, default=1, help="ranks that split each layer, in an arm of its own")
    parser.add_argument("--groups", type=int, default=2, help="prompts of the batch (default: %(default)s)")
    parser.add_argument("--group-size", type=int, default=8, help="answers to each (default: %(default)s)")
    parser.add_argument(
        "--micro-batch-tokens", type=int, default=768, help="as the trainer's flag (default: %(default)s)"
    )
    parser.add_argument("--only", default="", help="arms whose name contains this, beside one process")
    parser.add_argument("--limit-s", type=float, default=3600, help="seconds for one arm")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        return run_rank(options.rank)

    if options.model == RANDOM:
        with tempfile.TemporaryDirectory(prefix="trainer-scale-model-") as folder:
            options.model = random_model(folder)
            return compare(options)
    compare(options)


def random_model(folder: str) -> str:
    """A Llama with random weights in this directory."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16384,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def compare(options: argparse.Namespace) -> None:
    """Run the arms one after the other."""
    vocabulary = json.loads((Path(options.model) / "config.json").read_text())["vocab_size"]
    items = make_items(vocabulary, options.groups, options.group_size, (50, 80), (100, 250))
    for group in items:
        group.pop("prompt_tokens")
        group["inference_logprobs"] = [[1.0 if token == -100 else -10.0 for token in mask] for mask in group["masks"]]
    tokens = sum(len(sequence) for group in items for sequence in group["tokens"])
    print(f"{processor()}; {options.ranks} ranks of one thread; {tokens} tokens per step, {options.model}", flush=True)
    alone: list[dict[str, Any]] = []
    for name in [*ARMS, *([SPLIT] if options.tp_size > 1 else [])]:
        if name != ALONE and options.only not in name:
            continue
        found = run_arm(name, options, items)
        alone = alone or found
        report(name, found, alone)


def report(name: str, found: list[dict[str, Any]], alone: list[dict[str, Any]]) -> None:
    """One line per arm. Exits with 1 if an arm in float32 computed something else than one process."""
    cpu, reference = cpu_seconds(found), cpu_seconds(alone)
    wall = statistics.median(step["wall_s"] for step in found[0]["steps"][1:])
    first, expected = found[0]["steps"][0], alone[0]["steps"][0]
    difference = max(abs(first[key] / expected[key] - 1) for key in ("loss", "grad_norm"))
    walks = ", ".join(f"{dtype} {seconds:.2f} s" for dtype, seconds in found[0]["walks"].items())
    memory = ", ".join(f"{rank['peak_mb']:.0f}" for rank in found)
    print(
        f"{name}: {cpu:.1f} CPU s per step ({cpu / reference:.2f} x), wall {wall:.1f} s, peak {memory} MB,"
        f" walk {walks}, loss and norm within {difference:.1e}",
        flush=True,
    )
    if difference > AGREEMENT and "compute_dtype" not in ARMS.get(name, {}):
        sys.exit(f"error: {name} computed loss {first['loss']}, norm {first['grad_norm']}; one process {expected}")


def cpu_seconds(found: list[dict[str, Any]]) -> float:
    """CPU seconds of a step over all ranks: the median over steps."""
    return float(statistics.median(sum(step) for step in zip(*(rank["cpu_s"] for rank in found), strict=True)))


if __name__ == "__main__":
    main()
