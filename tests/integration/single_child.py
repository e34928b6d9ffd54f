"""A single-copy trainer without training, as a process of its own that tests can kill or freeze in the middle of an
update.

python -m tests.integration.single_child MODEL PORT ACT [BF16_UPDATE]
ACT: sync | train | idle | many | kill-mid-update | freeze-mid-update | freeze-when-told-mid-update (told by a line on
stdin) | fail-mid-update | kill-before-resume
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from transformers import PreTrainedModel

from example_trainer.bridges.single_copy import SingleCopyBridge
from example_trainer.optim.optimizer import make_optimizer
from example_trainer.settings.config import TrainerConfig
from tests.integration.bridge_child import change, joined, prove, sync_many


def main(model_name: str, port: int, act: str, bf16_update: str = "master") -> None:
    lease_s = 4 if act == "freeze-mid-update" else 20
    bridge, model = joined(model_name, port, single_copy=True, bridge_lease_s=lease_s, bf16_update=bf16_update)
    assert isinstance(bridge, SingleCopyBridge)
    if act == "idle":
        time.sleep(300)
    if act == "many":
        sync_many(bridge, model)
    elif act not in ("sync", "train"):
        if "when-told" in act:
            sys.stdin.readline()
        bridge.sync(1, _interrupted(model, act))
    update = _training(model, model_name, bf16_update) if act == "train" else partial(change, model)
    for version in (1, 2, 3) if act in ("sync", "train") else ():
        report = bridge.sync(version, update)
        print(f"BYTES {report.bytes_moved}", flush=True)
        prove(bridge, bridge._vllm)
    if act == "many":
        prove(bridge, bridge._vllm)
    bridge.close()


def _training(model: PreTrainedModel, model_name: str, bf16_update: str) -> Callable[[], None]:
    """Steps of the configured optimizer on the gradients of a backward pass."""
    config = TrainerConfig.model_validate(
        {"model_name": model_name, "lr": 1e-2, "bridge": {"kind": "single_copy", "bf16_update": bf16_update}}
    )
    optimizer = make_optimizer(model.parameters(), config)
    tokens = torch.arange(5, 45)[None]

    def update() -> None:
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()

    return update


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
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
