"""The doctor's checks of versions, settings, ports and servers: pure functions. doctor.py collects the facts; this
module and device_checks.py judge them.

A finding is a line: ok, warn (it runs, but worse than it could) or fail (the run would not start, or break), with
the value, the limit, and what to change.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from packaging.version import Version

from atropos_launcher.checks.gpu_record import GpuRecord
from atropos_launcher.checks.model_files import Model
from atropos_launcher.placement.this_machine import Listener
from atroposlib.extras import install
from atroposlib.logs import escape
from atroposlib.wire.bridge import Manifest, ManifestMismatch, compare
from example_trainer.settings.bridges import LAUNCHED, Mode
from example_trainer.socket_folder import LONGEST_PARENT

PYTHON = (3, 11)
DISTRIBUTION = "atroposlib"
# by CUDA release, docs.nvidia.com/cuda/cuda-toolkit-release-notes, "minimum required driver version for CUDA minor
# version compatibility"
DRIVERS = {12: 525, 13: 580}
PROXIES = ("http_proxy", "https_proxy", "all_proxy")
OPEN_FILES = 65_535  # vLLM raises its own limit to this


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    level: Literal["ok", "warn", "fail"]
    check: str
    found: str
    remedy: str = ""

    def __str__(self) -> str:
        line = f"{self.level:<4}  {self.check:<15} {self.found}" + (f": {self.remedy}" if self.remedy else "")
        return escape(line)  # servers are quoted


@dataclass(frozen=True)
class Answer:
    """Holds what an HTTP service answered; status 0 when it did not."""

    status: int
    body: Any = None


# --- versions and limits of the system ------------------------------------------------------------------------------


def check_python(version: tuple[int, int]) -> Finding:
    shown = f"{version[0]}.{version[1]}"
    if version < PYTHON:
        return Finding(
            "fail",
            "Python",
            f"{shown}, needs {PYTHON[0]}.{PYTHON[1]}",
            "set PYTHON to a newer one and run scripts/setup.sh",
        )
    return Finding("ok", "Python", shown)


def check_package(name: str, version: str | None, oldest: str, beyond: str | None = None) -> Finding:
    """`oldest` <= version < `beyond`."""
    limit = f"needs {oldest} or newer" + (f", below {beyond}" if beyond else "")
    if version is None:
        remedy = install("gpu") if name == "vllm" else f"{install('trainer')}, or scripts/setup.sh"
        return Finding("fail", name, f"not installed, {limit}", remedy)
    if Version(version) < Version(oldest) or (beyond and Version(version) >= Version(beyond)):
        return Finding("fail", name, f"{version}, {limit}", "run scripts/setup.sh, which installs one that fits")
    return Finding("ok", name, version)


def check_plugins(found: Mapping[str, Sequence[str]]) -> Finding:
    """`found`: of each of our entry points, the distributions that declare it. vLLM loads every one."""
    missing = [name for name, owners in found.items() if not owners]
    if missing:
        return Finding(
            "fail",
            "vLLM plugins",
            f"{' and '.join(missing)} not installed",
            "run scripts/setup.sh, or pip install -e .",
        )
    twice = sorted({owner for owners in found.values() if len(owners) > 1 for owner in owners} - {DISTRIBUTION})
    if twice:
        return Finding(
            "fail",
            "vLLM plugins",
            f"declared by {DISTRIBUTION} and by {', '.join(twice)}",
            f"pip uninstall {' '.join(twice)} {DISTRIBUTION}, then install again: they share files",
        )
    return Finding("ok", "vLLM plugins", ", ".join(found))


def check_driver(driver: str | None, driver_cuda: str | None, torch_cuda: str | None) -> Finding:
    """The driver must know the CUDA release that PyTorch was built for; within a major release any will do. `driver` is
    its version, which decides where nvidia-smi names no CUDA release.
    """
    if torch_cuda is None:
        return Finding("fail", "CUDA", "this machine has GPUs and PyTorch is a CPU build", "run scripts/setup.sh --gpu")
    built = int(torch_cuda.split(".")[0])
    needed = DRIVERS.get(built)
    limit = f", which needs {needed} or newer" if needed else ""
    shown = (
        f"driver {driver or 'unknown'} (CUDA {driver_cuda or 'unknown'}), PyTorch built for CUDA {torch_cuda}{limit}"
    )
    if driver_cuda is not None:
        is_old = int(driver_cuda.split(".")[0]) < built
    elif driver is not None and needed is not None:
        is_old = int(driver.split(".")[0]) < needed
    else:
        return Finding("warn", "CUDA", shown, "compare by hand")
    if is_old:
        return Finding("fail", "CUDA", shown, "update the driver, or install a PyTorch and a vLLM for an older CUDA")
    return Finding("ok", "CUDA", shown)


def check_compiler(compiler: str | None, header: Path) -> Finding:
    """vLLM's and the exact trainer's Triton kernels are compiled at their first use."""
    if compiler is None:
        return Finding(
            "fail", "C compiler", "none found, and Triton compiles kernels with it", "install gcc, or set CC to yours"
        )
    if not header.is_file():
        return Finding(
            "fail",
            "C compiler",
            f"{compiler}, but not {header}, which Triton includes",
            "install Python's headers (python3-dev, python3-devel), or use a Python from uv or conda",
        )
    return Finding("ok", "C compiler", f"{compiler}, {header}")


def check_proven(record: GpuRecord | str | None, gpus: Sequence[str]) -> Finding:
    """Report what `atropos gpu-check` found on these GPUs; `record` is a line where it cannot be read."""
    name, remedy = "gpu-check", "run atropos gpu-check once: it trains a small model over each bridge"
    if record is None:
        return Finding("warn", name, "never ran on this machine", remedy)
    if isinstance(record, str):
        return Finding("warn", name, record, remedy)
    shown = f"{record.passed} passed, {len(record.failed)} failed, {record.skipped} skipped on {record.date}"
    if sorted(record.gpus) != sorted(gpus):
        then = ", ".join(record.gpus) or "none"
        return Finding("warn", name, f"{shown}, with other GPUs or another driver ({then})", remedy)
    if record.failed:
        return Finding("warn", name, f"{shown}: {', '.join(record.failed)}", f"see {record.table}")
    return Finding("ok", name, f"{shown}, vLLM {record.vllm}")


def check_tmpdir(own: str, usable: str | None) -> Finding:
    """`usable`: the directory in which vLLM's sockets would be made; None if none is short enough."""
    if usable is None:
        shown = f"{own} has {len(own)} characters, vLLM's sockets need at most {LONGEST_PARENT}"
        return Finding("fail", "TMPDIR", shown, "set TMPDIR to a shorter directory")
    if usable != own:
        shown = f"{own} has {len(own)} characters, too long for vLLM's sockets: they will be in {usable}"
        return Finding("warn", "TMPDIR", shown, f"set TMPDIR to a directory of at most {LONGEST_PARENT} characters")
    return Finding("ok", "TMPDIR", own)


