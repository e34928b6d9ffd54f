"""One typed configuration tree per process, filled from flags, a YAML file and environment variables.

Every process declares a `Config` subclass and calls `load_config` before it touches a socket or a device:

    flags  >  --config FILE.yaml  >  environment  >  `defaults` argument  >  field defaults

A flag is the field's name with dashes or underscores, nested trees with dots (`--env.group-size 8`); a boolean
stands alone (`--use-wandb`), takes a value (`--use-wandb false`) or is negated (`--no-use-wandb`). `--dry-run`
prints the resolved tree as YAML and exits 0. Wrong input is one line on stderr and exit code 2: it names the value,
what was expected, and the nearest known key. The value of a secret, which is a SecretStr or has `repr=False`, is
never named, and a variable for one is not empty. pydantic-settings parses the flags, pydantic checks the values.
"""

import difflib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, NoReturn, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import AfterValidator, AliasChoices, BaseModel, ConfigDict, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, CliSettingsSource, SettingsConfigDict, SettingsError

from atroposlib.files import expect_regular, open_regular


def _regular_text(path: str) -> str:
    expect_regular(Path(path))
    return path


# fields that name a file to write: a device or a link is refused before anything starts
OutputFile = Annotated[Path, AfterValidator(expect_regular)]
OutputFileText = Annotated[str, AfterValidator(_regular_text)]


