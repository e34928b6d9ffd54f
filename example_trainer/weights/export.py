"""A Hugging Face directory from a sharded checkpoint, tensor by tensor: the model is never whole in memory.

python -m example_trainer.export CHECKPOINT NEW_DIRECTORY       atropos export is the same command
"""

import argparse
import math
import shutil
from collections.abc import Sequence
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from atroposlib.errors import WRONG_USE, one_line_errors
from atroposlib.wire.folders import MANIFEST, SHARDS, is_sharded
from example_trainer.model.loading import meta_model
from example_trainer.weights.checkpoint import STATE, verify
from example_trainer.weights.gathered import write_safetensors
from example_trainer.weights.shards import ShardFiles
from example_trainer.weights.source import shapes_of
from example_trainer.weights.written import CheckpointError, write_folder


class NothingToExport(CheckpointError):
    """The command names other directories than it needs."""

    exit_status = WRONG_USE


def export(checkpoint: Path, target: Path) -> None:
    """Make the directory `target`, whole or not at all. Raises CheckpointError or ModelError."""
    if target.exists():
        raise NothingToExport(f"{target} exists: give another directory, or remove it")
    if not checkpoint.exists():
        raise NothingToExport(f"{checkpoint} does not exist: give a step_N directory of a run's checkpoints")
    if not is_sharded(checkpoint):
        raise NothingToExport(f"{checkpoint} is not a sharded checkpoint: it has no {SHARDS}/ and needs no export")
    verify(checkpoint)
    model = meta_model(str(checkpoint))
    shapes, files = shapes_of(model), ShardFiles(checkpoint)
    for name, shape in shapes.items():
        files.expect(name, shape)

    def write(folder: Path) -> None:
        for path in checkpoint.iterdir():
            if path.is_file() and path.name not in (STATE, MANIFEST):
                shutil.copy(path, folder)
        tensors = ((name, files.part(name, 0, 0, shape[0])) for name, shape in shapes.items())
        write_safetensors(folder / "model.safetensors", shapes, tensors, model.config.model_type)

    nbytes = 4 * sum(math.prod(shape) for shape in shapes.values())
    write_folder(target, write, nbytes, remedy="free space, or give another directory")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line: 0 when written; exits with 1 and one line on stderr when not, with 2 for wrong directories."""
    parser = argparse.ArgumentParser("export", description="Convert a sharded checkpoint to a Hugging Face directory.")
    parser.add_argument("checkpoint", type=Path, help="a step_N directory with shards/")
    parser.add_argument("directory", type=Path, help="directory to create")
    options = parser.parse_args(argv)
    disable_progress_bar()
    with one_line_errors("export"):
        export(options.checkpoint, options.directory)
        print(f"Wrote {options.directory}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
