"""`python environment.py serve | process | evaluate`: one configuration tree from flags and YAML, one command, one
exit code.

    --env.<field>        the environment's configuration
    --openai.<field>     that of its one inference server
    --teacher.<field>    that of a teacher, which any environment can have (`teacher_distillation_env.py`)
    --slurm, --testing   how the inference servers are found
    --compat             accept what 0.4.0 accepted (`compat_mode.py`)
    --config FILE.yaml   keys env, openai (or a list), slurm, testing, compat

Flags override YAML, which overrides what the command itself changes, which overrides `config_init`. `--dry-run` prints
the tree, without keys. Exit codes: 0 done, 1 a peer or the environment failed, 2 wrong input, 130 and 143 interrupted
and terminated.
"""

import asyncio
import inspect
import os
import pkgutil
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, NoReturn

from pydantic import BaseModel, Field, create_model, model_validator

from atroposlib.config import Config, config_yaml, load_config, read_config_file
from atroposlib.envs.authors.author_checks import check_class, class_location, is_ours
from atroposlib.envs.authors.author_errors import AuthorError, WrongReturn, authors_lines, blamed, needed, origin
from atroposlib.envs.commands import compat_mode
from atroposlib.envs.config import LACKS, BaseEnvConfig
from atroposlib.envs.errors import EnvError, WrongSetting
from atroposlib.envs.files.records import the_only_evaluation, write_result
from atroposlib.envs.run.environment import Environment
from atroposlib.envs.run.order import why_not_repeatable
from atroposlib.envs.sampling.sampling_fields import SamplingFields
from atroposlib.envs.server_handling.errors import ServerError
from atroposlib.envs.server_handling.server_config import APIServerConfig, ServerBaseline
from atroposlib.errors import AtroposError, one_line_errors
from atroposlib.flags import ConfigError, early, keys_of, names, nearest, split
from atroposlib.logs import configure_logging, get_logger
from atroposlib.processes.utf8 import restart_in_utf8
from atroposlib.utils.tokenizers import NO_TOKENIZER

log = get_logger(__name__)

STOP_LIMIT_S = 4.5
LASTING_TOLD_AFTER_S = 5.0
OF_ASYNCIO = "(_do_shutdown)"  # in the name of its thread that waits for the others
TEACHER = "teacher"
ENDING = (signal.SIGINT, signal.SIGTERM)
CONFIG = "evaluate_config.yaml"  # of an evaluation, beside its results
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

    first_flags: ClassVar[Sequence[str]] = (
        "openai.base_url",
        "openai.model_name",
        "env.tokenizer_name",
        "env.rollout_server_url",
        "env.group_size",
        "env.total_steps",
        "env.max_new_tokens",
        "env.data_path_to_save_groups",
    )
    env: Any
    openai: Any
    slurm: bool = Field(default=False, description="Take the inference servers from the node list of the SLURM job.")
    testing: bool = Field(default=False, description="Use one in-process server with canned replies for inference.")
    max_n_completions: int = Field(
        default=8, ge=1, description="Largest n of one request; a request for more completions is split."
    )
    proxy_url: str | None = Field(default=None, description="Address of a managed proxy; default: ATROPOS_PROXY_URL.")
    compat: bool = Field(
        default=False,
        description="Accept what Atropos 0.4.0 accepted: unknown YAML keys, and items that fail without end.",
    )


class EvaluateTree(EnvTree, SamplingFields):
    """That of the `evaluate` command."""


class TeacherTree(EnvTree):
    """That of an environment with a teacher; None when none is configured."""

    teacher: Any = None


class EvaluateTeacherTree(TeacherTree, SamplingFields):
    """That of the `evaluate` command of an environment with a teacher."""


# --- commands -------------------------------------------------------------------------------------------------------


async def run_evaluate(env: Environment, tree: EnvTree) -> None:
    """Evaluate once; the configuration is kept beside the results, keys masked."""
    from atroposlib.envs.commands.evaluation_report import evaluate_once  # `--help` does not need it
    from atroposlib.envs.commands.fake_servers import fake_servers

    results = env.config.data_dir_to_save_evals
    async with AsyncExitStack() as stack:
        if results is not None:
            other = "choose another --env.data_dir_to_save_evals"
            stack.enter_context(the_only_evaluation(Path(results), other, within=CONFIG))
        run = await stack.enter_async_context(env._env_run)
        await run.wait_for_inference()
        await (await fake_servers(env)).tell_tokenizer()
        await run.set_up()
        if isinstance(tree, SamplingFields) and tree.samples:
            with needed("evaluate --samples", env.evaluate):
                await env._evaluate_samples(tree)
        else:
            with needed("evaluate", env.evaluate):
                output = tree.output if isinstance(tree, SamplingFields) else None
                with env._keep_answers(output):
                    await evaluate_once(env, run)
        if results is not None:
            write_result(Path(results) / CONFIG, config_yaml(tree).encode())