class Config(BaseModel):
    """Base of every configuration tree: an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", validate_default=True, populate_by_name=True, hide_input_in_errors=True)


C = TypeVar("C", bound=BaseModel)


class ConfigError(ValueError):
    """A configuration that cannot be used; the message is one line for the person who typed it."""


def load_config(
    config_cls: type[C],
    argv: Sequence[str] | None = None,
    *,
    prog: str,
    env: Mapping[str, str] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> C:
    """Resolve `config_cls` from `argv` (default: the process's own), YAML, `env` (default: os.environ) and `defaults`.

    Exits 0 after `--help` or `--dry-run`, 2 on wrong input.
    """
    try:
        config, dry_run = resolve_config(
            config_cls, sys.argv[1:] if argv is None else argv, prog=prog, env=env, defaults=defaults
        )
    except ConfigError as error:
        _exit(f"{prog}: error: {error}")
    if dry_run:
        print(config_yaml(config), end="")
        raise SystemExit(0)
    return config


def resolve_config(
    config_cls: type[C],
    argv: Sequence[str],
    *,
    prog: str,
    env: Mapping[str, str] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> tuple[C, bool]:
    """The configuration and whether `--dry-run` was asked for. Raises ConfigError."""
    flags = dict(_flag_fields(config_cls))
    arguments, yaml_path, dry_run = _normalise(argv, flags)
    tree: dict[str, Any] = {}
    for layer in (
        defaults or {},
        _from_environment(config_cls, os.environ if env is None else env),
        _from_yaml(yaml_path),
    ):
        tree = _merge(tree, layer, config_cls)
    tree = _merge(tree, _from_flags(config_cls, arguments, prog), config_cls)
    try:
        return config_cls.model_validate(tree), dry_run
    except ValidationError as error:
        raise ConfigError(_explain(error, config_cls)) from None


def config_yaml(config: BaseModel) -> str:
    """The resolved tree as YAML; secrets are masked."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def write_config(config: BaseModel, path: Path) -> None:
    """Keep the resolved configuration of a run beside its logs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_regular(path, "w") as file:
        file.write(config_yaml(config))


def known_keys(config_cls: type[BaseModel]) -> list[str]:
    """Every spelling of the keys at the top of a tree."""
    return [spelling for name, field in config_cls.model_fields.items() for spelling in _names(name, field)]


def nearest(name: str, known: Sequence[str]) -> str:
    """`; did you mean 'x'?` for the closest known key, or an empty string."""
    found = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean '{found[0]}'?" if found else ""


# --- flags ----------------------------------------------------------------------------------------------------------


def _names(name: str, field: FieldInfo) -> list[str]:
    alias = field.validation_alias
    choices = (
        [str(choice) for choice in alias.choices]
        if isinstance(alias, AliasChoices)
        else [alias]
        if isinstance(alias, str)
        else []
    )
    return list(dict.fromkeys([name, *choices]))


def _subtree(field: FieldInfo) -> type[BaseModel] | None:
    annotation = field.annotation
    options = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return next((option for option in options if isinstance(option, type) and issubclass(option, BaseModel)), None)


def _flag_fields(config_cls: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in config_cls.model_fields.items():
        subtree = _subtree(field)
        for spelling in _names(name, field):
            if subtree is not None:
                yield from _flag_fields(subtree, f"{prefix}{spelling}.")
            yield prefix + spelling, field


def _is_bool(field: FieldInfo) -> bool:
    return field.annotation is bool or bool in get_args(field.annotation)


def _normalise(argv: Sequence[str], flags: Mapping[str, FieldInfo]) -> tuple[list[str], Path | None, bool]:
    """Flags spelled with underscores and explicit values, the YAML path, and whether it is a dry run."""
    arguments: list[str] = []
    yaml_path: Path | None = None
    dry_run = False
    rest = list(argv)
    while rest:
        token = rest.pop(0)
        if token in ("-h", "--help"):
            arguments.append("--help")
            continue
        if not token.startswith("--"):
            raise ConfigError(f"unexpected argument {token!r}: flags start with '--'")
        spelled, has_value, value = token[2:].partition("=")
        key = spelled.replace("-", "_")
        if key == "dry_run" and key not in flags:
            dry_run = True
            continue
        if key == "config" and key not in flags:
            if not has_value and not rest:
                raise ConfigError("--config expects a YAML file")
            yaml_path = Path(value if has_value else rest.pop(0))
            continue
        leading, _, leaf = key.rpartition(".")
        positive = f"{leading}.{leaf[3:]}".lstrip(".") if leaf.startswith("no_") else ""
        if key not in flags and positive in flags and _is_bool(flags[positive]) and not has_value:
            arguments += [f"--{positive}", "false"]
            continue
        if key not in flags:
            raise ConfigError(f"unknown flag --{spelled}{nearest(key, list(flags))} (--help lists all)")
        if not has_value:
            if _is_bool(flags[key]) and (not rest or rest[0].startswith("--")):
                value = "true"
            elif not rest or (rest[0].startswith("--") and rest[0][2:3].isalpha() and " " not in rest[0]):
                raise ConfigError(f"--{spelled} expects a value; one that starts with -- is given as --{spelled}=VALUE")
            else:
                value = rest.pop(0)
        arguments.append(f"--{key}={value}")
    return arguments, yaml_path, dry_run


def _from_flags(config_cls: type[BaseModel], arguments: list[str], prog: str) -> dict[str, Any]:
    settings = type(
        config_cls.__name__,
        (config_cls, BaseSettings),
        {
            "__doc__": config_cls.__doc__,
            "model_config": SettingsConfigDict(
                extra="forbid", cli_prog_name=prog, env_prefix="UNUSED__", cli_avoid_json=True
            ),
        },
    )
    try:
        source = CliSettingsSource[Any](settings, cli_parse_args=arguments, cli_parse_none_str="None")
        return source()
    except SettingsError as error:  # a list is also read as JSON; this one is neither
        raise ConfigError(f"{error} ({error.__cause__})") from None


# --- the other layers -----------------------------------------------------------------------------------------------


def _from_environment(config_cls: type[BaseModel], env: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, field in config_cls.model_fields.items():
        subtree = _subtree(field)
        extra = field.json_schema_extra
        variable = extra.get("env") if isinstance(extra, dict) else None
        if isinstance(variable, str) and env.get(variable):
            found[name] = env[variable]
        elif isinstance(variable, str) and variable in env and _is_secret(field) and field.default is None:
            raise ConfigError(f"{variable} is set, but empty: give it a value, or unset it")
        elif subtree is not None and (nested := _from_environment(subtree, env)):
            found[name] = nested
    return found


def _from_yaml(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path} is not YAML: {_where(error)}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path}: expected keys and values at the top, found {type(content).__name__}")
    return content


def _where(error: yaml.YAMLError) -> str:
    """What is wrong and in which line; the line itself may hold a secret."""
    mark = getattr(error, "problem_mark", None)
    problem = " ".join(str(getattr(error, "problem", None) or getattr(error, "reason", "unreadable")).split())
    return problem if mark is None else f"{problem} (line {mark.line + 1}, column {mark.column + 1})"


def _merge(below: Mapping[str, Any], above: Mapping[str, Any], config_cls: type[BaseModel] | None) -> dict[str, Any]:
    """`above` over `below`, keys brought to the field's own name so that an alias cannot stand beside it."""
    fields = config_cls.model_fields if config_cls is not None else {}
    canonical = {spelling: name for name, field in fields.items() for spelling in _names(name, field)}
    merged = dict(below)
    for key, value in above.items():
        name = canonical.get(key, key)
        subtree = _subtree(fields[name]) if name in fields else None
        if isinstance(value, Mapping):
            under = merged.get(name)
            merged[name] = _merge(under if isinstance(under, Mapping) else {}, value, subtree)
        else:
            merged[name] = value
    return merged


def _explain(error: ValidationError, config_cls: type[BaseModel]) -> str:
    fields = dict(_flag_fields(config_cls))
    known = list(fields)
    secrets = {key for key, field in fields.items() if _is_secret(field)}
    problems = []
    for problem in error.errors():
        key = ".".join(str(part) for part in problem["loc"]) or "configuration"
        if problem["type"] == "extra_forbidden":
            problems.append(f"unknown key '{key}'{nearest(key, known)}")
        elif problem["type"] == "missing":
            problems.append(f"--{key.replace('_', '-')} is required")
        else:
            is_closed = isinstance(problem["input"], (dict, list, SecretStr)) or _may_hold(problem["loc"], secrets)
            shown = "" if is_closed else f" (got {problem['input']!r})"
            problems.append(f"{key}: {problem['msg'].removeprefix('Value error, ')}{shown}")
    return "; ".join(problems)


def _is_secret(field: FieldInfo) -> bool:
    return field.repr is False or SecretStr in (field.annotation, *get_args(field.annotation))


def _may_hold(location: tuple[int | str, ...], secrets: Set[str]) -> bool:
    """Whether a value at this place is a secret, is inside of one, or is a tree that has one."""
    names = [str(part) for part in location if not isinstance(part, int)]
    inner = {".".join(names[: count + 1]) for count in range(len(names))}
    return bool(inner & secrets) or any(secret.startswith(".".join(names) + ".") for secret in secrets) or not names


def _exit(message: str) -> NoReturn:
    print(message, file=sys.stderr)
    raise SystemExit(2)
