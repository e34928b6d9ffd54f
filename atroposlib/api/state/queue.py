"""The state of the batching API: who is registered, which groups wait, which batch is next. Pure: no clock, no I/O, no
framework.

    environments ── accept ──▶ buffer (group of another size than its environment's) ──▶ lanes ── take ──▶ trainer
                                                              └── a subset fills the size ──┘

A group is a number of rollouts and an opaque record (encoded bytes, a row id) that only its owner interprets. Every
method is one state change, so calls from one thread need no lock. Accepted groups are lost only by `drop` and
`clear_groups`. `dump` and `load` carry the state across a restart.
"""

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from itertools import islice
from typing import Generic

from msgspec import UNSET, Struct

from atroposlib.api.state.selection import (
    Group,
    Lanes,
    R,
    choose_batch,
    latest_summing_to,
    oldest_that_fit,
    sums,
    with_one_more,
)
from atroposlib.wire.batching import (
    BatchReply,
    EnvRegistration,
    EnvStatus,
    Evaluation,
    EvaluationResult,
    Evaluations,
    Registration,
    Status,
    TrainerStep,
)

MAX_OVERTAKEN = 4  # batches with a younger group that may pass a waiting group before it goes first
MAX_EVALUATIONS = 4096  # results that are kept: the trainer asks for that of its newest policy
MAX_EVALUATION_METRICS = 65_536  # of all of these together, about 20 MB with the longest names
MIN_ENV_WEIGHT = 0.01  # an environment is throttled, never starved


NOT_REGISTERED: BatchReply[object] = BatchReply(
    [], status="error", message="Trainer not registered. Call /register first."
)


class NotRegistered(Exception):
    """No trainer has registered yet. `answer` is the reply body of the route that was called."""

    def __init__(self, answer: Struct = NOT_REGISTERED) -> None:
        self.answer = answer


class UnknownEnvironment(Exception):
    """An environment id that was never given out, or whose environment was forgotten."""


class GroupTooLarge(Exception):
    """A group that no batch of the registered size can hold."""


@dataclass
class Environment:
    """A registered environment server; `env_id` counts registrations."""

    env_id: int
    name: str
    request: EnvRegistration
    connected: bool = True
    silent: bool = False  # no sign of life for too long; the next one ends that

    @property
    def counts(self) -> bool:
        """Return whether the weight, minimum and announced evaluations count."""
        return self.connected and not self.silent

    def announced(self, policy_version: int, num_steps: int) -> bool:
        """Return whether the environment said at registration that it evaluates this policy version."""
        every = self.request.steps_per_eval
        if policy_version == 0:
            return self.request.eval_at_start
        return every is not None and every > 0 and (policy_version % every == 0 or policy_version >= num_steps)