def check_proxies(environment: Mapping[str, str]) -> Finding:
    """Proxies are for the hub and for other people's servers; a run's own servers are asked directly."""
    proxies = [name for name in environment if name.lower() in PROXIES and environment[name]]
    if not proxies:
        return Finding("ok", "proxies", "none")
    return Finding("ok", "proxies", f"{', '.join(sorted(proxies))}, not used for this run's own servers")


def check_open_files(soft: int, hard: int) -> Finding:
    if soft < 1024:
        return Finding(
            "fail", "open files", f"at most {soft}, needs 1024", "ulimit -n 65535 in the shell that starts the services"
        )
    if hard < OPEN_FILES:
        return Finding(
            "warn",
            "open files",
            f"at most {hard}, vLLM asks for {OPEN_FILES}",
            "raise the hard limit (limits.conf, docker run --ulimit nofile)",
        )
    return Finding("ok", "open files", f"{soft}, up to {hard}")


def check_several(mode: type[Mode], servers: int) -> Finding:
    """Report that a mode feeds one server, and several are asked for."""
    able = " or ".join(kind for kind, other in LAUNCHED.items() if other.feeds_several)
    return Finding(
        "fail", "servers", f"{servers}, but {mode.shown()} supports only one", f"name one, or choose mode {able}"
    )


