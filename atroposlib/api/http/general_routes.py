"""The routes for everyone: health, progress of the run, contents of the queue; and the reset of all data."""

import functools
from collections.abc import Sequence

import msgspec
from fastapi import APIRouter, Query, Request, Response
from msgspec.structs import asdict
from prometheus_client import CONTENT_TYPE_LATEST

from atroposlib.addresses import server_address
from atroposlib.api.groups.decoding import RefusedBody
from atroposlib.api.groups.posted_groups import as_json
from atroposlib.api.http.messages import NO_BROWSER, beside, encode, large_reply, read_record, reply, service_of
from atroposlib.api.http.openapi import serves
from atroposlib.api.journal.dead_letters import MAX_LETTERS_IN_MEMORY, Kept
from atroposlib.logs import get_logger
from atroposlib.wire import batching as wire
from atroposlib.wire import routes
from atroposlib.wire.servers import ServerChange, Servers

log = get_logger(__name__)
router = APIRouter()
legacy_router = APIRouter(dependencies=[NO_BROWSER])  # a GET that changes state


@serves(router, routes.ROOT)
async def root() -> Response:
    """Say what this is."""
    return reply(wire.Message("AtroposLib API"))


@serves(router, routes.HEALTH)
async def health() -> Response:
    """Whether the server answers."""
    return reply(wire.Outcome("ok"))


@serves(router, routes.READY)
async def ready(request: Request) -> Response:
    """Whether groups are taken; 503 with the reason while the journal cannot be written."""
    error = service_of(request).journal_error
    return reply(wire.Outcome("ok")) if error is None else reply(wire.Outcome("failure", error), 503)


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(request: Request) -> Response:
    """Metrics for Prometheus."""
    service_of(request).expire_silent()
    return Response(request.app.state.metrics.text(), media_type=CONTENT_TYPE_LATEST)


@serves(router, routes.WANDB_INFO)
async def wandb_info(request: Request) -> Response:
    """The tracking group and project of the run."""
    run = service_of(request).state.queue.registration
    return reply(wire.WandbInfo(run.wandb_group, run.wandb_project) if run else wire.WandbInfo(None, None))


@serves(router, routes.INFO)
async def info(request: Request) -> Response:
    """Batch size in rollouts and the longest sequence in tokens."""
    service = service_of(request)
    run, needs = service.state.queue.registration, service.needs
    size, length = (run.batch_size, run.max_token_len) if run is not None else (-1, -1)
    return reply(wire.Info(size, length, **asdict(needs)))


@serves(router, routes.STATUS)
async def status(request: Request) -> Response:
    """Delivered batches and waiting groups."""
    state = service_of(request).state
    answer = state.queue.status()
    answer.rejected_groups = state.rejected
    return reply(answer)


@serves(router, routes.ACTIVITY)
async def activity(request: Request) -> Response:
    """Who does what, and what is missing for the next batch: trainer, queue, and each environment with its counts by
    reason.
    """
    return reply(service_of(request).activity())


@serves(router, routes.SERVERS)
async def servers(request: Request) -> Response:
    """Inference servers that have joined or left since the trainer registered, each with its state.

    After a restart there are none until a trainer is heard of.
    """
    return reply(Servers(service_of(request).servers()))


@serves(router, routes.CHANGE_SERVER)
async def change_server(request: Request) -> Response:
    """Announce that an inference server joins (`joining`) or leaves (`leaving`).

    The trainer gives a joining server the current policy with its next sync, and reports it as `serving`; environments
    send requests to it from then on, and no new ones to one that leaves. Once no request runs on it, whoever ends it
    reports it as `left`. 422 for what is no server's address.
    """
    change = await read_record(request, ServerChange)
    try:
        url = server_address(change.url)
    except ValueError as error:
        raise RefusedBody(422, str(error), location=("url",)) from None
    await service_of(request).change_server(url, change.state)
    log.info("The inference server at %s is %s", url, change.state)
    return reply(wire.Outcome("success"))


@serves(router, routes.LATEST_EXAMPLE)
async def latest_example(request: Request) -> Response:
    """The group that came last; empty lists before any."""
    latest = service_of(request).latest
    if latest is None:
        return reply(wire.NO_EXAMPLE)
    body = await beside(request, functools.partial(as_json, latest.data)) if latest.packed else latest.data
    return await large_reply(request, body)


@serves(router, routes.DEAD_LETTERS)
async def dead_letters(
    request: Request, limit: int = Query(100, ge=1, le=MAX_LETTERS_IN_MEMORY), groups: bool = Query(False)
) -> Response:
    """Groups that were set aside because they cannot be trained on, newest first; with `groups`, their content too.

    The content is left out where it would take too much memory: `run-api journal dead-letters` has it.
    """
    work = functools.partial(_described, service_of(request).dead_letters.newest(limit), groups)
    return await large_reply(request, await beside(request, work, is_heavy=groups))


def _described(letters: Sequence[Kept], with_groups: bool) -> bytes:
    described = []
    for kept in letters:
        letter, body = kept.letter, kept.letter.body
        described_letter = wire.DeadLetter(
            body.id, letter.at, letter.env_id, letter.environment, letter.reason, kept.size
        )
        if with_groups and body.data:
            described_letter.group = msgspec.Raw(as_json(body.data) if body.packed else body.data)
        described.append(described_letter)
    return encode(described)


@router.post("/reset_data", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
@legacy_router.get("/reset_data", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def reset_data(request: Request) -> Response:
    """Forget everything: groups, registrations, evaluations, steps."""
    await service_of(request).reset()
    request.app.state.said.clear()
    log.warning("All data was reset at the request of %s", request.client.host if request.client else "a local peer")
    return Response("Reset successful", media_type="text/plain")
