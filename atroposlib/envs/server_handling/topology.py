"""Where the inference servers are: as configured, on the default local ports, or on the nodes of a SLURM job.

list of configs                 one server each
one APIServerConfig             that server
ServerBaseline (no address)     http://localhost:9004/v1 ... 9007/v1
slurm=True, no list             http://<node>:9000+i/v1, i < 8 / INFER_TP, on the nodes after the first
                                NUM_TRAINING_NODES
"""

import re
from collections.abc import Iterator, Sequence

from atroposlib.envs.server_handling.server_config import APIServerConfig, ServerBaseline, ServerEnvironment
from atroposlib.logs import get_logger

log = get_logger(__name__)

LOCAL_PORTS = range(9004, 9008)
SLURM_FIRST_PORT = 9000
GPUS_PER_NODE = 8


def server_configs(
    configs: ServerBaseline | Sequence[APIServerConfig], slurm: bool, environment: ServerEnvironment
) -> list[APIServerConfig]:
    """One configuration a server. Raises ValueError for an empty list, or for SLURM without inference nodes."""
    if not isinstance(configs, ServerBaseline):
        if not configs:
            raise ValueError("the list of inference servers is empty; give at least one APIServerConfig")
        return list(configs)
    if slurm:
        if isinstance(configs, APIServerConfig) and configs.base_url:
            log.warning("slurm is on: the SLURM nodes replace base_url %s", configs.base_url)
        return [_at(configs, url) for url in slurm_urls(environment)]
    if isinstance(configs, APIServerConfig):
        return [configs]
    return [_at(configs, f"http://localhost:{port}/v1") for port in LOCAL_PORTS]


def slurm_urls(environment: ServerEnvironment) -> list[str]:
    """Addresses of the servers that the job's inference nodes run."""
    if not environment.slurm_job_nodelist:
        raise ValueError(
            "slurm is on but SLURM_JOB_NODELIST is not set; start this inside a SLURM job or turn slurm off"
        )
    nodes = list(expand_nodelist(environment.slurm_job_nodelist))
    inference_nodes = nodes[environment.num_training_nodes :]
    if not inference_nodes:
        raise ValueError(
            f"NUM_TRAINING_NODES={environment.num_training_nodes} leaves none of the {len(nodes)} nodes for inference;"
            " lower it"
        )
    return [
        f"http://{node}:{SLURM_FIRST_PORT + index}/v1"
        for node in inference_nodes
        for index in range(GPUS_PER_NODE // environment.infer_tp)
    ]


def expand_nodelist(nodelist: str) -> Iterator[str]:
    """Host names of SLURM's compressed form: `gpu[01-03,7],login` is gpu01 gpu02 gpu03 gpu7 login."""
    for entry in re.findall(r"[^,\[\]]+(?:\[[^\]]*\][^,\[\]]*)*", nodelist):
        yield from _expand_entry(entry)


def _expand_entry(entry: str) -> Iterator[str]:
    before, bracket, rest = entry.partition("[")
    if not bracket:
        yield before
        return
    ranges, _, after = rest.partition("]")
    for tail in _expand_entry(after):
        for part in ranges.split(","):
            first, _, last = part.partition("-")
            for number in range(int(first), int(last or first) + 1):
                yield f"{before}{number:0{len(first)}d}{tail}"


def _at(config: ServerBaseline, base_url: str) -> APIServerConfig:
    return APIServerConfig(**{**config.model_dump(), "base_url": base_url})
