"""The extras of pyproject.toml, and the error line for a command whose extra is missing.

    need("trainer", "grpo", "torch", "peft")
    grpo: error: grpo needs torch, which is not installed; pip install 'atroposlib[trainer]'

A command calls `need` before it imports what the extra brings. It looks for the modules and imports none. The name
`atroposlib` is the ancestor's on the public index, so pip is given it only where this distribution is installed.
"""

from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from atroposlib.errors import WRONG_USE, AtroposError

CHECKOUT = Path(__file__).parents[1]

Extra = Literal["trainer", "gpu", "doctor", "environments", "mcp", "wandb", "tensorboard", "ray"]


class MissingExtra(AtroposError):
    """Is raised when what the command needs is not installed; as a wrong flag does, this ends it with exit status 2."""

    exit_status = WRONG_USE


def need(extra: Extra, who: str, *modules: str) -> None:
    """Raise MissingExtra, with which of `modules` `who` lacks, unless all of them are installed."""
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise MissingExtra(f"{who} needs {' and '.join(missing)}, which {verb} not installed; {install(extra)}")


def install(extra: Extra) -> str:
    """The command that installs an extra: by name where Atropos is installed, else from this checkout."""
    is_installed = any(metadata.distributions(name="atroposlib"))
    command = f"pip install 'atroposlib[{extra}]'" if is_installed else f"pip install -e '{CHECKOUT}[{extra}]'"
    return command if extra != "gpu" else f"{command}, or on a machine without an NVIDIA GPU scripts/setup.sh"


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution, by its name on an index; None for one that is not there."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
