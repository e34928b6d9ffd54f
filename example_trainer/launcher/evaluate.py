"""`atropos evaluate RECIPE [MODEL]`: a model on the held-out problems of a run's environments, without training.

    vLLM ◀── every environment of the run, by its `evaluate` command ──▶ runs/NAME/ENVIRONMENT/

Where --env.openai.base_url names a server of one's own, no vLLM is started.
"""

from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from example_trainer.launcher.command_line import make_parser, read_command_line
from example_trainer.launcher.console import PlainConsole
from example_trainer.launcher.ports import Ports
from example_trainer.launcher.servers import is_server
from example_trainer.launcher.service import Service
from example_trainer.launcher.services import Plan, make_plan
from example_trainer.launcher.train import choose_folder, described, find_site, start

PROG = "atropos evaluate"
SHOWN = {"": r"(WARNING|ERROR|CRITICAL) |Evaluation: ", "vllm": "ERROR "}


def parser() -> ArgumentParser:
    """For completion."""
    return make_parser([], PROG)


def main(argv: Sequence[str]) -> int:
    """Evaluate. Returns the exit status. Raises ConfigError."""
    asked = read_command_line([*argv, "--bridge", "broadcast"], prog=PROG)  # any that does not start vLLM will do
    run_dir = choose_folder(asked, "evaluate-")
    with Ports() as ports:
        plan = make_plan(asked.run, asked.sections, find_site(asked, run_dir, ports))
        plan = replace(plan, services=evaluation_services(plan), files=evaluation_files(plan))
        if asked.dry_run:
            print(described(plan, asked), end="")
            return 0
        console = PlainConsole(run_dir, SHOWN)
        console.say(f"Evaluating {plan.site.model}; all output goes to {run_dir}/")
        status = start(plan, console, asked.gpus)
    if status == 0:
        for service in plan.environments:
            print(f"Results of {service}: {results(run_dir, service)}/")
    return status


def evaluation_services(plan: Plan) -> list[Service]:
    """vLLM's servers, if an environment asks them, and the environments."""
    told = [str(environment.resolved["openai"]) for environment in plan.environments.values()]
    asked = any(f"{url}/" in text for url in plan.site.vllm for text in told)
    servers = [service for service in plan.services if is_server(service.name) and asked]
    environments = [
        replace(
            service,
            command=(
                *("evaluate" if word == "serve" else word for word in service.command),
                *("--env.data_dir_to_save_evals", str(results(plan.site.run_dir, service.name))),
            ),
            restarts=0,
        )
        for service in plan.services
        if service.name in plan.environments
    ]
    return [*servers, *environments]


def evaluation_files(plan: Plan) -> dict[str, str]:
    """Without those of the services that are left out."""
    return {name: text for name, text in plan.files.items() if name not in ("api.yaml", "trainer.yaml")}


def results(run_dir: Path, service: str) -> Path:
    """Where an environment writes its metrics and answers."""
    return run_dir / f"evaluation_{service}"
