"""`python environment.py serve | process | evaluate`: one configuration tree from flags and YAML, one command, one
exit code.

    --env.<field>        the environment's configuration
    --openai.<field>     that of its one inference server
    --teacher.<field>    that of a teacher, for environments with one (`teacher_distillation_env.py`)
    --slurm, --testing   how the inference servers are found
    --config FILE.yaml   keys env, openai (or a list), slurm, testing

Flags beat YAML, which beats what the command itself changes, which beats `config_init`. `--dry-run` prints the tree,
without keys. Exit codes: 0 done, 1 a peer or the environment failed, 2 wrong input, 130 and 143 interrupted and
terminated.
"""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator

from atroposlib.config import Config, config_yaml, exit_usage, known_keys, load_config, read_config_file
from atroposlib.envs.discovery import fill_in_models
from atroposlib.envs.environment import Environment
from atroposlib.envs.errors import EnvError
from atroposlib.envs.process import default_groups_path, process
from atroposlib.envs.run import run_of
from atroposlib.envs.serve import serve, wait_for_inference
from atroposlib.envs.server_handling.server_config import APIServerConfig, ServerBaseline
from atroposlib.files import write_whole
from atroposlib.flags import nearest
from atroposlib.logs import configure_logging, get_logger

log = get_logger(__name__)

M = TypeVar("M", bound=BaseModel)
Servers = ServerBaseline | list[APIServerConfig]
STOP_LIMIT_S = 4.5
COMMANDS_HELP = """\
Commands:
  serve      feed the trainer until its last step
  process    sample groups into a file and a page, without API and trainer
  evaluate   evaluate once
"""


class EnvTree(Config):
    """Inference servers in general.

    The whole configuration: `env` and `openai` are narrowed to an environment's own classes.
    """

    env: Any
    openai: Any
    slurm: bool = Field(default=False, description="Take the inference servers from the node list of the SLURM job.")
    testing: bool = Field(default=False, description="Use one in-process harness with canned replies for inference.")
    max_n_completions: int = Field(default=8, ge=1, description="A request for more completions is split into several.")
    proxy_url: str | None = Field(
        default=None, description="Address of a managed proxy; that of ATROPOS_PROXY_URL if unset."
    )


class TeacherTree(EnvTree):
    """That of an environment with a teacher; None when none is configured."""

    teacher: Any = None


# --- commands -------------------------------------------------------------------------------------------------------


async def run_serve(env: Environment, tree: EnvTree) -> None:
    """Feed the trainer until its last step."""
    await serve(env)


async def run_process(env: Environment, tree: EnvTree) -> None:
    """Sample groups into files."""
    await process(env)


async def run_evaluate(env: Environment, tree: EnvTree) -> None:
    """Evaluate once; the configuration is kept beside the results, keys masked."""
    async with run_of(env):
        await wait_for_inference(env)
        await env.setup()
        returned = await env.evaluate()
        if returned is not None:
            log.info("Evaluation: %s", dict(returned))
        if env.config.data_dir_to_save_evals is not None:
            write_whole(Path(env.config.data_dir_to_save_evals) / "evaluate_config.yaml", config_yaml(tree).encode())


COMMANDS: dict[str, Callable[[Environment, EnvTree], Awaitable[None]]] = {
    "serve": run_serve,
    "process": run_process,
    "evaluate": run_evaluate,
}


