"""The batching API over HTTP: environments post scored groups, a trainer fetches batches of exactly its size.

All state is one `BatchQueue` that only the event loop's thread touches. A posted group is decoded once and encoded once; /batch splices
the stored bytes. There is no CORS: a web page has no business here. `create_app` gives an app of its own; `app` is the default one.
"""

import secrets

import msgspec
from fastapi import APIRouter, FastAPI, Query, Request, Response

from atroposlib.api import wire
from atroposlib.api.decoding import BodyDecoder, RefusedBody, check_group
from atroposlib.api.http import ERROR_REPLIES, encode, large_reply, read_body, reply, say_once
from atroposlib.api.openapi import describe, with_components
from atroposlib.api.queue import BatchQueue, GroupTooLarge, NotRegistered, UnknownEnvironment
from atroposlib.logs import get_logger

MAX_BODY_BYTES = 512 * 2**20  # of one request, as sent and decompressed
WAIT_FOR_TRAINER = "wait for trainer to start"

log = get_logger(__name__)
router = APIRouter()

_registration = BodyDecoder(wire.Registration)
_env_registration = BodyDecoder(wire.EnvRegistration)
_env_id = BodyDecoder(wire.EnvId)
_trainer_step = BodyDecoder(wire.TrainerStep)
_evaluation = BodyDecoder(wire.Evaluation)
_group = BodyDecoder(wire.ScoredData)
_groups = BodyDecoder(list[wire.ScoredData])


def create_app(*, max_body_bytes: int = MAX_BODY_BYTES) -> FastAPI:
    """An API with empty state. Bodies above `max_body_bytes`, compressed or not, are refused with 413."""
    app = FastAPI(title="AtroposLib API", description=__doc__)
    app.state.batching = BatchQueue[bytes]()
    app.state.max_body_bytes = max_body_bytes
    app.state.said = set()
    app.include_router(router)
    for kind, handler in ERROR_REPLIES.items():
        app.add_exception_handler(kind, handler)
    with_components(app)
    return app


def _queue(request: Request) -> BatchQueue[bytes]:
    queue: BatchQueue[bytes] = request.app.state.batching
    return queue


# --- trainer ------------------------------------------------------------------------------------------------------------


@router.post("/register", **describe(wire.Registered, body=wire.Registration))
async def register(request: Request) -> Response:
    """Register a trainer.

    Takes effect each time: the latest batch size and steps hold. Groups that were posted before stay queued.
    """
    registration = _registration.decode(await read_body(request))
    queue = _queue(request)
    queue.register(registration)
    log.info("Trainer registered: batch_size=%d sequences, starting_step=%d", registration.batch_size, registration.starting_step)
    too_big = {size: count for size, count in queue.queued_sizes().items() if size > registration.batch_size}
    if too_big:
        log.warning(
            "Waiting groups do not fit into batch_size=%d (size: groups %s); they stay until a larger batch is registered or /reset_data",
            registration.batch_size,
            too_big,
        )
    return reply(wire.Registered(secrets.randbelow(2**53 - 1) + 1))


@router.get("/batch", **describe(content={"batch": "array of items, or null"}))
async def batch(request: Request) -> Response:
    """Take the next batch: groups of exactly `batch_size` sequences in all, oldest first, or null when there is none yet.

    Never waits. An item has the fourteen fields of ScoredData, null where absent, and `policy_versions` if it was posted.
    Before any registration the reply is an error with an empty batch.
    """
    queue = _queue(request)
    try:
        records = queue.next_batch()
    except NotRegistered:
        return reply({"status": "error", "message": "Trainer not registered. Call /register first.", "batch": []})
    if records is None:
        say_once(request, queue.obstacle())
        return reply({"batch": None})
    log.info("Sending batch %d of %d groups", queue.current_step, len(records))
    return await large_reply(request, b'{"batch":[' + b",".join(records) + b"]}")


@router.post("/trainer-step", **describe(wire.Outcome, body=wire.TrainerStep))
async def trainer_step(request: Request) -> Response:
    """Tell environments which step is finished and which policy version vLLM serves from now on."""
    report = _trainer_step.decode(await read_body(request))
    _queue(request).trainer_step(report.step, report.policy_version)
    return reply(wire.Outcome("success"))


@router.get("/evaluations", **describe(wire.Evaluations))
async def evaluations(request: Request, policy_version: int = Query(ge=0, lt=2**53)) -> Response:
    """Results of a policy version, and which environments announced one and still owe it."""
    return reply(_queue(request).evaluations(policy_version))


# --- environments -------------------------------------------------------------------------------------------------------


@router.post("/register-env", **describe(wire.EnvRegistered, body=wire.EnvRegistration))
async def register_env(request: Request) -> Response:
    """Register an environment server.

    `{"status": "wait for trainer to start"}` until a trainer has registered and polled for a batch: ask again.
    """
    queue = _queue(request)
    environment = queue.register_env(_env_registration.decode(await read_body(request)))
    run = queue.registration
    if environment is None or run is None:
        return reply(wire.Outcome(WAIT_FOR_TRAINER))
    size = environment.request.group_size
    log.info("Environment %s registered: env_id=%d, group_size=%d", environment.name, environment.env_id, size)
    if run.batch_size % size:
        log.warning(
            "batch_size=%d is not a multiple of group_size=%d of %s; batches may never fill", run.batch_size, size, environment.name
        )
    return reply(
        wire.EnvRegistered(
            env_id=environment.env_id,
            wandb_name=environment.name,
            checkpoint_dir=run.checkpoint_dir,
            starting_step=queue.current_step,
            checkpoint_interval=run.save_checkpoint_interval,
            num_steps=run.num_steps,
        )
    )


