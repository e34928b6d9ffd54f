"""What handing weights to vLLM costs in every bridge mode, on one model, in one run, beside the limits of this machine.

    python benchmarks/weight_sync.py --model ~/.cache/atropos/SmolLM2-135M-Instruct [--modes broadcast,single_copy] [--syncs 10]

For each mode it starts a real vLLM server (legacy: the trainer does), then a trainer process of its own that takes one fused AdamW
step on random gradients a sync: first with nothing else going on, then with `--clients` generations in flight. Around the modes it
measures the limits: a memcpy of the model's bytes in one thread, and a bare Gloo broadcast of them between two processes over
loopback. Memory is the sum of PSS over the server's and the trainer's processes, so that shared pages count once.
"""

import argparse
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import requests
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from atroposlib.logs import configure_logging, get_logger, waiting
from example_trainer.bridges import make_bridge
from example_trainer.config import TrainerConfig
from example_trainer.grpo import keep_weights
from vllm_patching import transport

log = get_logger("weight_sync")
SERVER = Path(__file__).parents[1] / "example_trainer" / "vllm_api_server.py"
START_DEADLINE_S = 600
SAMPLE_S = 0.05


@dataclass(frozen=True)
class Mode:
    """How one bridge mode is started."""

    trainer: dict[str, Any]
    server: list[str] | None = field(default_factory=list)  # its flags; None: the trainer starts it
    idle_syncs: int | None = None
    loaded: bool = True  # whether it is synced under load too


MODES = {
    "broadcast": Mode({"weight_bridge_mode": "shared_vllm", "use_shared_memory": True}),
    "single_copy": Mode({"weight_bridge_mode": "shared_vllm", "single_copy": True}),
    "lora": Mode({"weight_bridge_mode": "lora_only"}, ["--enable-lora", "--max-lora-rank", "16"]),
    "legacy": Mode({"weight_bridge_mode": "none", "vllm_restart_interval": 1}, None, idle_syncs=2, loaded=False),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="local folder or hub id")
    parser.add_argument("--modes", default=",".join(MODES), help="comma list out of " + ", ".join(MODES))
    parser.add_argument("--syncs", type=int, default=10, help="of each kind, idle and under load")
    parser.add_argument("--clients", type=int, default=3, help="generations kept in flight during the loaded syncs")
    parser.add_argument("--arm", help=argparse.SUPPRESS)  # this script as the trainer of one mode
    parser.add_argument("--gloo-peer", help=argparse.SUPPRESS)  # this script as the receiving end of the bare broadcast
    options = parser.parse_args()
    if options.gloo_peer:
        _gloo_peer(*json.loads(options.gloo_peer))
    elif options.arm:
        _train(json.loads(options.arm))
    else:
        configure_logging("benchmark")
        _compare(options)


def _compare(options: argparse.Namespace) -> None:
    nbytes = _model_bytes(options.model)
    memcpy, gloo = [_memcpy(nbytes) for _ in range(5)], [_bare_gloo(nbytes)]
    figures = {}
    for name in options.modes.split(","):
        figures[name] = _measure(name, options, nbytes)
        memcpy += [_memcpy(nbytes) for _ in range(5)]
        gloo.append(_bare_gloo(nbytes))
    _print(options, nbytes, figures, statistics.median(memcpy), statistics.median(gloo))


def _measure(name: str, options: argparse.Namespace, nbytes: int) -> dict[str, Any]:
    """One mode from the start of its server to its end."""
    mode = MODES[name]
    idle, loaded = mode.idle_syncs or options.syncs, options.syncs if mode.loaded else 0
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        server = None if mode.server is None else _start_server(options.model, port, mode.server, folder)
        alone = _pss([server.pid]) if server else 0
        arm = {
            "model": options.model,
            "port": port,
            "idle": idle,
            "loaded": loaded,
            "clients": options.clients,
            "folder": folder,
            "mode": mode.trainer,
        }
        trainer = subprocess.Popen([sys.executable, __file__, "--model", "-", "--arm", json.dumps(arm)], stdout=subprocess.PIPE, text=True)
        try:
            return _read_arm(trainer, server, nbytes) | {"server_alone": alone}
        finally:
            for process in filter(None, (trainer, server)):
                if process.poll() is None:
                    process.terminate() if process is trainer else os.killpg(process.pid, signal.SIGTERM)
                process.wait(60)


