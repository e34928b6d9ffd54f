"""Entry points of commands whose modules load torch: flags are read first, so that `--help`, `--dry-run` and a typo
answer at once, and a missing torch is one line. `atropos-grpo` starts here.
"""

from atroposlib.config import load_config
from atroposlib.errors import one_line_errors
from atroposlib.extras import need
from example_trainer.config import TrainerConfig


def check_before_torch() -> None:
    """Exits 0 after `--help`, 2 on wrong flags or without what the trainer is made of."""
    config = load_config(TrainerConfig, prog="grpo")
    with one_line_errors("grpo"):
        need("trainer", "the trainer", "torch", "peft", "safetensors")
        if config.tensorboard:
            need("tensorboard", "--tensorboard", "tensorboard")
        if config.use_wandb:
            need("wandb", "--use-wandb", "wandb")


def grpo() -> int:
    """The trainer: its exit code."""
    check_before_torch()
    from example_trainer.grpo import main

    return main()
