"""`atropos doctor`: checks this machine and the servers before a run, and prints one line per check.

    atropos doctor --mode lora --model MODEL        exit status 1 if a check fails
    atropos doctor --live http://HOST:PORT          the weights of a running server alone
    atropos doctor --sampler URL --model MODEL      what any server samples, against the model's own distributions

It changes nothing and imports neither torch nor vLLM. checks/checks.py and device_checks.py contain the checks,
example_trainer/check_served_weights.py compares weights, sampler_doctor tests what is sampled. A host that does not
answer costs 2 s.
"""

import contextlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
from pydantic import Field

from atropos_launcher.checks import checks, device_checks
from atropos_launcher.checks.checks import Answer, Finding
from atropos_launcher.checks.gpu_record import RECORD, read_gpu_record
from atropos_launcher.checks.model_files import read_model
from atropos_launcher.paths import PACKAGES
from atropos_launcher.placement.this_machine import (
    Gpu,
    Listener,
    declared_by,
    find_compiler,
    find_gpus,
    find_listeners,
    gpu_names,
    peer_access,
    printed_by,
    python_header,
    resolve,
    torch_cuda,
)
from atropos_launcher.run_file.servers import is_server
from atroposlib.addresses import netloc
from atroposlib.clients.one_request import NoReply, request
from atroposlib.config import load_config
from atroposlib.errors import reading
from atroposlib.extras import installed_version
from atroposlib.flags import ConfigError, keys_of, make_parser
from atroposlib.http_guard import is_loopback
from atroposlib.processes.exit_words import exit_words
from atroposlib.wire.bridge import Manifest, ServerStatus
from example_trainer.memory.plan import GIB
from example_trainer.settings.bridges import LAUNCHED, Broadcast
from example_trainer.settings.servers import Port, VllmServers
from example_trainer.socket_folder import usable_parent
from sampler_doctor.settings import SamplerFlags
from vllm_patching.free_memory import available_memory

T = TypeVar("T")
PROG = "atropos doctor"
PLUGINS = ("atropos_processes", "atropos_bridge_http")  # the entry points of pyproject.toml
CONNECT_S, ANSWER_S = 2.0, 10.0  # a busy vLLM answers between two forward steps
LIVE_S = 1800  # to read a large model's files and compare them


class DoctorConfig(SamplerFlags, VllmServers):
    """Check this machine and the servers before a run: ports, versions, memory, models and limits."""

    mode: Literal[tuple(LAUNCHED)] = Field(  # type: ignore[valid-type]
        "broadcast", description="bridge mode, as in scripts/run_gsm8k_MODE.sh"
    )
    model: str | None = Field(
        None,
        min_length=1,
        description="Hugging Face id or local directory; without it, sizes and shapes are not checked",
    )
    api_port: Port = Field(8000, description="port of the batching API")
    tensor_parallel_size: int = Field(1, ge=1, le=1024, description="vLLM's tensor-parallel ranks, one per GPU")
    tp_size: int = Field(1, ge=1, le=64, description="trainer ranks that split each layer, as the trainer's flag")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="dtype that vLLM serves; auto is bfloat16 with a GPU, but float32 for a single copy with --tp-size",
    )
    bridge_staging: Literal["device", "host"] = Field(
        "device", description="where vLLM receives new weights: its --bridge-staging"
    )
    save_path: Path = Field(Path("."), description="directory of the trainer's checkpoints")
    master_addr: str = Field(
        "localhost",
        description="address at which vLLM's workers reach the trainer",
        json_schema_extra={"env": "MASTER_ADDR"},
    )
    master_port: int = Field(
        0,
        ge=0,
        le=65535,
        description="port of --master-addr; 0 takes a free one",
        json_schema_extra={"env": "MASTER_PORT"},
    )
    shared_weights: str = Field(
        "", description="whether vLLM will load the bridge", json_schema_extra={"env": "VLLM_ENABLE_SHARED_WEIGHTS"}
    )
    cuda_visible_devices: str | None = Field(
        None, description="GPUs to use", json_schema_extra={"env": "CUDA_VISIBLE_DEVICES"}
    )
    cuda_alloc_conf: str = Field(
        "", description="PyTorch's allocator settings", json_schema_extra={"env": "PYTORCH_CUDA_ALLOC_CONF"}
    )
    cpu_kv_cache_gib: int = Field(
        1, ge=0, description="vLLM's KV cache on a CPU", json_schema_extra={"env": "VLLM_CPU_KVCACHE_SPACE"}
    )
    cc: str | None = Field(None, description="C compiler for Triton's kernels", json_schema_extra={"env": "CC"})
    cache_home: Path = Field(
        Path.home() / ".cache",
        description="cache of this user, where gpu-check keeps its record",
        json_schema_extra={"env": "XDG_CACHE_HOME"},
    )
    live: tuple[str, ...] = Field(
        (),
        description="compare what these running vLLM servers compute with, word by word, with --weights, and check"
        " nothing else: http://HOST:PORT, or a run's directory; several with commas",
    )
    sampler: str | None = Field(
        None,
        pattern=r"^https?://",
        description="test what this server samples, against --model as transformers computes it, and check nothing"
        " else: http://HOST:PORT of vLLM, SGLang, or a server with OpenAI's completions",
    )
    weights: str | None = Field(
        None,
        min_length=1,
        description="for --live: a checkpoint, a model's directory or a Hugging Face id; by default the model that the"
        " server loaded",
    )


