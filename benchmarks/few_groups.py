"""How far a step moves the weights when one group of eight has a signal, compared with a step in which all eight have.

    python -m benchmarks.few_groups                            # a tiny random model: half a minute on two cores
    python -m benchmarks.few_groups --model DIR --seeds 1,2    # a real one

The trainer's own gradients, clipping and AdamW, on answers that the model samples before each step. An answer
scores the share of its tokens whose id is even, so that every group has a signal. After ten steps of all groups, the
run continues from the same weights and moments in two ways: all groups keep their scores, or in all but one the scores
are made equal. The table compares the two, step by step: how far the weights move (L2), and the gradient's norm before
it is clipped.
"""

import statistics
import tempfile
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import torch
from pydantic import Field
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from atroposlib.config import Config, load_config
from atroposlib.wire.batching import GroupRequirements, ScoredData
from example_trainer.data.batching import make_batch
from example_trainer.loop.learner import Learner
from example_trainer.ranks.ranks import Ranks
from example_trainer.settings.config import TrainerConfig
from example_trainer.settings.objectives import Algorithm

CPU = torch.device("cpu")
SEQ_LEN, PROMPT_TOKENS = 128, 8
RECOMPUTED = GroupRequirements(trainable_only=True, logprobs_optional=True)
SHOWN = (1, 2, 5, 10, 20)


class FewGroupsConfig(Config):
    """Compare steps in which few groups have a signal with steps in which all have."""

    model: str | None = Field(None, description="directory of a model; default a tiny random one")
    algorithms: list[Algorithm] = Field(["grpo", "dr_grpo"], description="presets")
    seeds: list[int] = Field([1, 2, 3], description="seeds of the tiny model, the prompts and the answers")
    lr: float = Field(1e-4, gt=0, description="learning rate")
    max_grad_norm: float = Field(1.0, gt=0, description="gradients are scaled down to this L2 norm")
    full_steps: int = Field(10, ge=0, description="steps of all groups before the two ways part")
    steps: int = Field(20, ge=1, description="steps of each way after that")
    groups: int = Field(8, ge=2, description="groups per batch")
    group_size: int = Field(8, ge=2, description="answers per group")
    tokens: int = Field(16, ge=1, description="tokens of an answer")


class Moved(NamedTuple):
    """Describes how far one step moved the weights."""

    distance: float  # L2, of all weights
    grad_norm: float  # before clipping


class Run:
    """A learner and the prompts that it answers. The same seed gives the same run."""

    def __init__(self, folder: str, config: FewGroupsConfig, algorithm: str, seed: int) -> None:
        self._config, self._seed = config, seed
        settings = {"model_name": folder, "lr": config.lr, "max_grad_norm": config.max_grad_norm, "seq_len": SEQ_LEN}
        self._trainer = TrainerConfig.model_validate({**settings, "algorithm": algorithm, "kernels": "torch"})
        self._learner = Learner(self._trainer, CPU, Ranks())
        self._learner.load(folder)
        self._learner.begin("")
        self._model: Any = self._learner.trained.model
        generator = torch.Generator().manual_seed(seed)
        shape = (config.groups, PROMPT_TOKENS)
        self._prompts = torch.randint(3, self._model.config.vocab_size, shape, generator=generator)
        self._sampler: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def step(self, number: int, with_signal: int) -> Moved:
        """One step of the trainer; the groups after the first `with_signal` have equal scores."""
        items = self._sampled(number, with_signal)
        batch = make_batch(items, seq_len=SEQ_LEN, policy_version=0, loss=self._trainer, needs=RECOMPUTED)
        before = [parameter.detach().clone() for parameter in self._model.parameters()]
        self._learner.gradients(self._learner.with_old_logprobs(batch.sequences), batch.loss_divisor)
        grad_norm = self._learner.clip()
        self._learner.update(self._config.lr)
        moved = [now.detach() - was for now, was in zip(self._model.parameters(), before, strict=True)]
        return Moved(float(torch.nn.utils.get_total_norm(moved)), grad_norm)

    @torch.no_grad()
    def _sampled(self, number: int, with_signal: int) -> list[ScoredData]:
        size, length = self._config.group_size, self._config.tokens
        torch.manual_seed(self._seed * 1009 + number)
        self._sampler.load_state_dict(self._model.state_dict(), strict=False)
        prompts = self._prompts.repeat_interleave(size, 0)
        settings = {"attention_mask": torch.ones_like(prompts), "pad_token_id": 0}
        settings |= {"min_new_tokens": length, "max_new_tokens": length}
        found = self._sampler.generate(prompts, do_sample=True, top_k=0, **settings)
        answers = found[:, PROMPT_TOKENS:]
        scores = (answers % 2 == 0).float().mean(1).view(-1, size)
        scores[with_signal:] = 0.0
        masks = torch.cat([torch.full_like(prompts, -100), answers], 1)
        groups = zip(found.view(-1, size, found.shape[1]), masks.view(-1, size, found.shape[1]), scores, strict=True)
        return [
            msgspec.convert({"tokens": rows.tolist(), "masks": mask.tolist(), "scores": score.tolist()}, ScoredData)
            for rows, mask, score in groups
        ]


def tiny_model(folder: Path, seed: int) -> str:
    """Save a random Llama whose distributions are not flat."""
    torch.manual_seed(seed)
    shape = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        initializer_range=0.1,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(shape).save_pretrained(folder)
    return str(folder)


def compared(config: FewGroupsConfig, algorithm: str, seed: int) -> list[tuple[float, float]]:
    """Per step: how far one group moves the weights, and how large its gradient is, as shares of all groups'."""
    with tempfile.TemporaryDirectory() as folder:
        source = config.model or tiny_model(Path(folder), seed)
        few, every = (continued(Run(source, config, algorithm, seed), config, each) for each in (1, config.groups))
    return [
        (one.distance / other.distance, one.grad_norm / other.grad_norm) for one, other in zip(few, every, strict=True)
    ]


def continued(run: Run, config: FewGroupsConfig, with_signal: int) -> list[Moved]:
    """The steps of one way, after those of all groups."""
    for number in range(config.full_steps):
        run.step(number, config.groups)
    return [run.step(config.full_steps + number, with_signal) for number in range(config.steps)]


def main() -> None:
    """Print a table, in Markdown."""
    config = load_config(FewGroupsConfig, prog="few_groups")
    disable_progress_bar()
    shown = [step for step in SHOWN if step <= config.steps]
    print(f"| | {' | '.join(f'step {step}' for step in shown)} | mean of {config.steps} |")
    print("|---" * (len(shown) + 2) + "|")
    kinds: dict[Literal["movement", "gradient"], int] = {"movement": 0, "gradient": 1}
    for algorithm in config.algorithms:
        found = [compared(config, algorithm, seed) for seed in config.seeds]
        for name, kind in kinds.items():
            ratios = [[step[kind] for step in run] for run in found]
            columns = [[run[step - 1] for run in ratios] for step in shown] + [[statistics.mean(run) for run in ratios]]
            cells = " | ".join(f"{min(each):.2f} to {max(each):.2f}" for each in columns)
            print(f"| `{algorithm}`: {name} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
