"""The checks of `atropos gpu-check`: one row of its table each, with the GPUs that it needs and its command.

A training row trains a small model for a few steps over one bridge; the trainer compares every word of vLLM's weights
with its own after the first syncs. A drill (tests/integration/device_drills.py) kills or freezes the trainer, or loads
the same weights into a second server. A rehearsal runs the same rows on a CPU, over Gloo, with shorter steps.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

LAUNCHER = "atropos_launcher"
DRILLS = "tests.integration.device_drills"
LARGE = "Qwen/Qwen2.5-1.5B-Instruct"  # of the hub: the large model, if none is named
BITS = "tests/integration/test_bit_exact.py"
SHORT = (  # of a rehearsal: what takes time on a CPU and proves nothing here
    *("--trainer.batch-size", "2", "--trainer.gradient-accumulation-steps", "1", "--env.group_size", "2"),
    *("--env.max_new_tokens", "8", "--env.steps_per_eval", "0", "--env.eval_at_start", "false"),
)
# each step updates the weights, also where all answers of a small model score alike
ALWAYS = ("--trainer.entropy-coef", "0.01")


# A trainer of one rank that computes in bfloat16 is FSDP2 over one rank. On a GPU this is the default; a rehearsal has
# to ask for it.
ONE_RANK, SHARDED = "broadcast over Gloo, one GPU (FSDP2 on one rank)", ("--trainer.compute-dtype", "bfloat16")


@dataclass(frozen=True)
class Check:
    """One row of the table."""

    gpus: int  # that it needs
    name: str
    command: tuple[str, ...]  # of `module`
    module: str = LAUNCHER
    most: int | None = None  # GPUs that it sees, where not all
    run: str | None = None  # the run that it makes
    has_digest: bool = False  # whether it must show that every word arrived
    on_cpu: bool = True  # False: on a CPU it is the same as another row
    needs_model: bool = False  # whether the model that it trains is not here

    @property
    def needs_checkout(self) -> bool:
        """Return whether it is part of the tests, which are not installed."""
        return self.module != LAUNCHER

    def visible(self, gpus: Sequence[str]) -> str | None:
        """CUDA_VISIBLE_DEVICES, where it does not see all."""
        return None if self.most is None or self.most >= len(gpus) else ",".join(gpus[: self.most])

    def shown(self, gpus: Sequence[str]) -> str:
        """Write the command as a person would type it."""
        first = ("atropos",) if self.module == LAUNCHER else ("python", "-m", self.module)
        visible = self.visible(gpus)
        return shlex.join([*([f"CUDA_VISIBLE_DEVICES={visible}"] if visible else []), *first, *self.command])


@dataclass(frozen=True)
class Models:
    """Directories or Hugging Face ids."""

    small: str
    large: str | None  # for tensor parallelism; None where no such model is here


def checks(stamp: str, runs: Path, models: Models, rehearse: bool = False) -> list[Check]:
    """Every check. On GPUs 3 steps are 4 policy versions."""

    def train(gpus: int, name: str, recipe: str, label: str, *flags: str, large: bool = False, **more: object) -> Check:
        large = large and not rehearse
        model = (models.large or LARGE) if large else models.small
        steps = ("--steps", "2", *SHORT) if rehearse else ("--steps", "3")
        dataset = () if recipe == "two_servers" else ("--dataset", "arithmetic")  # it has no other
        where = ("--run-name", f"{stamp}-{label}", "--runs", str(runs))
        words = ("train", recipe, model, *dataset, *steps, *where, *ALWAYS, *flags)
        lacks = large and models.large is None
        own = {"most": gpus, "run": f"{stamp}-{label}", "needs_model": lacks, **more}
        return Check(gpus, name, words, **own)  # type: ignore[arg-type]

    def drill(gpus: int, name: str, which: str, on_cpu: bool = True) -> Check:
        return Check(gpus, name, (which, models.small), DRILLS, gpus, has_digest=True, on_cpu=on_cpu)

    two, exact = ("--vllm.tensor_parallel_size", "2"), "--batch-invariant"
    return [
        Check(1, "doctor", ("doctor", "--mode", "single_copy", "--model", models.small)),
        train(1, "single copy by CUDA IPC", "gsm8k_single_copy", "single-copy", has_digest=True),
        train(1, "LoRA adapters", "gsm8k_lora", "lora"),
        train(1, "LoRA adapters, restart", "gsm8k_lora_restart", "lora-restart"),
        train(1, "reload", "gsm8k_reload", "reload", has_digest=True),
        train(1, "restart", "gsm8k_restart", "restart"),
        train(1, ONE_RANK, "gsm8k_broadcast", "gloo", *SHARDED, has_digest=True),
        Check(1, "bit-exact, trainer against sampler", ("-q", BITS, "-k", "bits"), "pytest", 1),
        train(1, "bit-exact training", "gsm8k_broadcast", "exact", exact, has_digest=True),
        drill(1, "trainer killed in mid-transfer, Gloo", "killed"),
        drill(1, "trainer frozen in mid-transfer, Gloo", "frozen"),
        drill(1, "greedy outputs after a commit against a fresh server", "fresh"),
        train(2, "broadcast over NCCL", "gsm8k_broadcast", "nccl", has_digest=True, on_cpu=False),
        train(2, "bit-exact training, two GPUs", "gsm8k_broadcast", "exact-two", exact, has_digest=True, on_cpu=False),
        drill(2, "trainer killed in mid-transfer, NCCL", "killed", on_cpu=False),
        drill(2, "trainer frozen in mid-transfer, NCCL", "frozen", on_cpu=False),
        train(3, "tensor parallel 2, large model", "gsm8k_broadcast", "tp2", *two, large=True, has_digest=True),
        train(3, "LoRA adapters, tensor parallel 2", "gsm8k_lora", "lora-tp2", *two),
        train(3, "two servers", "two_servers", "two-servers", has_digest=True),
        train(3, "two trainer ranks (FSDP2)", "gsm8k_broadcast", "fsdp2", "--trainer-ranks", "2", has_digest=True),
    ]
