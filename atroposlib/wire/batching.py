"""Every request and reply body of the batching API as a typed record.

The API decodes requests into these records, and its clients decode replies into them. The API also takes numeric
strings, integral floats and booleans as numbers (`atroposlib/api/groups/decoding.py`). Unknown fields are ignored.
"""

from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar, get_args

from msgspec import UNSET, Meta, Struct, UnsetType

from atroposlib.wire.processes import Process

G = TypeVar("G")

# A token that was not sampled: its mask, and its log-probability (no real one is positive).
NOT_TRAINED = -100
NO_LOGPROB = 1.0
MSGPACK = "application/msgpack"

Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Failures = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TopK = Annotated[int, Meta(ge=0, le=1000)]
Step = Annotated[int, Meta(ge=0, le=2**53 - 1)]
ReportText = Annotated[str, Meta(max_length=300)]
Integer = Annotated[int, Meta(ge=-(2**53), le=2**53 - 1)]  # exact in every JSON reader
WaitSeconds = Annotated[float, Meta(ge=0, le=30)]
# Why a sample has no score: it ran out of time, a server or sandbox failed, its scorer failed, or other code did.
Cause = Literal["timeout", "infrastructure", "scorer", "environment"]
CAUSES: tuple[Cause, ...] = get_args(Cause)
Ordinal = tuple[Annotated[str, Meta(min_length=1, max_length=200)], Step, Step]  # environment, batch, number in it
FinishReason = Annotated[str, Meta(min_length=1, max_length=64)]
CUT = "length"  # the finish reason of an answer that reached its limit of tokens


class RoutingShape(NamedTuple):
    """Of a mixture-of-experts model: its layers, those without experts included, the experts of each token, and all
    experts of a layer.
    """

    layers: Count
    top_k: Count
    experts: Count


class GroupRequirements(Struct, kw_only=True):
    """Lists what a trainer requires of a group. By default it requires nothing.

    Token ids must be below `vocab_size`. A trainer that is `trainable_only` gets only groups that pass the check of
    `atroposlib/groups.py`; others are refused or set aside. With `logprobs_optional` groups without
    `inference_logprobs` pass it. `routing` is the shape of a mixture-of-experts model, which `routed_experts` of a
    group must have; with `routing_required` groups without them do not pass. A trainer that distils registers
    `teacher_top_k`: how many of its likeliest tokens a teacher names at each sampled position, beside the sampled one.

    Trainers of the archived ancestor send none of these and get groups without log-probabilities, as they always did:
    not all of them read any. One that is `trainable_only` and does not say more, as ours once were, needs them.
    """

    vocab_size: Count | None = None
    trainable_only: bool = False
    logprobs_optional: bool = False
    routing: RoutingShape | None = None
    routing_required: bool = False
    teacher_top_k: TopK | None = None

    def requirements(self) -> "GroupRequirements":
        """Return the requirements alone, out of a record that has more."""
        return GroupRequirements(**{field: getattr(self, field) for field in GroupRequirements.__struct_fields__})


class Registration(GroupRequirements):
    """A trainer, the shape of its run, and what it requires of groups. `batch_size` is in rollouts, `max_token_len` in
    tokens.

    `run` names the run across restarts of its trainer: groups of another run are forgotten. `trained_leases` are
    those whose batches the checkpoint contains that this trainer continues from: they count as acknowledged. With
    `says_done` environments stay after the last step until /trainer-step says `done`.
    """

    wandb_group: str
    wandb_project: str
    batch_size: Count
    max_token_len: Integer
    checkpoint_dir: str
    save_checkpoint_interval: Integer
    starting_step: Integer
    num_steps: Integer
    run: Annotated[str, Meta(max_length=200)] | None = None
    trained_leases: list[Integer] = []
    says_done: bool = False


class Registered(Struct):
    """`uuid` identifies this registration and is exact in JSON readers that hold numbers as doubles."""

    uuid: int


class EnvRegistration(Struct):
    """An environment server. `min_batch_allocation` is its least share (0 to 1) of each batch; a negative `weight`
    means unweighted.

    `steps_per_eval` announces evaluations of every policy version that it divides, and of the last one. By `process`
    an API on the same machine sees at once that the environment was killed.
    """

    max_token_length: Integer
    desired_name: str
    weight: Annotated[float, Meta(ge=-1e12, le=1e12)]
    group_size: Count
    min_batch_allocation: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    steps_per_eval: Integer | None = None
    eval_at_start: bool = False
    process: Process | None = None


