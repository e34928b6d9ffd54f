"""The quickstart's model, made where it is missing, with a bar on a terminal."""

import sys
from pathlib import Path

from atropos_launcher.console.console import is_terminal


def unpack_start_model(folder: Path) -> None:
    """Make the model in `folder`, unless it is there. Raises QuickstartModelError."""
    from example_trainer.quickstart_model import ensure_model

    if not is_terminal(sys.stderr):
        ensure_model(folder)
        return
    from atropos_launcher.console.live_console import one_bar

    with one_bar("model", "tensors unpacked") as advance:
        ensure_model(folder, advance)
