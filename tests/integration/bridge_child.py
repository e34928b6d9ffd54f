"""A trainer without training, as a process of its own that tests can kill or freeze: connects, syncs, and does what it is told.

python bridge_child.py MODEL PORT ACT      ACT: sync | idle | kill-mid-transfer | freeze-mid-transfer
"""

import os
import signal
import sys
import time

import torch

from atroposlib.logs import configure_logging
from example_trainer.bridges import make_bridge
from example_trainer.config import TrainerConfig


def main(model_name: str, port: int, act: str) -> None:
    configure_logging("child")
    config = TrainerConfig(
        model_name=model_name,
        weight_bridge_mode="shared_vllm",
        use_shared_memory=True,
        vllm_port=port,
        bridge_timeout_s=40,
        bridge_lease_s=20,
        bridge_bucket_mb=1,
        vllm_api_key=os.environ["VLLM_API_KEY"],
    )
    bridge = make_bridge(config)
    model = bridge.connect(model_name, torch.device("cpu"))
    bridge.sync(0, lambda: None)
    print("SYNCED 0", flush=True)
    if act == "idle":
        time.sleep(300)
    if act.endswith("mid-transfer"):
        _stop_at_second_bucket(bridge, signal.SIGKILL if act.startswith("kill") else signal.SIGSTOP)
    bridge.sync(1, lambda: change(model))
    print(f"PARITY {bridge.parity_probe():.3e}", flush=True)
    bridge.close()


@torch.no_grad()
def change(model: torch.nn.Module) -> None:
    """An update that no one could mistake for none."""
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.02)


def _stop_at_second_bucket(bridge: object, with_signal: signal.Signals) -> None:
    groups = bridge._live_groups()  # type: ignore[attr-defined]
    send, sent = groups.broadcast, 0

    def broadcast(buffer: torch.Tensor) -> None:
        nonlocal sent
        sent += 1
        if sent == 2:
            print("MID-TRANSFER", flush=True)
            os.kill(os.getpid(), with_signal)
        send(buffer)

    groups.broadcast = broadcast


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