class EnvRegistered(Struct, tag_field="status", tag="success"):
    """What an environment needs to know of the run."""

    env_id: int
    wandb_name: str
    checkpoint_dir: str
    starting_step: int
    checkpoint_interval: int
    num_steps: int
    run: str | None = None  # its name, the same for each trainer that resumes it


class WaitForTrainer(Struct, tag_field="status", tag="wait for trainer to start"):
    """The reply of /register-env until a trainer has registered and asked for a batch."""


class EnvId(Struct):
    """Names one registered environment."""

    env_id: Integer


class Outcome(Struct, omit_defaults=True):
    """`status` is "success", "ok", or "failure" with `error`."""

    status: str
    error: str | UnsetType = UNSET


class WandbInfo(Struct):
    """Null before a trainer registered."""

    group: str | None
    project: str | None


class Info(GroupRequirements, omit_defaults=True):
    """-1 before a trainer registered. The rest is there if it registered them."""

    batch_size: int
    max_token_len: int


class Status(Struct, omit_defaults=True):
    """`current_step` counts delivered batches, `queue_size` waiting groups.

    Policy version and steps appear once a trainer reported a step; `rejected_groups`, those set aside since the last
    reset, once there is one.
    """

    current_step: int
    queue_size: int
    policy_version: int | UnsetType = UNSET
    trained_steps: int | UnsetType = UNSET
    rejected_groups: int = 0


class EnvStatus(Struct):
    """The queue as one environment sees it: `queue_size` and `self_queue_size` are in groups of its own size.

    `num_steps` is the trainer's; `instance` changes when the API has forgotten its environments, which then register
    again. The defaults are for an API that does not know a field.
    """

    current_step: int
    queue_size: int
    unallocated_fraction: float = 1.0
    self_queue_size: int = 0
    max_group_size: int = 1
    env_weight: float = 1.0
    num_steps: int = -1
    instance: str = ""
    policy_version: int | UnsetType = UNSET
    trained_steps: int | UnsetType = UNSET
    weights_of: int | UnsetType = UNSET
    more_versions: bool | UnsetType = UNSET  # whether one may be served after the last step

    @property
    def version(self) -> int:
        """The policy version that is served, as far as known."""
        return self.policy_version if isinstance(self.policy_version, int) else self.current_step


class LeaseRequest(Struct):
    """`trainer` is the uuid of /register; `holding` names the leases that it has and has not acknowledged.

    With `ids` the reply names the items, for /batch/reject, and the groups that were set aside. The API replies within
    `wait_s` seconds, as soon as there is a batch; one that does not know the field replies at once.
    """

    trainer: Integer
    holding: list[Integer] = []
    ids: bool = False
    wait_s: WaitSeconds = 0.0


class BatchReply(Struct, Generic[G]):
    """`batch` is null while there is none. Of a lease the reply has `lease`, and with `ids` in the request also `ids`
    and `rejected`: groups that were set aside since the last reply.

    Before any registration `status` is "error", with a `message` and an empty batch.
    """

    batch: list[G] | UnsetType | None = UNSET
    lease: int | UnsetType | None = UNSET
    ids: list[int] | UnsetType = UNSET
    rejected: list["SetAside"] | UnsetType = UNSET
    status: str | UnsetType = UNSET
    message: str | UnsetType = UNSET


class ArrivalsRequest(Struct):
    """`trainer` and `holding` as in LeaseRequest; `known` names the groups that the trainer has read already.

    The API replies within `wait_s` seconds, as soon as there are others or a batch is whole.
    """

    trainer: Integer
    holding: list[Integer] = []
    known: list[Integer] = []
    wait_s: WaitSeconds = 0.0


class Arrivals(Struct, Generic[G]):
    """Groups that wait for the next batch, with their `ids`, oldest first. They stay where they are: /batch/lease
    delivers them. `whole` if it has a batch now; then there are no groups here.
    """

    batch: list[G]
    ids: list[int] = []
    whole: bool = False


