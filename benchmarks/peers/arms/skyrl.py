"""SkyRL-tx: forward_backward and optim_step, or sampling, by its JAX backend in this process, without its HTTP server.

    python -m benchmarks.peers.arms.skyrl train WORK        in an environment with skyrl[jax]
    python -m benchmarks.peers.arms.skyrl sample WORK       64 answers of 24 tokens per step

Speaks the protocol of `benchmarks/trainer_step.py`. It trains a LoRA adapter: SkyRL-tx trains nothing else. The batch
is one micro-batch, its default.

skyrl 0.3.0 declares Python 3.11, on which pydantic takes no TypedDict of `typing`: it is given the backport of the same
class.
"""

import json
import statistics
import sys
import time
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typing_extensions

from benchmarks.trainer_step import CLIP, LR, answer

typing.TypedDict = typing_extensions.TypedDict
from skyrl.backends.jax import JaxBackend, JaxBackendConfig  # noqa: E402
from skyrl.tinker import types  # noqa: E402

MODEL = "policy"
RANK = 32
ANSWER_TOKENS = 24
Items = list[dict[str, Any]]


def model_input(tokens: list[int]) -> types.ModelInput:
    """Token ids as SkyRL takes them."""
    return types.ModelInput(chunks=[types.EncodedTextChunk(tokens=tokens)])


def training_batch(items: Items) -> types.PreparedModelPassBatch:
    """The groups with the advantages of GRPO. Position i predicts token i + 1."""
    inputs, targets, weights, logprobs, advantages = [], [], [], [], []
    for group in items:
        mean, deviation = statistics.mean(group["scores"]), statistics.pstdev(group["scores"])
        for tokens, score, sampled in zip(group["tokens"], group["scores"], group["inference_logprobs"], strict=True):
            behind, own = group["prompt_tokens"] - 1, len(tokens) - group["prompt_tokens"]
            inputs.append(model_input(tokens[:-1]))
            targets.append(tokens[1:])
            weights.append([0.0] * behind + [1.0] * own)
            logprobs.append([0.0] * behind + sampled[group["prompt_tokens"] :])
            advantages.append([0.0] * behind + [(score - mean) / (deviation + 1e-4)] * own)
    count = len(inputs)
    return types.PreparedModelPassBatch(
        all_model_inputs=inputs,
        all_targets=targets,
        all_token_weights=weights,
        all_sampling_logprobs=logprobs,
        all_advantages=advantages,
        all_values=[[]] * count,
        all_returns=[[]] * count,
        all_model_ids=[MODEL] * count,
        all_loss_fns=["ppo"] * count,
        all_loss_fn_configs=[{"clip_low_threshold": 1 - CLIP, "clip_high_threshold": 1 + CLIP}] * count,
        request_batch_slices=[("step", MODEL, 0, count)],
    )


def sampling_batch(items: Items) -> types.PreparedSampleBatch:
    """As many answers to each prompt as its group has, of the model without an adapter."""
    prompts = [group["tokens"][0][: group["prompt_tokens"]] for group in items for _ in group["tokens"]]
    count = len(prompts)
    return types.PreparedSampleBatch(
        all_model_inputs=[model_input(prompt) for prompt in prompts],
        all_sampling_params=[
            types.SamplingParams(temperature=1.0, max_tokens=ANSWER_TOKENS, seed=place) for place in range(count)
        ],
        all_model_ids=[""] * count,
        all_checkpoint_ids=[""] * count,
        all_checkpoint_paths=[""] * count,
        all_session_ids=[None] * count,
        needs_prompt_logprobs=False,
        request_batch_slices=[("sample", "", 0, count, False)],
    )


def training_step(backend: JaxBackend, items: Items) -> Callable[[], dict[str, float]]:
    """Make the step: forward_backward on the batch, and optim_step."""
    backend.create_model(MODEL, types.LoraConfig(rank=RANK, alpha=float(RANK), seed=0))
    adam = types.AdamParams(learning_rate=LR, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0)

    def step() -> dict[str, float]:
        output = backend.forward_backward(training_batch(items))["step"].loss_fn_outputs
        losses = [statistics.fmean(row["elementwise_loss"]["data"]) for row in output]
        metrics = backend.optim_step(MODEL, types.OptimStepInput(adam_params=adam)).metrics
        return {"loss": statistics.fmean(losses), "grad_norm": metrics["skyrl.ai/grad_norm"]}

    return step


def sampling_step(backend: JaxBackend, items: Items) -> Callable[[], dict[str, float]]:
    """Make the step: every answer."""

    def step() -> dict[str, float]:
        answers = backend.sample(sampling_batch(items))["sample"].sequences
        if any(len(each.tokens) != ANSWER_TOKENS for each in answers):
            raise SystemExit(f"an answer has not {ANSWER_TOKENS} tokens")
        return {}

    return step


def main(what: str, work: Path) -> None:
    """Answer each line on stdin by a step."""
    items = json.loads((work / "items.json").read_text())
    backend = JaxBackend(str(work / "model"), JaxBackendConfig(max_lora_adapters=2, max_lora_rank=RANK))
    step = (training_step if what == "train" else sampling_step)(backend, items)
    for _ in sys.stdin:
        start, cpu = time.perf_counter(), time.process_time()
        metrics = step()
        answer(seconds=time.perf_counter() - start, cpu_seconds=time.process_time() - cpu, **metrics)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
