"""Bit-exact on-policy RL in one loop: vLLM and the trainer take turns in one process, and every token is checked
every step.

    python -m example_trainer.simple_rl --steps 15      SmolLM2-135M learns sums and products on the CPU
    tensorboard --logdir runs/simple_rl

    problems ─▶ vLLM samples a group of answers each ─▶ rewards ─▶ advantages ─▶ loss ─▶ AdamW ─▶ weights back into vLLM
                     └── log-probabilities ──── equal to the trainer's, bit for bit? ────┘

Synchronous and deterministic: the same command gives the same bytes in metrics.jsonl and model.safetensors.
Deliberately missing: services, concurrency, resuming, more than one machine. example_trainer/grpo.py has all of these.
"""

import example_trainer.openmp  # noqa: F401  isort: skip  before torch

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from pydantic import Field
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from atroposlib.config import Config, load_config
from atroposlib.envs.data.problems import Problem, arithmetic_problems
from atroposlib.errors import one_line_errors
from atroposlib.files import make_private_directory, open_regular
from atroposlib.grading import last_number
from atroposlib.utils.tokenizers import chat_ids
from example_trainer.errors import TrainerError
from vllm_patching.batch_invariant.switch import switch_on

KERNEL_CACHE_BLOCK = 32
MAX_MODEL_LEN = 512


class SimpleConfig(Config):
    """Train with GRPO in one process: model, sampling and training beside vLLM's engine."""

    model: str | None = Field(
        None,
        description="Hugging Face id or directory of a Llama, Qwen2, Qwen3, Qwen3-MoE; default the quickstart's model",
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="dtype in which trainer and vLLM compute; the optimizer steps float32 weights"
    )
    steps: int = Field(15, ge=1, description="training steps")
    prompts: int = Field(8, ge=1, description="problems per step")
    group_size: int = Field(8, ge=2, description="answers per problem")
    max_new_tokens: int = Field(24, ge=1, description="longest answer, in tokens")
    temperature: float = Field(1.0, gt=0, description="temperature of sampling")
    lr: float = Field(2e-5, gt=0, description="AdamW's learning rate")
    clip_eps: float = Field(0.2, gt=0, lt=1, description="probability ratios are clipped to 1 ± this value")
    kl_coef: float = Field(0.0, ge=0, description="weight of the KL to the start model; above 0 keeps a copy of it")
    entropy_coef: float = Field(0.0, ge=0, description="weight of the entropy bonus")
    seed: int = Field(0, ge=0, description="seed of problems and sampling")
    out: Path = Field(
        Path("runs/simple_rl"), description="directory of TensorBoard files, metrics.jsonl and the trained model"
    )


@dataclass(frozen=True)
class Rollout:
    """One sampled answer."""

    prompt: list[int]
    answer: list[int]
    logprobs: Tensor  # [answer], the sampler's
    reward: float
    advantage: float


def start_vllm(model: str, config: SimpleConfig) -> object:
    """vLLM with batch-invariant kernels, in this process. The environment must be set before vLLM is imported, hence
    the late import.
    """
    switch_on(os.environ, cpu=True)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm_patching.compat import vllm_server

    return vllm_server.offline_engine(
        model,
        dtype=config.dtype,
        block_size=KERNEL_CACHE_BLOCK,
        seed=config.seed,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=64,
        max_num_batched_tokens=8192,
    )


def load_exact(name: str, config: SimpleConfig) -> PreTrainedModel:
    """Load the model `name` to compute as vLLM does: what is trained, and the start model of the KL term."""
    from example_trainer.exact.model import make_exact
    from example_trainer.model.loading import load_model

    model = load_model(name, torch.device("cpu"), longest=MAX_MODEL_LEN)
    make_exact(model, getattr(torch, config.dtype))
    return model


