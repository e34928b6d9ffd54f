"""Plans of runs without a process: environments answer `--dry-run` in this one."""

import hashlib
import importlib.util
import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from atropos_launcher.placement import gpus, ray_cluster
from atropos_launcher.placement.ports import Ports
from atropos_launcher.plan import command_line, sections, site
from atropos_launcher.plan.command_line import Asked, read_command_line
from atropos_launcher.plan.services import Plan, make_plan
from atroposlib.envs.base import BaseEnv
from atroposlib.envs.commands.cli import EnvTree, load_tree, with_teacher_if_given

ROOT = Path(__file__).resolve().parents[3]
MODEL = Path("/quickstart-135M")
PAGE_FILES = {"answers.jsonl": str(ROOT / "tests/unit/docs/answers.jsonl")}  # that commands of pages name


@cache
def environment_class(file: str) -> type[BaseEnv]:
    """The environment of a file."""
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (found,) = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, BaseEnv) and value.__module__ == module.__name__
    ]
    return found


@cache
def tree_of(file: str, argv: tuple[str, ...]) -> EnvTree:
    """What `python FILE serve ARGV --dry-run` resolves."""
    return load_tree(with_teacher_if_given(environment_class(file), argv), "serve", argv, "serve")


@cache
def resolved(file: str, argv: tuple[str, ...]) -> dict[str, Any]:
    """What it prints."""
    found: dict[str, Any] = json.loads(tree_of(file, argv).model_dump_json())
    return found


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Environments are asked in this process, the quickstart's model is at MODEL, no cluster is asked at all, and the
    processor does not multiply bfloat16.
    """

    def ask(
        name: str, program: Sequence[str], settings: Mapping[str, Any], typed: Sequence[str], environ: Mapping[str, str]
    ) -> tuple[dict[str, Any], list[str]]:
        text = yaml.safe_dump(dict(settings))
        config = tmp_path / f"{hashlib.sha256(text.encode()).hexdigest()}.yaml"
        config.write_text(text)
        with monkeypatch.context() as own:
            if key := environ.get("VLLM_API_KEY"):  # which the launcher makes for several machines
                own.setenv("VLLM_API_KEY", key)
            words = ("--config", str(config), *typed)
            return resolved(program[0], words), tree_of(program[0], words).env.lacks()

    monkeypatch.setattr(sections, "ask_environment", ask)
    monkeypatch.setattr(site, "find_model", lambda model, flag="--model": model or str(MODEL))
    monkeypatch.setattr(gpus, "multiplies_bfloat16", lambda: False)
    monkeypatch.setattr(ray_cluster, "connect", lambda address, nodes, silence_s: ray_cluster.planned(nodes, silence_s))


def on_gpus(monkeypatch: pytest.MonkeyPatch, visible: list[str]) -> None:
    """These are visible, of 80 GB each, and the one default model is the smallest."""
    monkeypatch.setattr(command_line, "found_gpus", lambda environ: (visible, 80 * 10**9))
    monkeypatch.setattr(site, "MODELS", site.MODELS[-1:])


def ask_for(*argv: str) -> Asked:
    """What was typed, as a dry run: ports are those of the defaults."""
    return read_command_line([*argv, "--dry-run"], {})


def plan(*argv: str, run_dir: Path = Path("/run")) -> Plan:
    """What `atropos train ARGV` would start."""
    asked = ask_for(*argv)
    return make_plan(asked.run, asked.sections, site.find_site(asked, run_dir, Ports()))
