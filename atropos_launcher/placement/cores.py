"""Shares the CPU cores of a run out, as `layout.cores` of its run file asks (run_file/core_settings.py).

vLLM's servers, their tensor-parallel ranks, and the trainer's ranks share theirs out evenly, a thread per core;
environments run on all of theirs.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from typing import ParamSpec, TypeVar

from atropos_launcher.run_file.core_settings import CoreLayout
from atropos_launcher.run_file.servers import is_for_each
from atroposlib.flags import ConfigError
from example_trainer.settings.cpu_cores import Cores, expect_cores, shared_out, shown_cores

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class CorePlacement:
    """The cores of each service; none where it may use all."""

    vllm: tuple[Cores, ...]  # of each server
    trainer: Cores = ()
    environments: Cores = ()
    api: Cores = ()
    teacher: Cores = ()


def place_cores(layout: CoreLayout, servers: int, usable: Iterable[int]) -> CorePlacement:
    """Shares the usable cores out. Raises ConfigError for cores that are not there, too many, or two servers' at
    once.
    """
    free = sorted(usable)
    asked: dict[str, object] = {name: getattr(layout, name) for name in CoreLayout.model_fields}
    for name, value in asked.items():
        for cores in _sets(value):
            _checked(f"layout.cores.{name}", expect_cores, tuple(cores), {*free})
    named = {core for value in asked.values() for cores in _sets(value) for core in cores}
    left = [core for core in free if core not in named]
    numbers = {name: value for name, value in asked.items() if isinstance(value, int)}
    if (wanted := sum(numbers.values())) > len(left):
        parts = " and ".join(f"{name} {number}" for name, number in numbers.items())
        raise ConfigError(
            f"layout.cores asks for {wanted} cores ({parts}), but only {len(left)} of {shown_cores(free)} are left: "
            "lower"
            " the numbers, or name sets such as 0-3, which may overlap"
        )
    of_services: dict[str, Cores] = {}
    for name, value in asked.items():
        count = numbers.get(name, 0)
        taken, left = left[:count], left[count:]
        of_services[name] = tuple(taken) if count else tuple(sorted({*chain(*_sets(value))}))
    return CorePlacement(
        _of_servers(layout, of_services["vllm"], servers),
        of_services["trainer"],
        of_services["environments"],
        of_services["api"],
        of_services["teacher"],
    )


def thread_bindings(cores: Cores, ranks: int, server: str) -> str:
    """vLLM's VLLM_CPU_OMP_THREADS_BIND: `0-1|2-3` for two ranks. Raises ConfigError for a number that does not
    divide.
    """
    owners = f"{ranks} tensor-parallel ranks of {server}"
    return "|".join(map(shown_cores, _checked("layout.cores.vllm", shared_out, cores, ranks, owners)))


def expect_ranks_share(cores: Cores, ranks: int) -> None:
    """Raise ConfigError for cores that the trainer's ranks cannot share out."""
    if cores:
        _checked("layout.cores.trainer", shared_out, cores, ranks, f"{ranks} trainer ranks")


def _of_servers(layout: CoreLayout, cores: Cores, servers: int) -> tuple[Cores, ...]:
    if not cores:
        return ((),) * servers
    if not is_for_each(layout.vllm):
        return tuple(_checked("layout.cores.vllm", shared_out, cores, servers, f"{servers} vLLM servers"))
    sets = _sets(layout.vllm)
    if len(sets) != servers:
        raise ConfigError(f"layout.cores.vllm: {len(sets)} sets, but this run has {servers} vLLM server(s)")
    for one, other in combinations(range(servers), 2):
        if both := {*sets[one]} & {*sets[other]}:
            raise ConfigError(
                f"layout.cores.vllm: the servers {one + 1} and {other + 1} both have core {min(both)}, but they "
                "compute at the same time: give it to one of them"
            )
    return tuple(tuple(sorted(one)) for one in sets)


def _checked(key: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return what `function` returns; its ValueError becomes a ConfigError that names the key."""
    try:
        return function(*args, **kwargs)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from None


def _sets(value: object) -> Sequence[Sequence[int]]:
    """The sets that were named: one, or one for each server."""
    if not isinstance(value, list):
        return []
    return value if is_for_each(value) else [value]
