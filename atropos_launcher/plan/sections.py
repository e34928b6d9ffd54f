"""The sections of a run, completed with the settings that connect the programs, and checked by the programs themselves:
trainer and batching API by their Config classes, an environment by its `serve --dry-run`.
"""

import importlib.util
import math
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import yaml

from atropos_launcher.paths import environment_file, environment_names, environments
from atropos_launcher.placement.addresses import Site, argv, variables, vllm_flags
from atropos_launcher.placement.gpus import device_bridge
from atropos_launcher.placement.machines import LOOPBACK
from atropos_launcher.placement.teacher import TeacherPlace
from atropos_launcher.plan.server_flags import unreachable
from atropos_launcher.run_file.run_file import RunFile, check_kind
from atropos_launcher.run_file.saved_settings import without_secrets
from atropos_launcher.run_file.servers import Tree, served_tokens
from atropos_launcher.run_file.teacher import TEACHER, TeacherSection
from atroposlib.config import Config, resolve_config
from atroposlib.envs.authors.author_errors import is_authors
from atroposlib.envs.config import LACKS
from atroposlib.errors import reading
from atroposlib.flags import ConfigError, Setting, nearest
from atroposlib.processes.exit_words import exit_words
from example_trainer.memory.model_size import context_of
from example_trainer.settings.bridges import MODES
from example_trainer.settings.config import TrainerConfig
from example_trainer.settings.cpu_cores import shown_cores

C = TypeVar("C", bound=Config)
CONFIGURATION = re.compile(r"^env:", re.MULTILINE)  # where that of an environment begins, after what else it prints
END_IT = 'end it with `MyEnv.cli(default_command="serve")`'  # an environment's program
FRAME = re.compile(r'  File "([^"]+)", line (\d+)')  # of a traceback

VLLM_START_S = 1800.0
CHECK_LIMIT_S = 120.0
KEY = "VLLM_API_KEY"  # with which a vLLM server opens to other machines
API_TOKEN = "ATROPOS_API_TOKEN"  # the same of the batching API
AGENT_ENDPOINT = "agent_endpoint"  # the setting of an environment whose agents call one
TIED = {  # settings of the trainer that the run decides, and where
    "model_name": "model",
    "training_steps": "steps",
    "batch_invariant": "batch_invariant",
    "deterministic": "deterministic",
    "cores": "layout.cores.trainer",
}


@dataclass(frozen=True)
class SectionFlags:
    """Flags of the programs, as they were typed: `--trainer.lr 1e-6` is `--lr 1e-6` for the trainer."""

    trainer: list[str] = field(default_factory=list)
    api: list[str] = field(default_factory=list)
    environments: dict[str, list[Setting]] = field(default_factory=dict)


@dataclass(frozen=True)
class EnvironmentPlan:
    """An environment server: its program, and what it was told as it resolved it."""

    name: str  # in the run
    program: tuple[str, ...]
    resolved: Tree
    host: str = LOOPBACK
    lacks: Sequence[str] = ()  # what it could not start without


