"""Weight bridges: how a policy reaches vLLM after each step. One file a bridge, one line here that registers it.

The trainer calls, in this order: `connect(source, device)` once, which gives the model to train, before the
optimizer exists; `sync(version, update)` with the start weights and for every step, where `update` is what changes
the weights; `parity_probe()` when it wants proof; `check()` while it waits for a batch; `close()` at the end.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from transformers import PreTrainedModel

from example_trainer.config import TrainerConfig
from example_trainer.errors import TrainerError


class BridgeError(TrainerError):
    """The bridge cannot be built or has failed; vLLM goes on serving its last committed weights."""


@dataclass(frozen=True)
class SyncReport:
    """What one sync did; seconds and bytes."""

    policy_version: int  # what vLLM serves now; behind the trainer's own between two restarts of mode none
    update_s: float  # the optimizer step; part of the stall only where trainer and vLLM share the weights
    stall_s: float  # generation stood still
    transfer_s: float  # bytes travelled, generation going on
    apply_s: float  # part of the stall in which the weights changed
    bytes_moved: int  # to all servers
    servers: int = 1  # that serve this version now


class WeightBridge(Protocol):
    """One way to hand weights over. Every method raises BridgeError with the value, the limit and the remedy."""

    served_dtype: str  # in which vLLM computes, e.g. "bfloat16"; known once connected

    def connect(self, source: str, device: torch.device) -> PreTrainedModel:
        """Agree with vLLM on every parameter; the model to train, with the weights of `source` (hub id or folder)."""

    def sync(self, policy_version: int, update: Callable[[], None]) -> SyncReport:
        """Run `update`, which changes the model's weights, and make the result what vLLM serves, as `policy_version`.

        What `update` raises comes out as it is, with vLLM serving what it served before; or, where weights are
        shared and already half updated, refusing to generate until a trainer's next whole sync.
        """

    def parity_probe(self) -> float:
        """How far vLLM's log-probabilities of a fixed prompt are from the trainer's, root mean square in nats; after a
        sync that served.
        """

    def check(self) -> None:
        """Return if vLLM is there as far as is known; never waits, and may be called before `connect`."""

    def close(self) -> None:
        """Leave in an orderly way; never raises for a peer that is gone."""


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