class Acknowledgement(Struct):
    """The trainer is done with the batches of these leases: they are forgotten."""

    trainer: Integer
    leases: list[Integer]


class Acknowledged(Struct):
    """`unknown` names leases that the trainer does not hold: acknowledged before, or handed to another trainer."""

    status: str
    acknowledged: int
    unknown: list[int]


class RejectedGroup(Struct):
    """A group of a leased batch, named by its entry in `ids` of the lease's reply, and why it cannot be trained on."""

    id: Integer
    reason: Annotated[str, Meta(min_length=1, max_length=1000)]


class Rejection(Struct):
    """The trainer cannot train on these groups of the batch that it has on this lease."""

    trainer: Integer
    lease: Integer
    groups: list[RejectedGroup]


class SetAside(Struct):
    """A group that was set aside: whose it was, and why."""

    id: int
    env_id: int | None
    environment: str
    reason: str


class RejectionTaken(Struct):
    """`unknown` names groups that are not in the batch: rejected before, or another trainer's."""

    status: str
    rejected: list[SetAside]
    unknown: list[int]


class DeadLetter(Struct, omit_defaults=True):
    """A group that was set aside: when (Unix seconds), whose it was, why, its bytes; `group` where asked for."""

    id: int
    at: float
    env_id: int | None
    environment: str
    reason: str
    bytes: int
    group: Any = UNSET


class EnvReport(Struct):
    """What an environment server does, as it tells with its heartbeats, from its start on.

    `process` is random and names the server before it is registered. `dropped` counts groups and items by reason since
    the last group that was posted, and `last_drop` is the last of them in full. `thrown_away` counts groups that were
    sampled and not posted, `failed` rollouts without a score by cause, both since the start. `waits_for` is empty while
    it samples.
    """

    name: ReportText
    process: ReportText
    posted: Integer = 0
    dropped: Annotated[dict[ReportText, Integer], Meta(max_length=16)] = {}
    last_drop: ReportText = ""
    in_flight: Integer = 0
    waits_for: ReportText = ""
    waited_s: float = 0.0
    thrown_away: Integer = 0
    failed: Annotated[dict[ReportText, Integer], Meta(max_length=16)] = {}


class Heartbeat(Struct, omit_defaults=True):
    """A sign of life of a trainer (the uuid of /register) or of an environment.

    An environment adds its report; before it is registered that is all it sends.
    """

    trainer: Integer | None = None
    env_id: Integer | None = None
    report: EnvReport | None = None


class EnvActivity(Struct, omit_defaults=True):
    """An environment server as the API knows it; `env_id` is null before it is registered.

    `heard_s` is how long ago its last sign of life was, null after too long a silence. Servers that send no reports
    have none.
    """

    name: str
    env_id: int | None
    heard_s: float | None
    group_size: int = 0
    connected: bool = True
    report: EnvReport | None = None


class Activity(Struct, omit_defaults=True):
    """Who does what, and what is missing for the next batch: see `explain` in atroposlib/clients/activity.py.

    `waiting` counts rollouts that a batch could take. `obstacle` says why enough of them make no batch. The trainer
    was last heard `trainer_heard_s` ago, null after too long a silence, and last asked for a batch `asked_s` ago.
    """

    trainer: bool
    trainer_heard_s: float | None = None
    asked_s: float | None = None
    batch_size: int = 0
    waiting: int = 0
    waiting_groups: int = 0
    obstacle: str | None = None
    queue_full: bool = False
    journal_error: str | None = None
    current_step: int = 0
    trained_steps: int | UnsetType = UNSET
    num_steps: int = -1
    environments: list[EnvActivity] = []
    more_environments: int = 0


class TrainerStep(Struct, omit_defaults=True):
    """The trainer finished `step`, and vLLM serves `policy_version` from now on.

    `num_steps` replaces the registered number of a run that ends earlier. A version after the last step has the weights
    of version `weights_of`, and is served to be evaluated. No version follows one that is `done`. `trainer` is the uuid
    of /register: a report of one whose batches another has taken over is refused.
    """

    step: Step
    policy_version: Step
    num_steps: Step | None = None
    weights_of: Step | None = None
    done: bool = False
    trainer: Integer | None = None


class Evaluation(Struct):
    """Held-out results of one policy version in one environment."""

    env_id: Integer
    policy_version: Step
    accuracy: float | None = None
    metrics: dict[str, float] = {}


