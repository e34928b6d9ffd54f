"""The cost of a weight sync in every bridge mode, for one model, in one run, compared with the limits of this machine.

    python benchmarks/weight_sync.py --model ~/.cache/atropos/SmolLM2-135M-Instruct [--modes broadcast,single_copy]
        [--syncs 10] [--out weight_sync.md]

For each mode it starts a real vLLM server (unless the trainer restarts it), then a trainer process that takes one fused
AdamW step on given gradients per sync: one to warm up, one during which memory is watched, then timed ones, first with
no other work, then with `--clients` generations in flight. Around the modes it measures the limits: a memcpy of
the model's bytes in one thread, and a bare Gloo broadcast of them between two processes over loopback. Memory is the
sum of PSS over the server's and the trainer's processes, so that shared pages count once. `--out` is the page that the
tables are written to. `--model random` has SmolLM2's size and heads that `--vllm-tp 2` can split.
"""

import example_trainer.openmp  # noqa: F401  isort: skip  as the trainer does

import argparse
import contextlib
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from atropos_launcher.placement.this_machine import processor
from atroposlib.clients.one_request import NoReply, request
from atroposlib.logs import configure_logging
from atroposlib.testing.tiny_tokenizer import make_tiny_tokenizer
from benchmarks.shared.vllm_server import ENVIRONMENT, SERVER_FLAGS, free_port, vllm_server
from benchmarks.shared.weight_sync_page import DIRECT, GATHERED, KINDS, Result, written_page
from example_trainer.bridges import make_bridge
from example_trainer.loop.learner import Learner
from example_trainer.loop.run import keep_weights
from example_trainer.ranks.ranks import collective, join
from example_trainer.settings.bridges import LAUNCHED, MODES
from example_trainer.settings.config import TrainerConfig
from vllm_patching import transport
from vllm_patching.version import VERSION

SAMPLE_S = 0.05
PAUSE_S = 1.5  # before an idle sync: vLLM's worker looks for messages without pause for 1 s after each
PARITY = {"float32": 2e-5, "bfloat16": 1.0}  # nats, by what vLLM serves; the trainer's weights are float32


@dataclass(frozen=True)
class Arm:
    """Describes how one bridge mode is started."""

    bridge: dict[str, Any]  # as in TrainerConfig
    server: list[str] | None  # its flags; None: the trainer starts it
    idle_syncs: int | None = None
    loaded: bool = True  # whether it is synced under load too
    ranks: int = 1  # of the trainer


def _arm(kind: str) -> Arm:
    if MODES[kind].owns_vllm:
        restarts = {"kind": kind, "restart_interval": 1, "vllm_flags": shlex.join(SERVER_FLAGS)}
        return Arm(restarts, None, idle_syncs=2, loaded=False)
    return Arm({"kind": kind}, ["--enable-lora", "--max-lora-rank", "16"] if MODES[kind].adapters else [])


# restarts last: they take minutes, and the page compares them with the broadcast
ARMS = {
    "legacy" if kind == "restart" else kind: _arm(kind)
    for kind in sorted(LAUNCHED, key=lambda kind: MODES[kind].owns_vllm)
} | {name: Arm({"kind": "broadcast", "sends": name.rpartition("_")[2]}, [], ranks=2) for name in (GATHERED, DIRECT)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="local directory, hub id, or random")
    parser.add_argument("--modes", default=",".join(ARMS), help="comma-separated list of " + ", ".join(ARMS))
    parser.add_argument("--dtype", default="float32", choices=PARITY, help="dtype that vLLM serves")
    parser.add_argument(
        "--vllm-tp", type=int, default=1, help="ranks of vLLM in the modes whose server is started here"
    )
    parser.add_argument("--syncs", type=int, default=10, help="of each kind, idle and under load")
    parser.add_argument("--clients", type=int, default=3, help="generations kept in flight during the loaded syncs")
    parser.add_argument("--out", type=Path, help="markdown page to write, beside printing it")
    parser.add_argument("--arm", help=argparse.SUPPRESS)  # this script as the trainer of one mode
    parser.add_argument("--gloo-peer", help=argparse.SUPPRESS)  # this script as the receiving end of the bare broadcast
    options = parser.parse_args()
    if options.gloo_peer:
        _gloo_peer(*json.loads(options.gloo_peer))
    elif options.arm:
        _train(json.loads(options.arm))
    else:
        configure_logging("benchmark")
        with tempfile.TemporaryDirectory() as folder:
            options.named = options.model.replace(str(Path.home()), "~")
            if options.model == "random":
                options.model = _save_random(Path(folder))
            _compare(options)


