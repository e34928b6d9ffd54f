"""A single-copy trainer without training, as a process of its own that tests can kill or freeze in the middle of an update.

python -m tests.integration.single_child MODEL PORT ACT
ACT: sync | idle | many | kill-mid-update | freeze-mid-update | fail-mid-update | kill-before-resume
"""

import os
import signal
import sys
import time
from collections.abc import Callable

import torch

from atroposlib.logs import configure_logging
from example_trainer.bridges import make_bridge
from example_trainer.config import TrainerConfig
from tests.integration.bridge_child import _many, change


def main(model_name: str, port: int, act: str) -> None:
    configure_logging("child")
    config = TrainerConfig(
        model_name=model_name,
        weight_bridge_mode="shared_vllm",
        single_copy=True,
        vllm_port=port,
        bridge_timeout_s=40,
        bridge_lease_s=4 if act == "freeze-mid-update" else 20,
        vllm_api_key=os.environ["VLLM_API_KEY"],
    )
    bridge = make_bridge(config)
    model = bridge.connect(model_name, torch.device("cpu"))
    bridge.sync(0, lambda: None)
    print("SYNCED 0", flush=True)
    if act == "idle":
        time.sleep(300)
    if act == "many":
        _many(bridge, model)
    elif act != "sync":
        bridge.sync(1, _interrupted(model, act))
    for version in (1, 2, 3) if act == "sync" else ():
        report = bridge.sync(version, lambda: change(model))
        print(f"BYTES {report.bytes_moved}", flush=True)
        print(f"PARITY {bridge.parity_probe():.3e}", flush=True)
    if act == "many":
        print(f"PARITY {bridge.parity_probe():.3e}", flush=True)
    bridge.close()


def _interrupted(model: torch.nn.Module, act: str) -> Callable[[], None]:
    """An update that stops after half of the parameters, or after all but before vLLM is told."""
    with_signal = signal.SIGSTOP if act.startswith("freeze") else signal.SIGKILL

    @torch.no_grad()
    def update() -> None:
        parameters = list(model.parameters())
        for number, parameter in enumerate(parameters):
            if number == len(parameters) // 2 and act.endswith("mid-update"):
                print("MID-UPDATE", flush=True)
                if act.startswith("fail"):
                    raise RuntimeError("the update failed half way")
                os.kill(os.getpid(), with_signal)
            parameter.add_(0.5)
        if act.endswith("before-resume"):
            os.kill(os.getpid(), with_signal)

    return update


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
