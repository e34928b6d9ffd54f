"""A trainer rank without API and vLLM: it learns from made-up batches, and rank 0 writes down what came of it.

python -m tests.unit.trainer.rank_child JOB.json
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from example_trainer.batching import Rollout, make_batch
from example_trainer.config import TrainerConfig
from example_trainer.learner import Learner
from example_trainer.parallel import join
from example_trainer.shard import local
from tests.unit.trainer.fakes import VOCAB, as_records, item

GROUPS = 4


def rollouts(step: int, seq_len: int = 64) -> tuple[list[Rollout], int]:
    """A step's rollouts, of ragged lengths, and its sampled tokens."""
    groups = [
        item([1.0, 0.0, 0.0, 1.0], seed=100 * step + index, longest=3 + 4 * index, policy_versions=[[0, 0]] * 4)
        for index in range(GROUPS)
    ]
    batch = make_batch(as_records(groups), seq_len=seq_len, divide_by_std=True, policy_version=0, vocab_size=VOCAB)
    return batch.rollouts, batch.completion_tokens


def main(job: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = TrainerConfig.model_validate(job["config"])
    device = torch.device("cpu")
    ranks = join(config, device)
    learner = Learner(config, device, ranks)
    if not ranks.leads:
        ranks.follow(learner)
        return
    learner.load(config.model_name)
    learner.begin("")
    found: list[dict[str, Any]] = []
    for step in range(job["steps"]):
        measured = learner.gradients(*rollouts(step))
        norm = learner.clip()
        learner.update(config.lr)
        found.append({**measured, "grad_norm": norm, **learner.comparison.row()})
    parameters = dict(learner.trained.model.named_parameters())
    held = sum(local(parameter).numel() for parameter in parameters.values())
    moments = sum(local(state["exp_avg"]).numel() for state in learner.optimizer.state.values())
    logprobs = learner.trained.prompt_logprobs(list(range(1, 30)))
    learner.trained.write(Path(job["out"]) / "model")
    count = sum(parameter.numel() for parameter in parameters.values())
    results = {"steps": found, "held": held / count, "moments": moments / count, "logprobs": logprobs.tolist()}
    (Path(job["out"]) / "results.json").write_text(json.dumps(results))
    ranks.leave()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
