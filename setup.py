"""What pyproject.toml cannot express: directories installed under another name, and the README of a package index.

    checkout           wheel
    environments/      atropos_environments/       `environments` could be any project's directory
    recipes/           example_trainer/recipes/
    scripts/slurm/     example_trainer/slurm/

An editable install is one plain path entry, the checkout itself: there the directories keep their names, and
`atropos_environments` is a package that points to `environments/`.
"""

import re
import sys
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
PACKAGES = ("atropos_launcher", "atroposlib", "example_trainer", "sampler_doctor", "vllm_patching")
CODE = find_packages(str(ROOT), include=[f"{name}*" for name in PACKAGES])
INSTALLED_AS = {
    "atropos_environments": "environments",
    "example_trainer.recipes": "recipes",
    "example_trainer.slurm": "scripts/slurm",
}
FILES = {
    "atroposlib.view": ["page/*.html", "page/*.js", "page/*.css", "page/*.svg"],
    "example_trainer.recipes": ["*.yaml"],
    "atropos_environments": ["verifiers_tasksets/*.py"],
    "example_trainer.slurm": ["*.sbatch"],
}
IMAGE = re.compile(r"^!\[[^\]]*\]\((?!https?://)[^)]*\)\n*", re.MULTILINE)
LINK_TO_A_FILE = re.compile(r"\[([^\]]+)\]\((?!https?://|#)([^)#]+)[^)]*\)")


def for_an_index(readme: str) -> str:
    """`readme` without the checkout's images, and with file names in place of links to files, which an index lacks."""
    return LINK_TO_A_FILE.sub(_text_and_file, IMAGE.sub("", readme))


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
