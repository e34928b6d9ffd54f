"""What every bridge is: the interface, the error and the report.

make_bridge(config)              the mode's `prepare`; nothing is reached yet
prepare(source, device)     ─▶ Prepared: before there is a model; says where the weights live, for single copy
prepared.connect(trained)   ─▶ WeightBridge: connected, and agreed with vLLM on every parameter
    sync(version, update)        with the start weights, and then once per step
    decoders()                   when the trainer wants proof: servers that show what they decode
    parity_probe()               the same, where there are none
    differing_tensors(version)   the same, of every word
    check()                      while the trainer waits for a batch
    close()                      at the end
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from atroposlib.wire.bridge import Decoded, DecodeProbe, ServerActivity
from example_trainer.errors import TrainerError
from example_trainer.weights.by_rank import SharedRanks
from example_trainer.weights.shared import SharedWeights
from example_trainer.weights.written import TrainedModel, remove_folder


class BridgeError(TrainerError):
    """The bridge cannot be built or has failed; vLLM continues serving its last committed weights."""


@dataclass(frozen=True)
class SyncReport:
    """Reports what one sync did, in seconds and bytes. `update` is not in them, unless the stall is: where trainer and
    vLLM share the weights.
    """

    policy_version: int  # what vLLM serves now; behind the trainer's own between two restarts of mode none
    stall_s: float  # generation stood still
    transfer_s: float  # bytes travelled, while generation continued
    apply_s: float  # part of the stall in which the weights changed
    bytes_moved: int  # to all servers
    bytes_whole: int | None = None  # that the weights take, where less may have been sent
    words_changed: float | None = None  # share of their 16-bit words, since the sync before
    servers: int = 1  # that serve this version now


class Decodes(Protocol):
    """A client whose server shows what it decodes."""

    url: str

    def decode(self, probe: DecodeProbe) -> Decoded:
        """Return the answers to the probe's prompts. Raises BridgeError."""

    def longest(self) -> int | None:
        """Return the tokens of a prompt with its answer, at most. Raises BridgeError."""


class TellsActivity(Protocol):
    """A client whose server says what it has done."""

    url: str

    def activity(self) -> ServerActivity:
        """Return what the server has done since its start. Raises BridgeError."""


class WeightBridge(Protocol):
    """A connected way to hand weights over. Every method raises BridgeError with value, limit and remedy."""

    served_dtype: str  # in which vLLM computes, e.g. "bfloat16"
    last_version: int | None = None  # the run's last policy version, once it is known

    def sync(self, policy_version: int, update: Callable[[], None]) -> SyncReport:
        """Run `update`, which changes the model's weights, and make the result what vLLM serves, as `policy_version`.

        What `update` raises comes out as it is, with vLLM serving what it served before; or, where weights are
        shared and already half updated, refusing to generate until a trainer's next whole sync.
        """

    def decoders(self) -> Sequence[Decodes]:
        """Return the servers that serve now and show what they decode. They may be asked from another thread."""
        return ()

    def parity_probe(self) -> float:
        """Return how far vLLM's log-probabilities of a fixed prompt are from the trainer's: the root mean square in
        nats, after a sync that served.
        """

    def differing_tensors(self, policy_version: int) -> list[str] | None:
        """Names of the tensors of which vLLM computes with other words than the trainer's, cast to its dtype; after a
        sync that served `policy_version`. None where vLLM loads files by itself and offers no checksums.
        """
        return None

    def check(self) -> None:
        """Return if vLLM is there as far as is known; never waits."""

    def sessions(self) -> set[str]:
        """The ids under which this trainer holds its servers; none where servers know no sessions."""
        return set()

    def admit(self, url: str) -> None:
        """Feed the server at `url` too, from the next sync on; nothing for one that is fed already."""
        raise BridgeError("this bridge feeds the servers of its configuration alone")

    def release(self, url: str, gone: bool = False) -> None:
        """Feed the server at `url` no more: it is about to end, or `gone`. Nothing for one that is not fed."""
        raise BridgeError("this bridge feeds the servers of its configuration alone")

    def joined(self) -> Sequence[TellsActivity]:
        """The servers that joined by `admit`, and were found to compute with the trainer's words."""
        return ()

    def reconnect(self) -> None:
        """Hold servers that were started again; the next sync brings them all weights. Modes with `survives_vllm`."""
        raise BridgeError("this bridge cannot continue with a server that was started again")

    def close(self) -> None:
        """End the session; never raises for a peer that is gone."""


@dataclass(frozen=True)
class Prepared:
    """A bridge before there is a model: what could be refused is refused, and what must be held is held until `close`.

    `storage` is where the weights live, for single copy; None where the trainer has weights of its own. `connect`
    agrees with vLLM on every parameter. `close` may be called twice, and after the connected bridge's own.
    """

    connect: Callable[[TrainedModel], WeightBridge]
    close: Callable[[], None]
    storage: SharedWeights | SharedRanks | None = None


def remove_replaced(folders: Iterable[Path], policy_version: int) -> None:
    """Remove the weights that `policy_version` has replaced. Raises BridgeError."""
    remedy = f"policy version {policy_version} is served; remove it by hand, then start the trainer again"
    for folder in folders:
        remove_folder(folder, remedy, BridgeError)
