"""Where a run takes place, and which settings of vLLM and the other services follow from that."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atropos_launcher.placement.cores import CorePlacement, thread_bindings
from atropos_launcher.placement.gpus import Placement, device_flags, device_variables, seen
from atropos_launcher.placement.machines import LOOPBACK as HOST
from atropos_launcher.placement.machines import THIS_ONE, Machines
from atropos_launcher.placement.teacher import TeacherPlace
from atropos_launcher.run_file.run_file import RunFile
from atropos_launcher.run_file.servers import Tree, server_name
from atropos_launcher.run_file.teacher import TEACHER
from example_trainer.settings.bridges import MODES, Adapter, Mode

# Of what vLLM's workers leave in shared memory, as it kills them at its end; shared_memory.py removes it.
NO_COMPLAINT = "ignore::UserWarning:multiprocessing.resource_tracker"
BARS = ("TQDM_POSITION", "-1")  # the hub's downloads have progress bars without a terminal, too
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM's --max-lora-rank takes, from 8 on


@dataclass(frozen=True)
class Site:
    """Describes where a run takes place."""

    run_dir: Path
    model: str  # an id, or the absolute path of a directory
    placement: Placement
    api_port: int
    vllm_ports: tuple[int, ...]  # of each vLLM server
    environ: Mapping[str, str]
    cores: CorePlacement
    machines: Machines = THIS_ONE
    meeting_port: int = 0  # of trainer ranks on several machines, on the first one
    # what the memory plan decides for a trainer that vLLM leaves a part of its GPU: --offload auto, sizes not given
    settled: Mapping[str, Any] = field(default_factory=dict)
    teacher: TeacherPlace | None = None
    agents_port: int = 0  # of the agent endpoint, for environments that ask for one

    @property
    def agents(self) -> str:
        """The address of the agent endpoint."""
        return f"http://{HOST}:{self.agents_port}"

    @property
    def api(self) -> str:
        return f"http://{HOST}:{self.api_port}"

    @property
    def vllm(self) -> list[str]:
        """The address of each vLLM server."""
        return [f"http://{self.vllm_host(index)}:{port}" for index, port in enumerate(self.vllm_ports)]

    def vllm_host(self, index: int) -> str:
        """Return where one vLLM server listens, and is reached."""
        return self.machines.host_of_server(index)


def variables(run: RunFile, site: Site) -> dict[str, str]:
    """The environment variables of every service."""
    variables_of_service = {
        "VLLM_ENABLE_SHARED_WEIGHTS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "NUM_INFERENCE_NODES": "0",
        "TORCH_CPP_LOG_LEVEL": site.environ.get("TORCH_CPP_LOG_LEVEL", "") or "ERROR",  # its warnings come with stacks
        BARS[0]: BARS[1],
        "PYTHONWARNINGS": ",".join(filter(None, [site.environ.get("PYTHONWARNINGS", ""), NO_COMPLAINT])),
        "MASTER_ADDR": _master(site),
        "VLLM_BRIDGE_CONFIG_PATH": _bridge_config(site, "vllm"),
        **device_variables(site.placement, site.environ),
    }
    models = [site.model, *([site.teacher.model] if site.teacher is not None and site.teacher.model else [])]
    if all(map(os.path.isabs, models)) and not any(section.from_hub for section in run.environments.values()):
        variables_of_service["HF_HUB_OFFLINE"] = "1"  # nothing is asked of it
    return variables_of_service


def _master(site: Site) -> str:
    """Return the address where vLLM's workers reach the trainer."""
    return site.machines.first if site.machines.several else site.environ.get("MASTER_ADDR", "") or "localhost"


def _bridge_config(site: Site, server: str) -> str:
    return str(site.run_dir / f"{server}_bridge_config.json")


def server_variables(run: RunFile, site: Site, index: int) -> dict[str, str]:
    """The environment variables of one vLLM server alone: its GPUs, and its cores where there are none. Raises
    ConfigError for cores that its ranks cannot share out.
    """
    name = server_name(index, len(run.servers))
    variables = seen(site.placement.servers[index].gpus)
    if len(run.servers) > 1:
        variables["VLLM_BRIDGE_CONFIG_PATH"] = _bridge_config(site, name)
    if (cores := site.cores.vllm[index]) and not site.placement.on_gpus:
        ranks = max(site.placement.by_ranks, tensor_parallel_size(run.servers[index]))
        variables["VLLM_CPU_OMP_THREADS_BIND"] = thread_bindings(cores, ranks, name)
    return variables


def teacher_variables(site: Site, teacher: TeacherPlace, ranks: int) -> dict[str, str]:
    """The environment variables of the teacher's server alone: its GPUs or cores, and that it gets no weights."""
    variables = {**seen(teacher.gpus), "VLLM_ENABLE_SHARED_WEIGHTS": "0"}
    if site.cores.teacher and not teacher.gpus:
        variables["VLLM_CPU_OMP_THREADS_BIND"] = thread_bindings(site.cores.teacher, ranks, TEACHER)
    return variables


def tensor_parallel_size(server: Mapping[str, Any]) -> int:
    """Return the tensor-parallel size that a run file gives a vLLM server."""
    return int(server.get("tensor_parallel_size") or 1)


def vllm_flags(run: RunFile, site: Site, bridge: Mode | None = None, index: int = 0) -> Tree:
    """A server's flags: what the devices and the bridge need, the run's own on top."""
    flags, mine = device_flags(run, site.placement, index), run.servers[index]
    mode = MODES[run.kind]
    if mode.adapters:
        rank = bridge.r if isinstance(bridge, Adapter) else 0
        flags |= {"enable_lora": True, "max_lora_rank": next((fit for fit in LORA_RANKS if fit >= rank), rank)}
    if run.batch_invariant:
        flags["batch_invariant"] = True
    if run.chat_template is not None:
        flags["chat_template"] = str(Path(run.chat_template).resolve())
    own = {key: value for key, value in mine.items() if value is not None and key != "tensor_parallel_size"}
    if not site.placement.on_gpus and tensor_parallel_size(mine) > 1:
        own["tensor_parallel_size"] = mine["tensor_parallel_size"]
    flags |= {"seed": run.seed + index} | own  # servers of one seed would sample the same answers
    if not mode.owns_vllm:
        flags |= {"model": site.model, "host": mine.get("host", site.vllm_host(index)), "port": site.vllm_ports[index]}
    return {key: value for key, value in flags.items() if not (mode.owns_vllm and key in ("model", "host", "port"))}


def argv(flags: Mapping[str, object]) -> tuple[str, ...]:
    """`{"max_model_len": 256, "enforce_eager": True}` as `--max-model-len 256 --enforce-eager`."""
    words: list[str] = []
    for key, value in flags.items():
        flag = key.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, Mapping):
            words += [f"--{flag}", json.dumps(value, default=str)]
        elif isinstance(value, (list, tuple)):
            words += [f"--{flag}", *map(str, value)]
        elif value is not None:
            words += [f"--{flag}", str(value)]
    return tuple(words)
