"""Weight bridges: how a policy reaches vLLM after each step. One file a bridge, one line here that registers it."""

from collections.abc import Callable

from example_trainer.bridges.base import BridgeError, SyncReport, WeightBridge
from example_trainer.config import TrainerConfig
from example_trainer.modes import MODES

__all__ = ["BRIDGES", "BridgeError", "SyncReport", "WeightBridge", "make_bridge"]


def _broadcast(config: TrainerConfig) -> WeightBridge:
    from example_trainer.bridges.broadcast import BroadcastBridge

    return BroadcastBridge(config)


def _restart(config: TrainerConfig) -> WeightBridge:
    from example_trainer.bridges.restart import LoraRestartBridge, RestartBridge

    return LoraRestartBridge(config) if config.bridge.trains_adapter else RestartBridge(config)


def _lora(config: TrainerConfig) -> WeightBridge:
    from example_trainer.bridges.lora import LoraBridge

    return LoraBridge(config)


def _single_copy(config: TrainerConfig) -> WeightBridge:
    from example_trainer.bridges.single_copy import SingleCopyBridge

    return SingleCopyBridge(config)


BRIDGES: dict[str, Callable[[TrainerConfig], WeightBridge]] = {
    "restart": _restart,
    "lora_restart": _restart,
    "broadcast": _broadcast,
    "lora": _lora,
    "single_copy": _single_copy,
}


def make_bridge(config: TrainerConfig) -> WeightBridge:
    """The bridge that the flags choose. Raises BridgeError where it feeds fewer servers than are named."""
    mode = config.bridge
    servers = config.vllm_servers
    if not mode.feeds_several and (len(servers) > 1 or config.num_inference_nodes):
        names = ", ".join(f"{host}:{port}" for host, port in servers)
        several = [other.typed for other in MODES.values() if other.feeds_several]
        raise BridgeError(
            f"--weight-bridge-mode {mode.typed} feeds the one vLLM server of --vllm-host, not {names}: "
            f"name one with NUM_INFERENCE_NODES=0, or choose --weight-bridge-mode {' or '.join(several)}"
        )
    return BRIDGES[mode.kind](config)
