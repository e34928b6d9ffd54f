"""What the trainer checks before it loads torch: `--help`, `--dry-run`, a typo and a missing extra answer at once."""

from atroposlib.config import load_config
from atroposlib.errors import one_line_errors
from atroposlib.extras import need
from example_trainer.config import TrainerConfig
from example_trainer.rank_processes import end_with_parent, ranks_to_start, run_ranks


def check_before_torch() -> None:
    """Exits 0 after `--help` and `--dry-run`, 2 on wrong flags or without what the flags need."""
    config = load_config(TrainerConfig, prog="grpo")
    with one_line_errors("grpo"):
        need("trainer", "the trainer", "torch", "peft", "safetensors")
        if config.tensorboard:
            need("tensorboard", "--tensorboard", "tensorboard")
        if config.use_wandb:
            need("wandb", "--use-wandb", "wandb")
    end_with_parent()
    if (ranks := ranks_to_start(config)) > 1:
        raise SystemExit(run_ranks(ranks, config.dist_timeout_s))
