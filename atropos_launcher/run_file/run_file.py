"""One run as one YAML file: its keys, its bases, and how flags change it.

    recipes/gsm8k.yaml  ◀──base──  my_run.yaml  ◀──  --steps 5 --trainer.lr 1e-6 --env.group_size 16

A file on top of another is merged over it key by key. Its overlays apply at its own place: `by_device: {gpu: ...}`,
`by_dataset: {arithmetic: ...}` and `by_bridge: {lora: ...}` hold what one of these changes, and a file on top, like
every flag, beats them. An overlay may have a `base` of its own.

The sections `trainer`, `vllm`, `api` and each environment are the programs' own settings. plan/services.py adds the
settings that connect the programs, and each program checks its own section. `vllm` may be a list (servers.py), and
`layout` assigns GPUs and CPU cores (placement/gpus.py, placement/cores.py). This module loads neither torch nor vLLM.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from atropos_launcher import paths
from atropos_launcher.run_file.core_settings import CoreLayout
from atropos_launcher.run_file.servers import (
    PLANNED,
    Servers,
    Tree,
    each_server,
    is_for_each,
    is_server,
    merged_servers,
)
from atropos_launcher.run_file.teacher import TEACHER, TeacherSection
from atropos_launcher.service import LAUNCHER, NAME, is_trainer
from atroposlib.config import Config, merged_trees
from atroposlib.flags import ConfigError, keys_of, nearest
from atroposlib.row_files.kept_rows import DEFAULT, KeepText
from atroposlib.yaml_text import Loader, text_of
from example_trainer.settings.bridges import LAUNCHED, MODES
from example_trainer.settings.distillation import DistillationSettings
from vllm_patching.kv_cache import ON_SYNC

STAGINGS = ("device", "host", "none")  # of vLLM's --bridge-staging
OVERLAYS = ("by_device", "by_bridge", "by_dataset")  # in the order in which they apply
MERGED = "tag:yaml.org,2002:merge"  # YAML's name of the key `<<`
DEVICES = ("cpu", "gpu")  # the keys of `by_device`
LOCAL_FILES = "path"  # the key of `by_dataset` for --dataset-path
SECTIONS = ("bridge", "environments", "trainer", TEACHER, "api", "layout")  # keys and values; so is `vllm`, or a list
TAKEN = ("api", "trainer", "view", TEACHER, LAUNCHER)  # names of services, and so of their logs
GONE = ("hosts", "remote_command", "host_timeout")  # settings from before Ray
INSTEAD = "Ray starts what runs on other machines: run `ray start` on each, and give --ray auto (docs/devices.md)"
NO_ENVIRONMENT = "a run needs an environment: `environments: {mine: {file: my_server.py}}`, or --env.file my_server.py"


def _list_of_names(value: object) -> object:
    """`0,1`, or the one GPU 0, as a list."""
    if value is None:
        return "auto"
    if isinstance(value, str) and value != "auto":
        return [part.strip() for part in value.split(",")]
    return [str(part) for part in value] if isinstance(value, list) else [str(value)] if value != "auto" else value


def _list_for_each_server(value: object) -> object:
    """`[[0, 1], [2]]`, or one list."""
    return [_list_of_names(part) for part in value] if is_for_each(value) else _list_of_names(value)


def _name_of_run(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", value):
        raise ValueError("a run's name has letters, digits, '_', '-' and '.', and does not begin with '.'")
    return value


RunName = Annotated[str, AfterValidator(_name_of_run)]
Gpus = Annotated[Literal["auto"] | list[str], BeforeValidator(_list_of_names)]
ServerGpus = Annotated[Literal["auto"] | list[str] | list[list[str]], BeforeValidator(_list_for_each_server)]


class Layout(Config):
    """Which GPUs are whose, named as in CUDA_VISIBLE_DEVICES, and which CPU cores."""

    vllm: ServerGpus = Field(
        "auto",
        description="vLLM's GPUs, one per tensor-parallel rank; for several servers in turn, or one list per server",
    )
    trainer: Gpus = Field("auto", description="the trainer's GPU; for a single copy, vLLM's")
    teacher: Gpus = Field("auto", description="the teacher's GPUs, where it is started; by default the last ones")
    ray: str | None = Field(None, min_length=1, description="Ray cluster that places services, as --ray names it")
    cores: CoreLayout = CoreLayout()

    @property
    def names_gpus(self) -> bool:
        """Return whether it names any GPU's owner."""
        return (self.vllm, self.trainer) != ("auto", "auto")


