"""A Ray cluster as the machines of a run (`--ray`): who they are, whether they suit it, and what it reserves there.

    connect: the nodes, this one first ──▶ Machines ──▶ plan ──▶ expect_ready: Python, checkout, model on each
                                                             └─▶ reserve: a placement group on each node

All of it runs before the first service starts, and names the node, the value and the remedy where something is missing.
The launcher holds the placement groups: Ray frees them when it ends. A cluster by `--ray local` ends with it, too.
"""

import logging
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Self

from atropos_launcher.paths import PACKAGES
from atropos_launcher.placement.machines import LOOPBACK, THIS_ONE, Machine, Machines, check_roles
from atroposlib import extras
from atroposlib.errors import reaching
from atroposlib.flags import ConfigError

LOCAL, AUTO = "local", "auto"
NAMESPACE = "atropos"  # in which services find the run's placement groups
LABEL = "atropos"  # of a node that has one role: ray start --labels atropos=vllm
JOIN_S = 600.0  # for the nodes that --ray-nodes asks for
PROBE_S = 120.0  # Ray starts a process on each node for it
RESERVE_S = 20.0
REACH_S = 5.0
ON_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # of ray/_private/ray_constants.py: no other machine joins
SKIP = "RAY_DEDUP_LOGS_SKIP_REGEX"
STORE_BYTES = 80_000_000  # the least that Ray takes: nothing large travels in it


@dataclass(frozen=True)
class Nodes:
    """How many nodes `--ray-nodes` asks for: `2` with both roles, or `4+1`, where one serves what four train."""

    count: int | None = None  # None: all that are there
    training: int | None = None

    @classmethod
    def of(cls, typed: str | None) -> Self:
        """Read the flag."""
        first, plus, second = (typed or "").partition("+")
        return cls(int(first) + int(second), int(first)) if plus else cls(int(first) if first else None)

    def taken(self, found: Sequence[Machine]) -> tuple[Machine, ...]:
        """The first of `found`, with their roles. Raises ConfigError unless these make a run."""
        taken = tuple(found[: self.count])
        if len(taken) == 1:
            return THIS_ONE.all
        if self.training is not None:
            last = self.training
            taken = tuple(replace(each, trains=at < last, serves=at >= last) for at, each in enumerate(taken))
        check_roles(Machines(taken), "--ray")
        return taken


@dataclass(frozen=True)
class Facts:
    """What a node says of itself."""

    python: str
    ray: str
    has_python: bool  # the launcher's, under the same path
    has_checkout: bool
    has_model: bool


def join(address: str, local: bool = False) -> Any:
    """Connect this process to a cluster, or start one here. Returns the module `ray`. Raises ConfigError."""
    extras.need("ray", "--ray", "ray")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported to anyone
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # GPUs are the memory plan's affair
    if local:  # whoever reaches a cluster can run code in it
        os.environ |= {**ON_LOOPBACK, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    os.environ[SKIP] = "."  # of its own lines on stdout, which hold twenty of a log where a node dies; read at import
    import ray

    del os.environ[SKIP]
    own = {"address": "local", "include_dashboard": False, "object_store_memory": STORE_BYTES}  # beside any other here
    here = own if local else {"address": address}
    try:
        ray.init(**here, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except (ray.exceptions.RayError, RuntimeError, ConnectionError, ValueError) as error:
        raise ConfigError(f"--ray {address}: {_remedied(str(error))}") from None
    return ray


def _remedied(error: str) -> str:
    if "ersion mismatch" in error:
        return f"{' '.join(error.split())}; install the cluster's versions here, or these there"
    first = error.strip().splitlines()[0] if error.strip() else "no answer"
    return f"{first}: start a node of the cluster on this machine (`ray start`), or give --ray local"


def planned(nodes: Nodes, silence_s: float) -> Machines:
    """The machines of a dry run that asks no cluster."""
    names = [f"node-{number}" for number in range(1, 1 + (nodes.count or 1))]
    return Machines(nodes.taken([Machine(name) for name in names]), silence_s, ray=names[0], group="atropos")


def connect(address: str, nodes: Nodes, silence_s: float) -> Machines:
    """The machines of a cluster, this one first. Raises ConfigError."""
    expect_reachable(address)
    ray = join(address, local=address == LOCAL)
    context = ray.get_runtime_context()
    mine = context.get_node_id()
    found = _nodes(ray, nodes.count or 1, address)
    found.sort(key=lambda node: (node["NodeID"] != mine, node["NodeManagerAddress"]))
    taken = nodes.taken([_machine(node) for node in found])
    return Machines(taken, silence_s, ray=context.gcs_address, group=f"atropos-{os.getpid()}")


def _machine(node: Mapping[str, Any]) -> Machine:
    role, host = (node.get("Labels") or {}).get(LABEL, ""), node["NodeManagerAddress"]
    if role not in ("", "trainer", "vllm"):
        raise ConfigError(
            f"--ray: node {host} has the label {LABEL}={role}: it is `trainer` or `vllm`, or leave it out for both"
        )
    return Machine(host, role in ("", "trainer"), role in ("", "vllm"), int(node["Resources"].get("GPU", 0)))


def _nodes(ray: Any, least: int, address: str) -> list[dict[str, Any]]:
    """The nodes that live, once there are `least`."""
    deadline, told = time.monotonic() + JOIN_S, False
    while True:
        found = live_nodes(ray)
        if len(found) >= least:
            return found
        if time.monotonic() > deadline:
            raise ConfigError(
                f"--ray-nodes: after {JOIN_S:.0f} s the cluster {address} has {len(found)} of {least} nodes: start Ray"
                " on the others (`ray start --address`), or ask for fewer"
            )
        if not told:
            print(f"Waiting at most {JOIN_S:.0f} s for {least} Ray nodes; {len(found)} there", flush=True)
            told = True
        time.sleep(0.5)


def live_nodes(ray: Any) -> list[dict[str, Any]]:
    """The nodes on which something listens: Ray lists one that has gone for a while, also beside its successor."""
    return [node for node in ray.nodes() if node["Alive"] and _listens(node)]


def _listens(node: Mapping[str, Any]) -> bool:
    try:
        socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), timeout=REACH_S).close()
    except OSError:
        return False
    return True


