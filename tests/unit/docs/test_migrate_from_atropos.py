"""docs/migrate_from_atropos.md: what it says of the flags of 0.4.0's trainer is so."""

import re
from pathlib import Path

import pytest

from atroposlib.config import resolve_config
from atroposlib.flags import ConfigError
from example_trainer.config import TrainerConfig

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
