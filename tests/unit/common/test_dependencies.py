"""What the packages import is what pyproject.toml says that they need, and nothing else is asked for."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGES = ("atropos_launcher", "atroposlib", "environments", "example_trainer", "sampler_doctor", "vllm_patching")
TORCHLESS = ("atroposlib", "environments", "atropos_launcher")  # a plain install runs all of it
EXTRAS_OF_TORCHLESS = {"mcp", "ray", "reasoning-gym", "wandb"}  # asked for late, with a line that names the extra
BROUGHT_ALONG = {
    "bitsandbytes",  # --optimizer adamw_8bit asks for it
    "mcp-types",  # of mcp
    "pydantic-core",  # of pydantic
    "pyzmq",  # of vLLM
    "renderers",  # --env.tool_parser renderers asks for it
    "uvloop",  # of vLLM
    "verifiers",  # in a virtual environment of its own: scripts/verifiers_setup.sh
    "xgrammar",  # of vLLM
}
NOT_IMPORTED: set[str] = set()


def name(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower().replace("_", "-")


CORE = set(map(name, PROJECT["dependencies"]))
EXTRAS = {name(line) for extra, lines in PROJECT["optional-dependencies"].items() if extra != "dev" for line in lines}


def imported(*folders: str) -> set[str]:
    """The distributions whose modules are imported in `folders`; an unknown module keeps its name."""
    found = set()
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                found.add(str(node.module).partition(".")[0])
    known = packages_distributions()
    modules = found - sys.stdlib_module_names - {*PACKAGES, "vllm"}
    return {name(distribution) for module in modules for distribution in known.get(module, [module])}


def test_every_import_is_declared() -> None:
    assert imported(*PACKAGES) - CORE - EXTRAS == BROUGHT_ALONG


def test_what_runs_without_torch_needs_no_extra() -> None:
    assert imported(*TORCHLESS) - CORE - BROUGHT_ALONG == EXTRAS_OF_TORCHLESS


def test_nothing_is_declared_that_nobody_imports() -> None:
    assert CORE - imported(*PACKAGES) == NOT_IMPORTED
