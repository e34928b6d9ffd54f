"""The command line of `atropos train`: a run file or a recipe, and flags that change it.

    atropos train gsm8k_lora [MODEL] --steps 5 --trainer.lr 1e-6 --vllm.max_model_len 512 --env.group_size 16

The run's own flags are fields of `RunFlags`. A flag with a dot is one of a section: `--trainer.X`, `--api.X` and
`--bridge.X` are parsed as the program's own flag `--X`, `--environments.NAME.X` as the environment's `--env.X` or
`--openai.X`, and `--env.X` is that of the one environment. `--vllm.X` (of every vLLM server), `--vllm.2.X` (of the
second) and `--layout.X` are values in YAML.
"""

import os
import re
import textwrap
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import BaseModel, Field, ValidationError, create_model, field_validator

from atropos_launcher.placement import ray_cluster
from atropos_launcher.placement.machines import THIS_ONE, MachineFlags, Machines
from atropos_launcher.plan.changes import (
    Sections,
    changed_environments,
    changed_servers,
    named_by_file,
    section_values,
    texts,
)
from atropos_launcher.plan.sections import SectionFlags
from atropos_launcher.run_file.run_file import (
    GONE,
    INSTEAD,
    LOCAL_FILES,
    Choice,
    RunFile,
    RunName,
    check_kind,
    find_run_file,
    merge,
    read_run,
    recipe_files,
    validated,
)
from atropos_launcher.run_file.servers import PLANNED, Tree, each_server, merged_servers
from atropos_launcher.run_file.teacher import TEACHER
from atropos_launcher.runs import RUNS, find_run
from atroposlib import flags as flag_parser
from atroposlib.api.settings import RunApiConfig
from atroposlib.config import Config, to_read
from atroposlib.envs.config import BaseEnvConfig
from atroposlib.errors import reading
from atroposlib.flags import ConfigError, Key, keys_of, split
from atroposlib.row_files.kept_rows import DEFAULT, KeepText
from atroposlib.yaml_text import text_of
from example_trainer.memory.plan import GB
from example_trainer.settings.bridges import LAUNCHED
from example_trainer.settings.config import TrainerConfig
from example_trainer.settings.gpus import gpu_bytes, visible_gpus
from example_trainer.settings.servers import Port
from vllm_patching.kv_cache import OnSync

PROG = "atropos train"
ABOUT = {
    PROG: "Start a training run from one file.",
    "atropos evaluate": "Evaluate a model on the held-out problems of a recipe's environments, without training.",
}
USAGE = {
    PROG: "%(prog)s RECIPE|FILE.yaml [MODEL] [--FLAG VALUE ...]",
    "atropos evaluate": "%(prog)s RECIPE|FILE.yaml [MODEL] [--FLAG VALUE ...]",
    "atropos quickstart": "%(prog)s [MODEL] [--FLAG VALUE ...]",
}
SECTIONS = ("trainer", "api", "bridge", "vllm", TEACHER, "layout", "env", "environments")
OWN_TRAINER_FLAGS = ("model_name", "training_steps")  # --model and --steps here
HOST_PER_GPU_BYTE = 2  # free host memory that --gpus assumes; servers with GPUs have two to three times theirs
PLANNED_GB = 80  # of a GPU that --gpus asks for
MORE = """\
Settings of the programs:
  --env.X V                     any flag --env.X of the environment; atropos env FILE serve --help all lists them
  --env.file FILE               another environment; it keeps the recipe's settings that it knows
  --environments.NAME.X V       the same, for one of several environments
  --vllm.X V                    any flag of vLLM; --vllm.count N starts N servers, --vllm.2.X V is for the second
  --layout.X V                  GPUs and CPU cores of each service: --layout.vllm 0,1 --layout.cores.trainer 0-3
{training}
Ctrl-C ends all services within 10 s. So does the failure of one service.
"""
OF_TRAINING = """\
  --trainer.X V                 any flag --X of the trainer; python -m example_trainer.grpo --help all lists them
  --teacher.model M             a model to learn from, served beside with flags --teacher.X V of vLLM; or --teacher.url
  --bridge.X V, --api.X V       the bridge's settings, the batching API's flags
"""