@dataclass(frozen=True)
class Server:
    """A vLLM server that a trainer would use, as found."""

    where: str
    local: bool
    listener: Listener | None
    status: Answer
    manifest: Manifest | None

    @property
    def running(self) -> bool:
        return self.status.status == 200 and self.status.body is not None


def parser() -> ArgumentParser:
    """For completion."""
    return make_parser(keys_of(DoctorConfig), PROG, DoctorConfig.__doc__ or "")


def main(argv: Sequence[str]) -> int:
    """The command line: 0 without a failing check, 1 with one, 2 on wrong flags."""
    words = ["--help" if word == "--flags" else word for word in argv]  # as it was called
    config = load_config(DoctorConfig, words, prog=PROG)
    if config.sampler:
        return examine_sampler(config)
    levels: Counter[str] = Counter()
    for finding in live(config) if config.live else examine(config):
        print(finding, flush=True)
        levels[finding.level] += 1
    print(
        f"{levels.total()} checks, {levels['fail']} failed, {levels['warn']} warnings"
        + (": fix what failed before you start" if levels["fail"] else "")
    )
    return 1 if levels["fail"] else 0


def examine(config: DoctorConfig) -> Iterator[Finding]:
    """Every check that applies, in the order in which they are worth reading."""
    gpus, driver_cuda = find_gpus(config.cuda_visible_devices)
    listeners = find_listeners()
    try:
        servers = [look_at(host, port, config, listeners) for host, port in config.vllm_servers]
    except ValueError as error:  # flags, hosts file and NUM_INFERENCE_NODES contradict each other
        servers = []
        yield Finding("fail", "servers", str(error))
    if len(servers) > 1 and not LAUNCHED[config.mode].feeds_several:
        yield checks.check_several(LAUNCHED[config.mode], len(servers))
    yield from versions(config, gpus, driver_cuda)
    yield from settings(config, gpus, servers)
    yield from ports(config, listeners, servers)
    yield from devices(config, gpus, servers)


# --- the groups of checks -------------------------------------------------------------------------------------------


def versions(config: DoctorConfig, gpus: Sequence[Gpu], driver_cuda: str | None) -> Iterator[Finding]:
    yield checks.check_python(sys.version_info[:2])
    yield checks.check_package("torch", installed_version("torch"), "2.6")
    yield checks.check_package("transformers", installed_version("transformers"), "5.0")
    if util.find_spec("vllm") is None:
        yield checks.check_package("vllm", None, "0.26")
    else:
        from vllm_patching.version import BEYOND, OLDEST, VERSION

        yield checks.check_package("vllm", str(VERSION), str(OLDEST), str(BEYOND))
        yield checks.check_plugins({name: declared_by(name) for name in PLUGINS})
    if LAUNCHED[config.mode].trains_adapter:
        yield checks.check_package("peft", installed_version("peft"), "0.14")
    if gpus:
        names = gpu_names()
        driver = names[0].rpartition(", ")[2] if names else None
        yield checks.check_driver(driver, driver_cuda, torch_cuda())
        yield checks.check_compiler(find_compiler(config.cc), python_header())
        yield checks.check_proven(read_gpu_record(config.cache_home / RECORD), names)
    yield checks.check_tmpdir(tempfile.gettempdir(), usable_parent(tempfile.gettempdir()))
    yield checks.check_proxies(os.environ)
    yield checks.check_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))


