"""docs/migrate_from_atropos.md: flags, import paths, values and commands of 0.4.0 are what the page says."""

import importlib
import re
import tomllib
from pathlib import Path

import pytest

from atroposlib.config import resolve_config
from atroposlib.envs.base import APIServerConfig, BaseEnvConfig
from atroposlib.flags import ConfigError
from atroposlib.old_paths import MOVED
from example_trainer.settings.config import TrainerConfig

PAGE = (Path(__file__).parents[3] / "docs/migrate_from_atropos.md").read_text().split("## The trainer")[1]
# Of 0.4.0, with a value where they take one.
KEPT = (
    "--model-name m --lr 1e-5 --training-steps 10 --batch-size 2 --seq-len 2048 --gradient-accumulation-steps 32"
    " --warmup-steps 0 --device cpu --save-path s --checkpoint-interval 3 --clip-eps 0.2 --vllm-port 9001"
    " --vllm-gpu 1 --vllm-restart-interval 3 --atropos-url http://localhost:8000 --use-wandb --wandb-project p"
    " --wandb-group g --weight-bridge-mode none --log-dir l"
)
GONE = [
    "--max-model-len 4096",
    "--gpu-memory-utilization 0.4",
    "--vllm-config-path x",
    "--trainer-rank 0",
    "--world-size 1",
    "--init-method env://",
    "--train-layer-indices 1-2",
    "--lora-layer-indices 1-2",
    "--adafactor-scale-parameter",
    "--adafactor-relative-step",
    "--debug-loading",
    "--benchmark",
]


def test_flags_that_are_not_listed_are_understood() -> None:
    config, _ = resolve_config(TrainerConfig, KEPT.split(), prog="grpo", env={})
    assert config.gradient_accumulation_steps == 32
    listed = set(re.findall(r"--[a-z-]+", "".join(re.findall(r"^\| (.*?) \|", PAGE, re.MULTILINE))))
    assert listed & set(re.findall(r"--[a-z-]+", KEPT)) == {"--weight-bridge-mode"}


@pytest.mark.parametrize("flag", GONE)
def test_flags_that_are_gone_are_listed(flag: str) -> None:
    assert f"`{flag.split()[0]}`" in PAGE
    with pytest.raises(ConfigError, match="unknown flag"):
        resolve_config(TrainerConfig, ["--model-name", "m", *flag.split()], prog="grpo", env={})


def test_shared_vllm_alone_is_refused() -> None:
    with pytest.raises(ConfigError, match="single-copy"):
        resolve_config(TrainerConfig, "--model-name m --weight-bridge-mode shared_vllm".split(), prog="grpo", env={})


# --- the rest of the page ---------------------------------------------------------------------------------------------

WHOLE = (Path(__file__).parents[3] / "docs/migrate_from_atropos.md").read_text()


def test_old_import_paths_of_the_page_lead_somewhere() -> None:
    row = next(line for line in WHOLE.splitlines() if "leads to `atroposlib.compat`" in line)
    named = {name.removeprefix("atroposlib.") for name in re.findall(r"`([\w.]+)`", row.split("|")[1])}
    moved = {old.removeprefix("atroposlib.") for old in MOVED if ".cli." not in old}
    assert named == moved - {"envs.server_handling.managed_server_proxy"}
    for name in named:
        importlib.import_module(f"atroposlib.{name}")


def test_the_old_way_of_each_row_is_a_setting() -> None:
    flags = re.findall(r"`--env\.(\w+) ([\w.]+)` \|$", WHOLE, re.MULTILINE)
    assert len(flags) == 3
    settings = BaseEnvConfig.model_validate(dict(flags))
    assert {name: getattr(settings, name) for name, _ in flags} == {
        "max_failed_items": 100,
        "max_fruitless_items": 0,
        "startup_timeout": 1e9,
    }


def test_values_that_had_a_meaning_are_accepted() -> None:
    section = WHOLE.split("Values that had a meaning")[1].split("\n## ")[0]
    for name, value in re.findall(r"`(\w+): ([^`]+)`", section):
        if name == "base_url":
            assert APIServerConfig(base_url=value).base_url == f"http://{value}"
        else:
            assert getattr(BaseEnvConfig.model_validate({name: value}), name) == -1
    assert section.count("`: ") + section.count(": -1`") >= 7


def test_every_command_of_the_ancestor_is_there_and_on_the_page() -> None:
    scripts = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]["scripts"]
    for name in ANCESTORS_COMMANDS:
        assert name in scripts
        assert f"`{name}`" in WHOLE


ANCESTORS_COMMANDS = (
    "run-api view-run view-run-multimodal atropos-sft-gen atropos-dpo-gen inference-node-wandb-watcher atropos-grpo"
    " atropos-grpo-run"
).split()
