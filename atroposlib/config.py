"""One typed configuration tree per process, filled from flags, a YAML file and environment variables.

Every process declares a `Config` subclass and calls `load_config` before it touches a socket or a device:

    flags  >  --config FILE.yaml  >  environment  >  `defaults` argument  >  field defaults

A flag is the field's name with dashes or underscores, nested trees with dots (`--env.group-size 8`); a boolean
stands alone (`--use-wandb`), takes a value (`--use-wandb false`) or is negated (`--no-use-wandb`). `--dry-run`
prints the resolved tree as YAML and exits 0. Wrong input is one line on stderr and exit code 2: it names the value,
what was expected, and the nearest known key. The value of a secret, which is a SecretStr or has `repr=False`, is
never named, and a variable for one is not empty. flags.py makes the flags and the help, pydantic checks the values.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar, get_args

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, SecretStr, ValidationError
from pydantic.fields import FieldInfo

from atroposlib import flags
from atroposlib.errors import one_line_errors
from atroposlib.files import expect_readable, expect_regular
from atroposlib.flags import ConfigError, Key, keys_of, nearest, subtrees
from atroposlib.yaml_text import read_yaml, text_of

MAX_NAME = 128
P = TypeVar("P", str, Path)


def check_name(name: str) -> str:
    """`name` itself, if it is a valid one: names reach logs, terminals, pages and file names. Raises ValueError."""
    if len(name) > MAX_NAME:
        raise ValueError(f"a name has at most {MAX_NAME} characters, this one has {len(name)}")
    if not name.isprintable():
        raise ValueError(f"a name has at most {MAX_NAME} characters, all of them printable")
    return name


def _to_write(path: P) -> P:
    """`path` with a home directory for `~`, which a shell leaves as it is behind `=`. Raises NotRegularFile."""
    return expect_regular(type(path)(os.path.expanduser(path)))


Name = Annotated[str, AfterValidator(check_name)]
# fields that name a file to write: a device or a link is refused before anything starts
OutputFile = Annotated[Path, AfterValidator(_to_write)]
OutputFileText = Annotated[str, AfterValidator(_to_write)]


@dataclass(frozen=True)
class Reads:
    """Marks a field that names a file or directory to read, which must be there once the program starts; with `names`,
    only a text of which that is true, where others name something else.
    """

    names: Callable[[str], bool] = bool


def to_read(path: P) -> P:
    """`path`, unless something is there that has no end or may wait for ever. Raises NotRegularFile."""
    if os.path.exists(expanded := os.path.expanduser(path)):
        expect_readable(expanded)
    return path


InputPathText = Annotated[str, Reads(), AfterValidator(to_read)]


class Config(BaseModel):
    """Base of every configuration tree: an unknown key is an error."""

    model_config = ConfigDict(
        extra="forbid", validate_default=True, populate_by_name=True, hide_input_in_errors=True, allow_inf_nan=False
    )
    first_flags: ClassVar[Sequence[str]] = ()  # paths of the keys that `--help` shows; all of them where it is empty


class Ambient(str):
    """The value of an environment variable, which other programs may have set: a choice of trees may leave it out."""


C = TypeVar("C", bound=BaseModel)
Tree = dict[str, Any]


def load_config(
    config_cls: type[C],
    argv: Sequence[str] | None = None,
    *,
    prog: str,
    env: Mapping[str, str] | None = None,
    defaults: Mapping[str, object] | None = None,
    epilog: str = "",
    content: Mapping[str, object] | None = None,
    notes: Callable[[C], Sequence[str]] | None = None,
) -> C:
    """Resolve `config_cls` from `argv` (default: the process's own), YAML, `env` (default: os.environ) and `defaults`.

    Exits 0 after `--help`, `--version` or `--dry-run`, 2 on wrong input. `epilog` ends the help; `content` is that of
    the YAML file where it was read before. `--dry-run` prints `notes` as comments behind the configuration.
    """
    with one_line_errors(prog):
        config, dry_run = resolve_config(
            config_cls,
            sys.argv[1:] if argv is None else argv,
            prog=prog,
            env=env,
            defaults=defaults,
            epilog=epilog,
            content=content,
        )
        if dry_run:
            print(config_yaml(config), end="")
            print("".join(f"# {note}\n" for note in (notes(config) if notes else [])), end="")
            raise SystemExit(0)
    return config


def resolve_config(
    config_cls: type[C],
    argv: Sequence[str],
    *,
    prog: str,
    env: Mapping[str, str] | None = None,
    defaults: Mapping[str, object] | None = None,
    epilog: str = "",
    content: Mapping[str, object] | None = None,
) -> tuple[C, bool]:
    """The configuration and whether `--dry-run` was asked for. Raises ConfigError."""
    keys = keys_of(config_cls)
    defaults = merged_trees(_preset(config_cls), defaults or {})
    values, typed = flags.parse(
        keys,
        argv,
        prog=prog,
        about=config_cls.__doc__ or "",
        epilog=epilog,
        defaults=defaults,
        first=config_cls.first_flags if issubclass(config_cls, Config) else (),
    )
    tree: Tree = {}
    for layer in (
        defaults,
        _from_environment(keys, os.environ if env is None else env),
        read_config_file(argv) if content is None else content,
        nested(values),
    ):
        tree = merged_trees(tree, in_place(layer, config_cls))
    try:
        return config_cls.model_validate(tree), "dry_run" in typed
    except ValidationError as error:
        raise ConfigError(_explain(error, keys)) from None


def absent_inputs(config: BaseModel, above: str = "") -> list[str]:
    """Tell each path to read of a configuration and its trees that is not there. Nothing is opened."""
    found: list[str] = []
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        if isinstance(value, BaseModel):
            found += absent_inputs(value, f"{above}{name}.")
        elif value and _reads(field, value) and not os.path.exists(os.path.expanduser(value)):
            found.append(f"{above}{name}: {value} does not exist: correct the path, seen from {Path.cwd()}")
    return found


def _reads(field: FieldInfo, value: str) -> bool:
    marks = [*field.metadata, *(mark for kind in get_args(field.annotation) for mark in get_args(kind))]
    return any(isinstance(mark, Reads) and mark.names(value) for mark in marks)


def read_config_file(argv: Sequence[str]) -> Tree:
    """Return what the `--config` file of `argv` holds; nothing without one. Raises ConfigError."""
    path = flags.early(argv)["config"]
    if not path:
        return {}
    try:
        content = read_yaml(text_of(Path(os.path.expanduser(path))))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"--config {path} is not YAML: byte {error.start + 1} is not UTF-8 text") from None
    except yaml.YAMLError as error:
        # what is wrong and in which line; the line itself may hold a secret
        problem = " ".join(str(getattr(error, "problem", None) or getattr(error, "reason", "unreadable")).split())
        mark = getattr(error, "problem_mark", None)
        place = "" if mark is None else f" (line {mark.line + 1}, column {mark.column + 1})"
        raise ConfigError(f"--config {path} is not YAML: {problem}{place}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path}: expected keys and values at the top, found {type(content).__name__}")
    return content


def config_yaml(config: BaseModel) -> str:
    """The resolved tree as YAML. Secrets are masked; those that are not set are left out, so that a program which reads
    this as its file finds them in its environment variables.
    """
    return yaml.safe_dump(_shown(config), sort_keys=False, allow_unicode=True)


def _shown(config: BaseModel) -> Tree:
    shown = config.model_dump(mode="json")
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        if isinstance(value, BaseModel) and isinstance(shown[name], dict):
            shown[name] = _shown(value)
        elif flags.is_secret(field) and not shown[name]:
            del shown[name]
    return shown


def in_place(values: Mapping[str, object], *trees: type[BaseModel]) -> Tree:
    """`values` with every key at its own place: an alias becomes the field's name, a hoisted one goes down into its
    tree, so that no layer holds two spellings of a value.
    """
    fields = {name: field for tree in trees for name, field in tree.model_fields.items()}
    canonical = {spelling: name for name, field in fields.items() for spelling in flags.names(name, field)}
    hoisted = {key.spellings[0]: key.path for tree in trees for key in keys_of(tree) if "." not in key.spellings[0]}
    placed: Tree = {}
    for key, value in values.items():
        name = canonical.get(key, key)
        if name not in fields and key in hoisted:
            name, inner = hoisted[key]
            value = {inner: value}
        below = subtrees(fields[name]) if name in fields else []
        if below and isinstance(value, Mapping):
            value = in_place(value, *below)
        placed = merged_trees(placed, {name: value})
    return placed


# --- the layers -----------------------------------------------------------------------------------------------------


def _from_environment(keys: Sequence[Key], env: Mapping[str, str]) -> Tree:
    tree: Tree = {}
    for key in keys:
        extra = key.field.json_schema_extra
        variable = extra.get("env") if isinstance(extra, dict) else None
        if not isinstance(variable, str) or variable not in env:
            continue
        if env[variable]:
            tree[".".join(key.path)] = Ambient(env[variable])
        elif key.is_secret and key.field.default is None:
            raise ConfigError(f"{variable} is set, but empty: give it a value, or unset it")
    return nested(tree)


def _preset(tree: type[BaseModel]) -> Tree:
    """Return what a tree sets in its subtrees, `data: Data = Data(name="main")`: setting another field keeps that."""
    found: Tree = {}
    for name, field in tree.model_fields.items():
        below, default = subtrees(field), field.get_default(call_default_factory=True)
        if len(below) == 1 and default is not None:
            given = default.model_dump(exclude_unset=True) if isinstance(default, BaseModel) else {}
            if values := merged_trees(_preset(below[0]), given):
                found[name] = values
    return found


def nested(values: Mapping[str, object]) -> Tree:
    """`{"env.steps": 5}` as `{"env": {"steps": 5}}`."""
    tree: Tree = {}
    for path, value in values.items():
        *above, leaf = path.split(".")
        here = tree
        for name in above:
            here = here.setdefault(name, {})
        here[leaf] = value
    return tree


def merged_trees(below: Mapping[str, Any], above: Mapping[str, Any]) -> Tree:
    """`above` over `below`, key by key, all the way down."""
    return {**below} | {
        key: merged_trees(below[key], value)
        if isinstance(value, Mapping) and isinstance(below.get(key), Mapping)
        else value
        for key, value in above.items()
    }


# --- errors ---------------------------------------------------------------------------------------------------------


def _explain(error: ValidationError, keys: Sequence[Key]) -> str:
    shown = {key.path: key.spellings[0] for key in keys}
    trees = {key.path[:depth] for key in keys for depth in range(len(key.path))}
    known = [spelling for key in keys for spelling in key.spellings] + [".".join(tree) for tree in trees]
    secrets = {key.path for key in keys if key.is_secret}
    problems = []
    for problem in error.errors():
        path = _without_tags(problem["loc"], trees, shown)
        key = shown.get(path) or ".".join(path) or "configuration"
        if problem["type"] == "extra_forbidden":
            problems.append(f"unknown key '{key}'{nearest(key, known)}")
        elif problem["type"] == "missing":
            problems.append(f"--{key.replace('_', '-')} is required")
        else:
            # a secret, what is inside of one, and a tree that has one are not shown
            is_closed = not path or any(path[: len(one)] == one or one[: len(path)] == path for one in secrets)
            is_closed = is_closed or isinstance(problem["input"], (dict, list, SecretStr))
            value = "" if is_closed else f" (got {problem['input']!r})"
            of_tree = problem["type"] == "value_error" and path in trees  # its message names the keys
            message = problem["msg"].removeprefix("Value error, ")
            problems.append(message if of_tree else f"{key}: {message}{value}")
    return "; ".join(problems)


def _without_tags(
    location: tuple[int | str, ...], trees: Set[tuple[str, ...]], leaves: Mapping[tuple[str, ...], str]
) -> tuple[str, ...]:
    """The path of a value: pydantic puts the name of the chosen tree between a choice and its keys."""
    path: tuple[str, ...] = ()
    for depth, part in enumerate(map(str, location), start=1):
        longer = (*path, part)
        if depth == len(location) or path not in trees or longer in trees or longer in leaves:
            path = longer
    return path
