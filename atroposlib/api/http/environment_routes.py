"""The routes for environments: join, status, posts of groups and evaluations, disconnect."""

import functools
from hashlib import blake2b
from typing import NamedTuple

import msgspec
from fastapi import APIRouter, Query, Request, Response

from atroposlib.api.groups.decoding import RefusedBody, check_names
from atroposlib.api.groups.group_checks import check_group
from atroposlib.api.groups.posted_groups import read_groups
from atroposlib.api.http.messages import beside, is_packed, read_body, read_record, reply, say_once, service_of
from atroposlib.api.http.openapi import serves
from atroposlib.api.state.changes import PostedGroup
from atroposlib.api.state.queue import GroupTooLarge, UnknownEnvironment
from atroposlib.groups import oldest_version, size_of
from atroposlib.logs import get_logger
from atroposlib.wire import batching as wire
from atroposlib.wire import routes
from atroposlib.wire.batching import GroupRequirements

log = get_logger(__name__)
router = APIRouter()


INLINE_GROUP_BYTES = 262_144  # larger bodies are read beside the event loop: each takes it some milliseconds
INLINE_LIST_BYTES = 32_768  # of small groups, which cost more for each byte
KEY_HEADER = "Idempotency-Key"
MAX_KEY_LENGTH = 200
MAX_METRICS = 256  # of one evaluation
_READS_PACKED = {"Accept-Post": f"application/json, {wire.MSGPACK}"}  # the client may post MessagePack
_KEY = {KEY_HEADER: {"type": "string", "minLength": 1, "maxLength": MAX_KEY_LENGTH}}


@serves(router, routes.REGISTER_ENV)
async def register_env(request: Request) -> Response:
    """Register an environment server.

    `{"status": "wait for trainer to start"}` until a trainer has registered and polled for a batch, and after a start
    from a journal until its trainer is heard of: ask again.
    """
    service = service_of(request)
    joining = await read_record(request, wire.EnvRegistration)
    check_names(desired_name=joining.desired_name)
    if joining.group_size > (most := service.settings.max_sequences):
        words = f"a group of {joining.group_size} sequences; at most {most} are accepted (--max-sequences)"
        raise RefusedBody(422, words, location=("group_size",), value=str(joining.group_size))
    environment = await service.join(joining)
    run = service.state.queue.registration
    if environment is None or run is None:
        return reply(wire.WaitForTrainer(), headers=_READS_PACKED)
    size = environment.request.group_size
    log.info("Environment %s registered: env_id=%d, group_size=%d", environment.name, environment.env_id, size)
    if run.batch_size % size:
        log.warning(
            "batch_size=%d is not a multiple of group_size=%d of %s; batches may never fill",
            run.batch_size,
            size,
            environment.name,
        )
    return reply(
        wire.EnvRegistered(
            env_id=environment.env_id,
            wandb_name=environment.name,
            checkpoint_dir=run.checkpoint_dir,
            starting_step=service.state.queue.current_step,
            checkpoint_interval=run.save_checkpoint_interval,
            num_steps=run.num_steps,
            run=run.run,
        ),
        headers=_READS_PACKED,
    )


@serves(router, routes.DISCONNECT_ENV)
async def disconnect_env(request: Request) -> Response:
    """Take an environment out of weights, minimums and announced evaluations. Its groups stay queued."""
    env_id = (await read_record(request, wire.EnvId)).env_id
    try:
        environment = await service_of(request).leave(env_id)
    except UnknownEnvironment as error:
        return reply(wire.Outcome("failure", str(error)))
    log.info("Environment %s disconnected", environment.name)
    return reply(wire.Outcome("success"))


@serves(router, routes.STATUS_ENV, body_required=False)
@serves(router, routes.STATUS_ENV, method="POST", body_required=False)
async def status_env(request: Request, env_id: int | None = Query(None, ge=-(2**53), lt=2**53)) -> Response:
    """The queue as one environment sees it. `env_id` comes in the query or in a JSON body, by GET or POST; 404 when it
    is unknown.
    """
    if env_id is None:
        env_id = (await read_record(request, wire.EnvId)).env_id
    return reply(service_of(request).env_status(env_id))


@serves(router, routes.SCORED_DATA, headers=_KEY)
async def scored_data(request: Request) -> Response:
    """Post one scored group, as JSON or MessagePack.

    422 names value and position of what is wrong: a number that is not finite, masks, scores or log-probabilities
    that do not match the tokens, no sequence at all, more rollouts than a batch has. 429: the queue is full. 507:
    the journal cannot be written. A post that is repeated with its Idempotency-Key (or `idempotency_key`) is
    answered as the first time and stored once.
    """
    (buffered,) = await _post(request, in_list=False)
    return reply(wire.Accepted("received") if buffered is None else wire.Accepted("buffered", buffered))


@serves(router, routes.SCORED_DATA_LIST, headers=_KEY)
async def scored_data_list(request: Request) -> Response:
    """Post several scored groups at once. All are accepted, or none. Idempotency-Key stands for the whole list."""
    sizes = await _post(request, in_list=True)
    buffered = [size for size in sizes if size is not None]
    answer = wire.ListAccepted("received", groups_processed=len(sizes))
    if buffered:
        answer.buffered, answer.last_buffer_size = len(buffered), buffered[-1]
    return reply(answer)