def resolve_trainer(run: RunFile, flags: SectionFlags, site: Site, *, off_policy: bool = False) -> TrainerConfig:
    """The trainer's configuration. A run that samples off-policy masks tokens that changed much. Raises ConfigError."""
    content = {
        **({"importance": "mask"} if off_policy else {}),
        "model_name": site.model,
        "training_steps": run.steps,
        "seed": run.seed,
        "atropos_url": site.api,
        **_addresses(site),
        "vllm_start_timeout": int(VLLM_START_S),
        **({"vllm_return_s": int(VLLM_START_S)} if MODES[run.kind].survives_vllm else {}),
        "save_path": str(site.run_dir / "checkpoints"),
        "log_dir": str(site.run_dir),
        "metrics_path": str(site.run_dir / "metrics.jsonl"),
        "use_wandb": run.wandb,
        "tensorboard": run.tensorboard,
        "keep_samples": run.keep_samples,
        **({"cores": shown_cores(site.cores.trainer)} if site.cores.trainer else {}),
        **({"overlap": True} if _apart(run, site) and not run.deterministic else {}),
        **({"batch_invariant": True, "bit_exact": "strict"} if run.batch_invariant else {}),
        **({"deterministic": True} if run.deterministic else {}),
        **run.trainer,
        "bridge": {**device_bridge(run, site.placement), **_meeting(site), **run.bridge, **_owned_vllm(run, site)},
    }
    if "bridge" in run.trainer:
        raise ConfigError("trainer.bridge: set `bridge` at the top of the run file")
    config = _resolved(TrainerConfig, "trainer", content, flags.trainer, {**site.environ, **variables(run, site)})
    if check_kind(config.bridge.kind) != run.kind:
        raise ConfigError(
            f"trainer.bridge.kind {config.bridge.kind}: `bridge` at the top of the run decides it, which is {run.kind}:"
            " give --bridge"
        )
    expected = {
        "model_name": site.model,
        "training_steps": run.steps,
        "batch_invariant": run.batch_invariant,
        "deterministic": run.deterministic,
    }
    if site.cores.trainer:
        expected["cores"] = shown_cores(site.cores.trainer)
    for name, value in expected.items():
        if getattr(config, name) != value:
            raise ConfigError(f"trainer.{name}: `{TIED[name]}` at the top of the run decides it")
    _expect_own_addresses(config, site)
    return config.model_copy(update=dict(site.settled))


def _expect_own_addresses(config: TrainerConfig, site: Site) -> None:
    """Raise ConfigError for a trainer that would wait for servers which are not the run's."""
    expect_api_of_run("trainer.atropos_url", config.atropos_url, site)
    if config.metrics_port in (site.api_port, *site.vllm_ports):
        raise ConfigError(f"trainer.metrics_port {config.metrics_port} is another service's of this run: give another")
    ports = [port for _, port in config.vllm_servers]
    if sorted(ports) != sorted(site.vllm_ports):
        raise ConfigError(
            f"trainer.vllm_port {','.join(map(str, ports))}: the run's vLLM has {','.join(map(str, site.vllm_ports))}:"
            " give --vllm-port"
        )


def expect_api_of_run(setting: str, url: str, site: Site) -> None:
    """Raise ConfigError for a program that would ask another batching API than the run's."""
    with reading(f"{setting} {url}", ConfigError, remedy="drop it"):
        port = urlsplit(url).port or (443 if url.startswith("https") else 80)
    if port != site.api_port:
        raise ConfigError(f"{setting} {url}: the run's API has port {site.api_port}: give --api-port, or drop it")


def _addresses(site: Site) -> Tree:
    """Return where the trainer finds the vLLM servers."""
    ports = list(map(str, site.vllm_ports))
    if not site.machines.several:
        return {"vllm_host": LOOPBACK, "vllm_port": ",".join(ports)}
    return {"vllm_host": ",".join(f"{site.vllm_host(index)}:{port}" for index, port in enumerate(ports))}


def _meeting(site: Site) -> Tree:
    """Return where the workers of vLLM servers on other machines reach a trainer that torchrun tells another
    address.
    """
    return {"master_addr": site.machines.first} if site.machines.several else {}


def _apart(run: RunFile, site: Site) -> bool:
    """Return whether vLLM and the trainer have devices of their own, so that both can compute at once."""
    if site.machines.are_apart:
        return True
    if site.placement.on_gpus:
        return not site.placement.is_shared and not MODES[run.kind].same_devices
    trainer, vllm = {*site.cores.trainer}, {core for cores in site.cores.vllm for core in cores}
    return bool(trainer and vllm) and not trainer & vllm


def _owned_vllm(run: RunFile, site: Site) -> Tree:
    """Return how a trainer starts the vLLM that it owns."""
    if not MODES[run.kind].owns_vllm:
        return {}
    own = str(run.bridge.get("vllm_flags", ""))
    settings: Tree = {"vllm_flags": " ".join(filter(None, [shlex.join(argv(vllm_flags(run, site))), own]))}
    placement = site.placement
    if placement.vllm != placement.trainer:
        settings["vllm_gpu"] = ",".join(placement.vllm)
    return settings


