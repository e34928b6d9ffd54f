"""What pyproject.toml cannot say: which folders are installed under another name, and the README of a package index.

    checkout           wheel
    environments/      atropos_environments/       `environments` could be any project's folder
    recipes/           example_trainer/recipes/
    scripts/slurm/     example_trainer/slurm/

An editable install is one plain path entry, the checkout itself: there the folders keep their names, and
`atropos_environments` is a package that points to `environments/`.
"""

import re
import sys
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
CODE = find_packages(str(ROOT), include=["atroposlib*", "example_trainer*", "vllm_patching*"])
INSTALLED_AS = {
    "atropos_environments": "environments",
    "example_trainer.recipes": "recipes",
    "example_trainer.slurm": "scripts/slurm",
}
FILES = {
    "example_trainer.recipes": ["*.yaml"],
    "example_trainer.slurm": ["*.sbatch"],
}
LINK_TO_A_FILE = re.compile(r"\[([^\]]+)\]\((?!https?://|#)([^)#]+)[^)]*\)")


def for_an_index(readme: str) -> str:
    """`readme` with the names of the checkout's files where it has links to them, which lead nowhere on an index."""
    return LINK_TO_A_FILE.sub(_text_and_file, readme)


def _text_and_file(link: re.Match[str]) -> str:
    text, file = link.groups()
    return text if text.strip("`") == file else f"{text} ({file})"


if "editable_wheel" in sys.argv:
    INSTALLED_AS, FILES = {}, {}

setup(
    packages=[*CODE, *INSTALLED_AS],
    package_dir={"": ".", **INSTALLED_AS},
    package_data={"": ["py.typed"], **FILES},
    long_description=for_an_index((ROOT / "README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
)