COMMANDS = ("serve", "process", "evaluate")


def main(env_cls: type[Environment], argv: Sequence[str] | None = None, default_command: str | None = None) -> NoReturn:
    """Run a command and exit."""
    if argv is None:
        restart_in_utf8()
    arguments = list(sys.argv[1:] if argv is None else argv)
    prog = Path(sys.argv[0]).name
    with one_line_errors(prog):
        command = _command(arguments, default_command)
        content = read_config_file(arguments)  # once: it may be a pipe
        env_cls = with_teacher_if_given(env_cls, arguments, content)
    tree = load_tree(env_cls, command, arguments, prog, content)
    with one_line_errors(prog):
        check_class(env_cls, command)
        env_cls._check_installed()
    configure_logging(env_cls.name or env_cls.__name__)
    raise SystemExit(_run_until_stopped(lambda: run(env_cls, command, tree)))


async def run(env_cls: type[Environment], command: str, tree: EnvTree) -> int:
    """Build the environment, run the command, and return the exit code; what went wrong is one line, or a traceback if
    it is a bug.
    """
    # `--help` does not need their HTTP clients
    from atroposlib.envs.commands.discovery import fill_in_models
    from atroposlib.envs.commands.process import process
    from atroposlib.envs.commands.reporting import StartUp
    from atroposlib.envs.commands.serve import serve_once_built

    name = env_cls.name or env_cls.__name__

    async def built(start: StartUp) -> Environment:
        await fill_in_models(tree.env, tree.openai, start)
        if isinstance(tree, TeacherTree) and tree.teacher is not None:
            await fill_in_models(tree.env, tree.teacher, start)
        return build(env_cls, tree)

    try:
        match command:
            case "serve":
                await serve_once_built(tree.env, tree.env.wandb_name or name, built)
            case "process":
                await process(await built(StartUp(name)))
            case _:
                _need_no_tokens(tree)
                await run_evaluate(await built(StartUp(name)), tree)
    except (AtroposError, ServerError) as error:
        log.error("%s", error)
        return error.exit_status if isinstance(error, AtroposError) else 1
    return 0


def with_teacher_if_given(
    env_cls: type[Environment], arguments: Sequence[str], content: Mapping[str, Any] | None = None
) -> type[Environment]:
    """The class, or one that also asks a teacher where YAML or flags give one and it knows of none. `content` is that
    of the YAML file where it was read before. Raises ConfigError, AuthorError.
    """
    content = read_config_file(arguments) if content is None else content
    if env_cls._further_servers() or not (
        split(arguments, sections=(TEACHER,)).sections[TEACHER] or content.get(TEACHER)
    ):
        return env_cls
    with needed("config_init", env_cls.config_init):
        config, _ = _initial(env_cls)
    # by its name: it extends the class that has these commands
    with_teacher = pkgutil.resolve_name("atroposlib.envs.teacher_distillation_env:with_teacher")
    made: type[Environment] = with_teacher(env_cls, type(config))
    return made


def _need_no_tokens(tree: EnvTree) -> None:
    """An evaluation also takes servers of text, without a tokenizer. Raises EnvError for one without a model's name."""
    servers = tree.openai if isinstance(tree.openai, list) else [tree.openai]
    for server in servers:
        if not isinstance(server, APIServerConfig) or server.server_type != "openai":
            return
        if server.model_name == "default":
            raise WrongSetting(f"name the model of {server.base_url or 'the server'}: --openai.model_name")
    if tree.env.tokenizer_name == "default":
        tree.env.tokenizer_name = NO_TOKENIZER


def build(env_cls: type[Environment], tree: EnvTree) -> Environment:
    """The environment as configured. Raises EnvError for a tokenizer, a file or a set of servers that cannot be."""
    if isinstance(tree, TeacherTree):
        # Whatever the arguments of its constructor, a class finds its teacher on itself.
        env_cls = type(
            env_cls.__name__,
            (env_cls,),
            {"teacher_servers": tree.teacher, "__module__": env_cls.__module__, "__doc__": env_cls.__doc__},
        )
    with needed("__init__", env_cls.__init__):
        try:
            # By position: environments out there have other names for the third.
            env = env_cls(tree.env, tree.openai, tree.slurm, tree.testing)
        except (OSError, ValueError, NotImplementedError) as error:
            raise EnvError(f"cannot build {class_location(env_cls)}: {error}") from error
        env.server.max_n_completions = tree.max_n_completions  # without `super().__init__(...)` there is no server
    env.server.allows_text_only = isinstance(tree, SamplingFields)
    env.server.proxy_url = tree.proxy_url or env.server.proxy_url
    return env


