"""Weight bridges: how a policy reaches vLLM or SGLang after each step. One file per mode, one line here that registers
it.
"""

from collections.abc import Callable
from functools import partial

import torch

from example_trainer.bridges import broadcast, lora, reload, restart, sglang, single_copy
from example_trainer.bridges.base import BridgeError, Prepared, SyncReport, WeightBridge
from example_trainer.settings.bridges import MODES
from example_trainer.settings.config import TrainerConfig

__all__ = ["BRIDGES", "BridgeError", "Prepare", "Prepared", "SyncReport", "WeightBridge", "make_bridge"]

# of the model's source (hub id or directory) and the trainer's device
Prepare = Callable[[str, torch.device], Prepared]

BRIDGES: dict[str, Callable[[TrainerConfig, str, torch.device], Prepared]] = {
    "restart": restart.prepare,
    "lora_restart": restart.prepare,
    "broadcast": broadcast.prepare,
    "lora": lora.prepare,
    "single_copy": single_copy.prepare,
    "reload": reload.prepare,
    "sglang": sglang.prepare,
}


def make_bridge(config: TrainerConfig) -> Prepare:
    """The bridge that the flags choose; nothing is reached yet. Raises BridgeError where it feeds fewer servers than
    are named.
    """
    mode = config.bridge
    servers = config.vllm_servers
    if not mode.feeds_several and (len(servers) > 1 or config.num_inference_nodes):
        names = ", ".join(f"{host}:{port}" for host, port in servers)
        raise BridgeError(
            f"--weight-bridge-mode {mode.typed} supports one vLLM server (--vllm-host), not {names}: "
            "name one with NUM_INFERENCE_NODES=0, or choose --weight-bridge-mode "
            + " or ".join(other.typed for other in MODES.values() if other.feeds_several)
        )
    return partial(BRIDGES[mode.kind], config)
