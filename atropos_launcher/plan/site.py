"""Where a run takes place: model, devices, cores and ports, and whether they have the memory for it.

flags ──▶ Asked ──▶ here: Site, which services.py turns into processes
"""

import os
import secrets
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

from atropos_launcher.placement.addresses import Site, tensor_parallel_size
from atropos_launcher.placement.cores import place_cores
from atropos_launcher.placement.gpu_shares import place
from atropos_launcher.placement.gpus import (
    Need,
    Placement,
    ServerNeed,
    ServerPlace,
    dtype_of_server,
    ranks_of_single_copy,
)
from atropos_launcher.placement.machines import LOOPBACK, Machines
from atropos_launcher.placement.ports import Ports
from atropos_launcher.placement.speed import best_layout, layouts
from atropos_launcher.placement.teacher import TeacherPlace, gpus_of_teacher, serving_of_teacher
from atropos_launcher.plan.command_line import PROG, Asked
from atropos_launcher.plan.hub import expect_model
from atropos_launcher.plan.sections import (
    API_TOKEN,
    KEY,
    resolve_trainer,
)
from atropos_launcher.run_file.run_file import RunFile
from atropos_launcher.run_file.servers import served_tokens, server_name
from atroposlib.agents.flags import PORT as AGENTS_PORT
from atroposlib.config import load_config
from atroposlib.flags import ConfigError
from atroposlib.wire.folders import is_sharded, needs_export
from example_trainer.memory.model_size import model_size
from example_trainer.settings.bridges import MODES

# "trainer" is where ranks of several machines meet
PORTS = {"api": 8000, "vllm": 9001, "agents": AGENTS_PORT, "trainer": 29500}

AUTO = "auto"  # the largest of these that fits the GPUs

MODELS = (
    "Qwen/Qwen2.5-14B-Instruct",
    "Qwen/Qwen2.5-7B-Instruct",
    "Qwen/Qwen2.5-3B-Instruct",
    "Qwen/Qwen2.5-1.5B-Instruct",
)


def find_site(asked: Asked, run_dir: Path, ports: Ports) -> Site:
    """Model, devices, cores and ports. Raises ConfigError, PortTaken."""
    run = asked.run
    machines = asked.machines
    ports.named = named_ports(run, one_machine=not machines.several)
    (api_port,) = choose_ports("api", [run.api.get("port")], ports, asked.dry_run)
    cores = place_cores(run.layout.cores, 1 if machines.several else len(run.servers), os.sched_getaffinity(0))
    given = [server.get("port") for server in run.servers]
    mine, others = gpus_of_teacher(run, asked.gpus)
    asked = replace(asked, gpus=others)
    if machines.several:
        vllm_ports = ports_of_machines(machines, given, ports, asked.dry_run)
        cores = replace(cores, vllm=cores.vllm * len(run.servers))
    else:
        vllm_ports = choose_ports("vllm", given, ports, asked.dry_run)
    ports.named |= {api_port, *vllm_ports}  # a dry run, too, gives none of them away twice
    environ = {**os.environ, **keys_of_machines(machines, run)}
    (meeting,) = choose_ports("trainer", [None], ports, asked.dry_run) if len(machines.training) > 1 else (0,)
    (agents_port,) = choose_ports("agents", [None], ports, asked.dry_run)
    anywhere = Placement((ServerPlace(),) * len(run.servers))
    sites = [
        Site(run_dir, model, anywhere, api_port, vllm_ports, environ, cores, machines, meeting)
        for model in (MODELS if run.model == AUTO else [find_model(run.model)])
    ]
    teacher = find_teacher(asked, mine, ports, vllm_ports)
    placed = [replace(_placed(asked, site), teacher=teacher, agents_port=agents_port) for site in sites]
    return next((site for site in placed[:-1] if _fits(asked, site)), placed[-1])


def with_best_layout(asked: Asked, run_dir: Path, ports: Ports) -> Asked:
    """With as many vLLM servers as sample the most on vLLM's GPUs, where neither the user nor the recipe says how these
    are used. A run that is resumed keeps what it had. Raises ConfigError.
    """
    run, vllm = asked.run, asked.run.vllm
    if isinstance(vllm, list) or {"count", "port"} & {*vllm} or tensor_parallel_size(vllm) > 1:
        return asked
    if not MODES[run.kind].feeds_several or run.layout.names_gpus or asked.resume is not None:
        return asked
    site = find_site(replace(asked, dry_run=True), run_dir, ports)
    need = need_of(asked, site)
    ways = {} if need is None else layouts(need, site.placement)
    if not ways or (count := best_layout(ways)) == 1:
        return asked
    return replace(asked, run=run.model_copy(update={"vllm": {**vllm, "count": count}, "model": site.model}))


def keys_of_machines(machines: Machines, run: RunFile) -> dict[str, str]:
    """What protects the servers that other machines reach: the user's own, or a secret of this start alone."""
    opened = [KEY] if machines.several else []
    if machines.spread(run.environments) and not {"api_token", "api_token_file"} & {*run.api}:
        opened.append(API_TOKEN)
    return {name: os.environ.get(name) or secrets.token_urlsafe(32) for name in opened}