def settings(config: DoctorConfig, gpus: Sequence[Gpu], servers: Sequence[Server]) -> Iterator[Finding]:
    mode = LAUNCHED[config.mode]
    yield checks.check_switch(mode, config.shared_weights, any(server.running for server in servers))
    yield checks.check_allocator(
        mode.same_devices,
        len(gpus),
        config.cuda_alloc_conf,
        " ".join(server.listener.command for server in servers if server.listener),
    )
    remote = [server.where.split(":")[0] for server in servers if not server.local]
    yield checks.check_hosts(remote, mode.same_devices)
    if mode is Broadcast:
        yield checks.check_master(config.master_addr, resolve(config.master_addr), remote)


def ports(config: DoctorConfig, listeners: dict[int, Listener], servers: Sequence[Server]) -> Iterator[Finding]:
    mode = LAUNCHED[config.mode]
    api = listeners.get(config.api_port)
    yield checks.check_api(
        config.api_port, api, ask(f"http://localhost:{config.api_port}/", None) if api else Answer(0)
    )
    if mode is Broadcast:
        yield checks.check_master_port(config.master_port, listeners.get(config.master_port))
    for server in servers:
        yield checks.check_server(mode, server.where, server.local, server.listener, server.status)
        if server.running:
            yield checks.check_ranks(config.tensor_parallel_size, server.status.body["tp_size"])


def devices(config: DoctorConfig, gpus: Sequence[Gpu], servers: Sequence[Server]) -> Iterator[Finding]:
    mode, ranks = LAUNCHED[config.mode], config.tensor_parallel_size
    by_ranks = mode.same_devices and config.tp_size > 1
    dtype = config.dtype if config.dtype != "auto" else "bfloat16" if gpus and not by_ranks else "float32"
    here = [server for server in servers if server.local]
    running, count = any(server.running for server in here), max(1, len(here))
    if gpus:
        yield device_checks.check_gpus(mode, ranks, len(gpus), count)
    else:
        yield device_checks.check_cores(ranks, len(os.sched_getaffinity(0)), count)
    model = read_model(config.model) if config.model else None
    if model is None:
        yield Finding(
            "warn",
            "model",
            f"{config.model} is not on this machine" if config.model else "no --model given",
            f"memory, ranks and shapes are not checked; {'download it' if config.model else 'name one'}",
        )
    else:
        yield Finding(
            "ok", "model", f"{model.source}: {len(model.shapes)} tensors, {model.parameters / 1e6:.1f} M parameters"
        )
        yield device_checks.check_heads(ranks, model)
        if config.tp_size > 1:
            yield from device_checks.split_checks(mode, config.tp_size, ranks, dtype, model)
        if gpus and len(gpus) >= ranks * count:
            on_host = config.bridge_staging == "host"
            yield device_checks.check_gpu_memory(
                gpus, mode, model, dtype, ranks, running, count, config.tp_size, on_host
            )
        elif not gpus:
            absent = max(1, sum(not server.running for server in here))
            all_run = running and all(server.running for server in here)
            yield device_checks.check_memory(
                available_memory(),
                mode,
                model,
                dtype,
                config.cpu_kv_cache_gib * GIB,
                all_run,
                absent,
                ranks,
                config.tp_size,
            )
        if mode.owns_vllm:
            path = config.save_path.absolute()
            folder = next(folder for folder in [path, *path.parents] if folder.exists())
            yield device_checks.check_disk(shutil.disk_usage(folder).free, model, mode, str(folder))
        for server in servers:
            if server.manifest:
                yield checks.check_same_model(model, server.manifest)
    several = len(gpus) > 1 and (ranks > 1 or not mode.same_devices)  # then NCCL connects them
    if several:
        yield device_checks.check_peers(gpus, peer_access(printed_by("nvidia-smi", "topo", "-p2p", "r")))
    free = shutil.disk_usage("/dev/shm").free
    yield device_checks.check_shared_memory(free, separate_workers=ranks > 1 or not gpus, nccl=several)


