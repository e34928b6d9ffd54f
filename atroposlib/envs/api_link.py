"""An environment's standing with the batching API: joined, lost and joined again, left.

The serve loop asks for `status`; that call is also what notices an API that was restarted, waits for it with a log
line every ten seconds, and registers again. Rollouts that finish meanwhile wait here to be posted: none is lost.
"""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError

from atroposlib.clients.waiting import NotYet
from atroposlib.envs.api_client import (
    ApiRefused,
    ApiUnreachable,
    BatchingApiClient,
    BatchLimits,
    EnvStatus,
    Registration,
)
from atroposlib.envs.errors import PeerError
from atroposlib.envs.waits import wait_for_peer
from atroposlib.logs import get_logger

log = get_logger(__name__)

T = TypeVar("T")

REPOST_PAUSE_S = 1.0


class ApiLink:
    """`announcement` is what /register-env is told; `on_joined` is called with the reply each time it succeeds."""

    def __init__(
        self,
        client: BatchingApiClient,
        announcement: Mapping[str, Any],
        timeout_s: float,
        on_joined: Callable[[Registration], None] = lambda registration: None,
    ) -> None:
        self.client = client
        self.env_id: int | None = None
        self._announcement = announcement
        self._timeout_s = timeout_s
        self._on_joined = on_joined
        self._last_evaluation: dict[str, Any] | None = None

    async def wait_until_up(self) -> None:
        """Return when the API answers. Raises PeerError after the timeout."""

        remedy = "start it with `python -m atroposlib.cli.run_api`, or correct --env.rollout_server_url"
        await self._answered("a reply of the batching API", self.client.root, remedy)

    async def join(self) -> Registration:
        """Register, once a trainer has started. Raises PeerError after the timeout or when the API refuses."""

        async def attempt() -> Registration:
            registration = await self.client.register_env(self._announcement)
            if registration is None:
                raise NotYet("no trainer has registered and asked for a batch")
            return registration

        registration = await self._answered("registration", attempt, "start a trainer for this API")
        self.env_id = registration.env_id
        log.info(
            "Registered as %s (id %d) with %s at step %d of %d",
            registration.wandb_name,
            registration.env_id,
            self.client.url,
            registration.starting_step,
            registration.num_steps,
        )
        self._on_joined(registration)
        return registration

    async def status(self) -> EnvStatus:
        """The API's figures for this environment, registered again first if the API has forgotten it."""
        while True:
            try:
                return await self._answered("its status", lambda: self.client.status(self._joined_id()))
            except ApiRefused as error:
                log.warning(
                    "%s does not know this environment any more (%s): registering again", self.client.url, error
                )
                await self.join()
                if self._last_evaluation is not None:
                    await self.post_evaluation(**self._last_evaluation)

    async def batch_limits(self) -> BatchLimits:
        """The trainer's."""
        return await self._answered("the batch size", self.client.batch_limits)

    async def wandb_info(self) -> tuple[str | None, str | None]:
        """(group, project) that the trainer named."""
        return await self._answered("the W&B project", self.client.wandb_info)

    async def post_groups(self, bodies: Sequence[dict[str, Any]]) -> None:
        """Hand over groups, whose env_id is filled in. Raises ApiRefused, or PeerError when the API stays away."""
        key = uuid.uuid4().hex  # of all tries together
        await self._persistently(
            lambda: self.client.post_groups([body | {"env_id": self.env_id} for body in bodies], key), "groups"
        )

    async def post_evaluation(self, policy_version: int, accuracy: float | None, metrics: Mapping[str, float]) -> None:
        """Report an evaluation; the last one is reported again to an API that was restarted."""
        self._last_evaluation = {"policy_version": policy_version, "accuracy": accuracy, "metrics": dict(metrics)}
        evaluation = self._last_evaluation
        try:
            await self._persistently(
                lambda: self.client.post_evaluation(evaluation | {"env_id": self.env_id}), "an evaluation"
            )
        except ApiRefused as error:
            log.warning(
                "The API refused an evaluation, which is reported again if this environment has to register again: %s",
                error,
            )

    async def leave(self) -> None:
        """Disconnect, if registered; an API that is gone needs no goodbye."""
        if self.env_id is None:
            return
        try:
            await self.client.disconnect_env(self.env_id)
            log.info("Disconnected from %s", self.client.url)
        except (ApiUnreachable, ApiRefused) as error:
            log.warning("Left without disconnecting: %s", error)
        self.env_id = None

    def _joined_id(self) -> int:
        if self.env_id is None:
            raise RuntimeError("this environment has not joined the API")
        return self.env_id

    async def _answered(self, what: str, call: Callable[[], Awaitable[T]], remedy: str = "start it again") -> T:
        """The reply to `call`, asked again while the API is away. Raises ApiRefused, or PeerError after the timeout."""

        async def attempt() -> T:
            try:
                return await call()
            except (ApiUnreachable, ValidationError) as error:
                raise NotYet(str(error)) from None

        return await wait_for_peer(what, self.client.url, attempt, timeout_s=self._timeout_s, remedy=remedy)

    async def _persistently(self, post: Callable[[], Awaitable[Any]], what: str) -> None:
        start, tries = time.monotonic(), 0
        while True:
            try:
                await post()
                return
            except ApiUnreachable as error:
                tries += 1
                waited = time.monotonic() - start
                if waited >= self._timeout_s:
                    raise PeerError(
                        f"could not post {what} to {self.client.url} within {self._timeout_s:g} s: {error}"
                    ) from error
                if tries == 1:
                    log.warning(
                        "Keeping %s until %s takes them, at most %.0f s: %s",
                        what,
                        self.client.url,
                        self._timeout_s,
                        error,
                    )
                pause = REPOST_PAUSE_S if error.retry_after_s is None else error.retry_after_s
            await asyncio.sleep(min(pause, self._timeout_s - waited))
