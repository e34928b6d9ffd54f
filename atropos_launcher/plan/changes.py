"""The changes that flags of sections make to a run file. Each function checks flags against what the file has, and
returns the changes of one section, which are merged over the file at once.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from atropos_launcher.placement.machines import Machines
from atropos_launcher.run_file.run_file import is_environment_name, only_environment
from atropos_launcher.run_file.servers import (
    Servers,
    Tree,
    expect_one_each,
    merged_servers,
    on_machines,
    with_flag,
    with_ports,
)
from atroposlib.config import merged_trees, nested
from atroposlib.flags import ConfigError, Setting
from example_trainer.settings.bridges import MODES, Mode

LAUNCHERS_OWN = ("file", "count", "from_hub")  # of an environment's section: not for its program
Sections = Mapping[str, Sequence[Setting]]  # the flags of each section, as they were typed


def changed_servers(
    content: Tree, typed: Sections, machines: Machines, tp_size: int | None, ports: tuple[int, ...] | None
) -> Servers:
    """The vLLM servers of the file as flags change them: those for every server before those for one. Raises
    ConfigError.
    """
    servers: Servers = content.get("vllm") or {}
    serving = len(machines.serving) if machines.several else None
    if serving is not None:
        _expect_several(content, machines)
        servers = on_machines(servers, serving)
    of_all, of_one = _vllm_flags(typed["vllm"])
    if _trainer_decides_tp(content, typed["trainer"], tp_size):
        of_all = {"tensor_parallel_size": None, **of_all}
    servers = merged_servers(servers, of_all)
    for number, key, value in of_one:
        servers = with_flag(servers, number, key, value)
    if serving is not None:
        expect_one_each(servers, serving)
    return servers if ports is None else with_ports(servers, ports)


def _expect_several(content: Tree, machines: Machines) -> None:
    """Raise ConfigError if several machines serve, but the bridge feeds one server."""
    mode = _mode(content, "broadcast")
    if machines.several and mode is not None and not mode.feeds_several:
        raise ConfigError(
            f"a run on {len(machines.all)} Ray nodes needs a bridge that feeds several vLLM servers, and"
            f" {mode.shown()} feeds one: choose --bridge broadcast, or --ray-nodes 1"
        )


def _trainer_decides_tp(content: Tree, typed: Sequence[Setting], tp_size: int | None) -> bool:
    """Return whether a typed --tp-size decides vLLM's tensor-parallel size: that of a single copy
    (placement/gpus.py), which has as many.
    """
    mode = _mode(content)
    ranks = texts(typed).get("tp_size") or tp_size
    return mode is not None and mode.same_devices and ranks not in (None, 1, "1")


def _mode(content: Tree, otherwise: str = "") -> type[Mode] | None:
    return MODES.get(str((content.get("bridge") or {}).get("kind", otherwise)))


def _vllm_flags(typed: Sequence[Setting]) -> tuple[Tree, list[tuple[int, str, object]]]:
    """The flags for every server, and those for one: its number, the key and the value."""
    of_all: Tree = {}
    of_one: list[tuple[int, str, object]] = []
    for flag in typed:
        number, _, key = flag.name.partition(".")
        if key and number.isdecimal():
            of_one.append((int(number), key, flag.value))
        else:
            of_all = merged_trees(of_all, {flag.name: flag.value})
    return of_all, of_one


def changed_environments(
    content: Tree, typed: Sections, dataset_path: Path | None, *, several_servers: bool
) -> tuple[dict[str, Tree], dict[str, list[Setting]]]:
    """Return what flags change in the sections of environments, and the flags of their programs. Raises ConfigError for
    an environment that is not there.
    """
    changes = _new_environments(content, typed)
    known = {"environments": content.get("environments", {}) | changes}
    programs: dict[str, list[Setting]] = {}
    for name, flag in _environment_flags(typed, known):
        connection = flag.name.removeprefix("openai.") if flag.name.startswith("openai.") else None
        if flag.name in LAUNCHERS_OWN:
            changes.setdefault(name, {})[flag.name] = _resolved(flag) if flag.name == "file" else flag.text
        elif connection is None:
            programs.setdefault(name, []).append(replace(flag, typed=f"env.{flag.name}"))
        elif several_servers:  # a flag is of one server only
            changes.setdefault(name, {}).setdefault("openai", {})[connection] = flag.value
        else:
            programs.setdefault(name, []).append(replace(flag, typed=flag.name))
    if dataset_path is not None:
        changes.setdefault(only_environment(known, "--dataset-path"), {})["dataset_path"] = str(dataset_path)
    return changes, programs


def named_by_file(content: Tree, changed: Tree) -> dict[str, str]:
    """Return the environments of `content` whose program `changed` replaces, with their new names, those of the files.
    One whose file has no name for an environment, or that of another, keeps its own.
    """
    before, after = content.get("environments", {}), changed.get("environments", {})
    names: dict[str, str] = {}
    for name, section in after.items():
        own = Path(str(section.get("file", ""))).stem.removesuffix("_server")
        replaced = name in before and section.get("file") != before[name].get("file")
        if replaced and is_environment_name(own) and own not in {*after, *names.values()}:
            names[name] = own
    return names


def _new_environments(content: Tree, typed: Sections) -> dict[str, Tree]:
    """The environments that the file does not have, by a flag that names their program."""
    known, new = content.get("environments", {}), dict[str, Tree]()
    for flag in typed["env"]:
        if flag.typed == "file" and flag.text and not known and not new:
            new[Path(flag.text).stem] = {"file": flag.text}
    for flag in typed["environments"]:
        name, _, key = flag.typed.partition(".")
        if key == "file" and name not in known:
            new[name] = {"file": flag.text}
    return new


def _environment_flags(typed: Sections, content: Mapping[str, Any]) -> Iterator[tuple[str, Setting]]:
    """Every flag for an environment, with its name. Raises ConfigError where there is no such environment."""
    for flag in typed["env"]:
        yield only_environment(content, f"--env.{flag.typed}"), flag
    known = content["environments"]
    for flag in typed["environments"]:
        name, _, key = flag.typed.partition(".")
        if not key:
            raise ConfigError(f"--environments.{flag.typed} does not name a field; write --environments.NAME.FIELD")
        if name not in known:
            raise ConfigError(f"--environments.{flag.typed}: the environments of this run are {', '.join(known)}")
        yield name, replace(flag, typed=key)


def _resolved(flag: Setting) -> str | None:
    file = Path(flag.text or "")
    return str(file.resolve()) if file.is_file() else flag.text


def section_values(section: str, typed: Sequence[Setting]) -> Tree:
    """Return what flags set in a section whose keys are the run file's own."""
    tree: Tree = {}
    for flag in typed:
        tree = merged_trees(tree, nested({f"{section}.{flag.name}": flag.value}))
    return tree


def texts(typed: Sequence[Setting]) -> dict[str, str | None]:
    """Return what the flags of a section set, by name, as it was typed last."""
    return {flag.name: flag.text for flag in typed}
