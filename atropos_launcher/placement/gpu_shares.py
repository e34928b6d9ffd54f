"""Who gets which GPU: ways to share a machine's GPUs out to vLLM servers and the trainer, and the first that fits.

no GPU            both on the CPU, in float32
one GPU           both on it, vLLM with 0.4 of its memory
more              vLLM on about half of them by tensor parallelism (1, 2, 4, ...), the trainer's ranks on the others;
                  on fewer, where the trainer needs more by the memory plan. A single copy: both on vLLM's, as many
                  as --tp-size if that is given
several servers   as many GPUs each, unless they say otherwise; the trainer's ranks on the others
several machines  each as above with one server, or all of its GPUs for its one role; each may have another number

plan: run file, GPUs, machines ──▶ candidates, the most balanced first ──▶ Need (gpus.py) ──▶ Placement
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product

from atropos_launcher.placement.gpus import (
    ONE_PROCESS,
    Need,
    Placement,
    ServerPlace,
    ranks_of_single_copy,
    trainer_ranks,
)
from atropos_launcher.placement.machines import THIS_ONE, Machine, Machines
from atropos_launcher.run_file.run_file import RunFile
from atropos_launcher.run_file.servers import is_for_each, server_name
from atroposlib.flags import ConfigError
from example_trainer.memory.plan import UTILIZATION
from example_trainer.ranks.place import ranks_on_cpu
from example_trainer.settings.bridges import MODES
from example_trainer.settings.config import TrainerConfig


def place(
    run: RunFile, gpus: list[str], config: TrainerConfig, need: Need | None = None, machines: Machines = THIS_ONE
) -> Placement:
    """The GPUs of vLLM and of the trainer: the first of `candidates` that fits `need`; the first of all where none
    does. Of several machines these are the first one's. Raises ConfigError where there are too few, and for settings
    that single copy by ranks cannot have.
    """
    training, ranks = len(machines.training), ranks_of_single_copy(config)
    if ranks > 1:
        _expect_by_ranks(run, gpus, ranks)
        run = run.model_copy(update={"vllm": {**run.servers[0], "tensor_parallel_size": ranks}})
    if more := [each for each in machines.all if each.gpus and not gpus]:
        raise ConfigError(
            f"--ray: node {more[0].host} has {more[0].gpus} GPUs, and the node of this command none: run it on a node"
            " with GPUs"
        )
    if not gpus:
        if run.layout.names_gpus:
            raise ConfigError(
                "layout names GPUs, but this machine shows none: remove it, or check CUDA_VISIBLE_DEVICES"
            )
        return Placement((ServerPlace(),) * len(run.servers), (), ((),) * (training - 1), machines.are_apart, ranks)
    typed, tp = config.trainer_ranks, config.tp_size
    shared = ranks_on_cpu(config)  # ranks that need each other
    most = 1 if run.batch_invariant else None if typed == "auto" else max(1, int(typed) // training)
    if machines.several:
        placements = list(_candidates_of_machines(run, gpus, machines, most, tp))
    else:
        placements = [
            replace(placement, by_ranks=ranks) for placement in candidates(run, gpus, most or len(gpus), shared)
        ]
    placements = [placement for placement in placements if trainer_ranks(config, placement) % shared == 0] or placements
    if typed != "auto":
        placements = [
            each for each in placements if min(map(len, each.training)) * training >= int(typed)
        ] or placements
    if need is None:
        return placements[0]
    sized = [_with_shares(placement, need) for placement in placements]
    choice = next((placement for placement in sized if need.fits(placement, without_offload=True)), None)
    return choice or next((placement for placement in sized if need.fits(placement)), sized[0])


def _expect_by_ranks(run: RunFile, gpus: list[str], ranks: int) -> None:
    """Raise ConfigError for what contradicts a single copy with as many trainer ranks."""
    (server,), mode = run.servers, f"single copy with --tp-size {ranks}"
    given = server.get("tensor_parallel_size")
    if given and given != ranks:
        raise ConfigError(
            f"vllm.tensor_parallel_size {given}: {mode} trains each rank of vLLM by one of its own: give"
            f" --vllm.tensor-parallel-size {ranks}, or {ONE_PROCESS}"
        )
    chosen = None if run.dtype == "auto" else run.dtype
    for name, dtype in (("dtype", chosen), ("vllm.dtype", server.get("dtype"))):
        if dtype not in (None, "float32"):
            raise ConfigError(
                f"{name} {dtype}: {mode} trains float32 weights in vLLM's memory: give --{name} float32, or"
                f" {ONE_PROCESS}"
            )
    asked = run.layout
    vllm = gpus[:ranks] if asked.vllm == "auto" else _named(asked.vllm, [ranks])[0]
    trainer = vllm if asked.trainer == "auto" else asked.trainer
    if gpus and (len(vllm) != ranks or trainer != vllm):
        raise ConfigError(
            f"layout: {mode} takes {ranks} GPUs, the same for vLLM and the trainer, but vLLM has {', '.join(vllm)} and"
            f" the trainer {', '.join(trainer)}; the visible GPUs are {', '.join(gpus)}: give both {ranks}, or"
            f" {ONE_PROCESS}"
        )


def candidates(run: RunFile, gpus: list[str], most: int, shared: int = 1) -> Iterator[Placement]:
    """Ways to share the GPUs out, the most balanced first; the trainer gets at most `most`, and a multiple of `shared`.
    Raises ConfigError where there are too few.
    """
    asked, same = run.layout, MODES[run.kind].same_devices
    for sizes in _tensor_parallel_sizes(run, gpus):
        if asked.vllm == "auto":
            mine = [] if asked.trainer == "auto" or same else asked.trainer
            free = [gpu for gpu in gpus if gpu not in mine]
            servers = _dealt(free, sizes)
            if len(sizes) == 1 and not free:
                servers = [gpus[: sizes[0]]]
        else:
            servers = _named(asked.vllm, sizes)
        vllm = [gpu for server in servers for gpu in server]
        if asked.trainer != "auto":
            trainer = list(asked.trainer)
        elif same or len(gpus) == 1:
            trainer = vllm
        else:
            trainer = [gpu for gpu in gpus if gpu not in vllm][:most]
            trainer = trainer[: max(shared, len(trainer) // shared * shared)]
        _check(run, gpus, servers, trainer, sizes)
        yield Placement(tuple(ServerPlace(tuple(server)) for server in servers), tuple(trainer))


def _candidates_of_machines(
    run: RunFile, gpus: list[str], machines: Machines, most: int | None, tp: int
) -> Iterator[Placement]:
    """Ways to share out the GPUs of several machines; those with the same number of GPUs do it in the same way. Raises
    ConfigError that names a machine with too few.
    """
    ways, kinds, servers = dict[tuple[object, ...], list[Placement]](), [], iter(run.servers)
    for machine in machines.all:
        own = gpus if machine is machines.all[0] or machine.gpus is None else [str(at) for at in range(machine.gpus)]
        if not own:
            raise ConfigError(
                f"--ray: node {machine.host} has no GPUs, and the node of this command {len(gpus)}: use fewer nodes"
                " (--ray-nodes), or start its Ray with --num-gpus"
            )
        one = run.model_copy(update={"vllm": next(servers) if machine.serves else run.servers[0]})
        kind = (machine.trains, len(own), machine.serves and one.servers[0].get("tensor_parallel_size"))
        kinds.append(kind)
        if kind not in ways:
            with_one_role = _candidates_apart(one, own, most or len(own), tp, machine)
            try:
                ways[kind] = list(with_one_role if machines.are_apart else candidates(one, own, most or len(own), tp))
            except ConfigError as error:
                raise ConfigError(f"node {machine.host}: {error}") from None
    for chosen in product(*ways.values()):
        way_of = dict(zip(ways, chosen, strict=True))
        each = [way_of[kind] for kind in kinds]
        training = [way.trainer for way in each if way.trainer]
        placed = tuple(server for way in each for server in way.servers)
        yield Placement(placed, training[0], tuple(training[1:]), machines.are_apart)


def _candidates_apart(run: RunFile, gpus: list[str], most: int, tp: int, machine: Machine) -> Iterator[Placement]:
    """A machine's GPUs for its one role, the largest vLLM first. Raises ConfigError for GPUs that are not there."""
    asked = run.layout.trainer if machine.trains else run.layout.vllm
    own = list(gpus) if asked == "auto" or is_for_each(asked) else _named(asked, [1])[0]
    if unknown := [gpu for gpu in own if gpu not in gpus]:
        raise ConfigError(f"layout: there is no GPU {unknown[0]}; the visible GPUs are {', '.join(gpus)}")
    if machine.trains:
        yield Placement((), tuple(own[: max(tp, min(most, len(own)) // tp * tp)]))
        return
    given = run.servers[0].get("tensor_parallel_size")
    for size in [given] if given else [1 << power for power in reversed(range(len(own).bit_length()))]:
        if size > len(own):
            raise ConfigError(f"vllm.tensor_parallel_size {size} needs {size} GPU(s), but a machine has {len(own)}")
        yield Placement((ServerPlace(tuple(own[:size])),), ())


def _tensor_parallel_sizes(run: RunFile, gpus: list[str]) -> list[list[int]]:
    """GPUs of each server, in the ways that are worth trying. Raises ConfigError where there are too few."""
    given = [server.get("tensor_parallel_size") for server in run.servers]
    asked = run.layout.vllm
    if is_for_each(asked) and len(asked) != len(given):
        raise ConfigError(f"layout.vllm: {len(asked)} lists of GPUs, but this run has {len(given)} vLLM server(s)")
    if all(given) and (asked != "auto" or len(given) == 1):
        return [[int(size) for size in given if size]]
    if asked != "auto":
        if len(given) == 1 and not is_for_each(asked):
            return [[len(asked)]]
        counts = [len(part) for part in asked] if is_for_each(asked) else [len(asked) // len(given)] * len(given)
        return [[int(size or count) for size, count in zip(given, counts, strict=False)]]
    fixed, free = sum(int(size) for size in given if size), sum(not size for size in given)
    powers = [1 << power for power in range(len(gpus).bit_length() if free else 1)]
    totals = {power: fixed + power * free for power in powers if fixed + power * free < max(2, len(gpus))}
    if not totals:
        raise ConfigError(
            f"{len(given)} vLLM servers and a trainer need {fixed + free + 1} GPUs, but the visible ones are"
            f" {', '.join(gpus)}: lower the number of servers (--vllm.count), or assign shared GPUs with `layout`"
        )
    half = -(-len(gpus) // 2)
    ordered = sorted(totals, key=lambda power: (totals[power] > half, abs(totals[power] - half)))
    return [[int(size or power) for size in given] for power in ordered]


def _dealt(gpus: list[str], sizes: list[int]) -> list[list[str]]:
    """The first ones to the first server, and so on."""
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [gpus[start : start + size] for start, size in zip(starts, sizes, strict=True)]


def _named(asked: list[str] | list[list[str]], sizes: list[int]) -> list[list[str]]:
    """The GPUs of each server, as `layout.vllm` names them. Raises ConfigError where there are more or fewer."""
    if is_for_each(asked):
        return [[*part] for part in asked]
    names = [str(gpu) for gpu in asked]
    if len(sizes) == 1:
        return [names]
    if sum(sizes) != len(names):
        raise ConfigError(
            f"layout.vllm: {len(names)} GPUs ({', '.join(names)}) are not {' + '.join(map(str, sizes))}, one for each"
            f" tensor-parallel rank of {len(sizes)} vLLM servers: name them as in [[0, 1], [2]]"
        )
    return _dealt(names, sizes)


def _with_shares(placement: Placement, need: Need) -> Placement:
    """With the share of its GPUs that each server takes."""
    shares = [need.share(placement, index) for index in range(len(placement.servers))]
    servers = [
        ServerPlace(server.gpus, None if share == UTILIZATION else share)
        for server, share in zip(placement.servers, shares, strict=True)
    ]
    return replace(placement, servers=tuple(servers))


def _check(run: RunFile, gpus: list[str], servers: list[list[str]], trainer: list[str], sizes: list[int]) -> None:
    shown = f"the visible GPUs are {', '.join(gpus)}"
    vllm = [gpu for server in servers for gpu in server]
    if unknown := [gpu for gpu in [*vllm, *trainer] if gpu not in gpus]:
        raise ConfigError(f"layout: there is no GPU {unknown[0]}; {shown}")
    for owner, own in (("vllm", vllm), ("trainer", trainer)) if len(servers) == 1 else (("trainer", trainer),):
        if twice := [gpu for at, gpu in enumerate(own) if gpu in own[:at]]:
            raise ConfigError(f"layout.{owner}: GPU {twice[0]} stands twice: name each once")
    for one, other in combinations(range(len(servers)), 2):
        if both := [gpu for gpu in servers[one] if gpu in servers[other]]:
            raise ConfigError(
                f"layout.vllm: the servers {one + 1} and {other + 1} both have GPU {both[0]}: give it to one of them"
            )
    if not trainer:
        raise ConfigError(
            f"layout: vLLM takes {', '.join(vllm)}, which leaves none for the trainer; {shown}. Give it fewer"
            " (--vllm.tensor-parallel-size, --vllm.count, --layout.vllm)"
        )
    for index, (server, size) in enumerate(zip(servers, sizes, strict=True)):
        given = run.servers[index].get("tensor_parallel_size")
        if len(server) < size or (given and len(server) != given):
            which, who = ("", "vLLM") if len(servers) == 1 else (f"{index + 1}.", server_name(index, len(servers)))
            raise ConfigError(
                f"vllm.{which}tensor_parallel_size {size} takes exactly {size} GPU(s), but {who} has"
                f" {', '.join(server) or 'none'}; {shown}"
            )