def resolve_api(run: RunFile, flags: SectionFlags, site: Site) -> Config:
    """The batching API's configuration. Raises ConfigError."""
    from atroposlib.api.settings import RunApiConfig

    open_to_all = {"host": "0.0.0.0"} if site.machines.spread(run.environments) else {}
    content = {"journal": str(site.run_dir / "rollouts.db"), **open_to_all, **run.api, "port": site.api_port}
    if content.get("in_memory"):
        del content["journal"]
    config = _resolved(RunApiConfig, "api", content, flags.api, site.environ)
    if not site.machines.several and (why := unreachable(config.host)):
        raise ConfigError(f"api.{why}")
    return config


def _resolved(
    config_cls: type[C], section: str, content: Mapping[str, object], typed: Sequence[str], environ: Mapping[str, str]
) -> C:
    try:
        config, _ = resolve_config(config_cls, typed, prog=section, env=environ, content=content)
    except ConfigError as error:
        raise ConfigError(f"{section}: {error}") from None
    return config


# --- environments ---------------------------------------------------------------------------------------------------


def resolve_environments(run: RunFile, flags: SectionFlags, site: Site) -> dict[str, EnvironmentPlan]:
    """Every environment server of the run by service, as its program resolves it. Raises ConfigError."""
    plans = {}
    environ = {**site.environ, **variables(run, site)}
    for name, section in run.environments.items():
        program = environment_program(section.file)
        if program is None:
            raise ConfigError(f"environments.{name}: {no_program(section.file)}")
        own = flags.environments.get(name, [])
        given = [word for flag in own if flag.name.startswith("env.") for word in flag.words()]
        known, _ = ask_environment(name, program, {"env": section.own}, given, environ)
        urls = [section.openai.get("base_url"), *(flag.value for flag in own if flag.name == "openai.base_url")]
        has_key = bool(site.environ.get(KEY)) and (urls[-1] is None or str(urls[-1]).removesuffix("/v1") in site.vllm)
        asked = environment_settings(run, site, name, known, has_key=has_key)
        for index, (service, settings) in enumerate(asked.items()):
            typed = [word for flag in own for word in flag.words()]
            resolved, lacks = ask_environment(name, program, settings, typed, environ)
            expect_api_of_run(f"{name}.rollout_server_url", str(resolved["env"].get("rollout_server_url")), site)
            plans[service] = EnvironmentPlan(name, program, resolved, host_of_copy(site, known, index), lacks)
    return plans


def environment_settings(
    run: RunFile, site: Site, name: str, known: Mapping[str, Any], *, has_key: bool
) -> dict[str, Tree]:
    """The configuration to give each server of one environment, by service. `known` is the program's own, with the
    settings that the run gives to the environment itself: `env` has every field. With `has_key` it sends the key of the
    run's vLLM servers.
    """
    section = run.environments[name]
    settings: dict[str, Tree] = {}
    for index in range(section.count):
        service = service_name(run, name, index)
        several = len(run.environments) > 1 or section.count > 1
        env: Tree = {
            "rollout_server_url": site.api,
            "tokenizer_name": "default",
            "total_steps": -1,
            "use_wandb": run.wandb,
            **({"chat_template": str(Path(run.chat_template).resolve())} if run.chat_template is not None else {}),
            "evaluations_path": str(site.run_dir / "evaluations.jsonl"),
            "held_out_path": str(site.run_dir / "held_out.jsonl"),
            **({"run_record_path": str(site.run_dir / "run.json")} if "run_record_path" in known["env"] else {}),
            **({AGENT_ENDPOINT: site.agents} if AGENT_ENDPOINT in known["env"] else {}),
            "data_path_to_save_groups": str(site.run_dir / f"samples{f'_{service}' if several else ''}.jsonl"),
            "keep_samples": run.keep_samples,
            **({"wandb_name": service} if several else {}),
            **{key: value for key, value in section.inherited.items() if key in known["env"]},
            **({"seed": run.seed} if "seed" in known["env"] else {}),
            **section.own,
        }
        if run.deterministic:
            env |= {"deterministic": True, "max_batches_offpolicy": 0}
            if several:
                env.setdefault("min_batch_allocation", 1 / sum(each.count for each in run.environments.values()))
        if site.machines.elsewhere(host_of_copy(site, known, index)):
            env["rollout_server_url"] = f"http://{site.machines.first}:{site.api_port}"
            env.pop("run_record_path", None)  # that file is on this machine
        if index:  # one of them evaluates; each samples other questions
            env |= {"steps_per_eval": 0, "eval_at_start": False}
            env |= {"seed": int(env["seed"]) + index} if "seed" in env else {}
        key = {"api_key_env": KEY} if has_key else {}
        settings[service] = {"env": env, "openai": connections(site, key | section.openai, known.get("openai"))}
        if run.teacher is not None and site.teacher is not None:
            settings[service] |= {
                TEACHER: connection_of_teacher(run.teacher, site.teacher, bool(site.environ.get(KEY)))
            }
            env.setdefault("teacher_enabled", True)
    return settings


