"""What the trainer does before it loads torch, so that `--help`, `--dry-run`, typos and missing extras answer at once.

Plain `grpo.py` with several ranks starts them here, and ends here when they have ended.
"""

import contextlib
import gc
import io
import os

from atroposlib.config import load_config
from atroposlib.errors import one_line_errors
from atroposlib.extras import need
from example_trainer.errors import TrainerError
from example_trainer.model.memory_check import plan_of_run
from example_trainer.ranks.place import Place, begin_rank, own_environment, ranks_to_start
from example_trainer.ranks.spawn import run_ranks
from example_trainer.settings.config import TrainerConfig
from example_trainer.settings.cpu_cores import expect_cores, parse_cores, shared_out


def check_before_torch() -> None:
    """Exits 0 after `--help` and `--dry-run`, 2 on wrong flags or without what the flags need; and with the exit
    status of the ranks if it has started them. Leaves the garbage collector off for the imports that follow.
    """
    with one_line_errors("grpo"):
        place = Place.of_this_process()
    with contextlib.ExitStack() as silence:
        if place.local_rank:  # rank 0 of this machine says the same
            silence.enter_context(contextlib.redirect_stderr(io.StringIO()))
            silence.enter_context(contextlib.redirect_stdout(io.StringIO()))
        config = load_config(TrainerConfig, prog="grpo", env=own_environment(os.environ), notes=plan_of_run)
        with one_line_errors("grpo"):
            need("trainer", "the trainer", "torch", "peft", "safetensors")
            if config.tensorboard:
                need("tensorboard", "--tensorboard", "tensorboard")
            if config.use_wandb:
                need("wandb", "--use-wandb", "wandb")
            ranks = 0 if place.started_by_others else ranks_to_start(config)
            take_cores(config, place, ranks)
    if place.size > 1:
        begin_rank(place)
    elif ranks:
        raise SystemExit(run_ranks(ranks, config.dist_timeout_s))
    gc.disable()


def take_cores(config: TrainerConfig, place: Place, ranks: int) -> None:
    """Keep this rank to its share of --cores, before torch counts them for its threads; the parent of `ranks` ranks to
    all of them. Raises TrainerError for cores that are not there, or cannot be shared out.
    """
    if config.cores is None:
        return
    cores, sharing = parse_cores(config.cores), ranks or place.local_size
    try:
        expect_cores(cores, os.sched_getaffinity(0))
        shares = shared_out(cores, sharing, f"{sharing} trainer ranks on this machine")
    except ValueError as error:
        raise TrainerError(f"--cores {config.cores}: {error}") from None
    os.sched_setaffinity(0, cores if ranks else shares[place.local_rank])