class RunFlags(Config):
    """Run"""

    first_flags: ClassVar[Sequence[str]] = (
        "model",
        "steps",
        "dataset",
        "dataset_path",
        "bridge",
        "run_name",
        "resume",
        "gpus",
    )
    not_offered: ClassVar[frozenset[str]] = frozenset()  # flags and sections

    model: str | None = Field(
        None, min_length=1, description="Hugging Face id or local directory; also the second word, without --model"
    )
    steps: int | None = Field(None, ge=1, le=10**9, description="training steps")
    dataset: str | None = Field(
        None,
        min_length=1,
        description="dataset of the environment; for gsm8k: arithmetic or gsm8k, for math: generated",
    )
    dataset_path: Path | None = Field(
        None, description="JSONL file with question and answer, or a directory with train.jsonl and test.jsonl"
    )
    bridge: str | None = Field(None, description=f"how new weights reach vLLM: {', '.join(LAUNCHED)}")
    run_name: RunName | None = Field(
        None, description="all output goes to runs/NAME/ (default: the recipe, date and time)"
    )
    seed: int | None = Field(None, ge=1, description="seed of sampling, problems and trainer")
    batch_invariant: bool | None = Field(
        None,
        description="trainer and vLLM compute the same bits; the first differing token ends the run"
        " (docs/bit-exactness.md)",
    )
    deterministic: bool | None = Field(
        None,
        description="--batch-invariant, and the run can be repeated bit for bit (docs/bit-exactness.md#repeat-a-run)",
    )
    dtype: Literal["auto", "float32", "bfloat16"] | None = Field(
        None,
        description=(
            "dtype in which vLLM computes, and with --batch-invariant the trainer; default float32, on a GPU bfloat16;"
            " auto is bfloat16 on a CPU, too, that multiplies it"
        ),
    )
    kv_on_sync: OnSync | None = Field(
        None, description="what vLLM's KV cache keeps over a sync (docs/bridges.md#the-kv-cache-over-a-sync)"
    )
    api_port: int | None = Field(None, ge=1, le=65535, description="default 8000, or the next free port")
    vllm_port: tuple[Port, ...] | None = Field(
        None,
        description="default 9001, or the next free port; for several servers the first port, or 9001,9002",
    )
    trainer_ranks: str | None = Field(
        None, pattern="^([0-9]+|auto)$", description="processes that share the trainer's weights, or auto"
    )
    tp_size: int | None = Field(None, ge=1, le=64, description="trainer ranks that split each layer")
    chat_template: str | None = Field(
        None,
        min_length=1,
        description="Jinja file of the chat template, for environments and vLLM (default: the model's)",
    )
    wandb: bool | None = Field(None, description="log to Weights & Biases")
    view: bool | None = Field(None, description="serve the run in a browser while it runs (default: yes)")
    tensorboard: bool | None = Field(None, description="log to TensorBoard")
    keep_samples: KeepText | None = Field(
        None, description=f"keep so much of sampled and of trained groups: 20GB, 200steps or all (default {DEFAULT})"
    )
    resume: str | None = Field(
        None, min_length=1, description="continue this run (name or directory); takes the place of RECIPE"
    )
    runs: Path = Field(RUNS, description="directory that contains all runs")
    gpus: str | None = Field(
        None,
        description="with --dry-run: plan for this many GPUs of 80 GB; 8x141 means eight of 141 GB",
    )
    host_memory: int | None = Field(
        None,
        ge=1,
        description=(
            "with --dry-run: plan with this much free host memory, in GB (default: this machine's; with --gpus, twice"
            " the memory of all GPUs)"
        ),
    )

    @field_validator("gpus")
    @classmethod
    def _number_of_gpus(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[1-9]\d?(x[1-9]\d{0,3})?", value):
            raise ValueError("write their number, at most 99, and the GB of one: 8x80; 8 means eight of 80 GB")
        return value

    @field_validator("vllm_port", mode="before")
    @classmethod
    def _one_port_or_several(cls, value: object) -> object:
        return value.split(",") if isinstance(value, str) else value

    @field_validator("dataset_path")
    @classmethod
    def _exists(cls, path: Path | None) -> Path | None:
        if path is not None and not os.path.exists(os.path.expanduser(path)):
            raise ValueError(f"--dataset-path {path} does not exist")
        return None if path is None else Path(os.path.expanduser(to_read(path))).resolve()


class TrainFlags(MachineFlags, RunFlags):
    """Declares the flags of `atropos train`."""


@dataclass(frozen=True)
class Asked:
    """Holds what was typed, resolved to a run; `given` are the command's own flags, of the class that it named."""

    run: RunFile
    given: RunFlags
    sections: SectionFlags
    source: Path  # the run file
    dry_run: bool
    runs: Path
    resume: Path | None
    gpus: list[str]
    gpu_bytes: int  # of one; 0 where it is not known
    view: bool = True
    host_bytes: int | None = None  # free in host memory; None: what this machine has
    machines: Machines = THIS_ONE


def read_command_line(
    argv: Sequence[str],
    environ: Mapping[str, str] = os.environ,
    prog: str = PROG,
    flags: type[RunFlags] = TrainFlags,
) -> Asked:
    """The run that was asked for. Raises ConfigError; exits 0 after `--help`."""
    line = split(argv, keys_of(flags), SECTIONS)
    for word in line.flags:
        section, dot, name = word.removeprefix("--no-").partition(".")
        if word.startswith("--no-") and dot and section in SECTIONS:
            raise ConfigError(f"unknown flag {word}; did you mean '--{section}.{name} false'?")
        if word.startswith("--") and word[2:].partition("=")[0].replace("-", "_") in GONE:
            raise ConfigError(f"{word.partition('=')[0]} was removed. {INSTEAD}")
    values, typed = flag_parser.parse(
        _offered(flags),
        line.flags,
        prog=prog,
        about=_about(line.words, prog),
        epilog=_more(flags),
        usage=USAGE[prog],
        first=flags.first_flags,
        elsewhere=_keys_of_programs,
    )
    given = _checked(values, flags)
    resume = find_run(given.runs, given.resume) if given.resume is not None else None
    source, models = _source(line.words, resume, getattr(typed, "config", None))
    gpus, memory = planned_gpus(given.gpus) if given.gpus is not None else found_gpus(environ)
    if given.gpus is not None and "dry_run" not in typed:
        raise ConfigError("--gpus is only for --dry-run; set CUDA_VISIBLE_DEVICES to choose the GPUs of a run")
    if given.host_memory is not None and "dry_run" not in typed:
        raise ConfigError("--host-memory is only for --dry-run; a run uses the memory that this machine has")
    bridge = texts(line.sections["bridge"]).get("kind") or given.bridge
    choice = Choice(
        device="gpu" if gpus else "cpu",
        dataset=LOCAL_FILES if given.dataset_path else given.dataset,
        bridge=check_kind(bridge) if bridge else None,
    )
    content = read_run(source, choice)
    layout = (content.get("layout") or {}) | texts(line.sections["layout"])
    machines = _machines(given, layout.get("ray"), "dry_run" in typed, is_planned=given.gpus is not None)
    changed, sections = _changed(content, line.sections, given, models, machines)
    run = validated(changed, source.name if _is_refused(content) else "the command line")
    view = given.view is not False
    host = None if given.host_memory is None else given.host_memory * GB
    if given.gpus is not None and host is None:
        host = HOST_PER_GPU_BYTE * len(gpus) * memory
    return Asked(
        run, given, sections, source, "dry_run" in typed, given.runs, resume, gpus, memory, view, host, machines
    )


def _is_refused(content: Tree) -> bool:
    """Return whether a run file cannot be used as it is, whatever flags change."""
    try:
        validated(content, "")
    except ConfigError:
        return True
    return False


def _changed(
    content: Tree, typed: Sections, given: RunFlags, words: Sequence[str], machines: Machines
) -> tuple[Tree, SectionFlags]:
    """`content` as the flags change it, and the flags of the programs. Raises ConfigError, before anything is merged,
    for a flag that does not suit it.
    """
    servers = changed_servers(content, typed, machines, given.tp_size, given.vllm_port)
    if given.kv_on_sync is not None:
        servers = merged_servers(servers, {"kv_on_sync": given.kv_on_sync})
    several = len(each_server(servers)) > 1
    environments, programs = changed_environments(content, typed, given.dataset_path, several_servers=several)
    changes = _own_changes(given, words)
    port = [flag for flag in typed["api"] if flag.name == "port"]  # which the other programs are told
    changes |= section_values("api", port)
    for section in ("layout", TEACHER):
        changes |= section_values(section, typed[section])
    if environments:
        changes["environments"] = environments
    changed = merge(content, changes)
    if names := named_by_file(content, changed):
        changed["environments"] = {names.get(name, name): each for name, each in changed["environments"].items()}
        programs = {names.get(name, name): flags for name, flags in programs.items()}
    if servers:
        changed["vllm"] = servers
    trainer = [word for flag in typed["trainer"] for word in flag.words()]
    bridge = [word for flag in typed["bridge"] for word in flag.words("bridge.")]
    api = [word for flag in typed["api"] if flag.name != "port" for word in flag.words()]
    return changed, SectionFlags([*trainer, *bridge], api, programs)


STAGING = "bridge_staging"  # a flag of vLLM's server that the memory plan knows
OF_QUESTIONS = ("max_new_tokens", "temperature", "top_p", "heldout_size", "max_turns")  # their environments load much


def _keys_of_programs() -> dict[str, list[Key]]:
    """Of two programs with one flag, the trainer's first. Of an environment's own flags those that most have, and of
    vLLM's those by which a run is planned.
    """
    texts_of = dict.fromkeys(OF_QUESTIONS, (str | None, None))
    of_questions = create_model("EnvFlags", __base__=BaseEnvConfig, **texts_of)  # type: ignore[call-overload]
    known_flags = dict.fromkeys((*PLANNED, STAGING), (str | None, None))
    planned = create_model("VllmFlags", **known_flags)  # type: ignore[call-overload]
    programs: dict[str, type[BaseModel]] = {
        "trainer": TrainerConfig,
        "env": of_questions,
        "api": RunApiConfig,
        "vllm": planned,
    }
    known = {program: list(keys_of(tree)) for program, tree in programs.items()}
    return {**known, "trainer": [key for key in known["trainer"] if ".".join(key.path) not in OWN_TRAINER_FLAGS]}


def _machines(given: RunFlags, ray: object, dry_run: bool, is_planned: bool) -> Machines:
    """The nodes of the Ray cluster, or this machine. A plan for GPUs that are not here asks no cluster."""
    if not isinstance(given, TrainFlags):
        return THIS_ONE
    if address := given.ray or ray:
        nodes = ray_cluster.Nodes.of(given.ray_nodes)
        if is_planned or (dry_run and address == ray_cluster.LOCAL):
            return ray_cluster.planned(nodes, given.ray_timeout)
        return ray_cluster.connect(str(address), nodes, given.ray_timeout)
    if given.ray_nodes is not None:
        raise ConfigError(f"--ray-nodes {given.ray_nodes} is only for --ray: give that, too, or leave this out")
    return THIS_ONE


def found_gpus(environ: Mapping[str, str]) -> tuple[list[str], int]:
    """The GPUs of this machine, and the memory of one."""
    gpus = visible_gpus(environ)
    return gpus, gpu_bytes(gpus) if gpus else 0


def planned_gpus(text: str) -> tuple[list[str], int]:
    """`8x141`: the GPUs that --gpus asks for."""
    count, _, size = text.partition("x")
    return [str(index) for index in range(int(count))], int(size or PLANNED_GB) * GB


def make_parser(argv: Sequence[str], prog: str = PROG, flags: type[RunFlags] = TrainFlags) -> ArgumentParser:
    """The flags, for help and completion."""
    about = _about(split(argv, keys_of(flags)).words, prog)
    keys = _offered(flags)
    return flag_parser.make_parser(keys, prog, about, _more(flags), usage=USAGE[prog], first=flags.first_flags)


def _offered(flags: type[RunFlags]) -> list[Key]:
    return [key for key in keys_of(flags) if key.path[0] not in flags.not_offered]


def _more(flags: type[RunFlags]) -> str:
    """What follows the launcher's own flags: those of the trainer that a newcomer needs, by name, and the sections."""
    if "trainer" in flags.not_offered:
        return MORE.format(training="")
    keys = {".".join(key.path): key for key in keys_of(TrainerConfig)}
    told = [keys[path] for path in TrainerConfig.first_flags if path not in OWN_TRAINER_FLAGS]
    lines = [
        textwrap.fill(
            f"{key.field.description}",
            initial_indent=f"  --trainer.{key.spellings[0]} V".ljust(32) + "  ",
            subsequent_indent=" " * 34,
            width=110,
        )
        for key in told
    ]
    return "\n".join(["The trainer's flags to begin with:", *lines, "", MORE.format(training=OF_TRAINING)])


def _checked(values: Mapping[str, object], flags: type[RunFlags]) -> RunFlags:
    try:
        given = flags.model_validate(dict(values))
    except ValidationError as error:
        problem = error.errors()[0]
        flag = "--" + ".".join(part for part in problem["loc"] if isinstance(part, str)).replace("_", "-")
        message = problem["msg"].removeprefix("Value error, ")
        raise ConfigError(message if flag in message else f"{flag}: {message} (got {problem['input']!r})") from None
    if given.dataset and given.dataset_path:
        raise ConfigError(f"--dataset {given.dataset} and --dataset-path {given.dataset_path} cannot be combined")
    return given


def _source(words: Sequence[str], resume: Path | None, config: str | None) -> tuple[Path, Sequence[str]]:
    """Return the run file, and the words that do not name it."""
    recipes = [path.stem for path in recipe_files()]
    if resume is not None:
        kept = resume / "run.yaml"
        if not kept.is_file():
            raise ConfigError(f"--resume {resume} has no run.yaml: name a run, or its directory")
        return kept, words[1:] if words and words[0] in recipes else words  # a script's recipe: the run has its own
    if config is not None:
        return find_run_file(config), words
    if not words:
        raise ConfigError(f"name a run file or a recipe: {', '.join(recipes)}")
    return find_run_file(words[0]), words[1:]


def _about(words: Sequence[str], prog: str) -> str:
    """The comment at the top of the recipe that help was asked for, else what the command does, and all recipes."""
    if words:
        return description(find_run_file(words[0]))
    lines = [f"  {path.stem:<20} {description(path).splitlines()[0]}" for path in recipe_files()]
    return "\n".join([ABOUT.get(prog, ABOUT[PROG]), "", "Recipes:", *lines])


def description(path: Path) -> str:
    """The comment at the top of a run file."""
    with reading(f"cannot read {path}", ConfigError, remedy="give a text file in UTF-8"):
        lines = text_of(path).splitlines()
    count = next((index for index, line in enumerate(lines) if not line.startswith("#")), len(lines))
    return "\n".join(line.removeprefix("#").removeprefix(" ") for line in lines[:count]) or path.stem


def _own_changes(given: RunFlags, words: Sequence[str]) -> Tree:
    """The flags as content of a run file."""
    models = [*words, *([given.model] if given.model else [])]
    if len(models) > 1:
        raise ConfigError(f"expected one MODEL, got {models[0]!r} and {models[1]!r}")
    own = (
        "steps",
        "seed",
        "dtype",
        "batch_invariant",
        "deterministic",
        "chat_template",
        "wandb",
        "tensorboard",
        "keep_samples",
    )
    changes: Tree = {key: value for key in own if (value := getattr(given, key)) is not None}
    if given.run_name is not None:
        changes["name"] = given.run_name
    if models:
        changes["model"] = models[0]
    trainer = {"resume": "auto"} if given.resume is not None else {}
    if given.trainer_ranks is not None:
        trainer["trainer_ranks"] = given.trainer_ranks
    if given.tp_size is not None:
        trainer["tp_size"] = str(given.tp_size)
    if trainer:
        changes["trainer"] = trainer
    if given.api_port is not None:
        changes["api"] = {"port": given.api_port}
    return changes
