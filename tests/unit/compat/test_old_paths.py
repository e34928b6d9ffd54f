"""The ancestor's import paths lead to `atroposlib.compat`, and no product module imports that package."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from atroposlib.old_paths import IN_DIRECTORIES, MOVED

ROOT = Path(__file__).parents[3]
ROOMS = ("atropos_launcher", "atroposlib", "environments", "example_trainer", "vllm_patching", "scripts")
MODULES = [*MOVED, "atroposlib.frontend.jsonl2html", "atroposlib.envs.reward_fns.accuracy_reward"]


@pytest.mark.parametrize("old", MODULES)
def test_an_old_path_gives_the_module_of_the_new_one(old: str) -> None:
    module = importlib.import_module(old)
    assert module.__name__.startswith("atroposlib.compat")
    assert module is importlib.import_module(module.__name__)


@pytest.mark.parametrize("old", IN_DIRECTORIES)
def test_a_path_of_ours_from_before_gives_the_module_in_its_directory(old: str) -> None:
    module = importlib.import_module(old)
    assert module.__name__ == IN_DIRECTORIES[old]
    assert module is importlib.import_module(module.__name__)


@pytest.mark.services
def test_one_registry_of_rewards_stands_under_both_paths() -> None:
    program = """
import atroposlib.envs.reward_fns.registry
from atroposlib.envs.reward_fns import RewardFunction, registry
@registry.register
class ShoutReward(RewardFunction): ...
from atroposlib.compat.reward_fns import registry as known
assert known.get("shout") is ShoutReward and known is atroposlib.envs.reward_fns.registry
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT, timeout=60)


def test_a_path_that_never_was_is_no_module() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_reward"):
        importlib.import_module("atroposlib.envs.reward_fns.no_such_reward")
    with pytest.raises(ModuleNotFoundError, match=r"atroposlib\.envs\.evals"):
        importlib.import_module("atroposlib.envs.evals")


@pytest.mark.services
def test_python_m_takes_an_old_path(tmp_path: Path) -> None:
    groups = tmp_path / "groups.jsonl"
    groups.write_text('{"messages": [[{"role": "user", "content": "hello"}]], "scores": [1.0]}\n')
    command = [sys.executable, "-m", "atroposlib.frontend.jsonl2html", str(groups)]
    subprocess.run(command, check=True, cwd=ROOT, timeout=60)
    assert "hello" in groups.with_suffix(".html").read_text()


def test_no_product_module_imports_the_compatibility_package() -> None:
    files = [
        path for room in ROOMS for path in (ROOT / room).rglob("*.py") if ROOT / "atroposlib/compat" not in path.parents
    ]
    assert len(files) > 150
    forbidden = ("atroposlib.compat", *MOVED, *IN_DIRECTORIES)
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in files
        for name in imported(ast.parse(path.read_text()))
        if f"{name}.".startswith(tuple(f"{prefix}." for prefix in forbidden))
    ]
    assert not found


def imported(tree: ast.Module) -> list[str]:
    """The full names of what a module imports, wherever in it."""
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return names + [f"{node.module}.{alias.name}" for node in froms for alias in node.names]