def _read_arm(trainer: subprocess.Popen[str], server: subprocess.Popen[bytes] | None, nbytes: int) -> dict[str, Any]:
    """The trainer's reports, and what the processes held meanwhile."""
    assert trainer.stdout is not None
    roots = [trainer.pid, *([server.pid] if server else [])]
    sampler, result = _Sampler(roots), {"reports": {"warm-up": [], "idle": [], "under load": []}}
    for line in trainer.stdout:
        message = json.loads(line)
        if message["event"] == "connected":
            result["steady"] = _pss(roots)
            result["counts"] = [_counts(roots)]
            sampler.start()
        elif message["event"] == "synced":
            result["reports"][message["kind"]].append(message["report"])
        else:
            result |= message
            result["counts"].append(_counts(roots))
            result["peak"] = sampler.stop()
    if trainer.wait() != 0:
        raise RuntimeError(f"the trainer of this mode ended with exit status {trainer.returncode}; its messages are above")
    return result


def _train(arm: dict[str, Any]) -> None:
    """The trainer of one mode: connect, sync, report each on stdout."""
    configure_logging("trainer")
    config = TrainerConfig(
        model_name=arm["model"],
        vllm_port=arm["port"],
        save_path=Path(arm["folder"]) / "checkpoints",
        log_dir=Path(arm["folder"]),
        **arm["mode"],
    )
    bridge = make_bridge(config)
    model = bridge.connect(arm["model"], torch.device("cpu"))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-6, fused=True)

    def report(kind: str, version: int) -> None:
        for parameter in trained:
            parameter.grad = torch.full_like(parameter, 1e-3)
        done = bridge.sync(version, optimizer.step)
        print(json.dumps({"event": "synced", "kind": kind, "report": asdict(done)}), flush=True)

    bridge.sync(0, keep_weights)
    print(json.dumps({"event": "connected"}), flush=True)
    report("warm-up", 1)  # the first step makes AdamW's moments
    for version in range(2, 2 + arm["idle"]):
        report("idle", version)
    load = _Load(arm["port"], arm["clients"])
    if arm["loaded"]:
        with load:
            for version in range(2 + arm["idle"], 2 + arm["idle"] + arm["loaded"]):
                report("under load", version)
                time.sleep(0.5)
    parity = bridge.parity_probe()
    print(json.dumps({"event": "done", "parity": parity, "served": load.served, "failed": load.failed}), flush=True)
    bridge.close()


class _Load:
    """Keeps `clients` generations in flight while the block runs."""

    def __init__(self, port: int, clients: int) -> None:
        self._url = f"http://127.0.0.1:{port}/generate"
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(clients)]
        self._lock = threading.Lock()
        self.served = self.failed = 0

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()
        time.sleep(1)

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def _run(self) -> None:
        body = {"prompt": {"prompt_token_ids": list(range(5, 25))}, "max_tokens": 24, "ignore_eos": True}
        while not self._stop.is_set():
            reply = requests.post(self._url, json=body, timeout=60)
            with self._lock:
                self.served += reply.status_code == 200
                self.failed += reply.status_code != 200


class _Sampler:
    """The largest PSS of some process trees while it runs."""

    def __init__(self, roots: list[int]) -> None:
        self._roots = roots
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._peak = 0

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> int:
        self._stop.set()
        self._thread.join()
        return self._peak

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            self._peak = max(self._peak, _pss(self._roots))


