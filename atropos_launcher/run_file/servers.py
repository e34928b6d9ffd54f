"""The vLLM servers of a run: the settings of each, from `vllm` in a run file, and their names.

    vllm: {max_model_len: 1024}                        one server
    vllm: {max_model_len: 1024, count: 2}              two equal ones
    vllm: [{max_model_len: 1024}, {port: 9005}]        two, each with flags of its own

On top of a base, a mapping changes every server below it. A list takes the flags below it for each of its servers, but
replaces another list.
"""

import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import partial
from typing import Any, TypeGuard

from atroposlib.config import merged_trees
from atroposlib.flags import ConfigError
from example_trainer.settings.bridges import SECRETS

Tree = dict[str, Any]
Servers = Tree | list[Tree]

MOST = 64
SINGLE = ("count", "port")  # of a mapping: what its servers cannot all have
NAME = "vllm"
DIGITS = 18  # of a number, far more than any has
# 1024, 1k for 1000, 1K for 1024: as vLLM reads them
TOKENS = re.compile(r"(\d{1,18})|(\d{1,18}(?:\.\d{1,18})?)([kmgKMG])")
UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
_NAMES = re.compile(rf"{NAME}(-[1-9]\d*)?")


def server_name(index: int, count: int) -> str:
    """`vllm` where there is one, else `vllm-1`, `vllm-2`, ...: of its service, its log and its settings."""
    return NAME if count == 1 else f"{NAME}-{index + 1}"


def is_server(service: str) -> bool:
    """Return whether a service of that name is a vLLM server."""
    return _NAMES.fullmatch(service) is not None


def each_server(vllm: object) -> list[Tree]:
    """The flags of each server. A port of several equal ones is the first one's. Raises ConfigError."""
    if isinstance(vllm, Mapping):
        count, flags = vllm.get("count", 1), {key: value for key, value in vllm.items() if key != "count"}
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MOST:
            raise ConfigError(f"vllm.count: expected 1 to {MOST} servers, got {count!r}")
        first = as_planned(flags)
        return [first, *({key: value for key, value in first.items() if key != "port"} for _ in range(count - 1))]
    if not isinstance(vllm, list) or not all(isinstance(server, Mapping) for server in vllm):
        raise ConfigError(f"vllm: expected keys and values of one server, or a list of servers, got {vllm!r}")
    if not 1 <= len(vllm) <= MOST:
        raise ConfigError(f"vllm: expected 1 to {MOST} servers, but the list has {len(vllm)}")
    if any("count" in server for server in vllm):
        raise ConfigError("vllm.count: vllm is a list here, with one entry per server; add or remove entries instead")
    return [as_planned(server) for server in vllm]


def as_planned(flags: Mapping[str, object], section: str = NAME) -> Tree:
    """The flags of a server, those as numbers by which a run is planned: `port`, `tensor_parallel_size`,
    `max_model_len`, which may also be "auto", `gpu_memory_utilization` and `max_num_seqs`; and `dtype` by its usual
    name. Raises ConfigError.
    """
    for name, variable in SECRETS.items():
        if not isinstance(flags.get(name), bool | None):  # `hf_token: true` is the stored login
            raise ConfigError(
                f"{section}.{name}: a run keeps no secrets, and its command lines are read: set {variable}"
            )
    found = dict(flags)
    for name, (read, expected) in PLANNED.items():
        if (value := found.get(name)) is not None:
            number = read(str(value))
            if isinstance(value, bool) or number is None:
                raise ConfigError(f"{section}.{name}: expected {expected}, got {value!r}")
            found[name] = number
    return found


def served_tokens(flags: Mapping[str, object]) -> int | None:
    """Return a server's `max_model_len`; None where it is vLLM's choice."""
    length = flags.get("max_model_len")
    return length if isinstance(length, int) else None


def _whole(text: str, least: int, most: int | None = None) -> int | None:
    number = int(text) if text.isdecimal() and len(text) <= DIGITS else -1
    return number if least <= number and (most is None or number <= most) else None


