"""How long a checkpoint delays training, and how long until it is on the disk, by format.

python -m benchmarks.checkpoint_stall --format hf            one rank, a random Llama of 134 million parameters
torchrun --nproc-per-node 2 -m benchmarks.checkpoint_stall   two ranks, in shards
"""

import argparse
import json
import logging
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from example_trainer.loop.learner import Learner
from example_trainer.loop.saves import Saves
from example_trainer.ranks.place import Place
from example_trainer.ranks.ranks import collective, join
from example_trainer.settings.config import TrainerConfig
from example_trainer.weights.checkpoint import Progress

SHAPE: dict[str, Any] = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9}


class Idle(Learner):
    """Has moments without having learnt."""

    @collective
    def make_moments(self) -> None:
        for parameter in self.trained.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.update(1e-5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", choices=("hf", "sharded"), default="sharded", help="default: %(default)s")
    parser.add_argument("--layers", type=int, default=30, help="of the model (default: %(default)s)")
    parser.add_argument("--saves", type=int, default=5, help="checkpoints to write (default: %(default)s)")
    place = Path(tempfile.gettempdir()) / "checkpoint_stall"
    parser.add_argument(
        "--folder", type=Path, default=place, metavar="DIR", help="where to write (default: %(default)s)"
    )
    options = parser.parse_args()
    logging.disable()
    torch.set_num_threads(1)
    measure(options.folder, options)
    if Place.of_this_process().rank == 0:
        shutil.rmtree(options.folder / "saved")


def measure(folder: Path, options: argparse.Namespace) -> None:
    model = folder / f"model_{options.layers}"
    if Place.of_this_process().rank == 0 and not (model / "model.safetensors").is_file():
        settings = LlamaConfig(**SHAPE, num_key_value_heads=3, num_hidden_layers=options.layers)
        LlamaForCausalLM(settings).save_pretrained(model)
    config = TrainerConfig.model_validate(
        {
            "model_name": str(model),
            "save_path": folder / "saved",
            "checkpoint_format": options.format,
            "keep_checkpoints": 1,
        }
    )
    ranks = join(config, torch.device("cpu"))
    learner = Idle(config, torch.device("cpu"), ranks)
    if not ranks.leads:
        ranks.follow(learner)
        return
    learner.load(str(model))
    learner.begin("")
    learner.make_moments()
    saves = Saves(config, learner, time.sleep)
    held, written = [], []
    for step in range(1, options.saves + 1):
        start = time.perf_counter()
        saves.save(Progress(step, step, step))
        held.append(time.perf_counter() - start)
        saves.complete()
        written.append(time.perf_counter() - start)
    print(
        json.dumps(
            {
                "ranks": ranks.size,
                "format": options.format,
                "parameters": sum(parameter.numel() for parameter in learner.trained.model.parameters()),
                "held_up_s": [round(value, 2) for value in held],
                "held_up_median_s": round(statistics.median(held), 2),
                "on_disk_median_s": round(statistics.median(written), 2),
            }
        ),
        flush=True,
    )
    ranks.leave()


if __name__ == "__main__":
    main()
