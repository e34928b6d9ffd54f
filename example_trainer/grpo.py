"""The GRPO trainer process.

    python -u example_trainer/grpo.py --model-name MODEL --weight-bridge-mode shared_vllm --use-shared-memory
    --vllm-port 9001

    batching API ──batch──▶ tensors ─▶ log-probabilities ─▶ loss ─▶ step ─▶ bridge ──weights──▶ vLLM
         ▲                                                                    │
         └────────────── step done, policy version N now serves ◀─────────────┘

The loop is in loop/run.py, what opens it in loop/opening.py. With --offline-share 1 nothing is sampled, and neither API
nor vLLM is asked (loop/fine_tuning.py).
"""

if __name__ == "__main__":  # flags before torch, as atropos-grpo does
    from example_trainer.before_torch import check_before_torch

    check_before_torch()

import example_trainer.openmp  # noqa: F401  isort: skip  before torch

import contextlib
import logging
import os
import signal
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

import torch
from transformers.utils.logging import disable_progress_bar

from atroposlib.config import load_config
from atroposlib.errors import AtroposError, one_line_errors
from atroposlib.logs import configure_logging, get_logger
from atroposlib.processes.imports import collect_again
from atroposlib.processes.utf8 import restart_in_utf8
from example_trainer.bridges import Prepare, make_bridge
from example_trainer.errors import TrainerError
from example_trainer.loop.fine_tuning import fine_tune
from example_trainer.loop.learner import Learner
from example_trainer.loop.opening import open_run
from example_trainer.loss.base import load_objective
from example_trainer.memory.plan import computes_in
from example_trainer.model.memory_check import one_line_when_out_of_memory
from example_trainer.ranks.place import LOST, Place, ignore_signals, own_environment, too_few_gpus
from example_trainer.ranks.ranks import RanksLost, ToldElsewhere, expect_the_same, join, told_once_a_machine
from example_trainer.settings.config import TrainerConfig

log = get_logger(__name__)


def run(config: TrainerConfig, prepare: Prepare | None = None) -> None:
    """Train to `config.training_steps`. `prepare` replaces the configured bridge. Raises TrainerError, of which
    BridgeError is one.
    """
    with one_line_when_out_of_memory(config), contextlib.ExitStack() as resources:
        with told_once_a_machine():
            device = prepare_torch(config)
            load_objective(config.objective)
            ranks = join(config, device)
        resources.callback(ranks.leave)
        expect_the_same(ranks, config)
        learner = Learner(config, device, ranks)
        resources.callback(learner.close)
        if not ranks.leads:
            ranks.follow(learner)
            return
        if config.offline_alone:
            fine_tune(learner)
            return
        run = resources.enter_context(open_run(learner, lambda final: prepare or make_bridge(final)))
        run.start()
        while run.progress.step < run.last_step:
            run.step(run.progress.step + 1)
        run.finish()


def prepare_torch(config: TrainerConfig) -> torch.device:
    """Seed, threads and device as configured. Raises TrainerError for a GPU that is not there."""
    if config.device.startswith("cuda") and not torch.cuda.is_available():
        raise TrainerError(
            f"--device {config.device}: PyTorch finds no CUDA device; use --device cpu or auto, or install a CUDA build"
            " of PyTorch"
        )
    place = Place.of_this_process()
    if config.threads or config.cores or place.local_size > 1:
        sharing = 1 if config.cores else place.local_size  # by --cores, each rank has its own already
        torch.set_num_threads(config.threads or max(1, len(os.sched_getaffinity(0)) // sharing))
    torch.manual_seed(config.seed)
    if config.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if place.local_size == 1:
        index = torch.device("cuda" if config.device == "auto" else config.device).index or 0
    elif place.local_rank >= torch.cuda.device_count():
        raise too_few_gpus(place.local_size, torch.cuda.device_count())
    else:
        index = place.local_rank
    torch.cuda.set_device(index)
    if computes_in(config, on_gpu=True) == "bfloat16":
        # of float32 products there is then the head's alone, whose hidden states are bfloat16's: TensorFloat-32 rounds
        # its weights less than vLLM does, which computes logits in bfloat16
        torch.set_float32_matmul_precision("high")
    return torch.device("cuda", index)  # NCCL's groups ask for an index


def _terminate(signum: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + signum)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line: 0 when trained; exits with 1 and one line on stderr when not, with 130 on Ctrl-C."""
    if argv is None:
        restart_in_utf8()
    collect_again()  # everything is loaded
    place = Place.of_this_process()
    config = load_config(TrainerConfig, argv, prog="grpo", env=own_environment(os.environ))
    if place.rank == 0:
        configure_logging("trainer")
    else:  # which does as rank 0 does, and reports it
        configure_logging(f"trainer rank {place.rank}", level=logging.WARNING)
    disable_progress_bar()
    if place.size == 1:  # before_torch.py has told several ranks what to do on a signal
        signal.signal(signal.SIGTERM, _terminate)
    with one_line_errors("grpo"):
        try:
            run(config)
        except ToldElsewhere as error:
            return error.exit_status if place.parent is not None else LOST  # to an agent that tells causes apart
        except RanksLost as error:
            if place.rank == 0 and place.parent is None:
                raise
            # rank 0 and the parent know which rank and why
            log.log(logging.WARNING if place.rank == 0 or place.parent is None else logging.INFO, "%s", error)
            return error.exit_status
        except AtroposError as error:
            if place.rank == 0:
                raise
            raise TrainerError(f"trainer rank {place.rank} of {place.size}: {error}") from error
        finally:
            if place.size > 1:
                ignore_signals()  # everything is closed, and what is said now is the run's last word
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
