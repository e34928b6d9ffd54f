"""The machines of a run, as `--hosts FILE` or a Ray cluster names them: which of them serve, and which train.

    10.0.0.1                   # this machine: launcher, batching API, environments, rank 0; and a vLLM server
    10.0.0.2                   # trainer ranks and a vLLM server
    10.0.0.3 vllm              # or, on every line: `trainer` or `vllm` alone

The first line is the machine on which the command is typed. What runs on the others is started there by a command of
the user's (`--remote-command`), one for each service, and watched from here (services/remote_client.py). With `--ray`
the machines are a cluster's nodes (placement/ray_cluster.py), and Ray starts what runs on them, on the first one, too.
"""

import re
import shlex
import shutil
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from pydantic import Field

from atroposlib.config import Config
from atroposlib.errors import reading
from atroposlib.flags import ConfigError

SSH = "ssh -o BatchMode=yes -o ConnectTimeout=10 {host}"
ROLES = ("trainer", "vllm")
LINE = "one host per line, followed by `trainer` or `vllm` if it has only that role"
LOOPBACK = "127.0.0.1"


class MachineFlags(Config):
    """Machines"""

    hosts: Path | None = Field(
        None, description="file with one host per line, this machine first: train on all of them (docs/devices.md)"
    )
    remote_command: str = Field(
        SSH,
        min_length=1,
        description=(
            "with --hosts: command that starts another command on a machine; {host} is replaced by the machine's name"
        ),
    )
    host_timeout: float = Field(
        30.0,
        ge=5,
        le=3600,
        description="with --hosts or --ray: seconds without a sign of life after which a machine counts as lost",
    )
    ray: str | None = Field(
        None,
        min_length=1,
        description="Ray cluster that places services: HOST:PORT, auto (this machine's), or local, which starts one",
    )
    ray_nodes: int | None = Field(
        None, ge=1, le=1024, description="with --ray: wait until the cluster has this many nodes, and use no more"
    )


@dataclass(frozen=True)
class Machine:
    """One line of the file, or a Ray node. `gpus` is their number; None: as the first one has."""

    host: str
    trains: bool = True
    serves: bool = True
    gpus: int | None = None


@dataclass(frozen=True)
class Machines:
    """All machines of a run; `THIS_ONE` is this one alone, by loopback."""

    all: tuple[Machine, ...] = (Machine(LOOPBACK),)
    remote: str = SSH
    silence_s: float = 30.0  # after which a machine that gives no sign of life counts as lost
    ray: str = ""  # the address of the Ray cluster that starts services
    group: str = ""  # the name of what it reserves for them

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
        return "" if host in (self.first, LOOPBACK) else host

    def group_of(self, index: int) -> str:
        """Return the name of the placement group on that machine."""
        return f"{self.group}-{index}"

    def host_of_server(self, index: int) -> str:
        """Return the host of a vLLM server: one on each of several machines, all of them on a single one."""
        return self.serving[index] if self.several else self.first

    def index_of(self, host: str) -> int:
        """Return which of `all` has that host."""
        return [machine.host for machine in self.all].index(host)

    def reached_at(self, host: str) -> str:
        """Return where processes of this machine reach a server there: on this machine, loopback."""
        return self.elsewhere(host) or LOOPBACK


THIS_ONE = Machines()


def read_machines(path: Path, remote: str, silence_s: float, check_here: bool = True) -> Machines:
    """The machines of a hosts file. Raises ConfigError that names the line, or says what does not fit together."""
    with reading(f"--hosts {path} cannot be read", ConfigError, remedy=f"give a text file with {LINE}"):
        lines = path.read_text(encoding="utf-8").splitlines()
    listed: list[Machine] = []
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        host, *roles = words
        if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", host) is None or not {*roles} <= {*ROLES}:
            raise ConfigError(f"{path}:{number}: {line.strip()!r} is not a host; write {LINE}")
        if host in [machine.host for machine in listed]:
            raise ConfigError(f"{path}:{number}: {host} appears twice; name each machine once")
        listed.append(Machine(host, not roles or "trainer" in roles, not roles or "vllm" in roles))
    if not listed:
        raise ConfigError(f"--hosts {path} names no machine: write {LINE}")
    machines = Machines(tuple(listed), remote, silence_s)
    if "{host}" not in machines.remote:
        raise ConfigError(f"--remote-command {machines.remote!r} has no {{host}}; write it where the host's name goes")
    try:
        shlex.split(machines.remote)
    except ValueError as error:
        raise ConfigError(f"--remote-command {machines.remote!r}: {error}; close the quote") from None
    check_roles(machines, str(path))
    if check_here and machines.several:
        _expect_here(machines.first, path)
        program = shlex.split(remote)[0]
        if shutil.which(program) is None:
            raise ConfigError(
                f"--remote-command {remote!r}: there is no program {program!r} here: install it, or give another"
                " command that starts one on a machine"
            )
    return machines


def check_roles(machines: Machines, source: str) -> None:
    """Raise ConfigError, which names `source`, unless the machines' roles make a run."""
    if not machines.all[0].trains:
        raise ConfigError(
            f"{source}: {machines.first} does not train, but rank 0 runs on the first machine; put another first"
        )
    if not machines.serving:
        raise ConfigError(
            f"{source}: no machine serves vLLM: write `vllm` in place of `trainer` behind a host, or no roles at all"
        )
    if len({machine.trains and machine.serves for machine in machines.all}) > 1:
        raise ConfigError(
            f"{source}: some machines have both roles and others only one, so their GPUs would be divided differently:"
            " give all machines both roles, or each exactly one"
        )


def _expect_here(host: str, path: Path) -> None:
    with reading(f"{path}: {host} has no address", ConfigError, remedy="write a name that this machine can resolve"):
        wanted = {str(info[4][0]) for info in socket.getaddrinfo(host, None, family=socket.AF_INET)}
    own = {held.address for each in psutil.net_if_addrs().values() for held in each if held.family == socket.AF_INET}
    if not wanted & own:
        raise ConfigError(
            f"{path}: the first machine, {host} ({', '.join(sorted(wanted))}), is not this machine, whose addresses are"
            f" {', '.join(sorted(own - {LOOPBACK})) or 'loopback only'}: run the command there, or list this machine"
            " first"
        )
    if all(address.startswith("127.") for address in wanted):
        raise ConfigError(f"{path}: {host} is loopback, where no other machine reaches it; write another address")


def remote_words(template: str, host: str) -> Sequence[str]:
    """The words of `--remote-command` for a host."""
    return [word.replace("{host}", host) for word in shlex.split(template)]