@router.post("/disconnect-env", **describe(wire.Outcome, body=wire.EnvId))
async def disconnect_env(request: Request) -> Response:
    """Take an environment out of weights, minimums and announced evaluations. Its groups stay queued."""
    env_id = _env_id.decode(await read_body(request)).env_id
    try:
        _queue(request).disconnect_env(env_id)
    except UnknownEnvironment as error:
        return reply(wire.Outcome("failure", str(error)))
    log.info("Environment %s disconnected", _queue(request).environment(env_id).name)
    return reply(wire.Outcome("success"))


@router.get("/status-env", **describe(wire.EnvStatus, body=wire.EnvId, body_required=False))
@router.post("/status-env", **describe(wire.EnvStatus, body=wire.EnvId, body_required=False))
async def status_env(request: Request, env_id: int | None = Query(None, ge=-(2**53), lt=2**53)) -> Response:
    """The queue as one environment sees it. `env_id` comes in the query or in a JSON body, by GET or POST; 404 when it is unknown."""
    if env_id is None:
        env_id = _env_id.decode(await read_body(request)).env_id
    return reply(_queue(request).env_status(env_id))


@router.post("/scored_data", **describe(wire.Accepted, body=wire.ScoredData))
async def scored_data(request: Request) -> Response:
    """Post one scored group.

    422 names value and position of what is wrong: a number that is not finite, masks, scores or log-probabilities that do not match the
    tokens, no sequence at all, more sequences than a batch has.
    """
    return reply(_accept(request, _group.decode(await read_body(request)), index=None))


@router.post("/scored_data_list", **describe(wire.ListAccepted, body=list[wire.ScoredData]))
async def scored_data_list(request: Request) -> Response:
    """Post several scored groups at once. All are accepted, or none."""
    groups = _groups.decode(await read_body(request))
    for index, data in enumerate(groups):
        _check(request, data, index)
    sizes = [_store(request, data).buffer_size for data in groups]
    buffered = [size for size in sizes if size is not msgspec.UNSET]
    answer = wire.ListAccepted("received", groups_processed=len(groups))
    if buffered:
        answer.buffered, answer.last_buffer_size = len(buffered), buffered[-1]
    return reply(answer)


@router.post("/evaluation", **describe(wire.Outcome, body=wire.Evaluation))
async def evaluation(request: Request) -> Response:
    """Post held-out results of a policy version; a second post for the same environment and version replaces the first."""
    _queue(request).add_evaluation(_evaluation.decode(await read_body(request)))
    return reply(wire.Outcome("success"))


# --- anyone -------------------------------------------------------------------------------------------------------------


@router.get("/", **describe(wire.Message))
async def root() -> Response:
    """Say what this is."""
    return reply(wire.Message("AtroposLib API"))


@router.get("/health", **describe(wire.Outcome))
async def health() -> Response:
    """Whether the server answers."""
    return reply(wire.Outcome("ok"))


@router.get("/wandb_info", **describe(wire.WandbInfo))
async def wandb_info(request: Request) -> Response:
    """The tracking group and project of the run."""
    run = _queue(request).registration
    return reply(wire.WandbInfo(run.wandb_group, run.wandb_project) if run else wire.WandbInfo(None, None))


@router.get("/info", **describe(wire.Info))
async def info(request: Request) -> Response:
    """Batch size in sequences and the longest sequence in tokens."""
    run = _queue(request).registration
    return reply(wire.Info(run.batch_size, run.max_token_len) if run else wire.Info(-1, -1))


@router.get("/status", **describe(wire.Status))
async def status(request: Request) -> Response:
    """Delivered batches and waiting groups."""
    return reply(_queue(request).status())


@router.get("/latest_example", **describe(wire.ScoredData))
async def latest_example(request: Request) -> Response:
    """The group that was queued last; empty lists before any."""
    latest = _queue(request).latest
    return reply(wire.NO_EXAMPLE) if latest is None else await large_reply(request, latest)


@router.get("/reset_data", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def reset_data(request: Request) -> Response:
    """Forget everything: groups, registrations, evaluations, steps."""
    _queue(request).reset()
    request.app.state.said.clear()
    log.warning("All data was reset on request of %s", request.client.host if request.client else "a local peer")
    return Response("Reset successful", media_type="text/plain")


# --- groups -------------------------------------------------------------------------------------------------------------


def _accept(request: Request, data: wire.ScoredData, index: int | None) -> wire.Accepted:
    _check(request, data, index)
    return _store(request, data)


def _check(request: Request, data: wire.ScoredData, index: int | None) -> None:
    """Raises RefusedBody (422); `index` is the group's place in a posted list."""
    try:
        for suspicion in check_group(data):
            say_once(request, f"A group of env_id={data.env_id} is passed on although its {suspicion}")
        _queue(request).check_size(len(data.tokens))
    except (RefusedBody, GroupTooLarge) as error:
        refusal = error if isinstance(error, RefusedBody) else RefusedBody(422, str(error), location=("tokens",), kind="too_large")
        raise refusal if index is None else refusal.within(index) from None


def _store(request: Request, data: wire.ScoredData) -> wire.Accepted:
    buffered = _queue(request).accept(len(data.tokens), data.env_id, encode(data))
    return wire.Accepted("received") if buffered is None else wire.Accepted("buffered", buffered)


app = create_app()