def sample(
    engine: Any, tokenizer: PreTrainedTokenizerBase, problems: list[Problem], step: int, config: SimpleConfig
) -> list[list[Rollout]]:
    """A group of answers to each problem. An answer is worth 1 if its last number is right, and its advantage is how
    much better it did than its siblings. Each has a seed of its own, so its neighbours do not matter.
    """
    from vllm_patching.compat.vllm_requests import SamplingParams

    prompts = [
        chat_ids(cast(Any, tokenizer), [{"role": "user", "content": problem.question}], add_generation_prompt=True)
        for problem in problems
    ]
    asked, settings = [], []
    for index, prompt in enumerate(prompts):
        for member in range(config.group_size):
            seed = ((config.seed * 100_003 + step) * 1009 + index) * 1009 + member
            asked.append({"prompt_token_ids": prompt})
            settings.append(
                SamplingParams(temperature=config.temperature, max_tokens=config.max_new_tokens, logprobs=0, seed=seed)
            )
    outputs = iter(engine.generate(asked, settings, use_tqdm=False))
    groups = []
    for problem, prompt in zip(problems, prompts, strict=True):
        answers = [next(outputs).outputs[0] for _ in range(config.group_size)]
        texts = [str(tokenizer.decode(list(answer.token_ids), skip_special_tokens=True)) for answer in answers]
        rewards = torch.tensor([float(last_number(text) == problem.result) for text in texts])
        advantages = (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-4)
        group = []
        for answer, reward, advantage in zip(answers, rewards.tolist(), advantages.tolist(), strict=True):
            ids = list(answer.token_ids)
            logprobs = torch.tensor([at[token].logprob for token, at in zip(ids, answer.logprobs, strict=True)])
            group.append(Rollout(prompt, ids, logprobs, reward, advantage))
        groups.append(group)
    return groups