def _compare(options: argparse.Namespace) -> None:
    nbytes = _model_bytes(options.model, getattr(torch, options.dtype))
    load, start = os.getloadavg()[0], time.monotonic()
    memcpy, gloo = [_memcpy(nbytes) for _ in range(5)], [_bare_gloo(nbytes)]
    figures = {}
    for name in options.modes.split(","):
        if options.dtype != "float32" and ARMS[name].server is None:
            raise SystemExit(
                f"--dtype {options.dtype}: in mode {name} the trainer starts vLLM; leave it out of --modes"
            )
        figures[name] = _measure(name, options)
        memcpy += [_memcpy(nbytes) for _ in range(5)]
        gloo.append(_bare_gloo(nbytes))
        limits = {"memcpy": statistics.median(memcpy), "bare Gloo broadcast": statistics.median(gloo)}
        described = _described(options, nbytes, load, time.monotonic() - start)
        page = written_page(described, figures, limits, PARITY[options.dtype])
        if options.out is not None:  # after each mode: a later one that fails must not cost the minutes of those before
            options.out.write_text(page)
    print(page)


def _described(options: argparse.Namespace, nbytes: int, load: float, seconds: float) -> dict[str, str]:
    """What the page says of the command and the machine."""
    flags = f"{options.named} --modes {options.modes}" if options.modes != ",".join(ARMS) else options.named
    flags += f" --dtype {options.dtype}" if options.dtype != "float32" else ""
    flags += f" --vllm-tp {options.vllm_tp}" if options.vllm_tp != 1 else ""
    return {
        "command": f"python benchmarks/weight_sync.py --model {flags} --syncs {options.syncs} --clients"
        f" {options.clients}",
        "model": f"{Path(options.named).name}, {nbytes / 1e6:.1f} MB of weights in {options.dtype}",
        "machine": f"{processor()}, {os.cpu_count()} cores; PyTorch {torch.__version__}, vLLM {VERSION}",
        "load": f"load average {load:.1f} at the start, {seconds / 60:.0f} minutes in all",
        "clients": str(options.clients),
    }


def _measure(name: str, options: argparse.Namespace) -> Result:
    """One mode from the start of its server to its end."""
    mode = ARMS[name]
    idle, loaded = mode.idle_syncs or options.syncs, options.syncs if mode.loaded else 0
    port = free_port()
    flags = [*(mode.server or []), "--dtype", options.dtype, "--tensor-parallel-size", str(options.vllm_tp)]
    with ExitStack() as ending:
        folder = ending.enter_context(tempfile.TemporaryDirectory())
        servers = [] if mode.server is None else [ending.enter_context(vllm_server(options.model, port, flags))]
        alone = _pss(servers) if servers else None
        arm = {
            "model": options.model,
            "port": port,
            "idle": idle,
            "loaded": loaded,
            "clients": options.clients,
            "folder": folder,
            "bridge": mode.bridge,
        }
        several = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(mode.ranks)]
        start = several if mode.ranks > 1 else []
        command = [sys.executable, *start, __file__, "--model", "-", "--arm", json.dumps(arm)]
        trainer = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | ENVIRONMENT
        )
        try:
            return _read_arm(trainer, [trainer.pid, *servers]) | {"server_alone": alone}
        finally:
            if trainer.poll() is None:
                trainer.terminate()
            trainer.wait(60)


def _read_arm(trainer: subprocess.Popen[str], roots: list[int]) -> Result:
    """The trainer's reports, and what the process trees `roots` held meanwhile."""
    assert trainer.stdout is not None
    assert trainer.stdin is not None
    reports: dict[str, list[Result]] = {kind: [] for kind in ("warm-up", "watched", *KINDS)}
    result: Result = {"reports": reports, "counts": []}
    sampler = _Sampler(roots)
    for line in trainer.stdout:
        message = json.loads(line)
        if message["event"] == "synced":
            reports[message["kind"]].append(message["report"])
        elif message["event"] == "warm":
            result |= {"steady": _pss(roots), "weights": _pss(roots, "memfd:atropos-weights")}
            result["counts"].append(_counts(roots))
            sampler.start()
        elif message["event"] == "watched":
            result["peak"] = sampler.stop()
        else:
            result["counts"].append(_counts(roots))
            result |= message | {"end": _pss(roots)}
        if message["event"] != "synced":
            trainer.stdin.write("\n")
            trainer.stdin.flush()
    if trainer.wait() != 0:
        raise RuntimeError(
            f"the trainer of this mode ended with exit status {trainer.returncode}; its messages are above"
        )
    return result


