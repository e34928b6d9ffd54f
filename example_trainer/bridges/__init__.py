"""Weight bridges: how a policy reaches vLLM after each step. One file a bridge, one line here that registers it."""

from collections.abc import Callable

from example_trainer.bridges.base import BridgeError, SyncReport, WeightBridge
from example_trainer.config import TrainerConfig

__all__ = ["BRIDGES", "FEEDS_SEVERAL", "BridgeError", "SyncReport", "WeightBridge", "make_bridge"]


def _broadcast(config: TrainerConfig) -> WeightBridge:
    from example_trainer.bridges.broadcast import BroadcastBridge

    return BroadcastBridge(config)


def _restart(config: TrainerConfig) -> WeightBridge:
    from example_trainer.bridges.restart import LoraRestartBridge, RestartBridge

    return LoraRestartBridge(config) if config.trains_adapter else RestartBridge(config)


def _lora(config: TrainerConfig) -> WeightBridge:
    from example_trainer.bridges.lora import LoraBridge

    return LoraBridge(config)


def _single_copy(config: TrainerConfig) -> WeightBridge:
    from example_trainer.bridges.single_copy import SingleCopyBridge

    return SingleCopyBridge(config)


BRIDGES: dict[str, Callable[[TrainerConfig], WeightBridge]] = {
    "none": _restart,
    "lora_restart": _restart,
    "shared_vllm --use-shared-memory": _broadcast,
    "lora_only": _lora,
    "shared_vllm --single-copy": _single_copy,
}
FEEDS_SEVERAL = ("shared_vllm --use-shared-memory",)


def make_bridge(config: TrainerConfig) -> WeightBridge:
    """The bridge that the flags choose. Raises BridgeError naming what is there."""
    flag = " --use-shared-memory" if config.use_shared_memory else " --single-copy" if config.single_copy else ""
    chosen = config.weight_bridge_mode + (flag if config.weight_bridge_mode == "shared_vllm" else "")
    if chosen not in BRIDGES:
        raise BridgeError(
            f"--weight-bridge-mode {chosen} is not available; choose:"
            f" {', '.join('--weight-bridge-mode ' + name for name in BRIDGES)}"
        )
    servers = config.vllm_servers
    if chosen not in FEEDS_SEVERAL and (len(servers) > 1 or config.num_inference_nodes):
        names = ", ".join(f"{host}:{port}" for host, port in servers)
        raise BridgeError(
            f"--weight-bridge-mode {chosen} feeds the one vLLM server of --vllm-host, not {names}: "
            f"name one with NUM_INFERENCE_NODES=0, or choose --weight-bridge-mode {FEEDS_SEVERAL[0]}"
        )
    return BRIDGES[chosen](config)
