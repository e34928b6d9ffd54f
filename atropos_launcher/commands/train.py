"""`atropos train`: one training run, from its file to its summary.

flags, recipe ──▶ RunFile ──▶ plan: every program's settings ──▶ runs/NAME/ ──▶ services ──▶ plot, summary
"""

import os
import shlex
import shutil
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from stat import S_ISREG
from typing import TYPE_CHECKING, NamedTuple

from atropos_launcher.commands.existing_runs.plot import draw
from atropos_launcher.commands.existing_runs.push import FINAL
from atropos_launcher.commands.existing_runs.view import beside, page
from atropos_launcher.console.console import PlainConsole, is_terminal, shown_lines
from atropos_launcher.console.idle_reason import Diagnosis
from atropos_launcher.console.progress import RunProgress
from atropos_launcher.console.progress_file import ProgressFile
from atropos_launcher.console.start_model import unpack_start_model
from atropos_launcher.console.summary import as_typed, outcome, read_rows, summary, typed_atropos
from atropos_launcher.paths import named
from atropos_launcher.placement import ray_cluster
from atropos_launcher.placement.addresses import Site, variables
from atropos_launcher.placement.machines import MachineFlags
from atropos_launcher.placement.ports import Ports, holder
from atropos_launcher.placement.speed import speed_lines
from atropos_launcher.placement.teacher import gpu_memory_of_teacher
from atropos_launcher.plan.command_line import PROG, Asked, RunFlags, make_parser, read_command_line
from atropos_launcher.plan.hub import by_name_alone
from atropos_launcher.plan.sections import (
    API_TOKEN,
    KEY,
    expect_complete,
    expect_evaluations,
    expect_filled_batches,
    expect_lengths,
    expect_lesson,
    expect_sampling,
)
from atropos_launcher.plan.server_flags import expect_usable_flags
from atropos_launcher.plan.services import AGENT_JOURNAL, Plan, machine_lines, make_plan, reservations
from atropos_launcher.plan.site import PORTS, find_model, find_site, need_of, with_best_layout
from atropos_launcher.run_file.servers import is_server
from atropos_launcher.run_record import add_outcome, write_record
from atropos_launcher.service import Service, is_trainer
from atropos_launcher.services.events import Event
from atropos_launcher.services.records import Records
from atropos_launcher.services.shared_memory import SharedMemory
from atropos_launcher.services.stop_services import end_leftovers
from atropos_launcher.services.supervisor import CannotStart, Supervisor
from atroposlib import extras
from atroposlib.errors import AtroposError, reading
from atroposlib.files import make_private_directory, write_whole
from atroposlib.flags import ConfigError
from atroposlib.logs import print_error
from atroposlib.wire.folders import LATEST
from example_trainer.memory.plan import GIB, amount
from example_trainer.settings.bridges import MODES
from example_trainer.settings.cpu_cores import shown_cores

if TYPE_CHECKING:  # loads an HTTP client
    from atropos_launcher.plan.scaling import Scaling

LEAST_FREE = 64 << 20  # bytes; logs, records and rows of a few minutes


def parser() -> ArgumentParser:
    """For completion."""
    return make_parser([])


def main(argv: Sequence[str], prog: str = PROG, newcomer: bool = False) -> int:
    """Train. Returns the exit status. Raises ConfigError."""
    started = time.monotonic()
    asked = read_command_line(argv, prog=prog)
    run_dir = choose_folder(asked)
    if asked.run.model is None and not asked.dry_run:
        unpack_start_model(Path(find_model(None)))
    if asked.resume is not None and not asked.dry_run:
        end_former(run_dir)
    with Ports() as ports:
        asked, plan = planned(asked, run_dir, ports)
        expect_continuation(plan, asked)
        if asked.dry_run:
            print(described(plan, asked), end="")
        expect_fit(plan, asked)
        expect_disk(plan, asked)
        scarce = scarcity(plan, asked)
        if asked.dry_run:
            print(f"#\n# {scarce}\n" if scarce else "", end="")
            return 0
        if scarce:
            print(scarce, file=sys.stderr)
        extras.need("trainer", prog, "torch", "matplotlib")
        extras.need("gpu", prog, "vllm")
        if plan.site.machines.ray:
            ray_cluster.expect_ready(plan.site.machines, plan.site.model)
            ray_cluster.reserve(plan.site.machines, reservations(plan))
        status = train(asked, plan, newcomer, beside(plan.site, ports) if asked.view else None, ports)
    if status == 0:
        try:
            sum_up(run_dir, round(time.monotonic() - started), newcomer)
        except AtroposError as error:  # the run has done well
            print_error(prog, error)
    return status