class EnvironmentSection(Config):
    """One environment: its program, and the fields of the program's own configuration (`--env.*`)."""

    model_config = ConfigDict(extra="allow")

    file: str = Field(min_length=1, description="a file, a module, or the name of an environment that is installed")
    count: int = Field(1, ge=1, le=64, description="number of copies to run, each with its own seed")
    from_hub: bool = Field(True, description="whether its problems may come from the hub")
    openai: Tree = Field({}, description="settings of its connection to the inference server (`--openai.*`)")
    inherited: Tree = Field({}, description="fields for an environment whose file was replaced, as far as known here")

    @property
    def own(self) -> Tree:
        """The fields of the program's own configuration."""
        return dict(self.model_extra or {})


class RunFile(Config):
    """One training run."""

    name: RunName | None = Field(None, description="all output goes to runs/NAME/")
    model: str | None = Field(
        None,
        min_length=1,
        description=(
            "Hugging Face id, local directory, or auto for the largest default model that fits the GPUs; by default the"
            " quickstart's"
        ),
    )
    steps: int = Field(100, ge=1, le=10**9, description="training steps")
    seed: int = Field(1, ge=1, lt=2**31, description="seed of sampling, problems and trainer")
    dtype: Literal["auto", "float32", "bfloat16"] | None = Field(
        None,
        description=(
            "dtype that vLLM serves; by default float32, on a GPU bfloat16, and by auto bfloat16 on a CPU, too, that"
            " multiplies it"
        ),
    )
    batch_invariant: bool = Field(False, description="trainer and vLLM compute the same bits, checked at every token")
    deterministic: bool = Field(
        False,
        description="the run can be repeated bit for bit, whatever is killed meanwhile; implies batch_invariant",
    )
    chat_template: str | None = Field(
        None,
        min_length=1,
        description="Jinja file of the chat template, for environments and vLLM; by default the model's",
    )
    wandb: bool = Field(False, description="log to Weights & Biases")
    tensorboard: bool = Field(False, description="log to TensorBoard")
    keep_samples: KeepText = Field(
        DEFAULT,
        description="how much of samples.jsonl, and of trained.jsonl, is kept: bytes (20GB), steps (200steps) or all",
    )
    bridge: Tree = Field({"kind": "broadcast"}, description="how new weights reach vLLM")
    environments: dict[str, EnvironmentSection] = Field({}, description="environment servers by name")
    trainer: Tree = Field({}, description="the trainer's settings")
    vllm: Servers = Field(
        {}, description="flags of the vLLM server; `count: N` in them for N equal ones, or a list of servers"
    )
    teacher: TeacherSection | None = Field(
        None, description="a model to learn from: `model`, with flags of its vLLM server, or `url` of one that runs"
    )
    api: Tree = Field({}, description="the batching API's settings")
    layout: Layout = Layout()

    @model_validator(mode="before")
    @classmethod
    def _repeatable_is_exact(cls, values: object) -> object:
        if not isinstance(values, dict) or values.get("deterministic") is not True:
            return values
        if values.get("batch_invariant") is False:
            raise ValueError("deterministic needs batch_invariant: drop `batch_invariant: false`")
        return {**values, "batch_invariant": True}

    @field_validator("environments")
    @classmethod
    def _there_is_one(cls, value: dict[str, EnvironmentSection]) -> dict[str, EnvironmentSection]:
        if not value:
            raise ValueError(NO_ENVIRONMENT)
        if wrong := [name for name in value if not is_environment_name(name)]:
            raise ValueError(
                f"{wrong[0]!r} is not a valid environment name: use letters, digits, '.', '_' and '-', and no "
                "service's name"
            )
        return value

    @field_validator("chat_template")
    @classmethod
    def _template_is_there(cls, value: str | None) -> str | None:
        if value is not None and not Path(value).is_file():
            raise ValueError(f"{value} is not a file: give the path of a Jinja chat template")
        return value

    @field_validator("api")
    @classmethod
    def _port_of_api_is_one(cls, value: Tree) -> Tree:
        read, expected = PLANNED["port"]
        port = value.get("port")
        if port is None:
            return {key: inner for key, inner in value.items() if key != "port"}
        if isinstance(port, bool) or read(str(port)) is None:
            raise ValueError(f"port: expected {expected}, got {port!r}")
        return {**value, "port": read(str(port))}

    @field_validator("vllm", mode="before")
    @classmethod
    def _servers_are_understood(cls, value: object) -> object:
        each_server(value)  # its ConfigError
        return value

    @model_validator(mode="after")
    def _bridge_feeds_all_servers(self) -> "RunFile":
        mode, count = LAUNCHED[self.kind], len(self.servers)
        if count > 1 and not mode.feeds_several:
            able = " or ".join(kind for kind, other in LAUNCHED.items() if other.feeds_several)
            raise ValueError(
                f"bridge {mode.shown()} supports one vLLM server, but `vllm` has {count}: keep one, or choose bridge"
                f" {able}"
            )
        if mode.owns_vllm and self.layout.cores.vllm != "auto":
            raise ValueError(
                f"layout.cores.vllm: with bridge {mode.shown()} the trainer starts vLLM, on its own cores: drop"
                " layout.cores.vllm, and give the trainer's cores"
            )
        return self

    @model_validator(mode="after")
    def _staging_suits_the_bridge(self) -> "RunFile":
        mode = LAUNCHED[self.kind]
        for staging in {server.get("bridge_staging") for server in self.servers}:
            if staging not in (None, *STAGINGS):
                raise ValueError(f"vllm.bridge_staging {staging}: expected one of {', '.join(STAGINGS)}")
            if staging == "none" and mode.vllm_copies > 1:
                raise ValueError(
                    f"vllm.bridge_staging none: bridge {mode.shown()} needs memory in which vLLM receives new weights:"
                    " drop it, or give device or host"
                )
            if staging == "host" and mode.vllm_copies == 1:
                raise ValueError(
                    f"vllm.bridge_staging host: with bridge {mode.shown()} vLLM receives no weights beside its own:"
                    " drop it"
                )
        return self

    @model_validator(mode="after")
    def _kv_cache_may_outlive_a_sync(self) -> "RunFile":
        mode = LAUNCHED[self.kind]
        for kept in {server.get("kv_on_sync") for server in self.servers} - {None, "reset"}:
            if kept not in ON_SYNC:
                raise ValueError(f"vllm.kv_on_sync {kept}: expected one of {', '.join(ON_SYNC)}")
            if not mode.switched:
                why = "each policy version is another adapter" if mode.adapters else "each starts vLLM again"
                raise ValueError(f"vllm.kv_on_sync {kept}: bridge {mode.shown()} keeps no KV cache, as {why}: drop it")
            if self.batch_invariant:
                raise ValueError(
                    f"vllm.kv_on_sync {kept}: keys and values of an older version are not the bits that the trainer"
                    " computes (batch_invariant): drop one of the two"
                )
        return self

    @property
    def servers(self) -> list[Tree]:
        """The flags of each vLLM server."""
        return each_server(self.vllm)

    @property
    def kind(self) -> str:
        """That of the bridge: a key of LAUNCHED."""
        return str(self.bridge["kind"])