def live(config: DoctorConfig) -> Iterator[Finding]:
    """Compare what running servers compute with against the files of --weights. Raises ConfigError."""
    name = "live weights"
    urls = [url for where in config.live for url in ([where] if ":" in where else urls_of_run(Path(where)))]
    flags = ["--live", ",".join(urls), *(["--weights", config.weights] if config.weights else [])]
    print(f"Comparing the weights of {', '.join(urls)} (at most {LIVE_S} s)", file=sys.stderr, flush=True)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "example_trainer.check_served_weights", *flags],
            env=_child_environment(config),
            capture_output=True,
            text=True,
            timeout=LIVE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        yield Finding("fail", name, f"not compared within {LIVE_S} s", "copy --weights to a faster disk")
        return
    for line in done.stdout.splitlines():
        row = json.loads(line)
        yield Finding(row["level"], name, f"{row['url']}: {row['found']}", row["remedy"])
    if done.returncode != 0:
        yield Finding("fail", name, (done.stderr.strip().splitlines() or [exit_words(done.returncode)])[-1])


def examine_sampler(config: DoctorConfig) -> int:
    """Test a sampler in a process of its own, because that loads torch. Returns its exit status, 2 without --model."""
    given = config.model_dump(mode="json", include={*SamplerFlags.model_fields, "sampler", "model"}, exclude_unset=True)
    flags = [word for name, value in given.items() for word in _flag(name, value)]
    return subprocess.run(
        [sys.executable, "-m", "sampler_doctor", *flags], env=_child_environment(config), check=False
    ).returncode


def _flag(name: str, value: object) -> list[str]:
    shown = ",".join(value) if isinstance(value, list) else str(value)
    return [f"--{name.replace('_', '-')}={shown}"]


def _child_environment(config: DoctorConfig) -> dict[str, str]:
    """The server's key, and where our packages are."""
    key = {"VLLM_API_KEY": config.vllm_api_key.get_secret_value()} if config.vllm_api_key else {}
    path = os.pathsep.join(filter(None, [str(PACKAGES), os.environ.get("PYTHONPATH")]))
    return {**os.environ, **key, "PYTHONPATH": path}


def urls_of_run(run: Path) -> list[str]:
    """The vLLM servers of a run's last start. Raises ConfigError."""
    with reading(f"--live {run}", ConfigError, remedy="give http://HOST:PORT, or the directory of a run"):
        services = json.loads((run / "run.json").read_text())["starts"][-1]["services"]
        if urls := [place["url"] for service, place in services.items() if is_server(service) and "url" in place]:
            return urls
        raise ValueError("its trainer starts vLLM itself")


# --- looking --------------------------------------------------------------------------------------------------------


def look_at(host: str, port: int, config: DoctorConfig, listeners: dict[int, Listener]) -> Server:
    address = resolve(host)
    local = address is not None and is_loopback(address)
    listener = listeners.get(port) if local else None
    status, manifest = Answer(0), None
    if listener or not local:
        key = config.vllm_api_key.get_secret_value() if config.vllm_api_key else None
        status = ask(f"http://{netloc(host, port)}/v1/bridge/status", key)
        if status.status == 200:
            status = Answer(200, _status(status.body))
        if status.body is not None and status.body.get("enabled"):
            manifest = _read(ask(f"http://{netloc(host, port)}/v1/bridge/manifest", key).body, Manifest)
    return Server(netloc(host, port), local, listener, status, manifest)


def _status(body: Any) -> dict[str, Any] | None:
    """Return the status of a vLLM server of ours, with what an older one leaves out; None for another program's."""
    if (status := _read(body, ServerStatus)) is None:
        return None
    defaults: dict[str, Any] = msgspec.to_builtins(status)
    del defaults["max_lora_rank"]  # absent from a server that takes no adapters
    return {**defaults, **body}


def _read(body: object, kind: type[T]) -> T | None:
    with contextlib.suppress(msgspec.ValidationError):
        return msgspec.convert(body, kind)
    return None


def ask(url: str, key: str | None) -> Answer:
    """One GET; status 0 if there is no answer in time."""
    with contextlib.suppress(NoReply, ValueError, RecursionError):
        reply = request("GET", url, connect_s=CONNECT_S, read_s=ANSWER_S, key=key)
        is_json = "json" in reply.headers.get("content-type", "")
        return Answer(reply.status, msgspec.json.decode(reply.content) if is_json else None)
    return Answer(0)