def _command(arguments: list[str], default: str | None) -> str:
    if arguments and arguments[0] in COMMANDS:
        return arguments.pop(0)
    if arguments and not arguments[0].startswith("-"):
        raise ConfigError(f"unknown command {arguments[0]!r}; choose one of: {', '.join(COMMANDS)}")
    if default is not None or arguments[:1] in (["-h"], ["--help"], ["--version"]):
        return default or "serve"
    raise ConfigError(f"no command; choose one of: {', '.join(COMMANDS)}, e.g. `{Path(sys.argv[0]).name} serve --help`")


# --- configuration --------------------------------------------------------------------------------------------------


def load_tree(
    env_cls: type[Environment],
    command: str,
    arguments: Sequence[str],
    prog: str,
    read: Mapping[str, Any] | None = None,
) -> EnvTree:
    """The resolved configuration, `env` and `openai` being of the environment's own classes. `read` is the content of
    the YAML file where it was read before. Exits 2 on wrong input.
    """
    with one_line_errors(f"{prog} {command}"), needed("config_init", env_cls.config_init):
        env_config, servers = _initial(env_cls)
    further = env_cls._further_servers()
    base: type[EnvTree] = TeacherTree if further else EnvTree
    if command == "evaluate":
        base = EvaluateTeacherTree if further else EvaluateTree
    with one_line_errors(f"{prog} {command}"):
        content = dict(read_config_file(arguments) if read is None else read)
        typed = split(arguments, sections=("openai", *further)).sections
        groups = {
            name: _server_group(name, given, content.get(name), bool(typed[name]))
            for name, given in ({"openai": servers} | further).items()
        }
        fields: dict[str, Any] = {"env": type(env_config)} | {name: group.annotation for name, group in groups.items()}
        tree_cls = create_model("EnvTree", __base__=_checked(base, env_cls), __doc__=_about(env_cls), **fields)
        kinds: dict[str, type[BaseModel]] = {"": tree_cls, "env": type(env_config)}
        kinds |= {name: group.kind for name, group in groups.items()}
        # a list of one is that one, which flags may change
        content |= {name: content[name][0] for name in groups if _is_list_of_one(content.get(name))}
        compat = [key for key in keys_of(tree_cls) if key.path == ("compat",)]
        accepts_former = compat_mode.is_on(early(arguments, *compat)["compat"], content)
        content = _known_keys(content, kinds, accepts_former)
        for name in (name for name in ("env", *groups) if name in content):
            content[name] = _known_keys(content[name], kinds, accepts_former, name)
    env_defaults = (compat_mode.DEFAULTS if accepts_former else {}) | env_config.model_dump(exclude_unset=True)
    if command == "process":
        env_defaults |= {
            "ensure_scores_are_not_same": False,
            "include_messages": True,
            "data_path_to_save_groups": f"data/{env_cls.name or env_cls.__name__}.jsonl",
        }
    with one_line_errors(f"{prog} {command}"):
        try:
            tree: Any = load_config(
                tree_cls,
                arguments,
                prog=f"{prog} {command}",
                defaults={"env": env_defaults} | {name: group.given for name, group in groups.items()},
                epilog=COMMANDS_HELP,
                content=content,
                notes=notes_of,
            )
        except Exception as error:
            if isinstance(error, OSError) and not blamed(error):  # of a dry run's output
                raise
            with needed("the configuration", type(env_config)):
                raise
    with one_line_errors(f"{prog} {command}", ValueError):
        for name in further:
            setattr(tree, name, env_cls._resolved_servers(name, getattr(tree, name), content, typed[name]))
    if not isinstance(tree.env, type(env_config)):
        rule = f"{class_location(type(env_config))}: a validator gave {tree.env!r}; end it with `return self`"
        with one_line_errors(f"{prog} {command}"):
            raise AuthorError(rule)
    # Without SLURM, environments take one server as a list of it.
    return base(
        **{name: [value] if isinstance(value, APIServerConfig) and not tree.slurm else value for name, value in tree}
    )