def expect_reachable(address: str) -> None:
    """Raise ConfigError unless something listens at HOST:PORT; Ray itself takes a minute to say so."""
    if address in (LOCAL, AUTO):
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"--ray {address} is no address: give HOST:PORT as `ray start` says it, auto or local")
    try:
        socket.create_connection((host, int(port)), timeout=REACH_S).close()
    except OSError as error:
        raise ConfigError(
            f"--ray {address} cannot be reached within {REACH_S:.0f} s ({error.strerror or error}): start the cluster"
            " (`ray start --head`), or give --ray local"
        ) from None


def expect_ready(machines: Machines, model: str) -> None:
    """Raise ConfigError that names a node without what a service needs there."""
    _expect_ready(_by_host(machines), model)


def _expect_ready(nodes: Mapping[str, Mapping[str, Any]], model: str) -> None:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def facts(executable: str, checkout: str, model: str) -> dict[str, Any]:  # sent by value
        import os
        import platform

        import ray

        return {
            "python": platform.python_version(),
            "ray": ray.__version__,
            "has_python": os.access(executable, os.X_OK),
            "has_checkout": os.path.isfile(checkout),
            "has_model": not os.path.isabs(model) or os.path.isfile(os.path.join(model, "config.json")),
        }

    checkout = str(PACKAGES / "atropos_launcher" / "services" / "ray_actor.py")
    asked = {
        host: ray.remote(num_cpus=0)(facts)
        .options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False))
        .remote(sys.executable, checkout, model)
        for host, node in nodes.items()
    }
    for host, answer in asked.items():
        try:
            expect_suits(host, Facts(**ray.get(answer, timeout=PROBE_S)), model)
        except (ray.exceptions.RayError, TimeoutError) as error:
            raise ConfigError(
                f"--ray: node {host} does not run a task ({str(error).strip().splitlines()[0]}): see `ray list nodes`"
                " and the node's /tmp/ray/session_latest/logs"
            ) from None


def expect_suits(host: str, facts: Facts, model: str) -> None:
    """Raise ConfigError for a node that differs from this one, or lacks something."""
    import platform

    import ray

    for what, there, here in (
        ("Ray", facts.ray, ray.__version__),
        ("Python", facts.python, platform.python_version()),
    ):
        if there != here:
            raise ConfigError(f"--ray: node {host} has {what} {there}, and this one {here}: install the same on both")
    for has, what in (
        (facts.has_python, f"this Python, {sys.executable}: install Atropos there under the same path"),
        (facts.has_checkout, f"Atropos in {PACKAGES}: install it there under the same path"),
        (facts.has_model, f"the model {model}: copy it there to the same path, or give a hub id"),
    ):
        if not has:
            raise ConfigError(f"--ray: node {host} lacks {what}")


