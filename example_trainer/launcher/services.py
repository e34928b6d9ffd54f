"""The processes of a run: RunFile -> list[Service].

RunFile ──▶ sections.py: what each program is told ──▶ here: commands, variables, GPUs, health, when each may end
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from atroposlib.config import config_yaml
from example_trainer.config import TrainerConfig
from example_trainer.launcher.core_layout import expect_ranks_share
from example_trainer.launcher.document import document, dumped, without_secrets
from example_trainer.launcher.folders import PACKAGES
from example_trainer.launcher.layout import seen, trainer_ranks
from example_trainer.launcher.run_file import RunFile
from example_trainer.launcher.run_site import Site, argv, server_variables, variables, vllm_flags
from example_trainer.launcher.sections import (
    VLLM_START_S,
    EnvironmentPlan,
    SectionFlags,
    resolve_api,
    resolve_environments,
    resolve_trainer,
    samples_off_policy,
)
from example_trainer.launcher.servers import server_name
from example_trainer.launcher.service import Service
from example_trainer.modes import MODES

API_START_S = 60.0
ENVIRONMENT_RESTARTS = 3
SERVER_RESTARTS = 3  # of one of several vLLM servers: training continues with the others, and takes it back


@dataclass(frozen=True)
class Plan:
    """A run, ready to start."""

    run: RunFile
    site: Site
    trainer: TrainerConfig
    environments: dict[str, EnvironmentPlan]  # by service
    services: list[Service]
    files: dict[str, str]  # to write to runs/NAME/ before the start


def make_plan(run: RunFile, flags: SectionFlags, site: Site) -> Plan:
    """Raises ConfigError for settings that a program refuses."""
    api = resolve_api(run, flags, site)
    trainer = resolve_trainer(run, flags, site)
    expect_ranks_share(site.cores.trainer, trainer_ranks(trainer, site.placement))
    environments = resolve_environments(run, flags, site)
    if samples_off_policy(environments):
        trainer = resolve_trainer(run, flags, site, off_policy=True)
    servers = {
        server_name(index, len(run.servers)): vllm_flags(run, site, trainer.bridge, index)
        for index in range(len(run.servers))
    }
    told = {
        plan.name: (plan.resolved, flags.environments.get(plan.name, []))
        for plan in reversed(environments.values())  # the first of several has the run's own seed
    }
    files = {
        "api.yaml": without_secrets(config_yaml(api), run.api, "api"),
        "trainer.yaml": without_secrets(config_yaml(trainer), run.trainer, "trainer"),
        **{f"{name}.yaml": dumped(argv(server)) for name, server in servers.items()},
        "run.yaml": dumped(document(run, (trainer, flags.trainer), (api, flags.api), told)),
        **{f"{service}.yaml": dumped(plan.resolved) for service, plan in environments.items()},
    }
    return Plan(run, site, trainer, environments, services(run, site, environments, servers), files)


def services(
    run: RunFile, site: Site, environments: Mapping[str, EnvironmentPlan], servers: Mapping[str, Mapping[str, Any]]
) -> list[Service]:
    """The processes, in the order in which they are started; each waits for whom it needs."""
    shared = variables(run, site)
    python = (sys.executable, "-u")
    program = PACKAGES / "example_trainer"
    config = site.run_dir
    made = [
        Service(
            name="api",
            command=(*python, "-m", "atroposlib.cli.run_api", "--config", str(config / "api.yaml")),
            environment=shared,
            health=f"{site.api}/health",
            start_limit_s=API_START_S,
            cores=site.cores.api,
        )
    ]
    for index, (name, server) in enumerate(servers.items()):
        if not MODES[run.kind].owns_vllm:
            made.append(
                Service(
                    name=name,
                    command=(*python, str(program / "vllm_api_server.py"), *argv(server)),
                    environment={**shared, **server_variables(run, site, index)},
                    health=f"{site.vllm[index]}/health",
                    start_limit_s=VLLM_START_S,
                    restarts=SERVER_RESTARTS if len(servers) > 1 else 0,
                    cores=site.cores.vllm[index],
                )
            )
    made.append(
        Service(
            name="trainer",
            command=(*python, str(program / "grpo.py"), "--config", str(config / "trainer.yaml")),
            environment={**shared, **seen(site.placement.trainer)},
            may_end=True,
            cores=site.cores.trainer,
        )
    )
    mine = site.cores.environments
    for service, plan in environments.items():
        made.append(
            Service(
                name=service,
                command=(*python, *plan.program, "serve", "--config", str(config / f"{service}.yaml")),
                environment={**shared, **({"OMP_NUM_THREADS": str(len(mine))} if mine else {})},
                may_end=True,
                restarts=ENVIRONMENT_RESTARTS,
                cores=mine,
            )
        )
    return made
