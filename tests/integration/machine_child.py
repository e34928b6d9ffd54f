"""A trainer rank that only meets the others and adds; `DRILL=kill` has rank 1 killed."""

import os
import signal
import sys
import time

import torch

from atroposlib.errors import one_line_errors
from atroposlib.logs import configure_logging
from example_trainer.ranks.place import Place, begin_rank
from example_trainer.ranks.ranks import join
from example_trainer.settings.config import TrainerConfig


def main() -> None:
    place = Place.of_this_process()
    begin_rank(place)
    configure_logging("trainer")
    config = TrainerConfig.model_validate({"model_name": "m", "dist_timeout_s": 60.0})
    ranks = join(config, torch.device("cpu"))
    total = ranks.sum(torch.tensor([float(place.rank + 1)])).item()
    print(f"rank {place.rank} of {place.size}: sum {total:g}", flush=True)
    if os.environ.get("DRILL") == "kill":
        if place.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with ranks._reaching_ranks("a drill"):  # as in a trainer's step
            while True:
                ranks.sum(torch.zeros(1))
                time.sleep(0.05)
    ranks.leave()


if __name__ == "__main__":
    with one_line_errors("grpo"):
        main()
    sys.exit(0)