@dataclass(frozen=True)
class Choice:
    """Holds what the overlays ask for."""

    device: Literal["cpu", "gpu"]
    dataset: str | None = None  # LOCAL_FILES for files of one's own
    bridge: str | None = None  # a key of LAUNCHED; by default the one that the file says


@dataclass
class Layers:
    """The content of a file and of those below it, lowest first."""

    trees: list[Tree] = field(default_factory=list)
    datasets: set[str] = field(default_factory=set)  # that an overlay is for


def read_run(path: Path, choice: Choice) -> Tree:
    """The merged content of a run file. Raises ConfigError."""
    layers = read_layers(path, choice)
    kind = choice.bridge or _last_kind(layers.trees)
    known = layers.datasets - {LOCAL_FILES}
    if known and choice.dataset not in (None, LOCAL_FILES, *known):
        raise ConfigError(
            f"--dataset expects {' or '.join(sorted(known))}, got {choice.dataset!r}; local files go to --dataset-path"
        )
    if kind is not None:
        layers = read_layers(path, Choice(choice.device, choice.dataset, kind))
    content: Tree = {}
    for tree in layers.trees:
        content = merge(content, _of_bridge(tree, kind))
    if kind is not None:
        content["bridge"] = {**content.get("bridge", {}), "kind": kind}
    if choice.dataset is not None and choice.dataset not in layers.datasets:
        content = with_dataset(content, choice.dataset)
    return content


def read_layers(path: Path, choice: Choice, above: tuple[Path, ...] = ()) -> Layers:
    """`path`, its bases, and the overlays that `choice` asks for. Raises ConfigError."""
    if path in above:
        raise ConfigError(f"{path} is its own base, through {', '.join(str(file) for file in above)}")
    return _layers(read_yaml(path), path, choice, (*above, path))