@serves(router, routes.HEARTBEAT)
async def heartbeat(request: Request) -> Response:
    """A sign of life of an environment or a trainer that has nothing else to say. 404 and 409 where it is not known
    any more. An environment's `report` is kept for /activity.
    """
    sign = await read_record(request, wire.Heartbeat)
    service = service_of(request)
    if sign.env_id is not None:
        service.state.queue.environment(sign.env_id)
        service.hear_environment(sign.env_id)
    if sign.report is not None:
        service.reports.note(sign.env_id, sign.report)
    if sign.trainer is not None:
        await service.trainer_heartbeat(sign.trainer)
    return reply(wire.Outcome("success"))


@serves(router, routes.EVALUATION)
async def evaluation(request: Request) -> Response:
    """Post held-out results of a policy version; a second post for the same environment and version replaces the
    first.
    """
    posted = await read_record(request, wire.Evaluation)
    if len(posted.metrics) > MAX_METRICS:
        raise RefusedBody(
            422, f"{len(posted.metrics)} metrics; at most {MAX_METRICS} are accepted", location=("metrics",)
        )
    for metric in posted.metrics:
        check_names(metrics=metric)
    await service_of(request).add_evaluation(posted)
    return reply(wire.Outcome("success"))


def _key(request: Request) -> str | None:
    """Raises RefusedBody (422). Read by hand: FastAPI's own reading costs as much as the rest of the request's way
    through it.
    """
    key = request.headers.get(KEY_HEADER)
    if key is not None and not 1 <= len(key) <= MAX_KEY_LENGTH:
        raise RefusedBody(
            422, f"{KEY_HEADER} has {len(key)} characters; 1 to {MAX_KEY_LENGTH} are accepted", kind="string_length"
        )
    return key


class _Ready(NamedTuple):
    """A group that was read and checked: what of it is kept, and what its sender might want to know."""

    posted: PostedGroup
    item: bytes
    key: str | None
    sequences: int
    tokens: int
    suspicions: list[str]
    digest: bytes


def _read_and_check(
    body: bytes, packed: bool, in_list: bool, max_sequences: int, needs: GroupRequirements, keyed: bool
) -> list[_Ready]:
    ready = []
    for index, (data, item) in enumerate(read_groups(body, packed, in_list=in_list)):
        try:
            suspicions = check_group(data, max_sequences=max_sequences, needs=needs)
        except RefusedBody as refusal:
            raise refusal.within(index) if in_list else refusal from None
        posted = PostedGroup(size_of(data), data.env_id, oldest_version(data))
        ready.append(
            _Ready(
                posted,
                item,
                data.idempotency_key,
                len(data.tokens),
                sum(map(len, data.tokens)),
                suspicions,
                _digest(data) if keyed or data.idempotency_key else b"",
            )
        )
    return ready


def _digest(data: wire.PostedData) -> bytes:
    """Compute the digest of a group, in whatever encoding it came. The env_id is not in it: an environment that had to
    register again posts the same groups under another one.
    """
    content = msgspec.structs.replace(data, env_id=None, idempotency_key=None)
    try:
        encoded = msgspec.msgpack.encode(content)
    except OverflowError:  # of an integer of more than 64 bits, which came as JSON and is delivered as JSON
        encoded = msgspec.json.encode(content)
    return blake2b(encoded, digest_size=8).digest()


async def _post(request: Request, *, in_list: bool) -> list[int | None]:
    """Store the groups of one post, all or none: for each what `BatchQueue.accept` says. Raises RefusedBody.

    They are read on a thread if they are large or many.
    """
    service, packed = service_of(request), is_packed(request)
    body = await read_body(request, service.settings.max_body_bytes)
    needs = service.needs
    groups = await beside(
        request,
        functools.partial(
            _read_and_check, body, packed, in_list, service.settings.max_sequences, needs, _key(request) is not None
        ),
        is_heavy=len(body) > (INLINE_LIST_BYTES if in_list else INLINE_GROUP_BYTES),
    )
    if not groups:
        return []
    key = _key(request) or (None if in_list else groups[0].key)
    digest = int.from_bytes(blake2b(b"".join(group.digest for group in groups), digest_size=8).digest(), "big") | 1
    for index, group in enumerate(groups):
        for suspicion in group.suspicions:
            say_once(request, f"A group of env_id={group.posted.env_id} is passed on, although its {suspicion}")
        try:
            service.state.queue.check_size(group.posted.size)
        except GroupTooLarge as error:
            raise RefusedBody(
                422, str(error), location=(index, "tokens") if in_list else ("tokens",), kind="too_large"
            ) from None
    answer, were_stored = await service.post(
        [group.posted for group in groups], [(group.item, packed) for group in groups], key, needs, digest
    )
    if len(answer) != len(groups):
        raise RefusedBody(
            422, f"{KEY_HEADER} is that of a post of {len(answer)} groups, not {len(groups)}: each post needs its own"
        )
    for env_id in {group.posted.env_id for group in groups}:
        service.hear_environment(env_id)
    if were_stored:
        service.counters.groups += len(groups)
        service.counters.rollouts += sum(group.posted.size for group in groups)
        service.counters.sequences += sum(group.sequences for group in groups)
        service.counters.tokens += sum(group.tokens for group in groups)
    return answer