def planned(asked: Asked, run_dir: Path, ports: Ports) -> tuple[Asked, Plan]:
    """Return the plan, and what was asked with the layout that it chose. Raises ConfigError for what would run nowhere,
    or lacks something here.
    """
    asked = with_best_layout(asked, run_dir, ports)
    plan = make_plan(asked.run, asked.sections, find_site(asked, run_dir, ports))
    expect_lesson(plan.run, plan.trainer, plan.environments)
    expect_sampling(plan.trainer)
    expect_evaluations(plan.trainer, plan.environments)
    if not asked.given.gpus:  # else it is another machine's plan
        expect_complete(plan.environments)
    expect_usable_flags(plan.run, plan.site, plan.trainer.bridge)
    expect_lengths(plan.run, plan.trainer, plan.environments)
    expect_filled_batches(plan.run, plan.trainer, plan.environments)
    return asked, plan


def sum_up(run_dir: Path, seconds: int, newcomer: bool) -> None:
    """Print the summary of a run that has ended, and keep its outcome. Raises CannotStart, with what it lacks."""
    with reading(f"the run is done, and its record in {run_dir} is not whole", CannotStart, remedy="free space"):
        print(summary(run_dir, seconds, newcomer, typed_atropos(), is_accepted))
        add_outcome(run_dir / "run.json", outcome(read_rows(run_dir / "evaluations.jsonl")))


def choose_folder(asked: Asked) -> Path:
    """The run's directory, which is not there yet unless it is resumed. Raises ConfigError."""
    if asked.resume is not None:
        return asked.resume.resolve()
    name = asked.run.name or f"{asked.source.stem.replace('_', '-')}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = (asked.runs / name).absolute()
    if folder.exists() and not asked.dry_run:
        raise ConfigError(f"{os.path.relpath(folder)} exists; choose another --run-name, or remove that directory")
    return folder


def end_former(run_dir: Path) -> None:
    """End what a killed launcher left of the run that is resumed, which may still have its ports and memory. Raises
    RunInUse, ForeignRecord and CannotStart.
    """
    records = Records(run_dir)
    if records.exist():
        with reading(f"cannot end what is left of {run_dir}", CannotStart):
            end_leftovers(records, SharedMemory(records), PlainConsole(run_dir, {}))
            records.forget()


def expect_fit(plan: Plan, asked: Asked) -> None:
    """Raise ConfigError for a run that the GPUs, or a machine without any, have no memory for."""
    need, cache = need_of(asked, plan.site), cache_on_cpu(plan)
    if need is not None and (why := need.refusal(plan.site.placement, cache)):
        if not asked.dry_run:
            print("\n".join(need.lines(plan.site.placement, cache)), file=sys.stderr)
        raise ConfigError(why + (fits_apart(asked, plan.site.run_dir) or ""))
    if plan.site.teacher is not None:
        lines, why = gpu_memory_of_teacher(plan.run, plan.site.teacher, plan.trainer, asked.gpu_bytes)
        if why and (asked.gpu_bytes or not asked.gpus):
            if not asked.dry_run:
                print("\n".join(lines), file=sys.stderr)
            raise ConfigError(why)


def fits_apart(asked: Asked, run_dir: Path) -> str | None:
    """Name the bridge under which a run fits that is too large for GPUs which hold one single copy; None if none."""
    if not asked.gpus or not MODES[asked.run.kind].same_devices:
        return None
    apart = replace(asked, run=asked.run.model_copy(update={"bridge": {"kind": "broadcast"}}), dry_run=True)
    with suppress(ConfigError), Ports() as ports:
        site = find_site(apart, run_dir, ports)
        need = need_of(apart, site)
        if need is not None and need.refusal(site.placement) is None:
            return ", or --bridge broadcast, whose two copies fit"
    return None


def expect_disk(plan: Plan, asked: Asked) -> None:
    """Raise ConfigError for a run whose checkpoints the disk has no room for, unless the plan is another machine's."""
    need = None if asked.given.gpus else need_of(asked, plan.site)
    folder = next(each for each in (plan.trainer.save_path, *plan.trainer.save_path.parents) if each.exists())
    free = shutil.disk_usage(folder).free
    there = taken_by(plan.trainer.save_path) if asked.resume is not None else 0
    if need is not None and need.disk > free + there:
        already = f", {amount(there)} of it already" if there else ""
        raise ConfigError(
            f"the run's checkpoints take up to {amount(need.disk)}{already}, and {amount(free)} are free in {folder}:"
            " free some, or write less"
            " (--trainer.checkpoint-interval 0, --trainer.keep-checkpoints 1, --trainer.keep-best 0)"
        )