def main(env_cls: type[Environment], argv: Sequence[str] | None = None, default_command: str | None = None) -> NoReturn:
    """Run a command and exit."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    prog = Path(sys.argv[0]).name
    command = _command(arguments, prog, default_command)
    tree = load_tree(env_cls, command, arguments, prog)
    configure_logging(env_cls.name or env_cls.__name__)
    raise SystemExit(_run_until_stopped(lambda: run(env_cls, command, tree)))


async def run(env_cls: type[Environment], command: str, tree: EnvTree) -> int:
    """Build the environment, run the command, and return the exit code; what went wrong is one line, or a traceback if
    it is a bug.
    """
    try:
        await fill_in_models(tree.env, tree.openai)
        if isinstance(tree, TeacherTree) and tree.teacher is not None:
            await fill_in_models(tree.env, tree.teacher)
        env = build(env_cls, tree)
        await COMMANDS[command](env, tree)
    except EnvError as error:
        log.error("%s", error)
        return 1
    return 0


def build(env_cls: type[Environment], tree: EnvTree) -> Environment:
    """The environment as configured. Raises EnvError for a tokenizer, a file or a set of servers that cannot be."""
    if isinstance(tree, TeacherTree):
        # Whatever the arguments of its constructor, a class finds its teacher on itself.
        body = {"teacher_servers": tree.teacher, "__module__": env_cls.__module__, "__doc__": env_cls.__doc__}
        env_cls = type(env_cls.__name__, (env_cls,), body)
    try:
        # By position: environments out there have other names for the third.
        env = env_cls(tree.env, tree.openai, tree.slurm, tree.testing)
    except (OSError, ValueError, NotImplementedError) as error:
        raise EnvError(f"cannot build {env_cls.__name__}: {error}") from error
    env.server.max_n_completions = tree.max_n_completions
    env.server.proxy_url = tree.proxy_url or env.server.proxy_url
    return env


def _command(arguments: list[str], prog: str, default: str | None) -> str:
    """The command, taken off `arguments`."""
    if arguments and arguments[0] in COMMANDS:
        return arguments.pop(0)
    if arguments and not arguments[0].startswith("-"):
        exit_usage(f"{prog}: error: unknown command {arguments[0]!r}; choose one of: {', '.join(COMMANDS)}")
    if default is not None or arguments[:1] in (["-h"], ["--help"], ["--version"]):
        return default or "serve"
    exit_usage(f"{prog}: error: no command; choose one of: {', '.join(COMMANDS)}, e.g. `{prog} serve --help`")


# --- configuration --------------------------------------------------------------------------------------------------


def load_tree(env_cls: type[Environment], command: str, arguments: Sequence[str], prog: str) -> EnvTree:
    """The resolved configuration, `env` and `openai` being of the environment's own classes. Exits 2 on wrong input."""
    env_config, servers = env_cls.config_init()
    base: type[EnvTree] = EnvTree
    content = read_config_file(arguments, prog=f"{prog} {command}")
    entries = {"openai": _server_entry("openai", servers, content, arguments, prog)}
    for name, further in env_cls._further_servers().items():
        base, entries[name] = TeacherTree, _server_entry(name, further, content, arguments, prog)
    env = _strict(type(env_config))
    fields: dict[str, Any] = {"env": (env, Field(default_factory=env))} | {
        name: entry.field for name, entry in entries.items()
    }
    defaults = {"env": _given(env_config) | command_defaults(command, env_cls)} | {
        name: entry.given for name, entry in entries.items()
    }
    bases: Any = (ForeignKeys, base)
    tree_cls: type[Config] = create_model("EnvTree", __base__=bases, **fields)
    tree: Any = load_config(
        tree_cls, arguments, prog=f"{prog} {command}", defaults=defaults, epilog=COMMANDS_HELP, content=content
    )
    resolved = {name: entry.resolve(getattr(tree, name), tree.slurm) for name, entry in entries.items()}
    return base(**dict(tree) | resolved | {"env": _as(type(env_config), tree.env)})


def command_defaults(command: str, env_cls: type[Environment]) -> dict[str, Any]:
    """What a command changes about `config_init`, below YAML and flags."""
    if command != "process":
        return {}
    path = str(default_groups_path(env_cls.name or env_cls.__name__))
    return {"ensure_scores_are_not_same": False, "include_messages": True, "data_path_to_save_groups": path}


@dataclass(frozen=True)
class ServerEntry:
    """A group of inference servers in the tree: whether it is a list, of which class, and what is `given` before YAML
    and flags.
    """

    server_cls: type[ServerBaseline]
    several: bool
    given: Any
    absent: bool  # nothing anywhere says that there is one

    @property
    def field(self) -> tuple[Any, Any]:
        """Its annotation and default, for pydantic."""
        server = _strict(self.server_cls)
        return (list[server] if self.several else server), ...  # type: ignore[valid-type]

    def resolve(self, value: Any, slurm: bool) -> Servers | None:
        """The servers as the environment takes them."""
        if isinstance(value, list):
            return [_as(APIServerConfig, server) for server in value]
        server = _as(self.server_cls, value)
        return None if self.absent else [server] if isinstance(server, APIServerConfig) and not slurm else server


