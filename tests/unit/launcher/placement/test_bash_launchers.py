"""The recipes give every program what the launchers in bash gave it: bash_launchers.txt was written by those."""

import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest

from atropos_launcher.placement.addresses import argv, variables, vllm_flags
from atroposlib.config import resolve_config
from example_trainer.settings.bridges import MODES, Restarting
from example_trainer.settings.config import TrainerConfig
from tests.unit.launcher.plans import MODEL, ROOT, no_processes, on_gpus, plan, resolved

__all__ = ["no_processes"]

VLLM = {"--host": "127.0.0.1", "--port": "9001", "--seed": "1"}
TRAINER = (
    "--batch-size 8 --gradient-accumulation-steps 8 --adam-betas 0.9,0.95 --vllm-host 127.0.0.1 --vllm-port 9001"
    " --vllm-start-timeout 1800 --atropos-url http://127.0.0.1:8000 --seed 1 --save-path /run/checkpoints"
    " --log-dir /run --metrics-path /run/metrics.jsonl --model-name"
).split()
ENVIRONMENT = (
    "--env.group_size 8 --env.max_batches_offpolicy 0 --env.steps_per_eval 5 --env.tokenizer_name default"
    " --env.eval_at_start true --env.ensure_scores_are_not_same false --env.total_steps -1 --env.seed 1"
    " --env.use_wandb false --env.rollout_server_url http://127.0.0.1:8000"
    " --env.evaluations_path /run/evaluations.jsonl --env.data_path_to_save_groups /run/samples.jsonl"
    " --env.held_out_path /run/held_out.jsonl --env.run_record_path /run/run.json"
    " --openai.base_url http://127.0.0.1:9001/v1 --openai.model_name default --openai.server_type vllm"
).split()


@dataclass(frozen=True)
class Bash:
    """One line of the file."""

    command: str
    gpus: list[str]
    vllm_gpus: str
    trainer_gpus: str
    model: str
    vllm: dict[str, str]
    trainer: list[str]
    environment: list[str]
    offline: bool


def read(line: str, problems: str) -> Bash:
    columns = [column.strip() for column in f"{line} ".replace("PROBLEMS", problems).split(" | ")]
    command, gpus, vllm_gpus, trainer_gpus, model, vllm, trainer, environment, hub = columns
    return Bash(
        command,
        gpus.split(",") if gpus else [],
        vllm_gpus,
        trainer_gpus,
        model,
        pairs(shlex.split(vllm)),
        words(pairs([*TRAINER, model, *shlex.split(trainer)])),
        words(pairs([*ENVIRONMENT, *shlex.split(environment)])),
        hub == "offline",
    )


def pairs(words: list[str]) -> dict[str, str]:
    """Flags and their values, empty for a switch."""
    found: dict[str, str] = {}
    for word in words:
        if word.startswith("--"):
            flag = word
            found[flag] = ""
        else:
            found[flag] = word
    return found


def words(flags: dict[str, str]) -> list[str]:
    return [word for flag, value in flags.items() for word in (flag, value) if word]


LINES = [
    line
    for line in (ROOT / "tests/unit/launcher/bash_launchers.txt").read_text().splitlines()
    if not line.startswith("#")
]
RECIPES = sorted({line.split()[0] for line in LINES})


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_program_is_told_what_bash_told_it(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problems = tmp_path / "problems.jsonl"
    problems.touch()
    for line in (line for line in LINES if line.split()[0] == recipe):
        bash = read(line, str(problems))
        on_gpus(monkeypatch, bash.gpus)
        made = plan(*shlex.split(bash.command))
        site, bridge = made.site, made.trainer.bridge
        assert (",".join(site.placement.vllm), ",".join(site.placement.trainer)) == (bash.vllm_gpus, bash.trainer_gpus)

        served = VLLM | bash.vllm | {"--model": bash.model}
        if MODES[made.run.kind].vllm_copies == 1:
            served |= {"--bridge-staging": "none"} if site.placement.on_gpus else {}  # bash had no such flag
        elif "--gpu-memory-utilization" in served:  # nor a share with room for the staging buffer
            served["--gpu-memory-utilization"] = "0.41" if bash.model.endswith("135M") else "0.44"
        if isinstance(bridge, Restarting):
            served = {flag: value for flag, value in served.items() if flag not in ("--host", "--port", "--model")}
            assert pairs(shlex.split(bridge.vllm_flags)) == served, line
        assert pairs(list(argv(vllm_flags(made.run, site, bridge)))) == served, line

        trainer, _ = resolve_config(TrainerConfig, bash.trainer, prog="grpo", env={})
        wanted, got = trainer.model_dump(), made.trainer.model_dump()
        got["bridge"].pop("vllm_flags", None)
        wanted["bridge"].pop("vllm_flags", None)
        apart = site.placement.on_gpus and not {*site.placement.vllm} & {*site.placement.trainer}
        returns_in_s = 1800.0 if MODES[made.run.kind].survives_vllm else 0.0
        decided = dict(site.settled)  # by the memory plan, where both share a GPU
        assert got == wanted | decided | {"overlap": apart, "vllm_return_s": returns_in_s}, (
            line
        )  # bash had no such flags

        environment = resolved(str(ROOT / "environments/gsm8k_server.py"), tuple(bash.environment))
        got = made.environments["env"].resolved
        later = {name: got["env"][name] for name in ("final_heldout_size",)}  # bash had no such fields
        assert got == environment | {"env": environment["env"] | later}, line

        told = variables(made.run, site)
        assert ("HF_HUB_OFFLINE" in told) == bash.offline, line
        assert ("VLLM_CPU_KVCACHE_SPACE" in told) == (not bash.gpus), line


def test_the_quickstarts_model_stands_for_one() -> None:
    assert any(str(MODEL) in line for line in LINES)
