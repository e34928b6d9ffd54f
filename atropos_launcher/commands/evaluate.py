"""`atropos evaluate RECIPE [MODEL]`: a model on the held-out problems of a run's environments, without training.

    vLLM ◀── every environment of the run, by its `evaluate` command ──▶ runs/NAME/evaluation_ENVIRONMENT/

With --base-url a server that runs already is asked, by OpenAI's API, and no vLLM is started. MODEL is then its name
there.
"""

import os
import re
import shlex
from argparse import ArgumentParser
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from atropos_launcher.commands.train import described, start
from atropos_launcher.console.console import PlainConsole
from atropos_launcher.console.start_model import unpack_start_model
from atropos_launcher.placement.ports import Ports
from atropos_launcher.plan.command_line import SECTIONS, Asked, RunFlags, make_parser, read_command_line
from atropos_launcher.plan.hub import by_name_alone
from atropos_launcher.plan.sections import expect_complete
from atropos_launcher.plan.server_flags import expect_usable_flags
from atropos_launcher.plan.services import Plan, make_plan
from atropos_launcher.plan.site import AUTO, find_model, find_site, with_best_layout
from atropos_launcher.run_file.run_file import RunFile, untaught
from atropos_launcher.run_file.servers import is_server
from atropos_launcher.run_file.teacher import TEACHER
from atropos_launcher.runs import expect_open
from atropos_launcher.service import Service
from atroposlib.config import Config
from atroposlib.envs.evaluation.evaluation_metrics import ANSWERS, SAMPLES, TABLE
from atroposlib.envs.sampling.sampling_fields import SampleFlags
from atroposlib.flags import ConfigError, keys_of, split

PROG = "atropos evaluate"
GREEDY = SampleFlags()  # the environments' own evaluation
OF_TRAINING = {"trainer", "bridge", "api", TEACHER}  # sections
ONLY_TRAINING = {
    *("steps", "bridge", "kv_on_sync", "trainer_ranks", "tp_size", "api_port"),
    *("wandb", "tensorboard", "view", "keep_samples"),
}
UNUSUAL = re.compile(r"[^A-Za-z0-9._-]+")  # in a directory's name
SHOWN = {"": r"(WARNING|ERROR|CRITICAL) |Sampled [0-9]+ of |Evaluated [0-9]+ of ", "vllm": "ERROR "}


class ServerFlags(Config):
    """Server"""

    base_url: str | None = Field(
        None,
        pattern=r"^https?://.+",
        description="ask this OpenAI-compatible server, such as http://localhost:9001/v1, instead of starting vLLM",
    )
    api_key_env: str = Field("", description="environment variable that holds its key")


class OutputFlags(Config):
    """Output"""

    output: Path | None = Field(
        None,
        description="with one environment: the JSONL file of answers, which the same command continues; by default in"
        " RUNS/evaluate-RECIPE-MODEL/",
    )


class EvaluateFlags(ServerFlags, OutputFlags, SampleFlags, RunFlags):
    """Declares the flags of `atropos evaluate`."""

    first_flags: ClassVar[Sequence[str]] = (
        "model",
        "dataset",
        "dataset_path",
        "base_url",
        "api_key_env",
        "samples",
        "output",
        "run_name",
    )
    not_offered: ClassVar[frozenset[str]] = frozenset(OF_TRAINING | ONLY_TRAINING)

    bridge: str | None = "broadcast"  # any bridge that does not start vLLM will do


def parser() -> ArgumentParser:
    """For completion."""
    return make_parser([], PROG, EvaluateFlags)


def main(argv: Sequence[str]) -> int:
    """Evaluate. Returns the exit status. Raises ConfigError."""
    expect_no_training(argv)
    asked = read_command_line(argv, prog=PROG, flags=EvaluateFlags)
    given = asked.given
    assert isinstance(given, EvaluateFlags)
    asked = replace(asked, run=untaught(asking(asked.run, given)))
    run_dir = evaluation_folder(asked, given)
    if asked.run.model is None and not asked.dry_run:
        unpack_start_model(Path(find_model(None)))
    with Ports() as ports, by_name_alone() if given.base_url else nullcontext():  # the name is the server's own
        asked = with_best_layout(asked, run_dir, ports)
        plan = make_plan(asked.run, asked.sections, find_site(asked, run_dir, ports))
        if not given.gpus:  # else it is another machine's plan
            expect_complete(plan.environments)
        expect_usable_flags(plan.run, plan.site, plan.trainer.bridge)
        plan = replace(
            plan,
            services=evaluation_services(plan, given, given.output and given.output.absolute()),
            files=evaluation_files(plan),
        )
        if asked.dry_run:
            print(described(plan, asked), end="")
            return 0
        console = PlainConsole(run_dir, SHOWN)
        known = " and continues there" if any(run_dir.glob(f"evaluation_*/{kept_file(given)}")) else ""
        console.say(f"Evaluating {plan.site.model}; all output goes to {run_dir}/{known}")
        status = start(plan, console, asked.gpus).status
    if status == 0:
        for service in plan.environments:
            print((results(run_dir, service) / TABLE).read_text(encoding="utf-8"))
            print(f"Results of {service}: {os.path.relpath(results(run_dir, service))}/")
    return status


