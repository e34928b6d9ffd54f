"""`atropos push`: a run's trained model, whole and as it was written, to a model hub or into a directory.

atropos push RUN --hub USER/NAME         a repository on the hub, created if it does not exist
atropos push RUN --directory DIR         a new directory, also on another disk
"""

import shutil
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from atropos_launcher import arguments
from atropos_launcher.runs import find_run, latest_run
from atroposlib.errors import AtroposError, reading
from atroposlib.wire.folders import is_sharded, needs_export
from example_trainer.weights.manifest import expect_whole

FINAL = ("final_model", "final_adapter")


class PushError(AtroposError):
    """Nothing was pushed, or not all: the message says what to do."""


def parser() -> ArgumentParser:
    command = arguments.Parser("push", "Push a run's trained model to a model hub or into a directory.")
    command.add_argument("run", nargs="?", metavar="RUN", help="name or directory (default: the newest run)")
    target = command.add_mutually_exclusive_group(required=True)
    target.add_argument("--hub", metavar="USER/NAME", help="repository on the hub (HF_ENDPOINT)")
    target.add_argument("--directory", type=Path, metavar="DIR", help="directory to create")
    command.add_argument(
        "--checkpoint", metavar="NAME", help="a directory of RUN/checkpoints (default: final_model or final_adapter)"
    )
    command.add_argument("--private", action="store_true", help="make the hub's repository private")
    arguments.add_runs(command)
    return command


def main(argv: Sequence[str]) -> int:
    options = parser().parse_args(argv)
    run = find_run(options.runs, options.run) if options.run else latest_run(options.runs)
    folder = trained_model(run, options.checkpoint)
    expect_whole(folder, PushError, "push another directory with --checkpoint")
    if options.hub:
        print(f"Pushed {folder} to {push_to_hub(folder, options.hub, private=options.private)}")
    else:
        print(f"Copied {folder} to {copy(folder, options.directory)}")
    return 0


def trained_model(run: Path, name: str | None) -> Path:
    """The directory to push. Raises PushError."""
    wanted = [run / "checkpoints" / each for each in ([name] if name else FINAL)]
    models = [folder for folder in wanted if folder.is_dir()]
    if not models:
        there = sorted(folder.name for folder in run.glob("checkpoints/[!.]*") if folder.is_dir())
        raise PushError(
            f"{run}/checkpoints has no {name or ' or '.join(FINAL)}; it has {', '.join(there) or 'nothing'}:"
            " name one with --checkpoint, or continue the run"
        )
    if is_sharded(models[0]):
        raise PushError(needs_export(models[0]))
    return models[0]


def push_to_hub(folder: Path, repository: str, *, private: bool) -> str:
    """Upload every file in one commit; the repository's address. Raises PushError."""
    from huggingface_hub import HfApi

    print(f"Pushing {folder} to {repository}", flush=True)
    remedy = "log in with `hf auth login` or HF_TOKEN, and check the name and the network"
    # The hub's library raises what its HTTP library raises, which differs between its releases.
    with reading(f"cannot push to {repository}", PushError, remedy=remedy, also=(Exception,)):
        hub = HfApi()
        url = hub.create_repo(repository, private=private, exist_ok=True)
        hub.upload_folder(repo_id=url.repo_id, folder_path=folder, commit_message=f"{folder.parts[-3]}: {folder.name}")
    return str(url)


def copy(folder: Path, target: Path) -> Path:
    """All of it or nothing at `target`. Raises PushError."""
    partial = target.with_name(f".{target.name}.partial")
    with reading(f"cannot copy to {target}", PushError, remedy="free space, or give another --directory"):
        if target.exists():
            raise PushError(f"--directory {target} exists: give another one, or remove it")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        try:
            shutil.copytree(folder, partial)
            partial.rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return target
