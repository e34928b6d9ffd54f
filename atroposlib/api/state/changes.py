"""Every change of the batching API's state as a value. The journal keeps it; `RolloutState.apply` carries it out.

A change contains the decision (which groups left, in which lease), never the rule behind it. So a journal written
under one version of the rules replays to the same state under another. Fields are only ever added at the end, with a
default.
"""

from typing import NamedTuple

import msgspec
from msgspec import Struct

from atroposlib.api.state.leases import Lease
from atroposlib.api.state.queue import QueueDump
from atroposlib.wire.batching import EnvRegistration, Evaluation, Registration
from atroposlib.wire.servers import State


class StoredGroup(NamedTuple):
    """A stored group, as the queue knows it. `version` is the oldest policy version that it was sampled under, if
    known.
    """

    id: int
    version: int | None


class PostedGroup(NamedTuple):
    """One group of a post. Its size is in rollouts, those that failed included."""

    size: int
    env_id: int | None
    version: int | None


class Change(Struct, tag=True, array_like=True):
    """One change of the state."""


class Founded(Change):
    """An empty state. `instance` distinguishes it from every other."""

    instance: str


class TrainerRegistered(Change):
    """`trainer` is the uuid that the reply names."""

    registration: Registration
    trainer: int


class TrainerPolled(Change):
    """The registered trainer asked for its first batch: environments may join."""


class TrainerReported(Change):
    """The trainer finished a step, and vLLM serves a policy version; see `TrainerStep`."""

    step: int
    policy_version: int
    num_steps: int | None = None
    weights_of: int | None = None
    done: bool = False


class EnvironmentJoined(Change):
    """A /register-env."""

    request: EnvRegistration


class EnvironmentLeft(Change):
    """A /disconnect-env."""

    env_id: int


class EnvironmentsForgotten(Change):
    """These environments were silent for so long that their ids are no longer known."""

    env_ids: list[int]


class GroupsPosted(Change):
    """One post. Its groups have the ids `first`, `first` + 1, ...; `key` is its idempotency key, `digest` that of their
    bodies, 0 in journals of earlier versions.
    """

    first: int
    groups: list[PostedGroup]
    key: str | None = None
    digest: int = 0


class BatchTaken(Change):
    """Waiting groups, named by their orders, left: for good (`lease` 0), or on a lease of `trainer`."""

    orders: list[int]
    lease: int = 0
    trainer: int = 0


class LeasesTaken(Change):
    """Returned batches left again: for good (`trainer` 0), or on the same leases, now of `trainer`."""

    leases: list[int]
    trainer: int = 0


class LeasesReturned(Change):
    """The trainer of these batches fell silent: they wait for another."""

    leases: list[int]


class LeasesAcknowledged(Change):
    """The trainer is done with these batches."""

    leases: list[int]


class GroupsDropped(Change):
    """Groups, named by their orders, were sampled too many policy versions ago."""

    orders: list[int]


class GroupsRejected(Change):
    """Groups, named by their orders, cannot be trained on: they are dead letters."""

    orders: list[int]


class EvaluationPosted(Change):
    """A /evaluation."""

    evaluation: Evaluation


class ServerChanged(Change):
    """An inference server joins, serves, leaves or has left."""

    url: str
    state: State


class Snapshot(Change):
    """The whole state, in place of every change before it."""

    instance: str
    trainer: int
    next_id: int
    queue: QueueDump[StoredGroup]
    leases: list[Lease[StoredGroup]]
    answered: list[tuple[str, list[int | None]]]
    rejected: int = 0
    digests: dict[str, int] = {}
    servers: dict[str, State] = {}


AnyChange = (
    Founded
    | TrainerRegistered
    | TrainerPolled
    | TrainerReported
    | EnvironmentJoined
    | EnvironmentLeft
    | EnvironmentsForgotten
    | GroupsPosted
    | BatchTaken
    | LeasesTaken
    | LeasesReturned
    | LeasesAcknowledged
    | GroupsDropped
    | EvaluationPosted
    | Snapshot
    | GroupsRejected
    | ServerChanged
)

encode_change = msgspec.msgpack.Encoder().encode
decode_change = msgspec.msgpack.Decoder(AnyChange).decode