def expect_no_training(argv: Sequence[str]) -> None:
    """Raise ConfigError, with the flag, for one that would have no effect."""
    line = split(argv, keys_of(EvaluateFlags), SECTIONS)
    useless = [f"--{name}.{each.name}" for name in sorted(OF_TRAINING) for each in line.sections[name]]
    typed = [word.partition("=")[0] for word in line.flags if word.startswith("--")]
    useless += [flag for flag in typed if flag[2:].removeprefix("no-").replace("-", "_") in ONLY_TRAINING]
    if useless:
        raise ConfigError(f"{useless[0]} is about training, which an evaluation does not do: leave it out")


def evaluation_folder(asked: Asked, given: EvaluateFlags) -> Path:
    """The directory of an evaluation. The same command has the same one, so that it asks only for what is missing: a
    finished evaluation is not paid for twice. Raises ConfigError, NoSuchRun.
    """
    if asked.resume is not None:
        kept = shlex.quote(os.path.relpath(asked.resume / "run.yaml"))
        folder, remedy = asked.resume.resolve(), f"give its run file instead: atropos evaluate {kept}"
    else:
        stem, model = asked.source.stem.replace("_", "-"), str(asked.run.model or AUTO).strip("/")
        name = f"evaluate-{stem}-{UNUSUAL.sub('-', model)[-60:]}{'' if given.samples else '-greedy'}"
        folder, remedy = (asked.runs / (asked.run.name or name)).absolute(), "choose another --run-name"
    if folder.exists():
        expect_open(folder)
    if (folder / "trainer.yaml").exists() or (folder / "api.yaml").exists():
        raise ConfigError(f"{os.path.relpath(folder)} is a training run; {remedy}")
    return folder


def asking(run: RunFile, given: ServerFlags) -> RunFile:
    """`run` whose environments ask the server that flags name, if they do. Raises ConfigError."""
    if given.base_url is None:
        if given.api_key_env:
            raise ConfigError("--api-key-env is for --base-url, the server that takes the key; give both or neither")
        return run
    if run.model in (None, AUTO):
        raise ConfigError(
            f"--base-url {given.base_url}: name the model as that server does: atropos evaluate RECIPE MODEL"
        )
    server = {"base_url": given.base_url, "server_type": "openai", "model_name": run.model}
    server |= {"api_key_env": given.api_key_env} if given.api_key_env else {}
    environments = {
        name: section.model_copy(update={"openai": {**section.openai, **server}})
        for name, section in run.environments.items()
    }
    return run.model_copy(update={"environments": environments})


def evaluation_services(plan: Plan, given: SampleFlags = GREEDY, output: Path | None = None) -> list[Service]:
    """vLLM's servers, if an environment asks them, and the environments. Raises ConfigError."""
    if output is not None and len(plan.environments) > 1:
        raise ConfigError(f"--output {output} is for one environment, whose answers it holds")
    sampling = given.model_dump(include=set(SampleFlags.model_fields), exclude_defaults=True)
    flags = [word for name, value in sampling.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    told = [str(environment.resolved["openai"]) for environment in plan.environments.values()]
    asked = any(f"{url}/" in text for url in plan.site.vllm for text in told)
    servers = [service for service in plan.services if is_server(service.name) and asked]
    environments = [
        replace(
            service,
            command=(
                *("evaluate" if word == "serve" else word for word in service.command),
                *("--env.data_dir_to_save_evals", str(results(plan.site.run_dir, service.name))),
                *flags,
                *("--output", str(output or results(plan.site.run_dir, service.name) / kept_file(given))),
            ),
            restarts=0,
        )
        for service in plan.services
        if service.name in plan.environments
    ]
    return [*servers, *environments]


def kept_file(given: SampleFlags) -> str:
    """The file of answers in an environment's results."""
    return SAMPLES if given.samples else ANSWERS


def evaluation_files(plan: Plan) -> dict[str, str]:
    """Without those of the services that are left out."""
    return {name: text for name, text in plan.files.items() if name not in ("api.yaml", "trainer.yaml")}


def results(run_dir: Path, service: str) -> Path:
    """Return where an environment writes its metrics and answers."""
    return run_dir / f"evaluation_{service}"