# --- environment variables ------------------------------------------------------------------------------------------


def check_switch(mode: type[Mode], enabled: str, running: bool) -> Finding:
    """VLLM_ENABLE_SHARED_WEIGHTS, as a server started from this shell would see it."""
    name = "VLLM_ENABLE_SHARED_WEIGHTS"
    if not mode.switched or running or enabled == "1":
        return Finding(
            "ok", "bridge switch", f"{name}={enabled or 'unset'}" + (", but a server runs already" if running else "")
        )
    return Finding(
        "warn",
        "bridge switch",
        f"{name}={enabled or 'unset'}",
        f"export {name}=1 before the server (`atropos train` does so itself)",
    )


def check_allocator(same_devices: bool, gpus: int, settings: str, command: str) -> Finding:
    """CUDA IPC, by which a single copy is shared, knows plain cudaMalloc allocations only. `command`: of a vLLM that
    runs.
    """
    name = "allocator"
    if not same_devices or not gpus:
        return Finding("ok", name, "no memory is shared between processes by CUDA IPC here")
    if "expandable_segments:true" in settings.lower().replace(" ", ""):
        return Finding(
            "fail",
            name,
            f"PYTORCH_CUDA_ALLOC_CONF={settings}: CUDA IPC cannot share such memory",
            "unset expandable_segments",
        )
    if "--enable-sleep-mode" in command:
        return Finding(
            "fail",
            name,
            "vLLM runs with --enable-sleep-mode: CUDA IPC cannot share its memory",
            "restart vLLM without it",
        )
    return Finding("ok", name, f"PYTORCH_CUDA_ALLOC_CONF={settings or 'unset'}, no sleep mode")


def check_master(address: str, resolved: str | None, remote_hosts: Sequence[str]) -> Finding:
    """The trainer's rendezvous must be reachable from every machine that vLLM runs on."""
    if resolved is None:
        return Finding(
            "fail", "MASTER_ADDR", f"{address} has no address here", "set it to a name or address of this machine"
        )
    if remote_hosts and resolved.startswith("127."):
        return Finding(
            "fail",
            "MASTER_ADDR",
            f"{address} is {resolved}, which {remote_hosts[0]} cannot reach",
            "set it to this machine's address on that network",
        )
    return Finding("ok", "MASTER_ADDR", f"{address} ({resolved})")


def check_hosts(remote: Sequence[str], shared_memory: bool) -> Finding:
    """A single copy is shared memory: it cannot cross machines."""
    if remote and shared_memory:
        return Finding(
            "fail",
            "hosts",
            f"{', '.join(remote)}: one copy is shared within a machine",
            "drop the remote hosts, or choose broadcast",
        )
    return Finding("ok", "hosts", ", ".join(remote) or "this machine alone")


# --- ports and servers ----------------------------------------------------------------------------------------------


def check_api(port: int, listener: Listener | None, answer: Answer) -> Finding:
    """Free, or our batching API."""
    name = f"port {port}"
    if listener is None:
        return Finding("ok", name, "free for the batching API")
    if answer.status == 200 and isinstance(answer.body, dict) and "Atropos" in str(answer.body.get("message", "")):
        return Finding("ok", name, f"the batching API runs there (pid {listener.pid})")
    return Finding(
        "fail",
        name,
        f"needed by the batching API, in use by {_holder(listener)}",
        "end that process, or choose another --api-port",
    )


