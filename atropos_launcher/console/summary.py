"""The summary of a run: accuracy before and after, where to look, what to try next."""

import json
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from msgspec import to_builtins
from msgspec.structs import replace

from atropos_launcher.paths import named
from atroposlib.wire.folders import LATEST
from atroposlib.wire.held_out import HeldOut, does_as_well, held_out

NAME = "atropos"
LARGER = (  # the first that the machine accepts is offered
    "quickstart --model Qwen/Qwen2.5-1.5B-Instruct --dataset gsm8k",
    "train gsm8k_lora --model Qwen/Qwen2.5-0.5B-Instruct",
)
Rows = list[dict[str, Any]]  # of a jsonl file, one per line
SCRIPTS = {"quickstart": "scripts/quickstart.sh", "train gsm8k_lora": "scripts/run_gsm8k_lora.sh"}  # of a checkout


def read_rows(path: Path) -> Rows:
    """The objects of a jsonl file, none for a file that is not there."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


def held_out_results(evaluations: Rows) -> dict[int, HeldOut]:
    """Return the held-out accuracies of one environment by policy version, in their order, as far as they were
    measured. Rows of evaluations.jsonl hold `policy_version`, `accuracy` (null if not measured) and `metrics`.
    """
    first: dict[int, HeldOut] = {}
    final: dict[int, HeldOut | None] = {}
    for row in evaluations:
        version, metrics = row["policy_version"], row.get("metrics", {})
        if (result := held_out([(row["accuracy"], metrics)])) is not None:
            first[version] = result
        if (more := held_out([(0.0, metrics)])) is not None and more.final is not None:
            final[version] = more.final
    return {version: replace(first[version], final=final.get(version)) for version in sorted(first)}


def last_and_best(results: Mapping[int, HeldOut]) -> tuple[int, int]:
    """Return the last policy version, and the one with the best accuracy of those that were trained, the later of equal
    ones. That is the last one, too, if it did as well on further questions.
    """
    last = max(results)
    best = max((version for version in results if version), key=lambda v: (results[v].accuracy, v), default=last)
    return last, last if does_as_well(results[last], results[best]) else best


def accuracy_line(evaluations: Rows) -> str:
    """`Held-out accuracy: 17.2 % before, 96.9 % after 20 steps`, and how the best policy did if that is another."""
    results = held_out_results(evaluations)
    if not results:
        return "Held-out accuracy: not measured"
    last, best = last_and_best(results)
    before = f"{100 * results[0].accuracy:.1f} % before, " if 0 in results and last > 0 else ""
    line = f"Held-out accuracy: {before}{_shown(results[last])} after {last} steps"
    return line if best == last else f"{line}; best {_shown(results[best])} after {best}"


def _shown(found: HeldOut) -> str:
    """`96.9 %`, and where further questions were asked, `97.3 % (256 questions)`."""
    if found.final is None:
        return f"{100 * found.accuracy:.1f} %"
    asked = f" ({found.final.questions} questions)" if found.final.questions else ""
    return f"{100 * found.final.accuracy:.1f} %{asked}"


def outcome(evaluations: Rows) -> dict[str, object]:
    """Return what run.json keeps of the evaluations: for each environment the last policy and the best one."""
    record: dict[str, object] = {}
    for name in sorted({str(row.get("env", "")) for row in evaluations}):
        if results := held_out_results([row for row in evaluations if str(row.get("env", "")) == name]):
            versions = dict(zip(("last", "best"), last_and_best(results), strict=True))
            record[name] = {
                key: {"policy_version": version, **to_builtins(results[version])} for key, version in versions.items()
            }
    return record


def accuracy_lines(evaluations: Rows) -> list[str]:
    """One for each environment, which is named where there are several."""
    names = sorted({str(row.get("env", "")) for row in evaluations})
    if len(names) < 2:
        return [accuracy_line(evaluations)]
    return [f"{name}: {accuracy_line([row for row in evaluations if row.get('env') == name])}" for name in names]


def reward_line(metrics: Rows) -> str:
    """`Mean sampled reward: 0.11 at step 1, 0.91 at step 20`."""
    if not metrics:  # of a run whose disk was full
        return "Mean sampled reward: not kept"
    first, last = metrics[0], metrics[-1]
    return (
        f"Mean sampled reward: {first['reward_mean']:.2f} at step {first['step']}, {last['reward_mean']:.2f} at step"
        f" {last['step']}"
    )


def trained_line(checkpoints: Path) -> str:
    """The directory of what was trained, and what it is: an adapter is not a whole model."""
    if (checkpoints / "final_adapter").is_dir():
        return "checkpoints/final_adapter  the trained adapter, a PEFT directory"
    return "checkpoints/final_model    the trained model, a Hugging Face directory"


def best_lines(checkpoints: Path) -> list[str]:
    """The link to the policy with the best held-out accuracy, if one was kept."""
    return [
        f"checkpoints/{name:<14} the one with the best held-out accuracy: {link.readlink()}"
        for name in ("best_model", "best_adapter")
        if (link := checkpoints / name).is_symlink()
    ]


def next_steps(
    run: str,
    newcomer: bool,
    typed: str,
    accepts: Callable[[str], bool] = lambda command: True,
    steps: int | None = None,
) -> dict[str, str]:
    """Commands with what they are for: what a newcomer tries next, of what this machine `accepts`, or what is done with
    a run. `steps` are those of a run that has a checkpoint, from which it can continue.
    """
    file, run = shlex.quote(f"{run}/run.yaml"), shlex.quote(named(Path(run)))
    look = {f"view {run}": "every curve, answer and token in your browser (docs/watch.md)"}
    if steps is not None:
        look[f"train --resume {run} --steps {2 * steps}"] = f"{steps} steps more, from the last checkpoint"
    if newcomer:
        larger = next(filter(accepts, LARGER), None)
        other_bridge = "train gsm8k_lora --dataset arithmetic"
        commands = {
            **look,
            "quickstart --seed 2": "the same with other samples",
            **({larger: "a larger model, real problems"} if larger else {}),
            **({other_bridge: "the same with another bridge (docs/bridges.md)"} if accepts(other_bridge) else {}),
            "train arithmetic --env.file my_server.py": "your own environment (docs/write_an_environment.md)",
        }
    else:
        commands = look | {
            f"train {file} --seed 2": "the same with other samples",
            f"plot {run} OTHER_RUN": "compare it with another run",
            f"push {run} --hub USER/NAME": "share the trained model",
        }
    return {as_typed(command, typed): what for command, what in commands.items()}


def typed_atropos() -> str:
    """Return what starts this installation's `atropos` in the user's shell: its name where it is on the path, else its
    file, which in a checkout is `.venv/bin/atropos`.
    """
    found, own = shutil.which(NAME), Path(sys.executable).with_name(NAME)
    if not own.exists() or (found is not None and own.samefile(found)):
        return NAME
    return shlex.quote(str(own.relative_to(Path.cwd()) if own.is_relative_to(Path.cwd()) else own))


def as_typed(command: str, typed: str) -> str:
    """`atropos COMMAND` as people type it: where the name is not on the path, also a script of the checkout."""
    script = next((name for name in SCRIPTS if command.startswith(f"{name} ")), None)
    if script is None or typed == NAME or not Path(SCRIPTS[script]).is_file():
        return f"{typed} {command}"
    return command.replace(script, SCRIPTS[script], 1)


def summary(
    run_dir: Path,
    seconds: int,
    newcomer: bool,
    typed: str,
    accepts: Callable[[str], bool] = lambda command: True,
) -> str:
    """The text shown at the end of a run. `typed`: what people type for `atropos`. Only commands that this machine
    `accepts` are offered.
    """
    run = str(run_dir.relative_to(Path.cwd()) if run_dir.is_relative_to(Path.cwd()) else run_dir)
    rows, checkpoints = read_rows(run_dir / "metrics.jsonl"), run_dir / "checkpoints"
    done = int(rows[-1]["step"]) if rows and (checkpoints / LATEST).exists() else None
    steps = next_steps(run, newcomer, typed, accepts, done)
    width = max(map(len, steps))
    return "\n".join(
        [
            "",
            *accuracy_lines(read_rows(run_dir / "evaluations.jsonl")),
            reward_line(rows),
            f"Took {seconds // 60} min {seconds % 60} s",
            "",
            f"Where to look, in {run}/:",
            "  reward.png                 reward and accuracy by step",
            "  metrics.jsonl              all metrics, one row per step",
            "  samples*.jsonl             what the model answered, and its rewards",
            f"  {trained_line(checkpoints)}",
            *(f"  {line}" for line in best_lines(checkpoints)),
            "  *.log, *.yaml              each service's log and configuration",
            "What to try next:",
            *(f"  {command:<{width}}  {what}" for command, what in steps.items()),
        ]
    )