class Buffer(Lanes[R]):
    """Groups that wait until some of them are exactly `target` rollouts. A group costs the same time however many wait
    already, of whatever sizes.
    """

    def __init__(self, target: int) -> None:
        super().__init__()
        self._target = target
        self._reached = 1  # bit s is set when some of the groups are s rollouts

    def append(self, group: Group[R]) -> None:
        """As in Lanes."""
        super().append(group)
        self._reached = with_one_more(self._reached, group.size, self._target)

    def drop(self, orders: Set[int]) -> list[Group[R]]:
        """As in Lanes."""
        dropped = super().drop(orders)
        if dropped:
            self._reached = sums(self.sizes(), self._target)
        return dropped

    def take_exactly(self) -> list[Group[R]]:
        """Remove and return groups of `target` rollouts in all, the oldest if possible; none if no choice is exact."""
        if not self._reached >> self._target & 1:
            return []
        chosen = oldest_that_fit(self, self._target)
        if sum(group.size for group in chosen) == self._target:
            self.take([group.order for group in chosen])
        else:
            chosen = self._take_latest()
        self._reached = sums(self.sizes(), self._target)
        return chosen

    def _take_latest(self) -> list[Group[R]]:
        last = sorted(
            group for (_, size), groups in self.items() for group in islice(reversed(groups), self._target // size)
        )
        chosen = [last[index] for index in latest_summing_to([group.size for group in last], self._target)]
        self.take_back(chosen)
        return chosen


class QueueDump(Struct, Generic[R], array_like=True):
    """All of a queue's state that outlives a restart."""

    registration: Registration | None
    environments: list[tuple[EnvRegistration, bool]]
    current_step: int
    started: bool
    progress: tuple[int, int] | None
    arrivals: int
    overtakers: list[int]
    waiting: list[Group[R]]
    buffered: list[Group[R]]
    evaluations: list[Evaluation]
    identities: list[tuple[int, str]] = []  # id and name of each environment; without them they count from 0
    next_env_id: int = 0
    report: TrainerStep | None = None  # with what `progress` has not


class BatchQueue(Generic[R]):
    """The whole state. See the module's head."""

    def __init__(self, instance: str = "") -> None:
        self.instance = instance  # tells environments whether they are still known
        self.registration: Registration | None = None
        self.environments: dict[int, Environment] = {}  # by env_id
        self._next_env_id = 0
        self._shares: tuple[dict[int, float], float, float] | None = None  # as `_counted` gives them, until one changes
        self._namesakes: Counter[str] = Counter()
        self.current_step = 0
        self.started = False
        self.report: TrainerStep | None = None  # the trainer's last
        self.lanes: Lanes[R] = Lanes()
        self._buffers: dict[int, Buffer[R]] = {}  # groups that together will fill the group size of their environment
        self._arrivals = 0
        self._overtakers: list[int] = []  # heap: of all delivered batches, the latest-arrived newest groups
        self._exhausted = False  # nothing has changed since no batch could be formed
        self._evaluations: dict[tuple[int, int], Evaluation] = {}

    # --- registration ------------------------------------------------------------------------------------------------

    def register(self, registration: Registration) -> None:
        """A trainer takes over from now on: its batch size and steps hold, waiting groups and environments stay.

        Environments may join again once it has polled for a batch. Evaluations of the policies that the same run
        trained before `starting_step` are kept, all others belong to another run and are dropped.
        """
        previous, self.registration = self.registration, registration
        is_resumed = previous is not None and is_same_run(previous, registration)
        last_kept = registration.starting_step if is_resumed else -1
        self._evaluations = {key: value for key, value in self._evaluations.items() if key[0] <= last_kept}
        self.current_step = registration.starting_step
        self.report = None
        self.started = False
        self._exhausted = False

    def register_env(self, request: EnvRegistration) -> Environment | None:
        """The new environment, or None while no trainer has both registered and polled for a batch."""
        return self._add_environment(request) if self.started else None

    def _add_environment(self, request: EnvRegistration) -> Environment:
        name = f"{request.desired_name}_{self._namesakes[request.desired_name]}"
        return self._keep_environment(Environment(self._next_env_id, name, request))

    def _keep_environment(self, environment: Environment) -> Environment:
        self.environments[environment.env_id] = environment
        self._next_env_id = max(self._next_env_id, environment.env_id + 1)
        self._note_name(environment)
        self._claims_changed()
        return environment

    def _claims_changed(self) -> None:
        self._shares = None
        self._exhausted = False

    def forget_envs(self, env_ids: Iterable[int]) -> list[Group[R]]:
        """Environments that will not come back: their ids are unknown from here on, and their names may be given again.

        Their groups stay; those that were buffered are queued, and come back.
        """
        queued = []
        for env_id in env_ids:
            if self.environments.pop(env_id, None) is not None:
                buffered: Iterable[Group[R]] = self._buffers.pop(env_id, ())
                queued += [self._enqueue(group.size, env_id, group.record) for group in sorted(buffered)]
        self._namesakes = Counter()
        for environment in self.environments.values():
            self._note_name(environment)
        self._claims_changed()
        return queued

    def _note_name(self, environment: Environment) -> None:
        """Give the next environment of this name a higher number."""
        name, number = environment.request.desired_name, int(environment.name.rpartition("_")[2])
        self._namesakes[name] = max(self._namesakes[name], number + 1)

    def set_silent(self, env_id: int, silent: bool) -> None:
        """Let a silent environment's weight, minimum and announced evaluations lapse, or count again. Raises
        UnknownEnvironment.
        """
        self.environment(env_id).silent = silent
        self._claims_changed()

    def disconnect_env(self, env_id: int) -> None:
        """Keep its groups; no longer count its weight, minimum and announced evaluations. Raises UnknownEnvironment."""
        self.environment(env_id).connected = False
        self._claims_changed()

    def environment(self, env_id: int) -> Environment:
        """The registered environment. Raises UnknownEnvironment."""
        if (environment := self.environments.get(env_id)) is None:
            raise UnknownEnvironment(
                f"no environment has env_id {env_id}: {len(self.environments)} are registered; POST /register-env first"
            )
        return environment

    def name_of(self, env_id: int | None) -> str:
        """The name of an environment, as far as it is known."""
        return self.environments[env_id].name if env_id in self.environments else "unknown"

    # --- groups in ---------------------------------------------------------------------------------------------------

    def check_size(self, size: int) -> None:
        """Raises GroupTooLarge when no batch of the registered size can hold the group. Any size goes before
        registration.
        """
        if self.registration is not None and size > self.registration.batch_size:
            raise GroupTooLarge(
                f"a group of {size} rollouts does not fit into a batch of {self.registration.batch_size}; "
                "lower the environment's group_size or raise the trainer's batch size"
            )

    def accept(self, size: int, env_id: int | None, record: R) -> tuple[int | None, list[Group[R]]]:
        """Take one group of 1 or more rollouts. Returns None when it was queued, else the rollouts still buffered of
        its environment; and the groups that were queued.

        A group smaller than its environment's group size is buffered; as soon as buffered groups fill that size
        exactly they move to the queue, as separate groups. Every other group, and one of an unknown environment, is
        queued at once.
        """
        self.check_size(size)
        arrival = self._arrivals
        self._arrivals += 1
        environment = None if env_id is None else self.environments.get(env_id)
        if env_id is None or environment is None or size >= environment.request.group_size:
            return None, [self._enqueue(size, env_id, record)]
        buffer = self._buffer_of(environment)
        buffer.append(Group(arrival, size, env_id, record))
        filled = buffer.take_exactly()
        return buffer.size, [self._enqueue(group.size, env_id, group.record) for group in filled]

    def _buffer_of(self, environment: Environment) -> Buffer[R]:
        return self._buffers.setdefault(environment.env_id, Buffer(environment.request.group_size))

    def _enqueue(self, size: int, env_id: int | None, record: R) -> Group[R]:
        group = Group(self._arrivals, size, env_id, record)
        self.lanes.append(group)
        self._arrivals += 1
        self._exhausted = False
        return group

    # --- batches out -------------------------------------------------------------------------------------------------

    def choose(self) -> list[Group[R]] | None:
        """Groups of exactly `batch_size` rollouts in all that `take` would deliver, or None: not yet. Raises
        NotRegistered.

        The first call after a registration lets environments join.
        """
        if self.registration is None:
            raise NotRegistered
        self.started = True
        if self._exhausted:
            return None
        batch_size = self.registration.batch_size
        oldest = self.lanes.oldest(at_most=batch_size)
        overtaken = oldest is not None and len(self._overtakers) == MAX_OVERTAKEN and oldest.order < self._overtakers[0]
        chosen = choose_batch(self.lanes, batch_size, self._counted()[0], overtaken=overtaken)
        self._exhausted = chosen is None
        return chosen

    def foreseen(self) -> list[Group[R]]:
        """The waiting groups that the next batch will hold unless the queue changes. None where groups differ in size,
        or an environment has a minimum: then nobody knows.
        """
        sizes = self.lanes.sizes()
        if self.registration is None or self._counted()[0] or len(sizes) != 1:
            return []
        return heapq.nsmallest(self.registration.batch_size // next(iter(sizes)), self.lanes)

    def take(self, orders: Sequence[int]) -> list[Group[R]]:
        """Deliver chosen groups, named by their orders: one step. Raises KeyError when they are not at the heads of
        their lanes.
        """
        chosen = self.lanes.take(orders)
        heapq.heappush(self._overtakers, max(orders))
        if len(self._overtakers) > MAX_OVERTAKEN:
            heapq.heappop(self._overtakers)
        self.current_step += 1
        return chosen

    def put_back(self, groups: Iterable[Group[R]]) -> None:
        """Return delivered groups to their old places in the queue. The caller corrects the step."""
        self.lanes.put_back(groups)
        self._exhausted = False

    def drop(self, orders: Set[int]) -> list[Group[R]]:
        """Remove queued or buffered groups by their orders. Returns those that were found."""
        dropped = self.lanes.drop(orders)
        for buffer in self._buffers.values():
            dropped += buffer.drop(orders)
        self._exhausted = False
        return dropped

    def clear_groups(self) -> list[Group[R]]:
        """Remove and return every group."""
        gone = [*self.lanes, *(group for buffer in self._buffers.values() for group in buffer)]
        self.lanes, self._buffers = Lanes(), {}
        return gone

    def _counted(self) -> tuple[dict[int, float], float, float]:
        """The minimums, their sum and the sum of all weights, of the environments that count."""
        if self._shares is None:
            counting = [environment for environment in self.environments.values() if environment.counts]
            minimums = {
                environment.env_id: environment.request.min_batch_allocation
                for environment in counting
                if environment.request.min_batch_allocation is not None
            }
            total = sum(_pull(environment.request) for environment in counting)
            self._shares = minimums, sum(minimums.values()), total
        return self._shares

    def obstacle(self) -> str | None:
        """Return why no batch can be formed although enough rollouts wait; None if one is possible or too few wait."""
        if self.registration is None or not self._exhausted or self.lanes.size < self.registration.batch_size:
            return None
        batch_size = self.registration.batch_size
        for env_id, share in self._counted()[0].items():
            if int(batch_size * share) and not self.lanes.largest_of(env_id):
                return (
                    f"environment {self.name_of(env_id)} must fill {share:.0%} of each batch but has no group waiting;"
                    " start it again or disconnect it"
                )
        return (
            f"no choice of whole groups sums to batch_size={batch_size} as required; choose a batch size that is "
            "a multiple of all group sizes"
        )

    # --- status ------------------------------------------------------------------------------------------------------

    def status(self) -> Status:
        """Steps and waiting groups, buffered ones not counted."""
        steps, version = self.progress or (UNSET, UNSET)
        return Status(self.current_step, self.lanes.groups, policy_version=version, trained_steps=steps)

    @property
    def progress(self) -> tuple[int, int] | None:
        """The trained steps and the policy version that the trainer last reported."""
        return None if self.report is None else (self.report.step, self.report.policy_version)

    @property
    def num_steps(self) -> int:
        """The steps of the run; -1 without a trainer."""
        if self.report is not None and self.report.num_steps is not None:
            return self.report.num_steps
        return -1 if self.registration is None else self.registration.num_steps

    def env_status(self, env_id: int) -> EnvStatus:
        """The queue as the environment sees it. Raises UnknownEnvironment."""
        environment = self.environment(env_id)
        minimums, allocated, pulls = self._counted()
        largest = max(1, self.lanes.largest())
        own_size = max(environment.request.group_size, self.lanes.largest_of(env_id))
        own = self.lanes.size_of[env_id]
        steps, version = self.progress or (UNSET, UNSET)
        run, report = self.registration, self.report
        share = _pull(environment.request) / pulls if pulls > 0 else 0.0  # of the work, by weight x context length
        return EnvStatus(
            current_step=self.current_step,
            queue_size=(own + self._available_from_others(env_id, largest, minimums)) // own_size,
            unallocated_fraction=1.0 - min(allocated, 1.0),
            self_queue_size=own // own_size,
            max_group_size=largest,
            env_weight=1.0 if environment.request.weight < 0 else max(MIN_ENV_WEIGHT, share),
            num_steps=self.num_steps,
            instance=self.instance,
            policy_version=version,
            trained_steps=steps,
            weights_of=UNSET if report is None or report.weights_of is None else report.weights_of,
            more_versions=not (report is not None and report.done) if run is not None and run.says_done else UNSET,
        )

    def _available_from_others(self, env_id: int, largest: int, minimums: dict[int, float]) -> int:
        """Sequences of the others, in whole packs of the largest group size, beyond their own minimums."""
        if largest == 1:
            return 0
        batch_size = self.registration.batch_size if self.registration is not None else 0
        return sum(
            max(
                0,
                math.ceil(size / largest) * largest
                - int(batch_size * minimums.get(other, 0.0) if other is not None else 0),
            )
            for other, size in self.lanes.size_of.items()
            if other != env_id
        )

    # --- training progress and evaluations ---------------------------------------------------------------------------

    def add_evaluation(self, evaluation: Evaluation) -> None:
        """Keep a result; a second one of the same environment and version replaces the first. The newest
        MAX_EVALUATIONS are kept, and of those the newest with MAX_EVALUATION_METRICS metrics.

        Raises UnknownEnvironment.
        """
        self.environment(evaluation.env_id)
        kept = self._evaluations
        kept[evaluation.policy_version, evaluation.env_id] = evaluation
        while len(kept) > MAX_EVALUATIONS or sum(len(one.metrics) for one in kept.values()) > MAX_EVALUATION_METRICS:
            del kept[next(iter(kept))]

    def evaluations(self, policy_version: int) -> Evaluations:
        """Results of a policy version, and the connected environments whose announced result is still missing."""
        posted = {env_id: value for (version, env_id), value in self._evaluations.items() if version == policy_version}
        num_steps = max(0, self.num_steps)
        return Evaluations(
            results=[
                EvaluationResult(env_id, self.name_of(env_id), policy_version, one.accuracy, one.metrics)
                for env_id, one in sorted(posted.items())
            ],
            pending=[
                environment.name
                for environment in self.environments.values()
                if environment.counts
                and environment.env_id not in posted
                and environment.announced(policy_version, num_steps)
            ],
        )

    # --- across a restart --------------------------------------------------------------------------------------------

    def dump(self) -> QueueDump[R]:
        """The state; shares nothing that changes later."""
        return QueueDump(
            registration=self.registration,
            environments=[(environment.request, environment.connected) for environment in self.environments.values()],
            current_step=self.current_step,
            started=self.started,
            progress=self.progress,
            report=self.report,
            arrivals=self._arrivals,
            overtakers=list(self._overtakers),
            waiting=sorted(self.lanes),
            buffered=sorted(group for buffer in self._buffers.values() for group in buffer),
            evaluations=list(self._evaluations.values()),
            identities=[(environment.env_id, environment.name) for environment in self.environments.values()],
            next_env_id=self._next_env_id,
        )

    def load(self, dump: QueueDump[R]) -> None:
        """Take over a dumped state. For a new queue."""
        self.registration = dump.registration
        if dump.identities:
            for (request, connected), (env_id, name) in zip(dump.environments, dump.identities, strict=True):
                self._keep_environment(Environment(env_id, name, request, connected))
        else:
            for request, connected in dump.environments:
                self._add_environment(request).connected = connected
        self._next_env_id = max(self._next_env_id, dump.next_env_id)
        self.current_step, self.started = dump.current_step, dump.started
        self._arrivals, self._overtakers = dump.arrivals, dump.overtakers
        self.report = dump.report or (TrainerStep(*dump.progress) if dump.progress is not None else None)
        self.lanes = Lanes(dump.waiting)
        for group in dump.buffered:
            assert group.env_id is not None
            self._buffer_of(self.environments[group.env_id]).append(group)
        self._evaluations = {
            (evaluation.policy_version, evaluation.env_id): evaluation for evaluation in dump.evaluations
        }


def is_same_run(before: Registration, after: Registration) -> bool:
    """Return whether a trainer continues with the run of an earlier registration.

    A trainer may name its run. Otherwise project, group and checkpoint directory identify it.
    """
    if before.run is not None or after.run is not None:
        return before.run == after.run
    names = [(run.wandb_project, run.wandb_group, run.checkpoint_dir) for run in (before, after)]
    return names[0] == names[1]


def _pull(request: EnvRegistration) -> float:
    return max(0, request.max_token_length) * max(0.0, request.weight)