def _layers(content: Tree, path: Path, choice: Choice, above: tuple[Path, ...]) -> Layers:
    layers = Layers()
    overlays = {key: _mapping(content.pop(key, {}), f"{path}: {key}") for key in OVERLAYS}
    for key, known in (("by_device", DEVICES), ("by_bridge", tuple(MODES))):
        if unknown := [name for name in overlays[key] if name not in known]:
            raise ConfigError(
                f"{path}: {key}: {unknown[0]} is not one of {', '.join(known)}{nearest(str(unknown[0]), known)}"
            )
    if base := content.pop("base", None):
        below = read_layers(find_run_file(str(base), beside=path.parent), choice, above)
        layers.trees += below.trees
        layers.datasets |= below.datasets
    layers.trees.append(normal(content, path))
    layers.datasets |= set(overlays["by_dataset"])
    for key in OVERLAYS:
        overlay = overlays[key].get(getattr(choice, key.removeprefix("by_")))
        if overlay is not None:
            applied = _layers(dict(_mapping(overlay, f"{path}: {key}")), path, choice, above)
            layers.trees += applied.trees
            layers.datasets |= applied.datasets
    return layers


def find_run_file(name: str, beside: Path | None = None) -> Path:
    """The file of that name, or the recipe: `my_run.yaml`, `gsm8k_lora`. Raises ConfigError."""
    given = Path(os.path.expanduser(name))
    places = [(beside or Path()) / given, paths.recipes() / given.name, paths.recipes() / f"{given.name}.yaml"]
    if given.suffix not in (".yaml", ".yml"):
        places = places[1:]
    for place in places:
        if place.is_file():
            return place.resolve()
    for run in (given, paths.RUNS / given):
        if (run / "run.yaml").is_file():
            kept = f"{run / 'run.yaml'} is its run file"
            raise ConfigError(
                f"{name!r} is a run: `atropos train --resume {paths.named(run)}` continues it, and {kept}"
            )
    if given.suffix == ".py" and given.is_file():
        raise ConfigError(f"{name!r} is no run file: `atropos train arithmetic --env.file {name}` trains on it")
    if given.is_file():
        raise ConfigError(f"{name!r} is no run file: the name of one ends in .yaml")
    recipes = [path.stem for path in recipe_files()]
    raise ConfigError(f"no run file {name!r}{nearest(given.stem, recipes)}; recipes: {', '.join(recipes)}")


def recipe_files() -> list[Path]:
    """Every recipe, by name."""
    return sorted(paths.recipes().glob("*.yaml"))


class _EachKeyOnce(Loader):
    """Refuses a key that stands twice in one mapping, of which YAML would silently take the last."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)  # before `<<` brings others' keys
        known: set[tuple[str, object]] = set()
        for key, _ in node.value:
            if (key.tag, str(key.value)) in known and key.tag != MERGED:
                why = f"{key.value} stands twice in one mapping"
                raise yaml.constructor.ConstructorError(problem=why, problem_mark=key.start_mark)
            known.add((key.tag, str(key.value)))
        return node


def read_yaml(path: Path) -> Tree:
    """A file's content. Raises ConfigError."""
    try:
        content = yaml.load(text_of(path), _EachKeyOnce)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    return dict(_mapping({} if content is None else content, str(path)))


def normal(content: Mapping[str, Any], path: Path) -> Tree:
    """`content` with `bridge: lora` as a tree, and the files of environments as they stand beside `path`. Raises
    ConfigError for a section that is none, before anything is merged over it.
    """
    tree = {key: value for key, value in content.items() if value is not None or key not in ("bridge", "environments")}
    if isinstance(tree.get("bridge"), str):
        tree["bridge"] = {"kind": tree["bridge"]}
    for section in SECTIONS:
        if tree.get(section) is not None:
            _mapping(tree[section], f"{path}: {section}")
    if tree.get("vllm") is not None:
        each_server(tree["vllm"])  # its ConfigError
    if "kind" in tree.get("bridge", {}):
        check_kind(str(tree["bridge"]["kind"]))
    environments = dict(tree.pop("environments", {}))
    for name, environment in environments.items():
        if environment is None:
            continue
        file = str(_mapping(environment, f"{path}: environments.{name}").get("file", ""))
        if file.endswith(".py"):
            environments[name] = {**environment, "file": str(paths.environment_file(file, path.parent))}
    return {**tree, "environments": environments} if environments else tree


