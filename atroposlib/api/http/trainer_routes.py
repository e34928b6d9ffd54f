"""The routes for trainers: register, batches (popped, or leased and acknowledged), steps, evaluations."""

import functools
from collections.abc import Sequence

import msgspec
from fastapi import APIRouter, Query, Request, Response
from msgspec import Raw

from atroposlib.api.groups.decoding import check_names
from atroposlib.api.groups.posted_groups import as_json, with_weight
from atroposlib.api.http.messages import (
    NO_BROWSER,
    beside,
    large_reply,
    read_record,
    reply,
    say_once,
    service_of,
)
from atroposlib.api.http.openapi import serves
from atroposlib.api.service import Content
from atroposlib.logs import get_logger
from atroposlib.wire import batching as wire
from atroposlib.wire import routes

Reply = wire.BatchReply[Raw] | wire.Arrivals[Raw]
log = get_logger(__name__)
router = APIRouter()
legacy_router = APIRouter(dependencies=[NO_BROWSER])  # a GET that changes state


@serves(router, routes.REGISTER)
async def register(request: Request) -> Response:
    """Register a trainer.

    Takes effect each time: the latest batch size and steps hold. Batches that a trainer before it leased and did not
    acknowledge wait again. Groups stay, unless they belong to another run.
    """
    registration = await read_record(request, wire.Registration)
    check_names(
        wandb_group=registration.wandb_group, wandb_project=registration.wandb_project, run=registration.run or ""
    )
    service = service_of(request)
    trainer, forgotten = await service.register(registration)
    log.info(
        "Trainer registered: batch_size=%d rollouts, starting_step=%d",
        registration.batch_size,
        registration.starting_step,
    )
    if forgotten:
        log.warning("Removed %d groups of the previous run, which this trainer does not continue", forgotten)
    too_big = {
        size: count for size, count in service.state.queue.lanes.sizes().items() if size > registration.batch_size
    }
    if too_big:
        log.warning(
            "Waiting groups do not fit into batch_size=%d (size: groups %s); they stay until a larger batch is"
            " registered or /reset_data",
            registration.batch_size,
            too_big,
        )
    return reply(wire.Registered(trainer))


@serves(legacy_router, routes.BATCH)
async def batch(request: Request) -> Response:
    """Take the next batch: groups of exactly `batch_size` rollouts in all, oldest first, or null when there is none
    yet.

    Never waits. An item has the fourteen fields of ScoredData, null where absent, and `policy_versions`,
    `version_spans`, `rollouts`, `finish_reasons` and `failed` if they were posted. Before any registration the reply is
    an error with an empty batch. What is sent is forgotten: see /batch/lease.
    """
    service = service_of(request)
    contents = await service.pop()
    if contents is None:
        say_once(request, service.state.queue.obstacle())
        return reply(wire.BatchReply(None))
    log.info("Batch %d sent (%d groups)", service.state.queue.current_step, len(contents))
    return await _batch_reply(request, contents, wire.BatchReply())


@serves(router, routes.LEASE)
async def lease_batch(request: Request) -> Response:
    """As GET /batch, but the batch is kept until /batch/ack names its `lease`.

    It is given again to this trainer when `holding` does not name it, and to the next trainer when this one is
    replaced or falls silent. 409 when another trainer has registered. With `wait_s` the reply waits for a batch, up to
    that many seconds, unless the same trainer asks again before.
    """
    body = await read_record(request, wire.LeaseRequest)
    service = service_of(request)
    look = functools.partial(service.lease, body.trainer, body.holding)
    leased = await service.long_poll.first(look, body.wait_s, request.receive)
    answer: wire.BatchReply[Raw] = wire.BatchReply(None, lease=None)
    if body.ids:
        answer.rejected = service.take_untold()
    if leased is None:
        say_once(request, service.state.queue.obstacle())
        return reply(answer)
    lease, contents = leased
    log.info(
        "Batch %d sent (%d groups, lease %.0f s)",
        service.state.queue.current_step,
        len(contents),
        service.settings.trainer_timeout,
    )
    answer.lease = lease.lease_id
    if body.ids:
        answer.ids = [group.record.id for group in lease.groups]
    return await _batch_reply(request, contents, answer)


@serves(router, routes.ARRIVALS)
async def arrivals(request: Request) -> Response:
    """Groups that wait for the next batch, for a trainer that computes on them before the batch is whole.

    Nothing is delivered: the batch that /batch/lease gives later most likely holds them. Empty, and `whole` false,
    after `wait_s` seconds without a new one. Where groups differ in size, or an environment has a minimum, nothing can
    be foreseen, and the reply waits for a whole batch. 409 when another trainer has registered.
    """
    body = await read_record(request, wire.ArrivalsRequest)
    service = service_of(request)
    look = functools.partial(service.arrivals, body.trainer, body.holding, set(body.known))
    arrived = await service.long_poll.first(look, body.wait_s, request.receive)
    if arrived is None:
        return reply(wire.Arrivals([]))
    ids, contents = arrived
    return await _batch_reply(request, contents, wire.Arrivals[Raw]([], ids, whole=not ids))


@serves(router, routes.ACKNOWLEDGE)
async def acknowledge(request: Request) -> Response:
    """The trainer is done with these leases; their batches are forgotten. Repeating it is harmless."""
    body = await read_record(request, wire.Acknowledgement)
    return reply(await service_of(request).acknowledge(body.trainer, body.leases))


@serves(router, routes.REJECT)
async def reject(request: Request) -> Response:
    """Set aside groups of a leased batch that the trainer cannot train on: they are never delivered again.

    They become dead letters, with the reason. The trainer continues with the others of the batch. Repeating it is
    harmless; 409 when another trainer has registered.
    """
    body = await read_record(request, wire.Rejection)
    return reply(
        await service_of(request).reject(body.trainer, body.lease, {group.id: group.reason for group in body.groups})
    )


@serves(router, routes.TRAINER_STEP)
async def trainer_step(request: Request) -> Response:
    """Tell environments which step is finished and which policy version vLLM serves from now on."""
    report = await read_record(request, wire.TrainerStep)
    await service_of(request).report_step(report)
    return reply(wire.Outcome("success"))


@serves(router, routes.EVALUATIONS)
async def evaluations(request: Request, policy_version: int = Query(ge=0, lt=2**53)) -> Response:
    """Results of a policy version, and which environments announced one and still owe it."""
    service_of(request).expire_silent()
    return reply(service_of(request).state.queue.evaluations(policy_version))


async def _batch_reply(request: Request, contents: Sequence[Content], answer: Reply) -> Response:
    """The batch in MessagePack if the client reads it and all groups came in it, else in JSON."""
    packed = (
        all(is_packed for _, is_packed, _ in contents) and wire.MSGPACK in request.headers.get("accept", "").lower()
    )
    is_changed = any(is_packed != packed or weight != 1 for _, is_packed, weight in contents)
    limit = service_of(request).settings.max_staleness
    body = await beside(request, functools.partial(_batch, contents, answer, packed, limit), is_heavy=is_changed)
    return await large_reply(request, body, wire.MSGPACK if packed else "application/json")


def _batch(contents: Sequence[Content], answer: Reply, packed: bool, limit: int | None) -> bytes:
    answer.batch = []
    for data, is_packed, weight in contents:
        item = data if weight == 1 else with_weight(data, is_packed, weight, limit)
        answer.batch.append(Raw(as_json(item) if is_packed and not packed else item))
    return msgspec.msgpack.encode(answer) if packed else msgspec.json.encode(answer)