def check_master_port(port: int, listener: Listener | None) -> Finding:
    if port and listener:
        return Finding(
            "fail",
            "MASTER_PORT",
            f"{port} is in use by {_holder(listener)}",
            "end that process, or set MASTER_PORT=0 to take a free port",
        )
    return Finding("ok", "MASTER_PORT", f"{port} is free" if port else "0: the trainer takes a free port")


def check_server(mode: type[Mode], where: str, local: bool, listener: Listener | None, status: Answer) -> Finding:
    """The vLLM server at `where` (host:port), by what it answers to /v1/bridge/status."""
    if local and listener is None:
        starter = (
            "the trainer will start vLLM there" if mode.owns_vllm else "start vLLM there, before or after the trainer"
        )
        return Finding("ok", where, f"free: {starter}")
    if status.status == 0:
        if local and listener:
            return Finding(
                "fail",
                where,
                f"in use by {_holder(listener)}, which does not answer",
                "wait for it to load, end it, or choose --vllm-port",
            )
        return Finding(
            "fail", where, "nobody answers", "start vLLM there, open its port, or change --vllm-host and --vllm-port"
        )
    if mode.owns_vllm:
        return Finding(
            "fail",
            where,
            f"in use by {_holder(listener)}",
            "end it: in this mode the trainer starts vLLM itself; or choose --vllm-port",
        )
    if status.status in (401, 403):
        return Finding("fail", where, "vLLM refuses the key", "set VLLM_API_KEY to the server's --api-key")
    if status.status != 200 or not isinstance(status.body, dict):
        return Finding(
            "fail", where, f"no /v1/bridge there ({status.status})", "start it with example_trainer/vllm_api_server.py"
        )
    return _check_bridge(mode, where, status.body)


def _check_bridge(mode: type[Mode], where: str, status: Mapping[str, Any]) -> Finding:
    if mode.adapters != ("max_lora_rank" in status):
        how = "with --enable-lora --max-lora-rank 16" if mode.adapters else "without --enable-lora"
        return Finding(
            "fail", where, "vLLM accepts " + ("no adapters" if mode.adapters else "only adapters"), f"restart it {how}"
        )
    if mode.switched and not status["enabled"]:
        return Finding(
            "fail", where, "vLLM runs without the weight bridge", "restart it with VLLM_ENABLE_SHARED_WEIGHTS=1"
        )
    if status["poisoned"]:
        return Finding(
            "warn",
            where,
            f"generation is paused ({status['poisoned']})",
            "the next trainer's first sync resumes it",
        )
    if (lease := status["lease_left_s"]) and lease > 0:
        return Finding(
            "fail",
            where,
            f"trainer {status['trainer']} holds the bridge for another {lease:.0f} s",
            "stop that trainer, or wait",
        )
    return Finding("ok", where, f"vLLM serves policy version {status['policy_version']} with TP={status['tp_size']}")


def check_ranks(asked: int, served: int) -> Finding:
    if asked != served:
        return Finding(
            "fail",
            "ranks",
            f"--tensor-parallel-size {asked}, but vLLM runs with {served}",
            "restart vLLM, or pass the size that it runs with",
        )
    return Finding("ok", "ranks", f"vLLM runs with {served}")


def check_same_model(model: Model, manifest: Manifest) -> Finding:
    """The trainer's tensors against those that vLLM holds, by name and shape."""
    try:
        compare(manifest, dict(model.shapes))
    except ManifestMismatch as mismatch:
        return Finding(
            "fail", "same model", str(mismatch), f"give --model {manifest.model}, or restart vLLM with {model.source}"
        )
    return Finding("ok", "same model", f"{len(manifest.tensors)}/{len(manifest.tensors)} tensors agree with vLLM's")


def _holder(listener: Listener | None) -> str:
    if listener is None or listener.pid is None:
        return "a process of another user or machine"
    return f"{listener.command[:80]} (pid {listener.pid})"