def host_of_copy(site: Site, known: Mapping[str, Any], index: int) -> str:
    """Return where a copy of an environment runs: in turn on all machines, unless its agents need the endpoint here."""
    return site.machines.first if AGENT_ENDPOINT in known["env"] else site.machines.host_of_environment(index)


def connection_of_teacher(teacher: TeacherSection, place: TeacherPlace, has_key: bool = False) -> Tree:
    """An environment's settings for the teacher. By default the server itself names its model and tokenizer."""
    key = teacher.api_key_env or (KEY if place.model and has_key else None)  # a server that the run starts has vLLM's
    return {
        "model_name": "default",
        "base_url": f"{place.url}/v1",
        "server_type": "vllm",
        **({"tokenizer_name": teacher.tokenizer_name} if teacher.tokenizer_name else {}),
        **({"api_key_env": key} if key else {}),
    }


def expect_lesson(run: RunFile, trainer: TrainerConfig, environments: Mapping[str, EnvironmentPlan]) -> None:
    """Raise ConfigError for a teacher that nothing is learned from, and for a trainer that distils without one."""
    distils = trainer.distill_coef > 0
    if run.teacher is not None and not distils:
        raise ConfigError(
            "teacher: nothing is learned from it while the trainer does not distil: give its weight, such as"
            " --trainer.distill-coef 1, or remove `teacher`"
        )
    untaught = [name for name, plan in environments.items() if not plan.resolved["env"].get("teacher_enabled")]
    if distils and untaught:
        raise ConfigError(
            f"--trainer.distill-coef {trainer.distill_coef:g}: the environment {untaught[0]} asks no teacher, and the"
            " trainer would refuse its groups: give `teacher` in the run file, as --teacher.model NAME or --teacher.url"
            " http://HOST:PORT, or drop the flag"
        )


def expect_evaluations(trainer: TrainerConfig, environments: Mapping[str, EnvironmentPlan]) -> None:
    """Raise ConfigError for a trainer that waits for evaluations which no environment makes."""
    asked = [int(plan.resolved["env"].get("steps_per_eval") or 0) for plan in environments.values()]
    if trainer.stop_when_flat and not any(each > 0 for each in asked):
        raise ConfigError(
            f"--trainer.stop-when-flat {trainer.stop_when_flat}: no environment evaluates, so the run would never be"
            " flat: give --env.steps-per-eval N, or drop the flag"
        )


def expect_sampling(trainer: TrainerConfig) -> None:
    """Raise ConfigError for a trainer that trains on nothing which is sampled."""
    if trainer.offline_alone:
        raise ConfigError(
            "--trainer.offline-share 1 trains on offline data alone, for which nothing is sampled: use `atropos"
            " fine-tune`, or give a smaller share"
        )