class EvaluationResult(Struct):
    """One posted evaluation."""

    env_id: int
    env_name: str
    policy_version: int
    accuracy: float | None
    metrics: dict[str, float]


class Evaluations(Struct):
    """Results of one policy version; `pending` names the connected environments that announced one and have not posted
    it.
    """

    results: list[EvaluationResult]
    pending: list[str]


class Accepted(Struct, omit_defaults=True):
    """`status` is "received", or "buffered" with the number of rollouts that wait for company to fill the group
    size.
    """

    status: str
    buffer_size: int | UnsetType = UNSET


class ListAccepted(Struct, omit_defaults=True):
    """`buffered` counts the groups of the list that were buffered."""

    status: str
    groups_processed: int
    buffered: int | UnsetType = UNSET
    last_buffer_size: int | UnsetType = UNSET


class Message(Struct):
    """A line for people."""

    message: str


class ScoredData(Struct):
    """One group of rollouts. The fields, in this order and null when absent, are the item that a trainer gets from
    /batch.

    Per sequence: `tokens`, `masks` (-100 where not trained, else the token id), `scores`. Per token where given:
    `advantages`, `ref_logprobs`, `inference_logprobs` (1.0 where masked). `distill_*` are `[sequence][position][k]`:
    tokens that a teacher names, the position's own first, and their log-probabilities. `policy_versions` is the first
    and last policy version that a sequence was sampled under, `version_spans` gives the version of each token: [start,
    version] pairs, each for the sampled tokens from position `start` to the next pair's. `finish_reasons` is why its
    last answer ended ("length": it was cut). `rollouts` is the number of the rollout that a sequence belongs to,
    counted from 0 in order; without it each sequence is a rollout of its own. `failed` counts the rollouts that have no
    score and no sequence here, by cause; in a batch each takes the place of one. `routed_experts` are the experts that
    a mixture-of-experts model read each token with, as `atroposlib/routing.py` writes them. `ordinal` is the place of a
    group of a run that can be repeated: its environment, its batch, and its number among what the environment began for
    that batch, both counted from 0. An item has these seven only if they were posted.
    """

    tokens: list[list[int]]
    masks: list[list[int]]
    scores: list[float]
    advantages: list[list[float]] | None = None
    ref_logprobs: list[list[float]] | None = None
    messages: list[list[dict[str, Any]]] | None = None
    generation_params: dict[str, Any] | None = None
    inference_logprobs: list[list[float]] | None = None
    overrides: list[dict[str, Any] | None] | None = None
    group_overrides: dict[str, Any] | None = None
    images: Any = None
    env_id: Integer | None = None
    distill_token_ids: list[list[list[Integer]]] | None = None
    distill_logprobs: list[list[list[float]]] | None = None
    policy_versions: list[tuple[Step, Step]] | UnsetType | None = UNSET
    version_spans: list[list[tuple[Step, Step]]] | UnsetType | None = UNSET
    rollouts: list[Integer] | UnsetType | None = UNSET
    finish_reasons: list[FinishReason] | UnsetType | None = UNSET
    failed: dict[Cause, Failures] | UnsetType | None = UNSET
    routed_experts: list[str] | UnsetType | None = UNSET
    ordinal: Ordinal | UnsetType | None = UNSET


# Of ScoredData, the fields that an item has only if they were posted; the ancestor's items did not have them.
IF_POSTED = (
    "policy_versions",
    "version_spans",
    "rollouts",
    "finish_reasons",
    "failed",
    "routed_experts",
    "ordinal",
)


class PostedData(ScoredData, omit_defaults=True):
    """A group as it is posted: a post that is repeated with the same `idempotency_key` is stored once.

    The API checks the range of each id once, here; readers of an item need not pay for that again.
    """

    tokens: list[list[Integer]]
    masks: list[list[Integer]]
    idempotency_key: Annotated[str, Meta(min_length=1, max_length=200)] | None = None


NO_EXAMPLE: dict[str, list[object]] = {
    name: []
    for name in (
        "tokens",
        "masks",
        "scores",
        "advantages",
        "ref_logprobs",
        "generation_params",
        "inference_logprobs",
        "messages",
        "images",
    )
}