def _server_entry(
    name: str, servers: Any, content: Mapping[str, Any], arguments: Sequence[str], prog: str
) -> ServerEntry:
    """The entry of `name` ("openai"), whose servers are `servers` unless YAML or flags say otherwise. Exits 2 on flags
    for several.
    """
    servers = list(servers) if isinstance(servers, Sequence) else servers
    yaml_servers = content.get(name)
    flagged = any(argument.startswith(f"--{name}.") for argument in arguments)
    count = (
        len(yaml_servers)
        if isinstance(yaml_servers, list)
        else 1
        if isinstance(yaml_servers, dict)
        else _count(servers)
    )
    if count > 1 and flagged:
        exit_usage(
            f"{prog}: error: --{name}.* sets one inference server but {count} are configured; list them under `{name}:`"
            " in a --config file"
        )
    several = count > 1 or isinstance(yaml_servers, list)
    asked = flagged or yaml_servers is not None
    server_cls = APIServerConfig if asked or servers is None or _has_address(servers) else ServerBaseline
    return ServerEntry(
        server_cls,
        several,
        {} if servers is None else _server_defaults(servers, several),
        servers is None and not asked,
    )


class ForeignKeys(BaseModel):
    """YAML files out there hold keys for other programs, and some that no class knows: a warning each.

    A key that resembles a known one is a mistyped one: it is left to be an error.
    """

    @model_validator(mode="before")
    @classmethod
    def _leave_out(cls, values: Any) -> Any:
        known = known_keys(cls)
        foreign = (
            [key for key in values if key not in known and not nearest(str(key), known)]
            if isinstance(values, Mapping)
            else []
        )
        for key in foreign:
            log.warning("Ignoring the key '%s', which %s does not know", key, cls.__name__)
        return {key: values[key] for key in values if key not in foreign} if foreign else values


def _strict(model: type[M]) -> type[M]:
    """`model`, but an unknown key is an error, or foreign."""
    rules = ConfigDict(extra="forbid", hide_input_in_errors=True)
    body = {"model_config": rules, "__module__": model.__module__, "__doc__": model.__doc__}
    strict: type[M] = type(model.__name__, (ForeignKeys, model), body)
    return strict


def _as(model: type[M], strict: BaseModel) -> M:
    """`strict` as an instance of `model` itself; only what was set is set."""
    return model(**{name: getattr(strict, name) for name in strict.model_fields_set})


def _given(config: BaseModel) -> dict[str, Any]:
    """What was set: an untouched default need not satisfy its own type, as environments out there have it."""
    return config.model_dump(exclude_unset=True)


def _server_defaults(servers: Servers, several: bool) -> Any:
    if isinstance(servers, list):
        given = [_given(server) for server in servers]
        return given if several else given[0]
    return _given(servers)


def _has_address(servers: Servers) -> bool:
    return isinstance(servers, (list, APIServerConfig))


def _count(servers: Servers) -> int:
    return len(servers) if isinstance(servers, list) else 1


# --- signals --------------------------------------------------------------------------------------------------------


def _run_until_stopped(main_coroutine: Callable[[], Awaitable[int]]) -> int:
    """The exit code of `main_coroutine`; SIGINT and SIGTERM cancel it, and end the process when that takes too long."""
    stopped_by: list[int] = []

    async def runner() -> int:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def stop(number: int, frame: FrameType | None) -> None:
            if stopped_by:
                os._exit(128 + number)
            stopped_by.append(number)
            log.info("%s: stopping within 5 s", signal.Signals(number).name)
            watchdog = threading.Timer(STOP_LIMIT_S, os._exit, [128 + number])
            watchdog.daemon = True
            watchdog.start()
            loop.call_soon_threadsafe(task.cancel)

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, stop)
        return await main_coroutine()

    try:
        return asyncio.run(runner())
    except asyncio.CancelledError:
        return 128 + stopped_by[0]