def answer_logprobs(model: PreTrainedModel, group: list[Rollout], temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies of a group's answer tokens, [tokens], from one packed row: sequences end to end,
    no padding.
    """
    fed = [rollout.prompt + rollout.answer[:-1] for rollout in group]  # nothing follows a last token
    lengths = tuple(len(tokens) for tokens in fed)
    ids = torch.tensor([[token for tokens in fed for token in tokens]])
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    hidden = model.base_model(
        input_ids=ids, position_ids=positions, packed_lengths=lengths, use_cache=False
    ).last_hidden_state[0]
    predicting = torch.cat(
        [row[len(rollout.prompt) - 1 :] for rollout, row in zip(group, hidden.split(lengths), strict=True)]
    )
    logits = model.get_output_embeddings()(predicting).float() / temperature  # [tokens, vocabulary]
    logprobs = logits.log_softmax(-1)
    targets = torch.tensor([token for rollout in group for token in rollout.answer])
    return logprobs.gather(1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


def token_loss(logprobs: Tensor, sampler: Tensor, advantages: Tensor, clip_eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The clipped surrogate of each token, its probability ratio, and whether the clip silenced it. On-policy, every
    ratio is exactly 1.
    """
    ratio = (logprobs - sampler).exp()
    free, bounded = ratio * advantages, ratio.clamp(1 - clip_eps, 1 + clip_eps) * advantages
    return -torch.minimum(free, bounded), ratio, bounded < free


def accumulate(
    model: PreTrainedModel, reference: PreTrainedModel | None, groups: list[list[Rollout]], config: SimpleConfig
) -> tuple[dict[str, float], Tensor, Tensor]:
    """Add the gradient of the mean token loss; the step's metrics, and the trainer's and the sampler's
    log-probabilities of all tokens.
    """
    total = sum(len(rollout.answer) for group in groups for rollout in group)
    sums = dict.fromkeys(("loss", "pg_loss", "kl_div", "entropy", "ratio_mean", "ratio_clipped_frac"), 0.0)
    seen = []
    for group in groups:
        logprobs, entropy = answer_logprobs(model, group, config.temperature)
        sampler = torch.cat([rollout.logprobs for rollout in group])
        advantages = torch.cat([torch.full((len(rollout.answer),), rollout.advantage) for rollout in group])
        policy, ratio, clipped = token_loss(logprobs, sampler, advantages, config.clip_eps)
        kl = torch.zeros_like(policy)
        if reference is not None:
            with torch.no_grad():
                start = answer_logprobs(reference, group, config.temperature)[0]
            kl = (start - logprobs).exp() - (start - logprobs) - 1
        loss = policy + config.kl_coef * kl - config.entropy_coef * entropy
        (loss.sum() / total).backward()
        for name, values in zip(sums, (loss, policy, kl, entropy, ratio, clipped), strict=True):
            sums[name] += float(values.detach().double().sum())
        seen.append((logprobs.detach(), sampler))
    ours, theirs = (torch.cat(column) for column in zip(*seen, strict=True))
    return (
        {name: summed / total for name, summed in sums.items()},
        ours,
        theirs,
    )  # divided once: the mean of ones is 1.0


def check(ours: Tensor, sampler: Tensor, tokens: list[int], shown: int = 3) -> int:
    """Print the comparison, the first tokens of it and every differing one; how many differ."""
    differing = ours.view(torch.int32) != sampler.view(torch.int32)
    for at, token in enumerate(tokens):
        if at < shown or differing[at]:
            print(f"  token {at}: id {token} [{'✗' if differing[at] else '✓'}]")
            print(f"    vLLM    {sampler[at].item():.10f}  [hex {int(sampler[at].view(torch.int32)) & 0xFFFFFFFF:08x}]")
            print(f"    trainer {ours[at].item():.10f}  [hex {int(ours[at].view(torch.int32)) & 0xFFFFFFFF:08x}]")
            print(f"    difference {(ours[at].double() - sampler[at].double()).item():.15f}")
    count = int(differing.sum())
    print(f"Bitwise identical: {count == 0} · {count} / {len(tokens)} tokens differ", flush=True)
    return count


def weight_deltas(model: PreTrainedModel, before: dict[str, Tensor]) -> dict[str, float]:
    """Per layer, how far the update moved the weights: L2 norm, and relative to that of the weights."""
    squares: dict[str, list[float]] = {}
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        layer = ".".join(parts[:3]) if "layers" in parts else name.removesuffix(".weight")
        moved, size = squares.setdefault(layer, [0.0, 0.0])
        difference = float((parameter.detach() - before[name]).double().square().sum())
        squares[layer] = [moved + difference, size + float(before[name].double().square().sum())]
    row = {}
    for layer, (moved, size) in squares.items():
        row[f"weight_delta/{layer}/magnitude"] = moved**0.5
        row[f"weight_delta/{layer}/relative_change"] = (moved / size) ** 0.5
    return row


def train(config: SimpleConfig) -> Path:
    """Run it all; the directory of the trained model. Raises TrainerError at the first token that differs."""
    from torch.utils.tensorboard import SummaryWriter

    from example_trainer.model.loading import load_tokenizer
    from example_trainer.quickstart_model import cached_model

    name = config.model or str(cached_model())
    engine = start_vllm(name, config)
    from vllm_patching.compat.vllm_server import load_weights

    torch.manual_seed(config.seed)
    model = load_exact(name, config)
    tokenizer = load_tokenizer(name)
    if tokenizer is None:
        raise TrainerError(f"--model {name} has no tokenizer; give a whole Hugging Face model")
    reference = load_exact(name, config).requires_grad_(False) if config.kl_coef else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=(0.9, 0.95), weight_decay=0.0)
    problems = arithmetic_problems(held_out=16, seed=config.seed).train
    order = torch.Generator().manual_seed(config.seed)

    make_private_directory(config.out)
    board = SummaryWriter(str(config.out))
    with open_regular(config.out / "metrics.jsonl", "w") as metrics:
        for step in range(1, config.steps + 1):
            chosen = torch.randperm(len(problems), generator=order)[: config.prompts].tolist()
            groups = sample(engine, tokenizer, [problems[index] for index in chosen], step, config)
            row, ours, sampler = accumulate(model, reference, groups, config)
            tokens = [token for group in groups for rollout in group for token in rollout.answer]
            if differing := check(ours, sampler, tokens):
                raise TrainerError(
                    f"step {step}: {differing} of {len(ours)} tokens differ between vLLM and trainer, see above"
                )

            before = {key: value.detach().clone() for key, value in model.named_parameters()}
            row["grad_norm"] = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            load_weights(engine, [(key, value.detach()) for key, value in model.named_parameters()])

            rewards = torch.tensor([rollout.reward for group in groups for rollout in group])
            row |= {
                "reward_mean": float(rewards.mean()),
                "reward_std": float(rewards.std(correction=0)),
                "bit_exact/differing_tokens": differing,
                "bit_exact/tokens": len(ours),
                **weight_deltas(model, before),
            }
            for key, value in row.items():
                board.add_scalar(key, value, step)
            metrics.write(json.dumps({"step": step, **row}) + "\n")
            metrics.flush()
            print(
                f"Step {step}/{config.steps} | reward {row['reward_mean']:.3f} | loss {row['loss']:+.4f} | entropy"
                f" {row['entropy']:.3f} | ratio {row['ratio_mean']}",
                flush=True,
            )
    board.close()
    model.save_pretrained(config.out / "model")
    tokenizer.save_pretrained(config.out / "model")
    return config.out / "model"


def main(argv: list[str] | None = None) -> int:
    """The command line: 0 when trained; exits with 1 and one line on stderr when not."""
    config = load_config(SimpleConfig, argv, prog="python -m example_trainer.simple_rl")
    disable_progress_bar()
    with one_line_errors("simple_rl"):
        print(f"Trained model: {train(config)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
