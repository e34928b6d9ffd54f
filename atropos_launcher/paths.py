"""Where recipes and environments are: in a checkout, or where pip has put them (setup.py).

in a checkout          installed
recipes/               example_trainer/recipes/
scripts/               example_trainer/scripts/
environments/          atropos_environments/
"""

import os
from pathlib import Path, PurePath

PACKAGES = Path(__file__).resolve().parents[1]  # the checkout, or site-packages
VLLM_PROGRAM = PACKAGES / "example_trainer" / "vllm_api_server.py"
ENVIRONMENTS = "environments"

RUNS = Path("runs")  # the directory of all runs, below the working directory


def recipes() -> Path:
    """The directory of the recipes that come with Atropos."""
    return _folder("recipes", installed="example_trainer/recipes")


def environments() -> Path:
    """The directory of the environment servers that come with Atropos."""
    return _folder(ENVIRONMENTS, installed="atropos_environments")


def environment_names() -> list[str]:
    """List the environments that come with Atropos, as `gsm8k` for gsm8k_server.py."""
    return sorted(path.stem.removesuffix("_server") for path in environments().glob("*_server.py"))


def environment_file(name: str, beside: Path) -> Path:
    """The file that a recipe in the directory `beside` calls `name`: there or in the working directory, else, for
    `environments/FILE`, the one that comes with Atropos. A file that does not exist is given as it was written.
    """
    path = PurePath(name)
    candidates = [beside / path, Path(path)]
    if path.parts[0] == ENVIRONMENTS:
        candidates.append(environments().joinpath(*path.parts[1:]))
    return next((candidate for candidate in candidates if candidate.is_file()), Path(path))


def _folder(name: str, installed: str) -> Path:
    is_checkout = (PACKAGES / "pyproject.toml").is_file()
    return PACKAGES / (name if is_checkout else installed)


def named(run: Path) -> str:
    """A run as people name it: by its name alone where it is in ./runs, where every command looks first."""
    return run.name if run.parent.absolute() == RUNS.absolute() else os.path.relpath(run)
