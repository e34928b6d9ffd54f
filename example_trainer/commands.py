"""Entry points of commands whose modules load torch. `atropos-grpo` starts here."""

from example_trainer.before_torch import check_before_torch


def grpo() -> int:
    """The trainer: its exit code."""
    check_before_torch()
    from example_trainer.grpo import main

    return main()
