"""An environment's registration with the batching API: join, rejoin after a restart, leave.

The serve loop asks for `status`; that call is also what notices an API that was restarted, waits for it with a log
line every ten seconds, and registers again. Rollouts that finish meanwhile wait here to be posted; none is lost.
"""

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from msgspec.structs import replace

from atroposlib.clients.batching_api import ApiRefused, ApiUnreachable, AsyncBatchingApi, UnexpectedReply
from atroposlib.clients.waiting import NotYet
from atroposlib.envs.limits.waits import wait_for_peer
from atroposlib.envs.run.order import post_key
from atroposlib.logs import get_logger
from atroposlib.wire import routes
from atroposlib.wire.batching import (
    EnvId,
    EnvRegistered,
    EnvRegistration,
    EnvStatus,
    Evaluation,
    Info,
    PostedData,
    WaitForTrainer,
    WandbInfo,
)
from atroposlib.wire.routes import Route
from atroposlib.wire.servers import State

log = get_logger(__name__)

R = TypeVar("R")

POLL_S = 0.5
REPOST_PAUSE_S = 1.0
NOBODY = -1  # the id of no environment


class ApiLink:
    """`announcement` is what /register-env is told; `on_joined` is called with the reply each time it succeeds."""

    def __init__(
        self,
        client: AsyncBatchingApi,
        announcement: EnvRegistration,
        timeout_s: float,
        on_joined: Callable[[EnvRegistered], None] = lambda registered: None,
    ) -> None:
        self.client = client
        self.env_id: int | None = None
        self._announcement = announcement
        self._timeout_s = timeout_s
        self._on_joined = on_joined
        self._run: str | None = None  # its name, if the trainer gave it one
        self._last_evaluation: Evaluation | None = None  # for this trainer
        self._lists_servers = True  # as far as is known

    async def wait_until_up(self) -> None:
        """Return when the API answers. Raises PeerError after the timeout."""
        await self._answered(
            "a reply of the batching API",
            routes.ROOT,
            remedy="start it with `python -m atroposlib.cli.run_api`, or correct --env.rollout_server_url",
        )

    async def join(self) -> EnvRegistered:
        """Register, once a trainer has started. Raises PeerError after the timeout or when the API refuses."""
        joined = await self._answered(
            "registration", routes.REGISTER_ENV, lambda: self._announcement, remedy="start a trainer for this API"
        )
        assert isinstance(joined, EnvRegistered)
        if joined.run != self._run:
            self._last_evaluation = None
        self.env_id, self._run = joined.env_id, joined.run
        log.info(
            "Registered as %s (id %d) with %s at step %d of %d",
            joined.wandb_name,
            joined.env_id,
            self.client.url,
            joined.starting_step,
            joined.num_steps,
        )
        self._on_joined(joined)
        return joined

    async def status(self) -> EnvStatus:
        """The API's numbers for this environment, registered again first if the API has forgotten it."""
        while True:
            if self.env_id is None:
                raise RuntimeError("this environment has not joined the API")
            try:
                return await self._answered("its status", routes.STATUS_ENV, query={"env_id": self.env_id})
            except ApiRefused as error:
                log.warning(
                    "%s does not know this environment any more (%s): registering again", self.client.url, error
                )
                await self.join()
                if self._last_evaluation is not None:
                    await self._report(self._last_evaluation)

    async def batch_limits(self) -> Info:
        """Ask what a group must be to enter a batch: its sequences, their tokens, what the trainer needs of them."""
        return await self._answered("the batch size", routes.INFO)

    async def servers(self) -> dict[str, State]:
        """Inference servers that have joined or left the run, by address; none of an API that lists none."""
        if not self._lists_servers:
            return {}
        try:
            return (await self._answered("the list of servers", routes.SERVERS)).servers
        except ApiRefused:
            self._lists_servers = False
            return {}

    async def wandb_info(self) -> WandbInfo:
        """Group and project that the trainer named."""
        return await self._answered("the W&B project", routes.WANDB_INFO)

    async def post_groups(self, groups: Sequence[PostedData]) -> None:
        """Hand over groups, whose env_id is filled in. One that has a key of its own is stored once, also if an earlier
        process has posted it. Raises ApiRefused, or PeerError when the API does not answer.
        """
        own = groups[0].idempotency_key if len(groups) == 1 else None
        key = own or uuid.uuid4().hex  # of all tries together

        def bodies() -> list[PostedData]:  # an environment that had to register again has another id
            return [replace(group, env_id=self.env_id) for group in groups]

        if len(groups) == 1:
            await self._posted("groups", routes.SCORED_DATA, lambda: bodies()[0], key)
        else:
            await self._posted("groups", routes.SCORED_DATA_LIST, bodies, key)

    async def post_in_place(self, group: PostedData) -> None:
        """Hand over a group of a run that can be repeated: posted again, also by a process that started anew, it is
        stored once. Raises as `post_groups` does; the API refuses another group for the same place.
        """
        assert isinstance(group.ordinal, tuple)
        key = post_key(self._run, group.ordinal)
        await self._posted("a group", routes.SCORED_DATA, lambda: replace(group, env_id=self.env_id), key)

    async def post_evaluation(self, policy_version: int, accuracy: float | None, metrics: Mapping[str, float]) -> None:
        """Report an evaluation; the last one is reported again to an API that was restarted in the same run."""
        self._last_evaluation = Evaluation(NOBODY, policy_version, accuracy, dict(metrics))
        await self._report(self._last_evaluation)

    async def leave(self) -> None:
        """Disconnect, if registered; an API that is gone needs no goodbye."""
        self._last_evaluation = None
        if self.env_id is None:
            return
        try:
            await self.client.call(routes.DISCONNECT_ENV, EnvId(self.env_id))
            log.info("Disconnected from %s", self.client.url)
        except (ApiUnreachable, ApiRefused) as error:
            log.warning("Left without disconnecting: %s", error)
        self.env_id = None

    async def _report(self, evaluation: Evaluation) -> None:
        def body() -> Evaluation:
            return replace(evaluation, env_id=NOBODY if self.env_id is None else self.env_id)

        try:
            await self._posted("an evaluation", routes.EVALUATION, body)
        except ApiRefused as error:
            log.warning(
                "The API refused an evaluation; it is reported again if this environment registers again: %s",
                error,
            )

    async def _posted(self, what: str, route: Route[Any], body: Callable[[], object], key: str | None = None) -> None:
        await self._answered(f"receipt for {what}", route, body, key=key, every_s=REPOST_PAUSE_S)

    async def _answered(
        self,
        what: str,
        route: Route[R],
        body: Callable[[], object] = lambda: None,
        *,
        query: Mapping[str, int] | None = None,
        key: str | None = None,
        remedy: str = "start it again",
        every_s: float = POLL_S,
    ) -> R:
        """The reply, asked again while the API is away or waits for a trainer. Raises ApiRefused, or PeerError after
        the timeout.
        """

        async def attempt() -> R:
            try:
                reply = await self.client.call(route, body(), query=query, key=key)
            except UnexpectedReply as error:  # perhaps of what stands there while the API starts
                raise NotYet(str(error)) from error
            if isinstance(reply, WaitForTrainer):
                raise NotYet("no trainer has registered and asked for a batch")
            return reply

        return await wait_for_peer(
            what, self.client.url, attempt, timeout_s=self._timeout_s, remedy=remedy, every_s=every_s
        )
