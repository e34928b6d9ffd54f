"""What environments ask for: join, status, posts of groups and evaluations, a goodbye."""

import msgspec
from fastapi import APIRouter, Query, Request, Response

from atroposlib.api import wire
from atroposlib.api.changes import PostedGroup
from atroposlib.api.decoding import BodyDecoder, RefusedBody
from atroposlib.api.group_checks import check_group, read_group, read_groups
from atroposlib.api.http import MSGPACK, is_packed, read_body, reply, say_once, service_of
from atroposlib.api.openapi import describe
from atroposlib.api.queue import GroupTooLarge, NotRegistered, UnknownEnvironment
from atroposlib.groups import Needs
from atroposlib.logs import get_logger

WAIT_FOR_TRAINER = "wait for trainer to start"

log = get_logger(__name__)
router = APIRouter()

_env_registration = BodyDecoder(wire.EnvRegistration)
_env_id = BodyDecoder(wire.EnvId)
_evaluation = BodyDecoder(wire.Evaluation)
_heartbeat = BodyDecoder(wire.Heartbeat)

KEY_HEADER = "Idempotency-Key"
MAX_KEY_LENGTH = 200
_KEY = {KEY_HEADER: {"type": "string", "minLength": 1, "maxLength": MAX_KEY_LENGTH}}


@router.post("/register-env", **describe(wire.EnvRegistered, body=wire.EnvRegistration))
async def register_env(request: Request) -> Response:
    """Register an environment server.

    `{"status": "wait for trainer to start"}` until a trainer has registered and polled for a batch: ask again.
    """
    service = service_of(request)
    environment = await service.join(_env_registration.decode(await read_body(request)))
    run = service.state.queue.registration
    if environment is None or run is None:
        return _readable(reply(wire.Outcome(WAIT_FOR_TRAINER)))
    size = environment.request.group_size
    log.info("Environment %s registered: env_id=%d, group_size=%d", environment.name, environment.env_id, size)
    if run.batch_size % size:
        log.warning(
            "batch_size=%d is not a multiple of group_size=%d of %s; batches may never fill", run.batch_size, size, environment.name
        )
    joined = reply(
        wire.EnvRegistered(
            env_id=environment.env_id,
            wandb_name=environment.name,
            checkpoint_dir=run.checkpoint_dir,
            starting_step=service.state.queue.current_step,
            checkpoint_interval=run.save_checkpoint_interval,
            num_steps=run.num_steps,
        )
    )
    return _readable(joined)


def _readable(answer: Response) -> Response:
    """Tell the client that it may post MessagePack."""
    answer.headers["Accept-Post"] = f"application/json, {MSGPACK}"
    return answer


@router.post("/disconnect-env", **describe(wire.Outcome, body=wire.EnvId))
async def disconnect_env(request: Request) -> Response:
    """Take an environment out of weights, minimums and announced evaluations. Its groups stay queued."""
    env_id = _env_id.decode(await read_body(request)).env_id
    try:
        environment = await service_of(request).leave(env_id)
    except UnknownEnvironment as error:
        return reply(wire.Outcome("failure", str(error)))
    log.info("Environment %s disconnected", environment.name)
    return reply(wire.Outcome("success"))


@router.get("/status-env", **describe(wire.EnvStatus, body=wire.EnvId, body_required=False))
@router.post("/status-env", **describe(wire.EnvStatus, body=wire.EnvId, body_required=False))
async def status_env(request: Request, env_id: int | None = Query(None, ge=-(2**53), lt=2**53)) -> Response:
    """The queue as one environment sees it. `env_id` comes in the query or in a JSON body, by GET or POST; 404 when it is unknown."""
    if env_id is None:
        env_id = _env_id.decode(await read_body(request)).env_id
    return reply(service_of(request).env_status(env_id))


