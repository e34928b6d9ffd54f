"""The vLLM servers that the trainer sends weights to: ports of --vllm-host, lines of a hosts file, or the last nodes of
a SLURM job.

    gpu01            # every port of --vllm-port
    gpu02:9005       # this one

Called by the trainer's configuration, which turns the ValueErrors raised here into one line and exit code 2.
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import AliasChoices, Field, SecretStr, field_validator

from atroposlib.config import Config
from atroposlib.envs.server_handling.topology import expand_nodelist
from atroposlib.errors import reading

Address = tuple[str, int]  # host, port
Port = Annotated[int, Field(ge=1, le=65535)]


class VllmServers(Config):
    """vLLM servers"""

    vllm_host: str = Field(
        "localhost",
        min_length=1,
        description="host of the vLLM server; for servers on several machines a comma-separated list of host[:port]",
    )
    vllm_ports: tuple[Port, ...] = Field(
        (9001,),
        validation_alias=AliasChoices("vllm_port", "vllm_ports"),
        description="port of the vLLM server; for several servers a comma-separated list, e.g. 9001,9002",
    )
    vllm_api_key: SecretStr | None = Field(
        None, description="vLLM's --api-key", json_schema_extra={"env": "VLLM_API_KEY"}
    )
    num_inference_nodes: int = Field(
        0,
        ge=0,
        description=(
            "number of machines of --hosts-file (or last nodes of a SLURM job) that run vLLM servers; 0 means "
            "--vllm-host alone"
        ),
        json_schema_extra={"env": "NUM_INFERENCE_NODES"},
    )
    hosts_file: Path | None = Field(
        None, description="for NUM_INFERENCE_NODES: one host[:port] per line; # starts a comment"
    )
    slurm_job_nodelist: str | None = Field(
        None, description="SLURM's nodes, used without --hosts-file", json_schema_extra={"env": "SLURM_JOB_NODELIST"}
    )

    @property
    def vllm_servers(self) -> list[Address]:
        """Every vLLM server that is fed, in the order given, none twice: of --vllm-host alone when NUM_INFERENCE_NODES
        is 0, else of exactly that many machines. Raises ValueError where flags, hosts file and nodes contradict each
        other.
        """
        nodes, ports, hosts_file = self.num_inference_nodes, self.vllm_ports, self.hosts_file
        if nodes == 0:
            if hosts_file is not None:
                raise ValueError(
                    f"--hosts-file {hosts_file} is given, but NUM_INFERENCE_NODES is 0: set it to the number of hosts"
                    " in the file"
                )
            if "," not in self.vllm_host:
                host = self.vllm_host.removeprefix("[").removesuffix("]")  # of IPv6
                return _distinct(((host, port) for port in ports), "--vllm-port")
            hosts = self.vllm_host.split(",")
            return _distinct((each for host in hosts for each in _addresses(host, ports, "--vllm-host")), "--vllm-host")
        if hosts_file is not None:
            addresses = read_hosts_file(hosts_file, ports)
            if (machines := len({name for name, _ in addresses})) != nodes:
                raise ValueError(
                    f"{hosts_file} names {machines} host(s), but NUM_INFERENCE_NODES is {nodes}: make them agree"
                )
            return addresses
        if not self.slurm_job_nodelist:
            raise ValueError(
                f"NUM_INFERENCE_NODES={nodes} needs --hosts-file FILE with one host[:port] per line (or a SLURM job, "
                "whose"
                f" last {nodes} nodes count)"
            )
        names = list(expand_nodelist(self.slurm_job_nodelist))
        if len(names) < nodes:
            raise ValueError(
                f"NUM_INFERENCE_NODES={nodes}, but the SLURM job has {len(names)} node(s): lower it, or ask for more"
                " nodes"
            )
        return [(name, port) for name in names[-nodes:] for port in ports]

    @property
    def vllm_port(self) -> int:
        """Port of the one server, for the bridges that feed one (`make_bridge` refuses them more)."""
        return self.vllm_ports[0]

    @field_validator("vllm_ports", mode="before")
    @classmethod
    def _one_port_or_several(cls, value: object) -> object:
        # from Python and YAML also 9001 and "9001,9002"
        return value.split(",") if isinstance(value, str) else (value,) if isinstance(value, int) else value


def read_hosts_file(path: Path, ports: Sequence[int]) -> list[Address]:
    """One address a line; a host without a port stands for all of `ports`. Raises ValueError naming file and line."""
    with reading(
        f"--hosts-file {path} cannot be read", ValueError, remedy="give a text file with one host[:port] per line"
    ):
        lines = path.read_text(encoding="utf-8").splitlines()
    addresses: list[Address] = []
    for number, line in enumerate(lines, start=1):
        if entry := line.partition("#")[0].strip():
            addresses += _addresses(entry, ports, f"{path}:{number}")
    if not addresses:
        raise ValueError(f"--hosts-file {path} contains no host: write one host[:port] per line")
    return _distinct(addresses, str(path))


def _addresses(entry: str, ports: Sequence[int], where: str) -> list[Address]:
    """List the addresses that one host[:port] names; one for every port where it has none."""
    bare = entry if entry.count(":") > 1 and not entry.startswith("[") else None  # an IPv6 address without a port
    name = f"[{bare}]" if bare else entry
    match = re.fullmatch(r"(?:([A-Za-z0-9][A-Za-z0-9._-]*)|\[([0-9A-Fa-f:.]+)\])(?::(\d+))?", name)
    if match is None:
        raise ValueError(f"{where}: {entry!r} is not host[:port]; write e.g. gpu01, 10.0.0.7:9001 or [fd00::7]:9001")
    host, port = match[1] or match[2], match[3]
    if port is not None and not 1 <= int(port) <= 65535:
        raise ValueError(f"{where}: port {port} is not between 1 and 65535")
    return [(host, int(port))] if port else [(host, each) for each in ports]


def _distinct(addresses: Iterable[Address], where: str) -> list[Address]:
    distinct: list[Address] = []
    for host, port in addresses:
        if (host, port) in distinct:
            raise ValueError(f"{where} names {host}:{port} twice: list each server once")
        distinct.append((host, port))
    return distinct