def expect_complete(environments: Mapping[str, EnvironmentPlan]) -> None:
    """Raise ConfigError for what an environment says that it lacks, such as its questions, which it would else miss
    once vLLM serves.
    """
    for plan in environments.values():
        for what in plan.lacks:
            raise ConfigError(f"environments.{plan.name}: {what}")


def expect_lengths(run: RunFile, trainer: TrainerConfig, environments: Mapping[str, EnvironmentPlan]) -> None:
    """Raise ConfigError for answers so long that no prompt fits beside them, on a vLLM server or in the trainer, and
    for a server that is to serve more than the model's context.
    """
    served = [length for server in run.servers if (length := served_tokens(server))]
    limits = {**({"vllm.max_model_len": min(served)} if served else {}), "trainer.seq_len": trainer.seq_len}
    context = context_of(trainer.model_name)
    if served and context is not None and max(served) > context:
        raise ConfigError(
            f"vllm.max_model_len {max(served)} is above the {context} tokens of context of {trainer.model_name}"
            f" (max_position_embeddings in its config.json): give {context} or fewer, or take another model"
        )
    for name, plan in environments.items():
        longest = plan.resolved["env"].get("max_new_tokens")
        for what, limit in limits.items():
            if isinstance(longest, int) and longest >= limit:
                raise ConfigError(
                    f"{name}.max_new_tokens {longest} leaves no room for a prompt within {what} {limit}: give fewer, or"
                    " a larger --vllm.max_model_len and --trainer.seq_len"
                )


def expect_filled_batches(run: RunFile, trainer: TrainerConfig, environments: Mapping[str, EnvironmentPlan]) -> None:
    """Raise ConfigError where no groups of the environments fill a batch; and, for a run that can be repeated, unless
    they give each batch as many groups as it takes: whichever of them is faster must not give more.
    """
    size = trainer.batch_size * trainer.gradient_accumulation_steps
    sizes = sorted({int(plan.resolved["env"]["group_size"]) for plan in environments.values()})
    if sizes and size % math.gcd(*sizes):
        raise ConfigError(
            f"env.group_size {', '.join(map(str, sizes))}: whole groups never fill a batch of {size} rollouts"
            f" (trainer.batch_size {trainer.batch_size} x trainer.gradient_accumulation_steps"
            f" {trainer.gradient_accumulation_steps}): give a group size that divides it, or another batch"
        )
    if not run.deterministic:
        return
    given = {}
    for name, plan in environments.items():
        env = plan.resolved["env"]
        share = env.get("min_batch_allocation")
        given[name] = int(size * (1.0 if share is None else share)) // env["group_size"] * env["group_size"]
    if sum(given.values()) != size:
        told = ", ".join(f"{name} {rollouts}" for name, rollouts in given.items())
        raise ConfigError(
            f"deterministic: the environments' whole groups give {sum(given.values())} of a batch's {size} rollouts"
            f" ({told}): give each env.min_batch_allocation so that they sum to 1, or another env.group_size or"
            " trainer.batch_size"
        )


def samples_off_policy(environments: Mapping[str, EnvironmentPlan]) -> bool:
    """Return whether an environment samples for later batches while the trainer is at one."""
    return any(plan.resolved["env"].get("max_batches_offpolicy", 0) > 0 for plan in environments.values())


def connections(site: Site, asked: Tree, known: object) -> Tree | list[Tree]:
    """An environment's settings for the vLLM server, or for each of several; for one of its own if `asked` has its
    address. `known` are the program's own: a list of servers takes nothing from them by itself.
    """
    tied = [{"model_name": "default", "base_url": f"{url}/v1", "server_type": "vllm"} for url in site.vllm]
    if len(tied) == 1 or "base_url" in asked:
        return {**tied[0], **asked}
    (given,) = known[:1] if isinstance(known, list) and known else [{}]
    return [{**given, **each, **asked} for each in tied]