def new_tokens(plan: Plan) -> int | None:
    """Most tokens of an answer or a turn, of the environment with the longest; None where none says it."""
    limits = [environment.resolved["env"].get("max_new_tokens") for environment in plan.environments.values()]
    return max((limit for limit in limits if isinstance(limit, int)), default=None)


def on_policy(plan: Plan) -> bool:
    """Return whether no environment samples while the trainer works."""
    return not any(
        environment.resolved["env"].get("max_batches_offpolicy") for environment in plan.environments.values()
    )


def taken_by(folder: Path) -> int:
    """Bytes of the files in a directory and below, each counted once."""
    found = [path.lstat() for path in folder.rglob("*")]
    return sum({(stat.st_dev, stat.st_ino): stat.st_size for stat in found if S_ISREG(stat.st_mode)}.values())


def scarcity(plan: Plan, asked: Asked) -> str | None:
    """Warn of too little free memory on a machine without a GPU."""
    need = need_of(asked, plan.site)
    return None if need is None else need.scarcity(plan.site.placement, cache_on_cpu(plan))


def is_accepted(command: str) -> bool:
    """Return whether `atropos COMMAND` would start here: with what the machine has free, too. No hub is asked, as this
    is for advice, for which nobody waits.
    """
    name, *words = shlex.split(command)
    try:
        asked = read_command_line([*(["quickstart"] if name == "quickstart" else []), *words, "--dry-run"])
        with Ports() as ports, by_name_alone():
            run_dir = choose_folder(asked)
            asked, plan = planned(asked, run_dir, ports)
            expect_fit(plan, asked)
            expect_disk(plan, asked)
    except AtroposError:
        return False
    return scarcity(plan, asked) is None


def cache_on_cpu(plan: Plan) -> int:
    """Bytes of the KV cache of each rank of vLLM on a CPU. Raises ConfigError for what is no number of GiB."""
    space = variables(plan.run, plan.site).get("VLLM_CPU_KVCACHE_SPACE", "0")
    if not space.isdecimal():
        raise ConfigError(f"VLLM_CPU_KVCACHE_SPACE: expected a whole number of GiB, got {space!r}: correct or unset it")
    return int(space) * GIB


def ports_line(asked: Asked, site: Site) -> str:
    """Name the ports that are not those of the defaults, and why; empty where all are."""
    ports: list[str] = []
    if site.machines.several:  # a port is looked at on this machine only
        return ""
    for section, servers, chosen in (
        ("api", [asked.run.api], [site.api_port]),
        ("vllm", asked.run.servers, list(site.vllm_ports)),
    ):
        for index, (server, port) in enumerate(zip(servers, chosen, strict=True)):
            default = chosen[index - 1] + 1 if index else PORTS[section]
            if port != default and "port" not in server and default not in chosen:
                ports.append(f"Port {default} is taken by {holder(default)}: using {port}")
    return "; ".join(ports)


def described(plan: Plan, asked: Asked) -> str:
    """Return what a dry run prints: the run as a file by which it can be repeated, the services' commands, the
    memory plan.
    """
    site = plan.site
    shared = variables(plan.run, site)
    machines = machine_lines(plan)
    notes = [f"All output goes to {site.run_dir}/", *machines, "", "Every service runs with"]
    notes += [f"  {_assigned(name, value)}" for name, value in shared.items()]
    for service in plan.services:
        own = [_assigned(name, value) for name, value in service.environment.items() if shared.get(name) != value]
        notes += ["", service.name, f"  {' '.join([*own, shlex.join(service.command)])}"]
        notes += [f"  on the CPU cores {shown_cores(service.cores)}"] if service.cores else []
    names = [service.name for service in plan.services]
    trains = any(map(is_trainer, names))
    if trains or any(map(is_server, names)):  # not where another's server is evaluated
        notes += ["", *_costs(plan, asked, trains)]
    return plan.files["run.yaml"] + "\n" + "".join(f"# {note}".rstrip() + "\n" for note in notes)


def _costs(plan: Plan, asked: Asked, trains: bool) -> list[str]:
    """Tell what a run takes of memory, and one that `trains` of disk and time."""
    site, need, cache = plan.site, need_of(asked, plan.site), cache_on_cpu(plan)
    if need is None:
        notes = [f"Memory: unknown, because neither config.json nor the name of {site.model} gives its size"]
    else:
        notes = need.lines(site.placement, cache, trains)
    if need is not None and trains:
        notes += [f"Checkpoints take up to {amount(need.disk)} of disk"] if need.disk else []
        speed = speed_lines(need, site.placement, new_tokens(plan), on_policy(plan))
        notes += ["", *speed] if speed else []
    if site.teacher is not None:
        notes += gpu_memory_of_teacher(plan.run, site.teacher, plan.trainer, asked.gpu_bytes)[0]
    return notes