def check_kind(kind: str) -> str:
    """`kind`, if it is a bridge's whose server `atropos train` starts. Raises ConfigError."""
    if kind in MODES and kind not in LAUNCHED:
        raise ConfigError(
            f"bridge {kind}: `atropos train` starts vLLM alone; start each program by hand, as docs/bridges.md"
            " describes"
        )
    if kind not in LAUNCHED:
        raise ConfigError(f"bridge {kind!r} is not one of {', '.join(LAUNCHED)}{nearest(kind, list(LAUNCHED))}")
    return kind


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> Tree:
    """`above` over `below`, key by key. An environment of None is taken out; one with another file keeps the fields
    of the one below apart, for its program may not know them.
    """
    merged = merged_trees(below, above)
    if {"vllm"} <= below.keys() & above.keys():
        merged["vllm"] = merged_servers(below["vllm"] or {}, above["vllm"] or {})
    environments: Tree = {}
    for name, section in merged.get("environments", {}).items():
        if section is None:
            continue
        lower, upper = below.get("environments", {}).get(name), above.get("environments", {}).get(name)
        if lower and upper and upper.get("file", lower.get("file")) != lower.get("file"):
            kept = {key: value for key, value in lower.items() if key not in EnvironmentSection.model_fields}
            section = {**upper, "inherited": {**lower.get("inherited", {}), **kept, **upper.get("inherited", {})}}
        environments[name] = section
    return {**merged, "environments": environments} if environments or "environments" in merged else merged


def is_environment_name(name: str) -> bool:
    """Return whether an environment may be called that: a name that no other service has."""
    return not (name in TAKEN or is_server(name) or is_trainer(name)) and NAME.fullmatch(name) is not None


def with_dataset(content: Mapping[str, object], dataset: str) -> Tree:
    """`content` whose one environment takes that dataset. Raises ConfigError."""
    if dataset == LOCAL_FILES:
        return dict(content)  # the path itself is a flag of the environment
    return merge(content, {"environments": {only_environment(content, "--dataset"): {"dataset": dataset}}})


def only_environment(content: Mapping[str, Any], flag: str) -> str:
    """The name of the one environment of a run. Raises ConfigError."""
    names = list(content.get("environments", {}))
    if len(names) > 1:
        raise ConfigError(
            f"{flag} is for a run with one environment, but this one has {', '.join(names)}: say"
            f" --environments.{names[0]}.{flag.removeprefix('--').removeprefix('env.').replace('-', '_')}"
        )
    if not names:
        raise ConfigError(NO_ENVIRONMENT)
    return str(names[0])


def validated(content: Mapping[str, object], source: str) -> RunFile:
    """The run. Raises ConfigError, whose message names every wrong key."""
    try:
        return RunFile.model_validate(content)
    except ValidationError as error:
        raise ConfigError(f"{source}: " + "; ".join(_problems(error))) from None


def _problems(error: ValidationError) -> Iterator[str]:
    known = [*(".".join(key.path) for key in keys_of(RunFile)), *RunFile.model_fields, "base", *OVERLAYS]
    for problem in error.errors():
        key = ".".join(str(part) for part in problem["loc"] if part not in ("literal['auto']", "list[str]"))
        if key.rpartition(".")[2] in GONE:
            yield f"'{key}' was removed. {INSTEAD}"
        elif problem["type"] == "extra_forbidden":
            yield f"unknown key '{key}'{nearest(key, known)}"
        elif problem["type"] == "missing":
            yield f"{key} is required"
        else:
            shown = "" if isinstance(problem["input"], (dict, list)) else f" (got {problem['input']!r})"
            yield f"{key}: {problem['msg'].removeprefix('Value error, ')}{shown}".removeprefix(": ")


def _last_kind(trees: Sequence[Tree]) -> str | None:
    kinds = [tree["bridge"]["kind"] for tree in trees if "kind" in (tree.get("bridge") or {})]
    return str(kinds[-1]) if kinds else None


def _of_bridge(tree: Tree, kind: str | None) -> Tree:
    """`tree` without the settings of a bridge that was replaced."""
    if (tree.get("bridge") or {}).get("kind", kind) == kind:
        return tree
    return {key: value for key, value in tree.items() if key != "bridge"}


def _mapping(value: object, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{what}: expected keys and values, found {type(value).__name__}")
    return value


def untaught(run: RunFile) -> RunFile:
    """The run without its teacher, for what does not train."""
    own = set(DistillationSettings.model_fields)
    return run.model_copy(
        update={TEACHER: None, "trainer": {key: value for key, value in run.trainer.items() if key not in own}}
    )