def service_name(run: RunFile, name: str, index: int = 0) -> str:
    """`env` where there is one environment, else its name, numbered where several of it run."""
    if len(run.environments) == 1 and run.environments[name].count == 1:
        return "env"
    return f"{name}_{index}" if run.environments[name].count > 1 else name


def environment_program(name: str) -> tuple[str, ...] | None:
    """Return what follows `python` to run an environment: of a file, of one that comes with Atropos (`gsm8k`), or of
    a module. None if there is no such thing.
    """
    if (ours := environments() / f"{name}_server.py").is_file():
        return (str(ours),)
    if name.endswith(".py"):
        file = environment_file(name, Path())
        return (str(file.resolve()),) if file.is_file() else None
    parts = name.split(".")
    if all(part.isidentifier() for part in parts) and Path(*parts).with_suffix(".py").is_file():
        return ("-m", name)  # `python -m` looks in the working directory; where this program looks depends on its start
    with suppress(ImportError, ValueError):
        return ("-m", name) if importlib.util.find_spec(name) else None
    return None


def no_program(name: str) -> str:
    """Tell that there is no such environment, and what to give instead."""
    ours = ", ".join(environment_names())
    if Path(f"{name}_server.py").is_file():
        return f"there is no file or module {name!r}; did you mean {name}_server.py?"
    meant = nearest(name, environment_names())
    remedy = f"{meant} Give" if meant else "; give"
    return f"there is no file or module {name!r}{remedy} the path of its .py file, or one of {ours}"


def _why_none(program: Sequence[str], done: subprocess.CompletedProcess[str]) -> str:
    """Tell why an environment's program printed no configuration: its own error, or what it raised and where."""
    if done.returncode == 0:
        return f"{shlex.join(program)} printed no configuration; {END_IT}"
    lines = done.stderr.rstrip().splitlines() or [f"{exit_words(done.returncode)}, and nothing on stderr"]
    if " error: " in lines[-1] or not (frames := [at for at, line in enumerate(lines) if FRAME.match(line)]):
        return lines[-1].partition(" error: ")[2] or lines[-1]
    raised = next((line for line in lines[frames[-1] :] if not line.startswith(" ")), lines[-1])
    places = [found.groups() for at in frames if (found := FRAME.match(lines[at])) and is_authors(found[1])]
    return " at ".join([raised, *(f"{file}:{line}" for file, line in places[-1:])])


def ask_environment(
    name: str, program: Sequence[str], settings: Mapping[str, object], typed: Sequence[str], environ: Mapping[str, str]
) -> tuple[Tree, list[str]]:
    """The configuration as the program resolves it, and what it lacks to start. Raises ConfigError with what it says
    against it.
    """
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", suffix=".yaml") as file:
        yaml.safe_dump(dict(settings), file)
        file.flush()
        command = [sys.executable, *program, "serve", "--config", file.name, *typed, "--dry-run"]
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=CHECK_LIMIT_S,
                env=dict(environ),
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ConfigError(
                f"environments.{name}: {shlex.join(program)} serve --dry-run did not end within {CHECK_LIMIT_S:.0f} s;"
                " does the module start its work when it is imported?"
            ) from None
    begins = CONFIGURATION.search(done.stdout)
    printed = done.stdout[begins.start() :] if begins else ""
    if done.returncode != 0 or not printed:
        raise ConfigError(f"environments.{name}: {_why_none(program, done)}")
    names = {word.partition("=")[0].removeprefix("--").replace("-", "_") for word in typed if word.startswith("--")}
    try:
        resolved: Tree = yaml.safe_load(without_secrets(printed, settings, f"environments.{name}", names))
    except yaml.YAMLError:  # such as of an `atexit` of the author's
        raise ConfigError(
            f"environments.{name}: {shlex.join(program)} prints more than its configuration after that, such as"
            f" {printed.splitlines()[-1]!r:.80}; print it to stderr"
        ) from None
    return resolved, [line.partition(LACKS)[2] for line in printed.splitlines() if line.startswith(f"# {LACKS}")]