def _initial(env_cls: type[Environment]) -> tuple[BaseEnvConfig, Any]:
    """The environment's configuration and its servers, as `config_init` gives them. Raises WrongReturn, and AuthorError
    for settings of a class that the environment's base class cannot work with.
    """
    match returned := env_cls.config_init():
        case (BaseModel() as config, None | ServerBaseline() as servers):
            pass
        case (BaseModel() as config, [*servers]) if all(isinstance(each, ServerBaseline) for each in servers):
            pass
        case _:
            raise WrongReturn(
                env_cls.config_init, returned, "its configuration and its server: `return config, server`"
            )
    base = next(owner for owner in env_cls.__mro__ if is_ours(owner) and "env_config_cls" in vars(owner))
    wanted = vars(base)["env_config_cls"]
    if not isinstance(config, wanted):
        raise AuthorError(
            f"{class_location(type(config))} has not the settings that a {base.__name__} needs; write `class"
            f" {type(config).__name__}({wanted.__name__})`"
        )
    return config, servers


def notes_of(tree: Any) -> list[str]:
    """Return what a dry run notes: what the environment lacks."""
    return [f"{LACKS}{' '.join(what.split())}" for what in tree.env.lacks()]


def _checked(base: type[EnvTree], env_cls: type[Environment]) -> type[EnvTree]:
    """`base`, which refuses to repeat what an environment of this class does, before it asks for other settings that
    go with it. A dry run refuses it, too.
    """
    why = why_not_repeatable(env_cls)

    class Checked(base):  # type: ignore[valid-type,misc]
        @model_validator(mode="before")
        @classmethod
        def _can_be_repeated(cls, values: dict[str, Any]) -> dict[str, Any]:
            asked = values["env"].get("deterministic") if isinstance(values.get("env"), dict) else None
            if why is not None and str(asked).lower() in ("true", "1"):
                raise ValueError(why)
            return values

    return Checked


@dataclass(frozen=True)
class ServerGroup:
    """Inference servers in the tree: the class of each, the annotation of all, and what is `given` before YAML and
    flags.
    """

    kind: type[ServerBaseline]
    annotation: object
    given: object


def _about(env_cls: type[Environment]) -> str:
    """For `--help`: the first paragraph of the docstring of the environment's program, else of its class."""
    written = getattr(sys.modules.get(env_cls.__module__), "__doc__", None) or env_cls.__doc__ or ""
    return inspect.cleandoc(written).partition("\n\n")[0]


def _server_group(name: str, servers: Any, in_yaml: Any, flagged: bool) -> ServerGroup:
    """The group `name` ("openai"), whose servers are `servers` unless YAML or flags say otherwise. Raises ConfigError
    for flags for several.
    """
    if servers is None and in_yaml is None and not flagged:
        return ServerGroup(APIServerConfig, APIServerConfig | None, None)
    given = [servers] if isinstance(servers, ServerBaseline) else list(servers or [])
    count = len(in_yaml) if isinstance(in_yaml, list) else 1 if isinstance(in_yaml, dict) else len(given)
    if count > 1 and flagged:
        raise ConfigError(
            f"--{name}.* sets one inference server, but {count} are configured; list them under `{name}:` in a --config"
            " file"
        )
    has_address = flagged or in_yaml is not None or not given or isinstance(given[0], APIServerConfig)
    kind = APIServerConfig if has_address else ServerBaseline
    values = [server.model_dump(exclude_unset=True) for server in given]
    if count > 1 or (isinstance(in_yaml, list) and not in_yaml):
        return ServerGroup(kind, list[kind], values)  # type: ignore[valid-type]
    return ServerGroup(kind, kind, values[0] if values else {})


def _is_list_of_one(content: object) -> bool:
    return isinstance(content, list) and len(content) == 1


def _known_keys(content: object, kinds: Mapping[str, type[BaseModel]], accepts_former: bool, place: str = "") -> Any:
    """Return what YAML has at `place` ("env") without the keys that users' files hold for other programs; warn of each.
    `kinds` are the trees by place.

    Raises ConfigError for a key that is known elsewhere, and for one that resembles a known one, but in compat mode.
    """
    if isinstance(content, list):
        return [_known_keys(each, kinds, accepts_former, place) for each in content]
    if not isinstance(content, Mapping):
        return content
    known = {
        where: [name for each in kind.model_fields.items() for name in names(*each)] for where, kind in kinds.items()
    }
    above = f"{place}." if place else ""
    for key in (key for key in content if key not in known[place]):
        if accepts_former:
            log.warning("Ignoring the unknown key '%s%s' (compat mode)", above, key)
            continue
        for where in (where for where, keys in known.items() if key in keys):
            raise ConfigError(f"the key '{key}' belongs {_level(where)} in the --config file, not {_level(place)}")
        if nearest(str(key), known[place]):
            likely = nearest(f"{above}{key}", [above + name for name in known[place]])
            raise ConfigError(f"unknown key '{above}{key}'{likely}")
        log.warning("Ignoring the unknown key '%s' %s of the --config file", key, _level(place))
    return {key: value for key, value in content.items() if key in known[place]}