class _Stepping(Learner):
    """Takes optimizer steps on gradients that are given."""

    @collective
    def make_optimizer(self) -> None:
        """Once the bridge has bound the weights."""
        self._trained = [parameter for parameter in self.trained.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(self._trained, lr=1e-6, fused=True)

    @collective
    def give_gradients(self) -> None:
        """Set the gradients of the next step."""
        for parameter in self._trained:
            parameter.grad = torch.full_like(parameter, 1e-3)

    @collective
    def step(self) -> None:
        """One update."""
        self.optimizer.step()

    def timed_step(self) -> None:
        """One update, whose seconds are kept."""
        start = time.perf_counter()
        self.step()
        self.update_s = time.perf_counter() - start


def _train(arm: Result) -> None:
    """A rank of the trainer of one mode. Rank 0 connects, syncs, and tells each on stdout; after the messages other
    than "synced" a line on stdin lets it continue.
    """
    configure_logging("trainer")
    config = TrainerConfig(
        model_name=arm["model"],
        vllm_ports=(arm["port"],),
        save_path=Path(arm["folder"]) / "checkpoints",
        log_dir=Path(arm["folder"]),
        bridge=arm["bridge"],
    )
    device = torch.device("cpu")
    with contextlib.ExitStack() as resources:
        ranks = join(config, device)
        resources.callback(ranks.leave)
        if not ranks.leads:
            ranks.follow(_Stepping(config, device, ranks))
            return
        prepared = make_bridge(config)(arm["model"], device)
        resources.callback(prepared.close)
        learner = _Stepping(config, device, ranks)
        learner.load_into(prepared.storage, arm["model"])
        bridge = resources.enter_context(contextlib.closing(prepared.connect(learner.trained)))
        learner.make_optimizer()
        bridge.sync(0, keep_weights)
        parity = [bridge.parity_probe()]
        kinds = ["warm-up", "watched"] + ["idle"] * arm["idle"] + ["under load"] * arm["loaded"]
        load = _Load(arm["port"], arm["clients"])
        with contextlib.ExitStack() as during_load:
            for version, kind in enumerate(kinds, start=1):
                if kind == "under load" and kinds[version - 2] != kind:
                    during_load.enter_context(load)
                time.sleep(0.5 if kind == "under load" else PAUSE_S)
                learner.give_gradients()
                start = time.perf_counter()
                done = bridge.sync(version, learner.timed_step)
                served_after_s = time.perf_counter() - start - learner.update_s - done.transfer_s
                own = {"update_s": learner.update_s, "served_after_s": served_after_s}
                _tell(event="synced", kind=kind, report=asdict(done) | own)
                if kind in ("warm-up", "watched"):  # the first step makes AdamW's moments
                    _tell(event={"warm-up": "warm"}.get(kind, kind))
                    sys.stdin.readline()
        parity.append(bridge.parity_probe())
        _tell(event="done", parity=max(parity), served=load.served, failed=load.failed)
        sys.stdin.readline()


def _tell(**message: object) -> None:
    print(json.dumps(message), flush=True)


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
            try:
                served = request("POST", self._url, connect_s=5, read_s=120, body=body).status == 200
            except NoReply:
                served = False
            with self._lock:
                self.served += served
                self.failed += not served


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


def _pss(roots: list[int], mapping: str | None = None) -> int:
    """Bytes held by the process trees, shared pages once; of the mappings whose name starts with `mapping` alone if it
    is given.
    """
    total = 0
    for process in _trees(roots):
        try:
            smaps = Path(f"/proc/{process.pid}/smaps" + ("_rollup" if mapping is None else "")).read_text()
        except OSError:  # it ended meanwhile
            continue
        pattern = r"^Pss: +(\d+) kB" if mapping is None else rf"/{mapping}.*(?:\n.*){{1,8}}?\nPss: +(\d+) kB"
        total += sum(int(size) << 10 for size in re.findall(pattern, smaps, re.MULTILINE))
    return total


def _counts(roots: list[int]) -> tuple[int, int]:
    """Open files and threads of the process trees."""
    trees = _trees(roots)
    return sum(process.num_fds() for process in trees), sum(process.num_threads() for process in trees)


def _save_random(folder: Path) -> str:
    """A model of SmolLM2-135M's size, with 8 heads and 4 key-value heads instead of 9 and 3."""
    shape = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        tie_word_embeddings=True,
        max_position_embeddings=512,
    )
    AutoModelForCausalLM.from_config(shape).save_pretrained(folder)
    make_tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def _model_bytes(model: str, dtype: torch.dtype) -> int:
    """Bytes of the model's parameters, tied ones once."""
    config = AutoConfig.from_pretrained(model)
    with torch.device("meta"):
        return sum(
            parameter.numel() * dtype.itemsize for parameter in AutoModelForCausalLM.from_config(config).parameters()
        )


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
    peer = subprocess.Popen(
        [sys.executable, __file__, "--model", "-", "--gloo-peer", json.dumps([port, session, nbytes, repeats])]
    )
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


if __name__ == "__main__":
    main()
