"""What a run keeps of its settings: run.yaml, and each program's configuration without its secrets."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import yaml

from atropos_launcher import paths
from atropos_launcher.run_file.run_file import EnvironmentSection, RunFile
from atropos_launcher.run_file.servers import Tree
from atroposlib.config import Config
from atroposlib.flags import ConfigError, Setting, keys_of, parse

MASKED = "**********"  # a secret in a configuration that a program prints


def document(
    run: RunFile,
    trainer: tuple[Config, Sequence[str]],
    api: tuple[Config, Sequence[str]],
    environments: Mapping[str, tuple[Tree, Sequence[Setting]]],
) -> Tree:
    """The run as a file by which it can be repeated: what was chosen, and no more. Every program comes with its
    resolved configuration and the flags that were typed for it; an environment's is what `--dry-run` prints.
    """
    kept = run.model_dump(mode="json", exclude_defaults=True, exclude={"name", "environments"})
    kept["trainer"] = run.trainer | typed_values(*trainer)
    kept["bridge"] = run.bridge | kept["trainer"].pop("bridge", {})
    kept["api"] = run.api | typed_values(*api)
    kept["environments"] = {
        name: _environment(section, *environments[name]) for name, section in run.environments.items()
    }
    return {key: kept[key] for key in RunFile.model_fields if kept.get(key) not in ({}, None)}


def _environment(section: EnvironmentSection, resolved: Tree, typed: Sequence[Setting]) -> Tree:
    """One environment's section."""
    kept = section.model_dump(include={"file", "count", "from_hub"}, exclude_defaults=True)
    file = Path(section.file)
    if file.is_relative_to(paths.environments()):
        kept["file"] = f"{paths.ENVIRONMENTS}/{file.relative_to(paths.environments())}"
    typed_keys = (
        flag.name[4:].partition(".")[0] for flag in typed if flag.name.startswith("env.")
    )  # of a tree, its name
    chosen = {*section.own, *section.inherited, *typed_keys}
    kept |= {key: value for key, value in resolved["env"].items() if key in chosen}
    server = resolved["openai"][0] if isinstance(resolved["openai"], list) else resolved["openai"]
    connection = {*section.openai, *(flag.name[7:] for flag in typed if flag.name.startswith("openai."))}
    if connection:
        kept["openai"] = {key: value for key, value in server.items() if key in connection}
    return kept


def typed_paths(config: Config, typed: Sequence[str]) -> list[str]:
    """Return the settings of a configuration that flags set."""
    values, _ = parse(keys_of(type(config)), typed, prog="", about="")
    return list(values)


def typed_values(config: Config, typed: Sequence[str]) -> Tree:
    """Collect what flags set in a configuration, with the values that they came to."""
    found: Tree = {}
    for path in typed_paths(config, typed):
        source, target = config.model_dump(mode="json"), found
        *above, leaf = path.split(".")
        for part in above:
            source, target = source[part], target.setdefault(part, {})
        target[leaf] = source[leaf]
    return found


def dumped(content: object) -> str:
    """Write `content` as YAML."""
    plain = list(content) if isinstance(content, tuple) else content
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=120)


def without_secrets(text: str, given: Mapping[str, object], section: str, typed: Collection[str] = frozenset()) -> str:
    """A configuration without its masked secrets: a service finds them in its environment variables. Raises
    ConfigError for one that the run itself holds, or that was `typed`, as the service would not get it.
    """

    def cleared(value: object, own: object, above: str) -> object:
        if isinstance(value, list):
            owners = own if isinstance(own, list) and len(own) == len(value) else [own] * len(value)
            return [cleared(item, owner, above) for item, owner in zip(value, owners, strict=True)]
        if not isinstance(value, Mapping):
            return value
        kept = {}
        for key, inner in value.items():
            given_here = own.get(key) if isinstance(own, Mapping) else None
            path = f"{above}{key}"
            if inner != MASKED:
                kept[key] = cleared(inner, given_here, f"{path}.")
            elif given_here is not None or path in typed:
                raise ConfigError(f"{section}.{path}: a run keeps no secrets; give it by its environment variable")
        return kept

    return dumped(cleared(yaml.safe_load(text), given, ""))
