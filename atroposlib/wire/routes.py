"""The routes of the batching API: the one table that the API serves from and its clients ask by.

`sender` is who may ask: "trainer" with the API's token alone, "environment" with that or the post token, "anyone"
without a token.
"""

from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from atroposlib.wire.batching import (
    Accepted,
    Acknowledged,
    Acknowledgement,
    Activity,
    Arrivals,
    ArrivalsRequest,
    BatchReply,
    DeadLetter,
    EnvId,
    EnvRegistered,
    EnvRegistration,
    EnvStatus,
    Evaluation,
    Evaluations,
    Heartbeat,
    Info,
    LeaseRequest,
    ListAccepted,
    Message,
    Outcome,
    PostedData,
    Registered,
    Registration,
    Rejection,
    RejectionTaken,
    ScoredData,
    Status,
    TrainerStep,
    WaitForTrainer,
    WandbInfo,
)
from atroposlib.wire.servers import ServerChange, Servers

R = TypeVar("R")


LEASE_WAIT_S = 5.0  # the longest that our trainer has one request wait for a batch: in between it looks after vLLM


@dataclass(frozen=True)
class Route(Generic[R]):
    """One route: `request` and `reply` are the records of its JSON bodies, `deadline_s` bounds one request of a
    client.
    """

    method: Literal["GET", "POST"]
    path: str
    sender: Literal["trainer", "environment", "anyone"]
    reply: type[R]
    request: object = None
    deadline_s: float = 10.0


REGISTER = Route("POST", "/register", "trainer", Registered, Registration)
BATCH = Route("GET", "/batch", "trainer", BatchReply[ScoredData])
LEASE = Route("POST", "/batch/lease", "trainer", BatchReply[ScoredData], LeaseRequest, LEASE_WAIT_S + 10.0)
ARRIVALS = Route("POST", "/batch/arrivals", "trainer", Arrivals[ScoredData], ArrivalsRequest, LEASE_WAIT_S + 10.0)
ACKNOWLEDGE = Route("POST", "/batch/ack", "trainer", Acknowledged, Acknowledgement)
REJECT = Route("POST", "/batch/reject", "trainer", RejectionTaken, Rejection)
TRAINER_STEP = Route("POST", "/trainer-step", "trainer", Outcome, TrainerStep)
EVALUATIONS = Route("GET", "/evaluations", "trainer", Evaluations)
LATEST_EXAMPLE = Route("GET", "/latest_example", "trainer", ScoredData)
ACTIVITY = Route("GET", "/activity", "trainer", Activity)
CHANGE_SERVER = Route("POST", "/servers", "trainer", Outcome, ServerChange)
DEAD_LETTERS = Route("GET", "/dead-letters", "trainer", list[DeadLetter])

REGISTER_ENV: Route[EnvRegistered | WaitForTrainer] = Route(
    "POST",
    "/register-env",
    "environment",
    EnvRegistered | WaitForTrainer,  # type: ignore[arg-type]  # a union is a type to msgspec, but not to mypy
    EnvRegistration,
    30.0,
)
DISCONNECT_ENV = Route("POST", "/disconnect-env", "environment", Outcome, EnvId, 30.0)
STATUS_ENV = Route("GET", "/status-env", "environment", EnvStatus, EnvId, 30.0)
SCORED_DATA = Route("POST", "/scored_data", "environment", Accepted, PostedData, 30.0)
SCORED_DATA_LIST = Route("POST", "/scored_data_list", "environment", ListAccepted, list[PostedData], 30.0)
EVALUATION = Route("POST", "/evaluation", "environment", Outcome, Evaluation, 30.0)
HEARTBEAT = Route("POST", "/heartbeat", "environment", Outcome, Heartbeat)
ROOT = Route("GET", "/", "environment", Message)
INFO = Route("GET", "/info", "environment", Info)
STATUS = Route("GET", "/status", "environment", Status)
SERVERS = Route("GET", "/servers", "environment", Servers)
WANDB_INFO = Route("GET", "/wandb_info", "environment", WandbInfo)

HEALTH = Route("GET", "/health", "anyone", Outcome)
READY = Route("GET", "/ready", "anyone", Outcome)

ROUTES: list[Route[object]] = [value for value in list(globals().values()) if isinstance(value, Route)]