def _assigned(name: str, value: str) -> str:
    """`NAME=value`, of a token or key without its value: each start of a run makes or reads its own."""
    return f"{name}={'...' if name.endswith(('_TOKEN', '_KEY')) else value}"


def train(asked: Asked, plan: Plan, newcomer: bool, window: Service | None, ports: Ports) -> int:
    """Start the services, and watch them to their end. Returns the exit status."""
    site, run = plan.site, plan.run
    with make_console(plan, newcomer) as console:
        console.say(
            f"Training {site.model} for {run.steps} steps on {problems(plan)}; all output goes to "
            f"{os.path.relpath(site.run_dir)}/"
        )
        for line in machine_lines(plan):
            console.say(line)
        if line := ports_line(asked, site):
            console.say(line)
        if window is not None:
            console.say(f"Watch it in a browser: {page(window, site.run_dir)}")
        if asked.resume is not None and not has_checkpoint(plan) and (line := forget_turns(site.run_dir)):
            console.say(line)
        try:
            more = [] if window is None else [window]
            end = start(plan, console, asked.gpus, more, partial(scaling, asked, plan, ports))
        except AtroposError:
            say_how_to_continue(asked, plan, console)
            raise
    if end.status == 0:
        draw([site.run_dir], site.run_dir / "reward.png")
    if end.why_memory:
        console.say(end.why_memory)
        memory = need_of(asked, site)
        for line in [] if memory is None else memory.lines(site.placement, cache_on_cpu(plan)):
            console.put(line)
    if end.status != 0:
        say_how_to_continue(asked, plan, console)
    return end.status


def scaling(asked: Asked, plan: Plan, ports: Ports, supervisor: Supervisor) -> "Scaling":
    """Let servers join and leave a run that starts."""
    from atropos_launcher.plan.scaling import Scaling

    def fits(more: Plan) -> None:
        expect_fit(more, replace(asked, run=more.run, dry_run=True))

    return Scaling(plan, asked.gpus, ports, supervisor, fits)


def has_checkpoint(plan: Plan) -> bool:
    """Return whether a run that is resumed continues; without a checkpoint it begins anew."""
    return (plan.trainer.save_path / LATEST).exists()


def trained_model(plan: Plan) -> Path | None:
    """The trained model of a run that is done, without a checkpoint from which it could continue; else None."""
    models = [plan.trainer.save_path / name for name in FINAL]
    return None if has_checkpoint(plan) else next((each for each in models if each.is_dir()), None)


def expect_continuation(plan: Plan, asked: Asked) -> None:
    """Raise ConfigError for a run that is done and kept no checkpoint, as it would begin anew, over what it trained."""
    model = trained_model(plan) if asked.resume is not None else None
    if model is not None:
        run, name = os.path.relpath(plan.site.run_dir), os.path.relpath(model)
        words = f"atropos train {shlex.quote(f'{run}/run.yaml')} --model"
        further = f"{words} {shlex.quote(name)}"
        if not (model / "config.json").is_file():
            further = f"merge {name} into its model (docs/bridges.md#lora), then {words} MERGED"
        raise ConfigError(
            f"--resume {run}: it is done, and kept no checkpoint to continue from. To train its model further, in a new"
            f" run: {further}; --trainer.checkpoint-interval 20 keeps checkpoints"
        )


def forget_turns(run_dir: Path) -> str:
    """Remove the turns of agents, which policies sampled that the new run has not trained; the batching API drops their
    groups for the same reason. Return the line that tells the user, or an empty one if there were no turns.
    """
    held = [*run_dir.glob(f"{AGENT_JOURNAL}*")]
    for path in held:
        path.unlink()
    return "Removed the turns of agents: there is no checkpoint, so the run begins anew" if held else ""


def disk_line(run_dir: Path) -> str:
    """Tell what to do about a disk without room, which ends every service; empty while there is room."""
    free = shutil.disk_usage(run_dir).free
    if free >= LEAST_FREE:
        return ""
    return (
        f"The disk of {os.path.relpath(run_dir)} has {free / 1e6:.1f} MB free, and a run needs at least"
        f" {LEAST_FREE / 1e6:.0f}: free some first. Groups that the batching API acknowledged and complete checkpoints"
        " are kept"
    )