@router.post("/scored_data", **describe(wire.Accepted, body=wire.PostedData, headers=_KEY))
async def scored_data(request: Request) -> Response:
    """Post one scored group, as JSON or MessagePack.

    422 names value and position of what is wrong: a number that is not finite, masks, scores or log-probabilities that do not match the
    tokens, no sequence at all, more sequences than a batch has. 429: the queue is full. 507: the journal cannot be written.
    A post that is repeated with its Idempotency-Key (or `idempotency_key`) is answered as the first time and stored once.
    """
    packed = is_packed(request)
    data, item = read_group(await read_body(request), packed)
    (buffered,) = await _store(request, [(data, item)], packed, _key(request) or data.idempotency_key, in_list=False)
    return reply(wire.Accepted("received") if buffered is None else wire.Accepted("buffered", buffered))


@router.post("/scored_data_list", **describe(wire.ListAccepted, body=list[wire.PostedData], headers=_KEY))
async def scored_data_list(request: Request) -> Response:
    """Post several scored groups at once. All are accepted, or none. Idempotency-Key stands for the whole list."""
    packed = is_packed(request)
    groups = read_groups(await read_body(request), packed)
    sizes = await _store(request, groups, packed, _key(request), in_list=True) if groups else []
    buffered = [size for size in sizes if size is not None]
    answer = wire.ListAccepted("received", groups_processed=len(groups))
    if buffered:
        answer.buffered, answer.last_buffer_size = len(buffered), buffered[-1]
    return reply(answer)


@router.post("/heartbeat", **describe(wire.Outcome, body=wire.Heartbeat))
async def heartbeat(request: Request) -> Response:
    """A sign of life of an environment or a trainer that has nothing else to say. 404 and 409 where it is not known any more."""
    sign = _heartbeat.decode(await read_body(request))
    service = service_of(request)
    if sign.env_id is not None:
        service.state.queue.environment(sign.env_id)
        service.hear_environment(sign.env_id)
    if sign.trainer is not None:
        try:
            await service.trainer_heartbeat(sign.trainer)
        except NotRegistered:
            return reply(wire.Outcome("failure", "no trainer is registered"))
    return reply(wire.Outcome("success"))


@router.post("/evaluation", **describe(wire.Outcome, body=wire.Evaluation))
async def evaluation(request: Request) -> Response:
    """Post held-out results of a policy version; a second post for the same environment and version replaces the first."""
    await service_of(request).add_evaluation(_evaluation.decode(await read_body(request)))
    return reply(wire.Outcome("success"))


def _key(request: Request) -> str | None:
    """Raises RefusedBody (422). Read by hand: FastAPI's own reading costs as much as the rest of the request's way through it."""
    key = request.headers.get(KEY_HEADER)
    if key is not None and not 1 <= len(key) <= MAX_KEY_LENGTH:
        raise RefusedBody(422, f"{KEY_HEADER} has {len(key)} characters; 1 to {MAX_KEY_LENGTH} are taken", kind="string_length")
    return key


async def _store(
    request: Request, groups: list[tuple[wire.PostedData, bytes]], packed: bool, key: str | None, *, in_list: bool
) -> list[int | None]:
    """Check and store the groups of one post with their items, all or none."""
    needs = service_of(request).needs
    for index, (data, _) in enumerate(groups):
        try:
            _check(request, data, packed, needs)
        except RefusedBody as refusal:
            raise refusal.within(index) if in_list else refusal from None
    posted = [PostedGroup(len(data.tokens), data.env_id, _oldest_version(data)) for data, _ in groups]
    service = service_of(request)
    answer = await service.post(posted, [(item, packed) for _, item in groups], key, needs)
    for data, _ in groups:
        service.hear_environment(data.env_id)
        service.figures.count_groups([len(sequence) for sequence in data.tokens], data.scores)
    return answer


def _check(request: Request, data: wire.PostedData, packed: bool, needs: Needs) -> None:
    """Raises RefusedBody (422)."""
    service = service_of(request)
    for suspicion in check_group(data, packed=packed, max_sequences=service.settings.max_sequences, needs=needs):
        say_once(request, f"A group of env_id={data.env_id} is passed on although its {suspicion}")
    try:
        service.state.queue.check_size(len(data.tokens))
    except GroupTooLarge as error:
        raise RefusedBody(422, str(error), location=("tokens",), kind="too_large") from None


def _oldest_version(data: wire.ScoredData) -> int | None:
    versions = data.policy_versions
    return None if versions is None or isinstance(versions, msgspec.UnsetType) else min((first for first, _ in versions), default=None)