def tokens_in(text: str) -> int | str | None:
    """Return a number as vLLM reads it, or "auto"; None for what is neither, and for 0."""
    if text.lower() == "auto" or text == "-1":
        return "auto"
    if (match := TOKENS.fullmatch(text)) is None:
        return None
    return int(match[1] or Decimal(match[2]) * UNITS[match[3]]) or None


def _share(text: str) -> float | None:
    try:
        share = float(text)
    except ValueError:
        return None
    return share if 0 < share <= 1 else None


DTYPES = {  # that vLLM's --dtype takes
    **{name: name for name in ("auto", "float32", "bfloat16", "float16")},
    **{"float": "float32", "half": "float16"},
}
PLANNED: dict[str, tuple[Callable[[str], object], str]] = {
    "port": (partial(_whole, least=1, most=65535), "a port from 1 to 65535"),
    "tensor_parallel_size": (partial(_whole, least=1), "a number of GPUs, at least 1"),
    "max_model_len": (tokens_in, "a number of tokens, as 4096, 4k or 4K, or auto"),
    "gpu_memory_utilization": (_share, "a share of a GPU's memory, above 0 and at most 1"),
    "max_num_seqs": (partial(_whole, least=1), "a number of sequences, at least 1"),
    "dtype": (DTYPES.get, f"one of {', '.join(DTYPES)}"),
}


def is_for_each(value: object) -> TypeGuard[list[Any]]:
    """Return whether a value of `layout` is a list for each server, as [[0, 1], [2]]."""
    return isinstance(value, list) and any(isinstance(part, list) for part in value)


def merged_servers(below: Servers, above: Servers) -> Servers:
    """`above` over `below`."""
    if isinstance(above, list):
        common = {} if isinstance(below, list) else {key: below[key] for key in below if key not in SINGLE}
        return [merged_trees(common, server) if isinstance(server, Mapping) else server for server in above]
    if isinstance(below, list):
        return [merged_trees(server, above) if isinstance(server, Mapping) else server for server in below]
    return merged_trees(below, above)


def with_flag(vllm: Servers, number: int, key: str, value: object) -> Servers:
    """With one flag of one server, counted from 1. Raises ConfigError."""
    servers = each_server(vllm)
    if not 1 <= number <= len(servers):
        raise ConfigError(f"--vllm.{number}.{key}: the vLLM servers of this run are 1 to {len(servers)}")
    if len(servers) == 1:
        return merged_servers(vllm, {key: value})
    servers[number - 1][key] = value
    return list(servers)


def on_machines(vllm: Servers, count: int) -> Servers:
    """One server on each of the `count` machines that serve. Raises ConfigError."""
    if count > MOST:
        raise ConfigError(
            f"{count} Ray nodes serve, and a run has at most {MOST} vLLM servers: give fewer with --ray-nodes (60+4: 60"
            " train, and 4 serve)"
        )
    if isinstance(vllm, Mapping):
        return {**vllm, "count": count}
    expect_one_each(vllm, count)
    return vllm


def expect_one_each(vllm: Servers, count: int) -> None:
    """Raise ConfigError unless there are as many servers as machines that serve."""
    servers = len(each_server(vllm))
    if servers != count:
        named = "1 node that serves" if count == 1 else f"{count} nodes that serve"
        what = f"--vllm.count {servers}" if isinstance(vllm, Mapping) else f"vllm: the list has {servers} servers"
        remedy = "leave it out" if isinstance(vllm, Mapping) else "remove or add entries of `vllm` in the run file"
        raise ConfigError(f"{what}, but the Ray cluster has {named}, and each runs one server: {remedy}")


def with_ports(vllm: Servers, ports: tuple[int, ...]) -> Servers:
    """With the ports of --vllm-port: one for each server, or the first one's. Raises ConfigError."""
    servers = each_server(vllm)
    if len(ports) not in (1, len(servers)):
        shown = ",".join(map(str, ports))
        raise ConfigError(f"--vllm-port {shown} is {len(ports)} ports, but this run has {len(servers)} vLLM server(s)")
    if isinstance(vllm, Mapping) and len(ports) == 1:
        return {**vllm, "port": ports[0]}
    for server, port in zip(servers, ports, strict=False):
        server["port"] = port
    return servers
