"""A trainer without training, as a process of its own that tests can kill or freeze: connects, syncs, and does what it
is told.

python -m tests.integration.bridge_child MODEL PORT ACT [TIMEOUT_S [DEVICE BACKEND [FOLDER]]]
ACT: sync | told (one for each line of its input) | save (to FOLDER, after a sync) | idle | many |
changes (with --bridge-delta) | kill-before-transfer | kill-mid-transfer | freeze-mid-transfer | kill-after-ack |
kill-during-commit
"""

import http.client
import json
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoTokenizer, PreTrainedModel

from atroposlib.logs import configure_logging
from example_trainer.bridges import WeightBridge, make_bridge
from example_trainer.bridges.vllm_client import VllmClient
from example_trainer.settings.config import TrainerConfig
from example_trainer.weights.by_rank import SharedRanks
from example_trainer.weights.load import load_trained

CPU = "cpu"


def main(
    model_name: str,
    port: int,
    act: str,
    timeout_s: str = "40",
    device: str = CPU,
    backend: str = "auto",
    folder: str = "",
) -> None:
    settings: dict[str, Any] = {"bridge_timeout_s": float(timeout_s), "bridge_backend": backend, "device": device}
    settings["bridge_delta"] = act == "changes"
    if act.startswith("freeze"):
        settings["bridge_lease_s"] = 8  # until a test may see its end
    bridge, model = joined(model_name, port, use_shared_memory=True, bridge_bucket_mb=1, **settings)
    if act == "idle":
        time.sleep(300)
    several = {"many": sync_many, "told": sync_when_told, "changes": sync_changes}.get(act)
    if several is not None:
        several(bridge, model)
    elif act.endswith("mid-transfer"):
        _stop_at_second_bucket(bridge, signal.SIGKILL if act.startswith("kill") else signal.SIGSTOP)
    elif act == "kill-after-ack":
        _link(bridge).vllm.commit = _die
    elif act == "kill-during-commit":
        _link(bridge).vllm.commit = partial(_send_commit_and_die, port)
    if several is None:
        bridge.sync(1, _die if act == "kill-before-transfer" else lambda: change(model))
    prove(bridge, _link(bridge).vllm)
    bridge.close()
    if act == "save":
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(model_name).save_pretrained(folder)


def prove(bridge: WeightBridge, vllm: VllmClient) -> None:
    """Every word that vLLM computes with is the trainer's; print how far the log-probabilities are."""
    assert bridge.differing_tensors(vllm.status().policy_version) == []
    print(f"PARITY {bridge.parity_probe():.3e}", flush=True)


def joined(model_name: str, port: int, **settings: Any) -> tuple[WeightBridge, PreTrainedModel]:
    """A bridge whose server serves version 0, and the model that it trains."""
    configure_logging("child")
    common: dict[str, Any] = dict(
        model_name=model_name,
        weight_bridge_mode="shared_vllm",
        vllm_port=port,
        bridge_timeout_s=120,
        bridge_lease_s=20,
        vllm_api_key=os.environ["VLLM_API_KEY"],
    )
    bridge, model = connect(TrainerConfig(**common | settings), model_name)
    bridge.sync(0, lambda: None)
    print("SYNCED 0", flush=True)
    return bridge, model


def connect(config: TrainerConfig, source: str) -> tuple[WeightBridge, PreTrainedModel]:
    """The configured bridge, which is to be closed, and the model that it hands over; on the CPU unless the
    configuration names a device.
    """
    device = torch.device(CPU if config.device == "auto" else config.device)
    prepared = make_bridge(config)(source, device)
    assert not isinstance(prepared.storage, SharedRanks)  # one process trains
    trained = load_trained(config, source, device, prepared.storage)
    return prepared.connect(trained), trained.model


@torch.no_grad()
def change(model: torch.nn.Module) -> None:
    """An update that no one could mistake for none."""
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:  # of a LoRA model the adapter alone
            parameter.add_(torch.randn_like(parameter) * 0.02)


def sync_changes(bridge: WeightBridge, model: PreTrainedModel) -> None:
    """Syncs 1 to 4: norms alone, nothing, everything, norms. Prints what each sent, as shares."""

    @torch.no_grad()
    def change_norms() -> None:
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.125)

    updates: list[Callable[[], None]] = [change_norms, lambda: None, partial(change, model), change_norms]
    for version, update in enumerate(updates, start=1):
        report = bridge.sync(version, update)
        assert report.bytes_whole is not None
        print(f"SENT {version} {report.bytes_moved / report.bytes_whole} {report.words_changed}", flush=True)
        assert bridge.differing_tensors(version) == []


def sync_when_told(bridge: WeightBridge, model: PreTrainedModel) -> None:
    """The next version for each line that comes, with other weights."""
    for version, _ in enumerate(sys.stdin, start=1):
        bridge.sync(version, partial(change, model))
        print(f"SYNCED {version}", flush=True)


def _link(bridge: Any) -> Any:
    return bridge._links[0]


def _die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _send_commit_and_die(port: int, session: str, version: int) -> None:
    """The server has begun, so that its answer finds nobody; the request of a sender that dies sooner is void."""
    commit, status = (http.client.HTTPConnection("127.0.0.1", port, timeout=60) for _ in range(2))
    headers = {"Authorization": f"Bearer {os.environ['VLLM_API_KEY']}", "Content-Type": "application/json"}
    status.connect()
    commit.request("POST", "/v1/bridge/commit", json.dumps({"session": session, "policy_version": version}), headers)
    while True:
        status.request("GET", "/v1/bridge/status", headers=headers)
        found = json.load(status.getresponse())
        if found["paused"] or found["policy_version"] == version:
            _die()


def _stop_at_second_bucket(bridge: Any, with_signal: signal.Signals) -> None:
    groups = _link(bridge)._groups
    send, sent = groups.broadcast, 0

    def broadcast(buffer: torch.Tensor) -> None:
        nonlocal sent
        sent += 1
        if sent == 2:
            print("MID-TRANSFER", flush=True)
            os.kill(os.getpid(), with_signal)
        send(buffer)

    groups.broadcast = broadcast


def held_by(pids: list[int]) -> dict[str, int]:
    """What processes hold together; of memory, what the kernel cannot drop and read again from a file when it is short
    of it.
    """
    processes = [psutil.Process(pid) for pid in pids]
    kept = re.compile(r"Rss(?:Anon|Shmem):\s+(\d+) kB")
    return {
        "memory": sum(int(kb) << 10 for pid in pids for kb in kept.findall(Path(f"/proc/{pid}/status").read_text())),
        "files": sum(process.num_fds() for process in processes),
        "threads": sum(process.num_threads() for process in processes),
    }


def sync_many(bridge: WeightBridge, model: torch.nn.Module) -> None:
    """Syncs 1 to 200; what this process holds after the first 20 and at the end."""
    logging.getLogger().setLevel(logging.WARNING)  # nobody reads the pipe meanwhile

    @torch.no_grad()
    def nudge() -> None:
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 1e-3)

    for version in range(1, 201):
        bridge.sync(version, nudge)
        if version in (20, 200):
            print(f"SYNCED {version} {json.dumps(held_by([os.getpid()]))}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