def _level(place: str) -> str:
    return f"under {place}:" if place else "at the top"


# --- signals --------------------------------------------------------------------------------------------------------


def _end_in_time(number: int) -> None:
    log.info("%s: stopping within 5 s", signal.Signals(number).name)
    time.sleep(STOP_LIMIT_S)
    os._exit(128 + number)


def _tell_what_lasts(loop: asyncio.AbstractEventLoop, loop_ended: threading.Event) -> None:
    """Warn of the author's work for which Python waits without a limit once a command is done: tasks and the threads of
    the loop's executor, and then, when the process ends, all threads that are no daemons.
    """
    if not loop_ended.wait(LASTING_TOLD_AFTER_S):
        tasks = {f"task {task.get_name()}": authors_lines(*task.get_stack(limit=1)) for task in asyncio.all_tasks(loop)}
        _tell({task: lines for task, lines in tasks.items() if lines} | _lasting_threads())
        loop_ended.wait()
    time.sleep(LASTING_TOLD_AFTER_S)
    if _process_ends():  # a command may have been called by another program
        _tell(_lasting_threads())


def _lasting_threads() -> dict[str, list[str]]:
    """The author's lines by thread, of those that keep Python from ending."""
    stacks = sys._current_frames()
    return {
        f"thread {thread.name}": authors_lines(stacks[thread.ident])
        for thread in threading.enumerate()
        if thread.ident in stacks and not thread.daemon and thread is not threading.main_thread()
        if OF_ASYNCIO not in thread.name
    }


def _process_ends() -> bool:
    """Return whether the main thread is at its end, where Python waits for the others."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    return frame is None or frame.f_code.co_filename == threading.__file__


def _tell(lasting: Mapping[str, Sequence[str]]) -> None:
    if lasting:
        shown = ", ".join(" at ".join([what, *lines[-1:]]) for what, lines in lasting.items())
        log.warning("The command is done, but Python waits for %s: end that work; Ctrl-C ends all now", shown)


def _end_forks_by_signals(stop: Callable[[int, FrameType | None], None]) -> None:
    """Let forks of an author's, such as multiprocessing's, end by SIGINT and SIGTERM at once, without `stop`."""
    before = threading.local()

    def block() -> None:  # Python forgets the signals of a fork that come before its hooks have run
        before.mask = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before.mask)

    def leave_to_the_system() -> None:
        for number in ENDING:
            if signal.getsignal(number) is stop:
                signal.signal(number, signal.SIG_DFL)
        unblock()

    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=leave_to_the_system)


def _run_until_stopped(main_coroutine: Callable[[], Awaitable[int]]) -> int:
    """The exit code of `main_coroutine`; SIGINT and SIGTERM cancel it, and end the process when that takes too long."""
    stopped_by: list[int] = []
    loop_ended = threading.Event()

    async def runner() -> int:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def stop(number: int, frame: FrameType | None) -> None:
            if stopped_by or loop_ended.is_set():
                os._exit(128 + number)
            stopped_by.append(number)
            # in a thread: the signal may have come in the middle of a write to the log
            threading.Thread(target=_end_in_time, args=(number,), name="StopLimit", daemon=True).start()
            loop.call_soon_threadsafe(task.cancel)

        for number in ENDING:
            signal.signal(number, stop)
        _end_forks_by_signals(stop)
        try:
            return await main_coroutine()
        finally:
            threading.Thread(
                target=_tell_what_lasts, args=[loop, loop_ended], name="LastingThreads", daemon=True
            ).start()

    try:
        return asyncio.run(runner())
    except asyncio.CancelledError:
        return 128 + stopped_by[0]
    except SystemExit as error:  # of an author's `exit()`: what was asked for is not done
        log.error("The environment ended its own process (%s): raise an error instead", origin(error))
        return error.code if isinstance(error.code, int) and error.code else 1
    finally:
        loop_ended.set()
