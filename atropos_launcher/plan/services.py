"""The processes of a run: RunFile -> list[Service].

RunFile ──▶ sections.py: what each program is told ──▶ here: commands, variables, GPUs, health, when each may end
"""

import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from atropos_launcher.paths import PACKAGES, VLLM_PROGRAM
from atropos_launcher.placement.addresses import (
    Site,
    argv,
    server_variables,
    teacher_variables,
    variables,
    vllm_flags,
)
from atropos_launcher.placement.cores import expect_ranks_share
from atropos_launcher.placement.gpus import ranks_of_machines, seen, trainer_ranks
from atropos_launcher.placement.machines import LOOPBACK
from atropos_launcher.placement.teacher import teacher_flags
from atropos_launcher.plan.on_machine import on_machine
from atropos_launcher.plan.sections import (
    AGENT_ENDPOINT,
    KEY,
    VLLM_START_S,
    EnvironmentPlan,
    SectionFlags,
    resolve_api,
    resolve_environments,
    resolve_trainer,
    samples_off_policy,
)
from atropos_launcher.run_file.run_file import RunFile
from atropos_launcher.run_file.saved_settings import document, dumped, typed_paths, without_secrets
from atropos_launcher.run_file.servers import server_name
from atropos_launcher.run_file.teacher import TEACHER
from atropos_launcher.service import AGENTS, TRAINER, Service, trainer_name
from atroposlib.agents.flags import SERVER_KEY, TOKEN
from atroposlib.config import config_yaml
from atroposlib.flags import ConfigError
from atroposlib.wire.folders import LATEST, MANIFEST
from example_trainer.errors import TrainerError
from example_trainer.ranks.place import LOST, check_ranks
from example_trainer.settings.bridges import MODES
from example_trainer.settings.config import TrainerConfig

AGENT_JOURNAL = "agents.journal"
API_START_S = 60.0
ENVIRONMENT_RESTARTS = 3
SERVER_RESTARTS = 3  # of a vLLM server: the trainer takes it back, and continues with the others if there are any


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
    expect_ranks_share(site.cores.trainer, max(checked_ranks(trainer, site)))
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
        "api.yaml": without_secrets(config_yaml(api), run.api, "api", typed_paths(api, flags.api)),
        "trainer.yaml": without_secrets(
            config_yaml(trainer), run.trainer, "trainer", typed_paths(trainer, flags.trainer)
        ),
        **{f"{name}.yaml": dumped(argv(server)) for name, server in servers.items()},
        "run.yaml": dumped(document(run, (trainer, flags.trainer), (api, flags.api), told)),
        **{f"{service}.yaml": dumped(plan.resolved) for service, plan in environments.items()},
    }
    return Plan(run, site, trainer, environments, services(run, site, trainer, environments, servers), files)


def checked_ranks(trainer: TrainerConfig, site: Site) -> list[int]:
    """Trainer ranks on each machine that trains. Raises ConfigError for ranks that cannot be shared out."""
    ranks, machines = trainer_ranks(trainer, site.placement), site.placement.machines
    if machines > 1 and trainer.batch_invariant:
        raise ConfigError(
            f"--batch-invariant trains on one device, but {machines} nodes train: give --ray-nodes 1+{machines - 1}, or"
            " drop the flag"
        )
    counts = ranks_of_machines(trainer, site.placement)
    if sum(counts) != ranks:
        raise ConfigError(
            f"--trainer-ranks {ranks} cannot be shared out evenly over {machines} nodes: give a multiple of"
            f" {machines}, or auto"
        )
    try:
        check_ranks(trainer, ranks, sharded=ranks > 1)
    except TrainerError as error:
        raise ConfigError(f"{machines} nodes train: {error}" if machines > 1 else str(error)) from None
    for host, count, own in zip(site.machines.training, counts, site.placement.training, strict=True):
        if site.placement.on_gpus and count > len(own):
            others = ", ".join(dict.fromkeys(site.placement.vllm))
            where = f"node {host}" if machines > 1 else "a machine"
            raise ConfigError(
                f"{count} trainer ranks on {where}, but its GPUs for the trainer are {', '.join(own)}; vLLM has"
                f" {others}: lower --trainer-ranks, or give vLLM fewer GPUs (--vllm.tensor-parallel-size)"
            )
    return counts