def find_teacher(asked: Asked, gpus: tuple[str, ...], ports: Ports, taken: tuple[int, ...]) -> TeacherPlace | None:
    """Where the run's teacher is, or will be on these GPUs. Raises ConfigError, PortTaken."""
    teacher = asked.run.teacher
    if teacher is None:
        return None
    if teacher.url is not None:
        return TeacherPlace(teacher.url.rstrip("/").removesuffix("/v1"))
    if asked.machines.several:
        raise ConfigError(
            "teacher.model: a run on several Ray nodes starts no teacher: start its vLLM server on one, and give"
            " --teacher.url http://HOST:PORT"
        )
    given = teacher.flags.get("port")
    if given in taken:
        raise ConfigError(f"teacher.port {given} is a vLLM server's too: give the teacher another, or none")
    first = int(given or taken[-1] + 1)
    if asked.dry_run:
        port = first if given else next(port for port in count(first) if port not in ports.named)
    else:
        port = ports.require("--teacher.port", first) if given else ports.first_free(first)
    return TeacherPlace(f"http://{LOOPBACK}:{port}", find_model(teacher.model, "--teacher.model"), port, gpus)


def _placed(asked: Asked, site: Site) -> Site:
    """The site with the GPUs of vLLM and of the trainer. Raises ConfigError."""
    config = resolve_trainer(asked.run, asked.sections, site)
    need = need_of(asked, site)
    placement = place(asked.run, asked.gpus, config, need, site.machines)
    beside = need is not None and placement.on_gpus and placement.is_shared and not config.bridge.same_devices
    return replace(site, placement=placement, settled=need.verdict(placement).decided if need and beside else {})


def ports_of_machines(machines: Machines, given: Sequence[int | None], ports: Ports, dry_run: bool) -> tuple[int, ...]:
    """A port for the one vLLM server of each machine. Only those of this machine can be looked at. Raises PortTaken."""
    chosen: list[int] = []
    for host, port in zip(machines.serving, given, strict=True):
        if machines.elsewhere(host):
            chosen.append(int(port or given[0] or PORTS["vllm"]))
        else:
            chosen += choose_ports("vllm", [port], ports, dry_run)
    return tuple(chosen)


def named_ports(run: RunFile, *, one_machine: bool) -> frozenset[int]:
    """The ports that the run gives to its services; of several machines the first one's. Raises ConfigError where the
    API's is another's, too.
    """
    api = run.api.get("port")
    flags = [*(run.servers if one_machine else []), *([run.teacher.flags] if run.teacher else [])]
    others = frozenset(port for server in flags if (port := server.get("port")) is not None)
    if api in others:
        raise ConfigError(f"api.port {api} is a vLLM server's too: give one of them another, or none")
    return others if api is None else others | {api}


def choose_ports(section: str, given: Sequence[int | None], ports: Ports, dry_run: bool) -> tuple[int, ...]:
    """A port for each server: the one that is given, else the next free one after the server before it. A dry run looks
    at none. Raises PortTaken, and ConfigError where two are the same.
    """
    if twice := [port for index, port in enumerate(given) if port is not None and port in given[:index]]:
        first = given.index(twice[0])
        second = given.index(twice[0], first + 1)
        raise ConfigError(
            f"{section}.port: {server_name(first, len(given))} and {server_name(second, len(given))} both have"
            f" {twice[0]}: give each its own port, or none"
        )
    chosen: list[int] = []
    for port in given:
        following = chosen[-1] + 1 if chosen else PORTS[section]
        while following in (*given, *chosen, *ports.named):
            following += 1
        if dry_run:
            chosen.append(following if port is None else port)
        elif port is not None:
            chosen.append(ports.require(f"--{section}-port", port))
        else:
            chosen.append(ports.first_free(following))
    return tuple(chosen)


def need_of(asked: Asked, site: Site) -> Need | None:
    """Collect what the memory plan is made of; None where the model's size or the GPUs' memory is not known."""
    size = model_size(site.model)
    if size is None or (asked.gpus and not asked.gpu_bytes):
        return None
    run = asked.run
    config = resolve_trainer(run, asked.sections, site)
    servers = []
    by_ranks = ranks_of_single_copy(config)
    for server in run.servers:
        share = server.get("gpu_memory_utilization")
        length = served_tokens(server) or config.seq_len
        on_host = server.get("bridge_staging") == "host"
        dtype = dtype_of_server(run, server, bool(asked.gpus), by_ranks)
        servers.append(ServerNeed(length, dtype, share, on_host, tensor_parallel_size(server)))
    need = Need(config, size, asked.gpu_bytes, tuple(servers), asked.host_bytes)
    if site.teacher is None or run.teacher is None or site.teacher.gpus:
        return need
    return replace(need, teacher=serving_of_teacher(run, site.teacher, config), teacher_ranks=run.teacher.ranks)


def _fits(asked: Asked, site: Site) -> bool:
    need = need_of(asked, site)
    return need is not None and site.placement.on_gpus and need.fits(site.placement, without_offload=True)


def find_model(model: str | None, flag: str = "--model") -> str:
    """The absolute directory of a local model, the quickstart's where none is given, or an id. Raises ConfigError, in
    which `flag` has named it.
    """
    if model is None:
        from example_trainer.quickstart_model import QuickstartModelConfig

        return str(load_config(QuickstartModelConfig, [], prog=PROG).folder.absolute())
    path = Path(os.path.expanduser(model))
    if is_sharded(path):
        raise ConfigError(f"{flag} {needs_export(path)}")
    if (path / "config.json").is_file():
        return str(path.resolve())
    if model.startswith(("/", ".", "~")):
        raise ConfigError(f"{flag} {model} has no config.json; give a Hugging Face id or a model's directory")
    expect_model(model, flag)
    return model
