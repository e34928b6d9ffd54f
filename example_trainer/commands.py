"""Entry points of commands whose modules load torch: flags are read first, so that `--help`, `--dry-run` and a typo
answer at once. `atropos-grpo` starts here.
"""

from atroposlib.config import load_config
from example_trainer.config import TrainerConfig


def grpo() -> int:
    """The trainer: its exit code. Exits 0 after `--help`, 2 on wrong flags."""
    load_config(TrainerConfig, prog="grpo")
    from example_trainer.grpo import main

    return main()