def services(
    run: RunFile,
    site: Site,
    trainer: TrainerConfig,
    environments: Mapping[str, EnvironmentPlan],
    servers: Mapping[str, Mapping[str, object]],
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
    if not MODES[run.kind].owns_vllm:
        made += [inference_server(run, site, index, server) for index, server in enumerate(servers.values())]
    made += teachers(run, site, trainer, shared)
    made += trainers(site, trainer, (str(program / "grpo.py"), "--config", str(config / "trainer.yaml")), shared)
    endpoint, token = agent_endpoints(site, environments, shared)
    made += endpoint
    mine = site.cores.environments
    for name, plan in environments.items():
        service = Service(
            name=name,
            command=(*python, *plan.program, "serve", "--config", str(config / f"{name}.yaml")),
            environment={**shared, **token, **({"OMP_NUM_THREADS": str(len(mine))} if mine else {})},
            may_end=True,
            restarts=ENVIRONMENT_RESTARTS,
            cores=mine,
        )
        elsewhere = site.machines.elsewhere(plan.host)
        made.append(on_machine(service, plan.host, site, files=(f"{name}.yaml",)) if elsewhere else service)
    return made


def inference_server(run: RunFile, site: Site, index: int, flags: Mapping[str, object]) -> Service:
    """One of the run's vLLM servers, with these flags."""
    serving = Service(
        name=server_name(index, len(run.servers)),
        command=(sys.executable, "-u", str(VLLM_PROGRAM), *argv(flags)),
        environment={**variables(run, site), **server_variables(run, site, index)},
        health=f"{site.vllm[index]}/health",
        start_limit_s=VLLM_START_S,
        again=("--await-sync",),
        restarts=SERVER_RESTARTS if MODES[run.kind].survives_vllm else 0,
        cores=site.cores.vllm[index],
    )
    machines = site.machines
    group = machines.group_of_server(index) if machines.ray else ""
    return on_machine(serving, machines.host_of_server(index), site, group=group)


def agent_endpoints(
    site: Site, environments: Mapping[str, EnvironmentPlan], shared: Mapping[str, str]
) -> tuple[list[Service], dict[str, str]]:
    """The agent endpoint, if an environment uses the run's, and the variable with its token for who may open all of
    it. Raises ConfigError for an environment whose agents are to call another model.
    """
    using = [plan for plan in environments.values() if plan.resolved["env"].get(AGENT_ENDPOINT) == site.agents]
    if not using:
        return [], {}
    for plan in using:
        told = plan.resolved["openai"]
        servers = told if isinstance(told, list) else [told]
        if any(each["base_url"].removesuffix("/v1") not in site.vllm for each in servers):
            raise ConfigError(
                f"environments.{plan.name}: its openai.base_url is not a server of this run, whose agent endpoint calls"
                " the model in training: start `atropos agent-endpoint` for that server, and give --env.agent_endpoint"
            )
    token = {TOKEN: secrets.token_urlsafe(32)}
    words = [word for url in site.vllm for word in ("--server", f"{url}/v1")]
    words += ["--model", site.model, "--also-model", "*", *_rendering(using)]
    words += ["--api", site.api, "--port", str(site.agents_port), "--journal", str(site.run_dir / AGENT_JOURNAL)]
    key = {SERVER_KEY: site.environ[KEY]} if site.environ.get(KEY) else {}
    endpoint = Service(
        name=AGENTS,
        command=(sys.executable, "-u", "-m", "atroposlib.agents.serve", *words),
        environment={**shared, **token, **key},
        health=f"{site.agents}/health",
        start_limit_s=VLLM_START_S,  # it asks a server for its context
        restarts=SERVER_RESTARTS,
        cores=site.cores.environments,
    )
    return [endpoint], token


def _rendering(using: Sequence[EnvironmentPlan]) -> list[str]:
    """The endpoint's flags for the chat template. Raises ConfigError for environments that have different ones."""
    told = [
        argv({name: plan.resolved["env"].get(name) or None for name in ("chat_template", "chat_template_kwargs")})
        for plan in using
    ]
    if any(each != told[0] for each in told):
        raise ConfigError(
            "environments whose agents share the run's endpoint have different chat_template or chat_template_kwargs:"
            " give them the same, or start an `atropos agent-endpoint` for one of them and give --env.agent_endpoint"
        )
    return list(told[0])


def teachers(run: RunFile, site: Site, trainer: TrainerConfig, shared: Mapping[str, str]) -> list[Service]:
    """The teacher's server, if this run starts it."""
    teacher = site.teacher
    if teacher is None or not teacher.model or run.teacher is None:
        return []
    flags = argv(teacher_flags(run, teacher, trainer, LOOPBACK))
    return [
        Service(
            name=TEACHER,
            command=(sys.executable, "-u", str(VLLM_PROGRAM), *flags),
            environment={**shared, **teacher_variables(site, teacher, run.teacher.ranks)},
            health=f"{teacher.url}/health",
            start_limit_s=VLLM_START_S,
            restarts=SERVER_RESTARTS,  # environments drop what they sample meanwhile
            cores=site.cores.teacher,
        )
    ]


def trainers(site: Site, trainer: TrainerConfig, program: tuple[str, ...], shared: Mapping[str, str]) -> list[Service]:
    """The trainer: `trainer`, or on several machines torchrun's agent on each, `trainer` and `trainer-2`, ..."""
    hosts, python = site.machines.training, (sys.executable, "-u")
    cores, gpus = site.cores.trainer, site.placement.training
    if len(hosts) == 1:
        alone = Service(TRAINER, (*python, *program), {**shared, **seen(gpus[0])}, may_end=True, cores=cores)
        return [on_machine(alone, hosts[0], site)]
    made = []
    for number, (host, ranks) in enumerate(zip(hosts, checked_ranks(trainer, site), strict=True)):
        agent = {
            "nnodes": len(hosts),
            "node-rank": number,
            "nproc-per-node": ranks,
            "master-addr": site.machines.first,
            "master-port": site.meeting_port,
            "local-addr": host,
            "rdzv-conf": f"timeout={trainer.dist_timeout_s:.0f}",
        }
        flags = [word for key, value in agent.items() for word in (f"--{key}", str(value))]
        command = (*python, "-m", "example_trainer.ranks.agent", *flags, *program)
        name = trainer_name(number)
        environment = {**shared, **seen(gpus[number])}
        service = Service(name, command, environment, may_end=True, cores=cores, missing_another=LOST)
        made.append(on_machine(service, host, site, files=("trainer.yaml",), sees=seen_by_ranks(site, trainer)))
    return made


def seen_by_ranks(site: Site, trainer: TrainerConfig) -> dict[str, str]:
    """Return what ranks on other machines must find in the run's directory, and what to do where they do not. Raises
    ConfigError for checkpoints that are to be elsewhere.
    """
    saved = trainer.save_path
    if trainer.checkpoint_format != "hf":
        if not saved.absolute().is_relative_to(site.run_dir.absolute()):
            raise ConfigError(
                f"each rank writes its part of a checkpoint to --trainer.save-path {saved}, but whether all nodes share"
                f" a directory is only checked for the run's, {site.run_dir}: leave the flag out and choose --runs, or"
                " give --trainer.checkpoint-format hf, with which rank 0 writes whole checkpoints"
            )
        remedy = (
            f"each rank writes its part of a checkpoint to {saved}: put --runs on a file system that all nodes"
            " share, or give --trainer.checkpoint-format hf, with which rank 0 writes whole checkpoints"
        )
        return {str(site.run_dir / "run.json"): remedy}
    latest = saved / LATEST
    if trainer.resume is None or not latest.is_file():
        return {}
    newest = saved / latest.read_text().strip()
    remedy = f"every rank reads the checkpoint: copy {saved} from {site.machines.first} to the same path there"
    return {str(newest / MANIFEST): remedy}


def machine_lines(plan: Plan) -> list[str]:
    """Who runs where, of a run on Ray."""
    site = plan.site
    machines = site.machines
    if not machines.ray:
        return []
    where: dict[str, list[str]] = {machine.host: [] for machine in machines.all}
    for index, port in enumerate(site.vllm_ports):
        where[machines.host_of_server(index)].append(f"{server_name(index, len(site.vllm_ports))} on port {port}")
    counts = checked_ranks(plan.trainer, site)
    for number, (host, count) in enumerate(zip(machines.training, counts, strict=True)):
        first = sum(counts[:number])
        ranks = f"ranks {first} to {first + count - 1}" if count > 1 else f"rank {first}"
        where[host].append(f"trainer {ranks} of {sum(counts)}")
    api = "0.0.0.0" if machines.spread(plan.run.environments) else LOOPBACK
    where[machines.first].append(f"batching API on {api}:{site.api_port}, environments")
    for name, environment in plan.environments.items():
        if machines.elsewhere(environment.host):
            where[environment.host].append(name)
    lines = [
        f"Machine {host}: {', '.join(services)}; Ray reserves {bundle['CPU']} CPUs and {bundle['GPU']} GPUs"
        for (host, services), bundle in zip(where.items(), reservations(plan), strict=True)
    ]
    if len(machines.training) > 1:
        lines.append(
            f"Trainer ranks meet at {machines.first}:{site.meeting_port} within {plan.trainer.dist_timeout_s:.0f} s"
        )
    return lines


def reservations(plan: Plan) -> list[dict[str, int]]:
    """What Ray is to reserve on each machine: a CPU for each service that it starts, and the GPUs of the plan."""
    site, machines = plan.site, plan.site.machines
    placement, hosts = site.placement, [machines.host_of_server(index) for index in range(len(site.vllm_ports))]
    serving = [] if MODES[plan.run.kind].owns_vllm else hosts
    sampling = [environment.host for environment in plan.environments.values()]
    found, training = [], iter(placement.training)
    for machine in machines.all:
        gpus = {*next(training)} if machine.trains else set()
        served = [server.gpus for host, server in zip(hosts, placement.servers, strict=True) if host == machine.host]
        gpus |= {*chain(*served)}
        of_environments = sampling.count(machine.host) if machines.elsewhere(machine.host) else 0
        cpus = serving.count(machine.host) + machine.trains + of_environments
        found.append({"CPU": cpus, "GPU": len(gpus)})
    return found
