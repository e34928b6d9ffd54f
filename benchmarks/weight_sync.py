"""What a weight sync costs on this machine, beside its limits, in one run.

    python benchmarks/weight_sync.py --model ~/.cache/atropos/SmolLM2-135M-Instruct [--syncs 10] [--clients 3]

Starts one real vLLM server with the bridge on, keeps `--clients` requests in flight, and syncs again and again. In the same run it
measures the limits: a memcpy of the same bytes in one thread, and a bare Gloo broadcast of the same bytes between two processes
over loopback. Prints a table (median and worst) and the two ratios the product promises.
"""

import argparse
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import requests
import torch

from atroposlib.logs import configure_logging, get_logger, waiting
from example_trainer.bridges import make_bridge
from example_trainer.bridges.broadcast import BroadcastBridge
from example_trainer.config import TrainerConfig
from example_trainer.grpo import keep_weights
from vllm_patching import transport

log = get_logger("weight_sync")
SERVER = Path(__file__).parents[1] / "example_trainer" / "vllm_api_server.py"
START_DEADLINE_S = 600


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="local folder or hub id")
    parser.add_argument("--syncs", type=int, default=10)
    parser.add_argument("--clients", type=int, default=3, help="requests kept in flight during the syncs")
    parser.add_argument("--gloo-peer", help=argparse.SUPPRESS)  # this script as the receiving end of the bare broadcast
    options = parser.parse_args()
    if options.gloo_peer:
        port, session, nbytes, repeats = options.gloo_peer.split(",")
        _gloo_peer(int(port), session, int(nbytes), int(repeats))
        return
    configure_logging("benchmark")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    server = _start_server(options.model, port)
    try:
        _measure(options, port)
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(30)


def _measure(options: argparse.Namespace, port: int) -> None:
    config = TrainerConfig(model_name=options.model, weight_bridge_mode="shared_vllm", use_shared_memory=True, vllm_port=port)
    bridge = make_bridge(config)
    assert isinstance(bridge, BroadcastBridge)
    bridge.connect(options.model, torch.device("cpu"))
    bridge.sync(0, keep_weights)
    nbytes = bridge.sync(1, keep_weights).bytes_moved
    load = _Load(port, options.clients)
    rows: dict[str, list[float]] = {
        "transfer under load": [],
        "stall under load": [],
        "apply under load": [],
        "transfer idle": [],
        "stall idle": [],
    }
    version = 2
    with load:
        for _ in range(options.syncs):
            report = bridge.sync(version, keep_weights)
            version += 1
            rows["transfer under load"].append(report.transfer_s)
            rows["stall under load"].append(report.stall_s)
            rows["apply under load"].append(report.apply_s)
            time.sleep(0.5)
    # idle syncs and both limits take turns, so that whatever else the machine does falls on all of them alike
    rows["memcpy"], rows["bare Gloo broadcast"] = [], []
    for _ in range(options.syncs):
        report = bridge.sync(version, keep_weights)
        version += 1
        rows["transfer idle"].append(report.transfer_s)
        rows["stall idle"].append(report.stall_s)
        rows["memcpy"].append(_memcpy(nbytes))
        rows["bare Gloo broadcast"].append(_bare_gloo(nbytes))
    parity = bridge.parity_probe()
    bridge.close()
    _print(options, nbytes, rows, parity, load)


def _print(options: argparse.Namespace, nbytes: int, rows: dict[str, list[float]], parity: float, load: "_Load") -> None:
    median = {name: statistics.median(values) for name, values in rows.items()}
    print(f"\nmachine: {os.cpu_count()} cores, {_cpu_name()}; PyTorch {torch.__version__}")
    print(
        f"command: python benchmarks/weight_sync.py --model {Path(options.model).name} --syncs {options.syncs} --clients {options.clients}"
    )
    print(f"bytes: {nbytes / 1e6:.1f} MB (fp32), {options.syncs} syncs each\n")
    print("| what | median ms | worst ms |\n|---|---|---|")
    for name, values in rows.items():
        print(f"| {name} | {median[name] * 1e3:.1f} | {max(values) * 1e3:.1f} |")
    allowed = 2 * median["memcpy"] + 0.060
    print(f"\nstall idle / (2 x memcpy + 60 ms) = {median['stall idle'] / allowed:.2f} (goal <= 1)")
    print(f"stall under load / (2 x memcpy + 60 ms) = {median['stall under load'] / allowed:.2f} (goal <= 1)")
    print(f"transfer idle / bare Gloo broadcast = {median['transfer idle'] / median['bare Gloo broadcast']:.2f} (goal <= 2)")
    print(f"requests during the loaded syncs: {load.served} served, {load.failed} failed; parity probe after the last: {parity:.1e}")


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


def _memcpy(nbytes: int) -> float:
    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.ones(nbytes, dtype=torch.uint8)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    start = time.perf_counter()
    target.copy_(source)
    seconds = time.perf_counter() - start
    torch.set_num_threads(threads)
    return seconds


def _bare_gloo(nbytes: int, repeats: int = 2) -> float:
    """Best of `repeats` broadcasts between this process and a fresh one; first touches excluded."""
    store, port = transport.host_store("127.0.0.1", 0, 60)
    session = uuid.uuid4().hex
    peer = subprocess.Popen([sys.executable, __file__, "--model", "-", "--gloo-peer", f"{port},{session},{nbytes},{repeats}"])
    control = transport.make_control_group(store, session, 0, 2, 60)
    groups = transport.Groups(control, control, "gloo")
    buffer = torch.ones(nbytes, dtype=torch.uint8)
    seconds = []
    for _ in range(repeats):
        groups.barrier()
        start = time.perf_counter()
        groups.broadcast(buffer)
        groups.barrier()
        seconds.append(time.perf_counter() - start)
    peer.wait(60)
    return min(seconds)


def _gloo_peer(port: int, session: str, nbytes: int, repeats: int) -> None:
    store = transport.join_store("127.0.0.1", port, 60)
    control = transport.make_control_group(store, session, 1, 2, 60)
    groups = transport.Groups(control, control, "gloo")
    buffer = torch.ones(nbytes, dtype=torch.uint8)
    for _ in range(repeats):
        groups.barrier()
        groups.broadcast(buffer)
        groups.barrier()


def _start_server(model: str, port: int) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "VLLM_ENABLE_SHARED_WEIGHTS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "LOGDIR": "/tmp"}
    command = [sys.executable, "-u", str(SERVER), "--model", model, "--port", str(port), "--max-model-len", "256", "--max-num-seqs", "64"]
    server = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    with waiting(log, "the vLLM server", peer=f"127.0.0.1:{port}", deadline_s=START_DEADLINE_S):
        deadline = time.monotonic() + START_DEADLINE_S
        while server.poll() is None and time.monotonic() < deadline:
            try:
                if requests.get(f"http://127.0.0.1:{port}/health", timeout=5).ok:
                    return server
            except requests.ConnectionError:
                time.sleep(0.5)
        raise RuntimeError(f"vLLM did not come up within {START_DEADLINE_S} s (exit code {server.poll()})")


def _cpu_name() -> str:
    lines = [line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return lines[0] if lines else platform.machine()


if __name__ == "__main__":
    main()
