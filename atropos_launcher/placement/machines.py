"""The machines of a run: this one alone, or the nodes of a Ray cluster, this one first (placement/ray_cluster.py).

Either each machine trains and serves, or each does one of both. The first one has the launcher, the batching API and
rank 0 of the trainer.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import Field

from atropos_launcher.run_file.run_file import EnvironmentSection
from atroposlib.config import Config
from atroposlib.flags import ConfigError

LOOPBACK = "127.0.0.1"


class MachineFlags(Config):
    """Machines"""

    ray: str | None = Field(
        None,
        min_length=1,
        description="Ray cluster that places services: HOST:PORT, auto (this machine's), or local, which starts one",
    )
    ray_nodes: str | None = Field(
        None,
        pattern=r"^[1-9]\d{0,3}(\+[1-9]\d{0,3})?$",
        description="with --ray: wait until the cluster has this many nodes, and use no more; with 4+1 four train and"
        " the fifth serves",
    )
    ray_timeout: float = Field(
        30.0,
        ge=5,
        le=3600,
        description="with --ray: seconds without a sign of life after which a node counts as lost",
    )


@dataclass(frozen=True)
class Machine:
    """A machine, by the address at which the others reach it. `gpus` is their number; None: as the first one has."""

    host: str
    trains: bool = True
    serves: bool = True
    gpus: int | None = None

    @property
    def gpu_names(self) -> list[str]:
        """Names all of its GPUs, as CUDA does."""
        return [str(number) for number in range(self.gpus or 0)]


@dataclass(frozen=True)
class Machines:
    """All machines of a run; `THIS_ONE` is this one alone, by loopback."""

    all: tuple[Machine, ...] = (Machine(LOOPBACK),)
    silence_s: float = 30.0  # after which a machine that gives no sign of life counts as lost
    ray: str = ""  # the address of the Ray cluster that starts services
    group: str = ""  # the name of what it reserves for them
    joined: Mapping[int, str] = field(default_factory=dict)  # hosts of vLLM servers that came later, by their place

    @property
    def first(self) -> str:
        """This machine, by the address at which the others reach it."""
        return self.all[0].host

    @property
    def several(self) -> bool:
        return len(self.all) > 1

    @property
    def training(self) -> list[str]:
        """The hosts of trainer ranks; that of rank 0 first."""
        return [machine.host for machine in self.all if machine.trains]

    @property
    def serving(self) -> list[str]:
        """The hosts of vLLM servers, one server each."""
        return [machine.host for machine in self.all if machine.serves]

    @property
    def are_apart(self) -> bool:
        """Return whether no machine both trains and serves."""
        return self.several and not any(machine.trains and machine.serves for machine in self.all)

    def elsewhere(self, host: str) -> str:
        """The host, or nothing for this machine."""
        return "" if host == self.first else host

    def host_of_server(self, index: int) -> str:
        """Return the host of a vLLM server: one on each of several machines, all of them on a single one."""
        return self.joined.get(index) or (self.serving[index] if self.several else self.first)

    def host_of_environment(self, index: int) -> str:
        """Return where a copy of an environment runs: the first on this machine, the others in turn."""
        return self.all[index % len(self.all)].host

    def spread(self, environments: Mapping[str, EnvironmentSection]) -> bool:
        """Return whether copies of an environment run on other machines, so that the API must be open to these."""
        return self.several and any(section.count > 1 for section in environments.values())

    def group_on(self, host: str) -> str:
        """Return the name of the placement group on that machine."""
        return f"{self.group}-{[machine.host for machine in self.all].index(host)}"

    def group_of_server(self, index: int) -> str:
        """Return the name of a vLLM server's placement group: its machine's, or its own if it came later."""
        return self.own_group(index) if index in self.joined else self.group_on(self.host_of_server(index))

    def own_group(self, index: int) -> str:
        """Return the name of the placement group of a vLLM server that comes later."""
        return f"{self.group}-server-{index}"


THIS_ONE = Machines()


def check_roles(machines: Machines, source: str) -> None:
    """Raise ConfigError, which names `source`, unless the machines' roles make a run."""
    if not machines.all[0].trains:
        raise ConfigError(
            f"{source}: {machines.first} only serves, but rank 0 runs on the machine of this command: run it on a node"
            " that trains"
        )
    if not machines.serving:
        raise ConfigError(f"{source}: no node serves vLLM: give one the label atropos=vllm, or none a label")
    if len({machine.trains and machine.serves for machine in machines.all}) > 1:
        raise ConfigError(
            f"{source}: some nodes have both roles and others only one, so their GPUs would be divided differently:"
            " label all nodes or none"
        )