def say_how_to_continue(asked: Asked, plan: Plan, console: PlainConsole) -> None:
    """The command that continues the run, and from where; nothing where none was begun, or nothing is left to do."""
    run_dir = plan.site.run_dir
    if not (run_dir / "run.yaml").is_file() or trained_model(plan) is not None:
        return
    words = ["train", "--resume", named(run_dir), *flags_of_machines(asked.given)]
    if line := disk_line(run_dir):
        console.say(line)
    first = "start Ray on the lost node again or continue without it, then run: " if plan.site.machines.ray else "run: "
    if has_checkpoint(plan):
        console.say("Nothing up to the last checkpoint is lost, nor any group that the batching API acknowledged")
    kept = "from the last checkpoint" if has_checkpoint(plan) else "(there is no checkpoint yet: from step 1)"
    console.say(f"To continue {kept}, {first}{as_typed(shlex.join(words), typed_atropos())}")


def flags_of_machines(given: RunFlags) -> list[str]:
    """The flags of machines that were typed; a run does not keep them."""
    fields = MachineFlags.model_fields
    typed = given.model_dump(include=set(fields), exclude_defaults=True)
    return [word for name, value in typed.items() for word in (f"--{name.replace('_', '-')}", f"{value}")]


def make_console(plan: Plan, newcomer: bool) -> PlainConsole:
    """Bars on a terminal, lines anywhere else."""
    if not is_terminal(sys.stdout):
        return PlainConsole(plan.site.run_dir, shown_lines(with_bridge=not newcomer))
    from atropos_launcher.console.live_console import live_console

    return live_console(plan, with_bridge=not newcomer)


class End(NamedTuple):
    """The launcher's exit status, and how the service died that ended the run, if one did."""

    status: int
    out_of_memory: bool
    killed: bool  # by a signal that the launcher did not send

    @property
    def why_memory(self) -> str:
        """Return what there is to say of memory; empty if nothing, as where a service that died was started again."""
        if self.status == 0:
            return ""
        if self.out_of_memory:
            return "The system ended a process for want of memory. What this run was planned to take:"
        if self.killed:
            return (
                "Nothing of this run sent the signal that killed it. Usually the system was out of memory (`dmesg` says"
                " so). What this run was planned to take:"
            )
        return ""


def start(
    plan: Plan,
    console: PlainConsole,
    gpus: list[str],
    more: Sequence[Service] = (),
    scale: "Callable[[Supervisor], Scaling] | None" = None,
) -> End:
    """Write what is kept of the plan, start its services, and `more`, and watch them. With `scale`, servers may join
    and leave.
    """
    run_dir = plan.site.run_dir
    with writing_to(run_dir):
        make_private_directory(run_dir)
    token = plan.trainer.atropos_token
    apart = {"api", *(service.name for service in more)}

    def others() -> dict[str, str]:
        return {name: url for name, url in supervisor.health.items() if name not in apart}

    watch = Diagnosis(
        plan.site.api, None if token is None else token.get_secret_value(), others, records=Records(run_dir)
    )
    services = [*plan.services, *more]
    os.environ.update({name: plan.site.environ[name] for name in (KEY, API_TOKEN) if name in plan.site.environ})
    kept = ProgressFile(run_dir, RunProgress(plan.trainer.training_steps, None))

    def tell(event: Event) -> None:
        kept(event)
        console(event)

    def look() -> Iterable[Event]:
        kept.write()
        return chain(watch(), *(each.look() for each in scalings))

    with (
        closing(watch),
        closing(kept),
        Supervisor(run_dir, services, tell, watch=look) as supervisor,
        ExitStack() as also,
    ):
        scalings = [] if scale is None else [also.enter_context(closing(scale(supervisor)))]
        with writing_to(run_dir):
            for name, text in plan.files.items():
                write_whole(run_dir / name, text.encode())
            write_record(run_dir / "run.json", plan.run.seed, plan.site.model, gpus, services)
        status = supervisor.run()
        return End(status, supervisor.out_of_memory, supervisor.killed)


def writing_to(run_dir: Path) -> AbstractContextManager[None]:
    """Turn what fails in writing to a run's directory into a CannotStart of one line."""
    return reading(f"cannot write to {run_dir}", CannotStart, remedy="free space, or choose another --runs")


def problems(plan: Plan) -> str:
    """`arithmetic`, or the environments' names."""
    sources = []
    for name, section in plan.run.environments.items():
        datasets = (section.own.get("dataset_path"), section.own.get("dataset"))
        sources.append(next((str(each) for each in datasets if each and each != "auto"), name))
    return ", ".join(sources)