def _trees(roots: list[int]) -> list[psutil.Process]:
    """The processes `roots` and all below them that live."""
    found = []
    for root in roots:
        try:
            process = psutil.Process(root)
            found += [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
    return found


def _pss(roots: list[int]) -> int:
    """Bytes held by the process trees, shared pages once."""
    total = 0
    for process in _trees(roots):
        try:
            lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
        except OSError:  # it ended meanwhile
            continue
        total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    return total


def _counts(roots: list[int]) -> tuple[int, int]:
    """Open files and threads of the process trees."""
    trees = _trees(roots)
    return sum(process.num_fds() for process in trees), sum(process.num_threads() for process in trees)


def _print(options: argparse.Namespace, nbytes: int, figures: dict[str, dict[str, Any]], memcpy: float, gloo: float) -> None:
    print(f"\nmachine: {os.cpu_count()} cores, {_cpu_name()}; PyTorch {torch.__version__}")
    print(f"command: python benchmarks/weight_sync.py --model {Path(options.model).name} --modes {options.modes}"
          f" --syncs {options.syncs} --clients {options.clients}")  # fmt: skip
    print(f"weights: {nbytes / 1e6:.1f} MB in float32: memcpy {memcpy * 1e3:.0f} ms, bare Gloo broadcast {gloo * 1e3:.0f} ms\n")
    print("Median (worst) in ms:\n")
    print("| mode | load | update | transfer | stall | apply | MB moved |\n|---|---|---|---|---|---|---|")
    for name, found in figures.items():
        for kind, reports in found["reports"].items():
            if reports and kind != "warm-up":
                cells = (
                    _median_and_worst([report[part] for report in reports]) for part in ("update_s", "transfer_s", "stall_s", "apply_s")
                )
                print(f"| {name} | {kind} | {' | '.join(cells)} | {reports[-1]['bytes_moved'] / 1e6:.1f} |")
    print("\n| mode | PSS in MB: server alone, both, peak | files, threads | requests | parity |\n|---|---|---|---|---|")
    for name, found in figures.items():
        held = ", ".join(f"{found[key] / 1e6:.0f}" for key in ("server_alone", "steady", "peak"))
        counts = " → ".join(f"{files}, {threads}" for files, threads in found["counts"])
        print(f"| {name} | {held} | {counts} | {found['served']} served, {found['failed']} failed | {found['parity']:.1e} |")
    _print_ratios(figures, memcpy, gloo)


def _print_ratios(figures: dict[str, dict[str, Any]], memcpy: float, gloo: float) -> None:
    """The figures the product promises, each beside its goal."""

    def median(mode: str, part: str, kind: str = "idle") -> float:
        return statistics.median(report[part] for report in figures[mode]["reports"][kind])

    print()
    if "broadcast" in figures:
        allowed = 1.5 * memcpy + 0.060
        for kind in ("idle", "under load"):
            print(f"broadcast stall {kind} / (1.5 x memcpy + 60 ms) = {median('broadcast', 'stall_s', kind) / allowed:.2f} (goal <= 1)")
        print(f"broadcast transfer idle / bare Gloo broadcast = {median('broadcast', 'transfer_s') / gloo:.2f} (goal <= 2)")
    if "single_copy" in figures:
        extra = median("single_copy", "stall_s") - median("single_copy", "update_s")
        print(f"single copy stall idle - optimizer step = {extra * 1e3:.0f} ms (goal <= 60)")
    if {"legacy", "broadcast"} <= set(figures):
        print(f"legacy stall / broadcast stall = {median('legacy', 'stall_s') / median('broadcast', 'stall_s'):.0f} (goal >= 100)")


def _median_and_worst(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.1f} ({max(seconds) * 1e3:.1f})"


def _model_bytes(model: str) -> int:
    """Bytes of the model's parameters in float32, tied ones once."""
    config = AutoConfig.from_pretrained(model)
    with torch.device("meta"):
        return sum(parameter.numel() * 4 for parameter in AutoModelForCausalLM.from_config(config).parameters())


def _memcpy(nbytes: int) -> float:
    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.ones(nbytes, dtype=torch.uint8)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    start = time.perf_counter()
    target.copy_(source)
    seconds = time.perf_counter() - start
    torch.set_num_threads(threads)
    return seconds


def _bare_gloo(nbytes: int, repeats: int = 3) -> float:
    """Best of `repeats` broadcasts between this process and a fresh one; first touches excluded."""
    store, port = transport.host_store("127.0.0.1", 0, 60)
    session = uuid.uuid4().hex
    peer = subprocess.Popen([sys.executable, __file__, "--model", "-", "--gloo-peer", json.dumps([port, session, nbytes, repeats])])
    seconds = _broadcasts(store, session, 0, nbytes, repeats)
    peer.wait(60)
    return min(seconds)


def _gloo_peer(port: int, session: str, nbytes: int, repeats: int) -> None:
    _broadcasts(transport.join_store("127.0.0.1", port, 60), session, 1, nbytes, repeats)


def _broadcasts(store: torch.distributed.Store, session: str, rank: int, nbytes: int, repeats: int) -> list[float]:
    control = transport.make_control_group(store, session, rank, 2, 60)
    groups = transport.Groups(control, control, "gloo")
    buffer = torch.ones(nbytes, dtype=torch.uint8)
    seconds = []
    for _ in range(repeats):
        groups.barrier()
        start = time.perf_counter()
        groups.broadcast(buffer)
        groups.barrier()
        seconds.append(time.perf_counter() - start)
    return seconds


def _start_server(model: str, port: int, flags: list[str], folder: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "VLLM_ENABLE_SHARED_WEIGHTS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "LOGDIR": folder}
    command = [
        sys.executable,
        "-u",
        str(SERVER),
        "--model",
        model,
        "--port",
        str(port),
        "--max-model-len",
        "256",
        "--max-num-seqs",
        "64",
        *flags,
    ]
    output = (Path(folder) / "vllm.log").open("wb")
    server = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    with waiting(log, "the vLLM server", peer=f"127.0.0.1:{port}", deadline_s=START_DEADLINE_S):
        deadline = time.monotonic() + START_DEADLINE_S
        while server.poll() is None and time.monotonic() < deadline:
            try:
                if requests.get(f"http://127.0.0.1:{port}/health", timeout=5).ok:
                    return server
            except requests.ConnectionError:
                time.sleep(0.5)
        os.killpg(server.pid, signal.SIGKILL)
        raise RuntimeError(f"vLLM did not come up within {START_DEADLINE_S} s: {Path(output.name).read_text()[-2000:]}")


def _cpu_name() -> str:
    lines = [line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return lines[0] if lines else platform.machine()


if __name__ == "__main__":
    main()
