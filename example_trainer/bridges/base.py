"""What every bridge is: the interface, the error and the report.

The trainer calls, in this order: `connect(source, device)` once, which gives the model to train, before the
optimizer exists; `sync(version, update)` with the start weights and for every step, where `update` is
what changes the weights; `parity_probe()` when it wants proof; `check()` while it waits for a batch; `close()` at the
end.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from transformers import PreTrainedModel

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