def reserve(machines: Machines, wanted: Sequence[Mapping[str, float]]) -> None:
    """Hold `wanted`, CPUs and GPUs, on each machine until this process ends. Raises ConfigError that names a node which
    has too few, or on which others hold them.
    """
    for (machine, node), bundle in zip(_by_host(machines).items(), wanted, strict=True):
        _hold(node, bundle, machines.group_on(machine))


def _hold(node: Mapping[str, Any], bundle: Mapping[str, float], name: str) -> None:
    from ray.util import placement_group, remove_placement_group

    host = node["NodeManagerAddress"]
    expect_enough(host, node["Resources"], bundle)
    group = placement_group([{**bundle, f"node:{host}": 0.001}], name=name)
    if not group.wait(RESERVE_S):
        remove_placement_group(group)
        raise ConfigError(
            f"--ray: node {host} is full: {shown(bundle)} were not free within {RESERVE_S:.0f} s of the"
            f" {shown({kind: node['Resources'].get(kind, 0) for kind in bundle})} that it has: end what holds them"
            " (`ray status -v`), or wait"
        )


def reserve_more(
    machines: Machines, model: str, bundle: Mapping[str, float], name: str, goes_on: Callable[[], bool]
) -> Machine:
    """Hold `bundle` in a group of this name for one server more, on the node that Ray finds for it, while `goes_on`.
    Ray may have an autoscaler start that node. A run on one machine stays there. Raises ConfigError.
    """
    from ray.exceptions import RayError

    with reaching("--ray", ConfigError, remedy="see `ray status`", also=(RayError, StopIteration)):
        if not machines.several:
            ((host, node),) = _by_host(machines).items()
        else:
            node = _free_node(bundle, goes_on)
            host = node["NodeManagerAddress"]
            _expect_ready({host: node}, model)
        _hold(node, bundle, name)
    return Machine(host, trains=False, gpus=int(node["Resources"].get("GPU", 0)))


def _free_node(bundle: Mapping[str, float], goes_on: Callable[[], bool]) -> dict[str, Any]:
    """The node that has room for a server and does not only train."""
    import ray
    from ray.util import placement_group, placement_group_table, remove_placement_group

    group = placement_group([dict(bundle)], bundle_label_selector=[{LABEL: "!trainer"}])
    deadline = time.monotonic() + JOIN_S
    try:
        while not group.wait(0.5):
            if time.monotonic() > deadline or not goes_on():
                raise ConfigError(
                    f"--ray: no node of the cluster has {shown(bundle)} free: start Ray on one more (`ray start"
                    " --address`), end what holds them (`ray status -v`), or ask for fewer servers"
                )
        (chosen,) = placement_group_table(group)["bundles_to_node_id"].values()
    finally:
        remove_placement_group(group)
    return next(node for node in ray.nodes() if node["NodeID"] == chosen)


def release(name: str) -> None:
    """Give back what a group of this name holds, if there is one."""
    from ray.exceptions import RayError
    from ray.util import get_placement_group, remove_placement_group

    with suppress(ValueError, RayError):  # none of this name, or the cluster is gone and holds nothing
        remove_placement_group(get_placement_group(name))


def expect_enough(host: str, resources: Mapping[str, float], bundle: Mapping[str, float]) -> None:
    """Raise ConfigError for a node that has fewer CPUs or GPUs than the run reserves there."""
    for kind, number in bundle.items():
        has = resources.get(kind, 0)
        if has < number:
            raise ConfigError(
                f"--ray: node {host} has {has:g} {kind}s, and this run needs {number:g} there: start its Ray with"
                f" --num-{kind.lower()}s, or use fewer (--layout.vllm, --trainer-ranks)"
            )


def shown(bundle: Mapping[str, float]) -> str:
    """Write it as `2 CPUs and 1 GPUs`."""
    return " and ".join(f"{number:g} {kind}s" for kind, number in bundle.items())


def _by_host(machines: Machines) -> dict[str, dict[str, Any]]:
    """The nodes of the run, in the order of its machines."""
    import ray

    if not machines.several:
        mine = ray.get_runtime_context().get_node_id()
        return {LOOPBACK: next(node for node in ray.nodes() if node["NodeID"] == mine)}
    alive = {node["NodeManagerAddress"]: node for node in live_nodes(ray)}
    if gone := [machine.host for machine in machines.all if machine.host not in alive]:
        raise ConfigError(f"--ray: node {gone[0]} has left the cluster: start Ray there again")
    return {machine.host: alive[machine.host] for machine in machines.all}
