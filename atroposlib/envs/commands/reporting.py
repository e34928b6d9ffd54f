"""Tells the API every few seconds what this environment server does, from its start on: its heartbeat.

    StartUp, while it waits for the name of the model it is built for ──▶ EnvRun ──▶ registered, an ApiLink

The API shows the reports to clients that ask why no batch comes (atroposlib/clients/activity.py). A failed report is
ignored: the environment's other requests report what is wrong.
"""

import asyncio
import contextlib
import secrets
import time
from dataclasses import dataclass, field
from typing import Self

from atroposlib.clients.batching_api import ApiRefused, ApiUnreachable, AsyncBatchingApi
from atroposlib.envs.run.api_link import ApiLink
from atroposlib.envs.run.env_run import EnvRun
from atroposlib.envs.run.environment import Environment
from atroposlib.envs.run.outcomes import Outcomes
from atroposlib.wire import routes
from atroposlib.wire.batching import EnvReport, Heartbeat

INTERVAL_S = 5.0
DEADLINE_S = 2.0
TEXT = 300  # characters, as the record allows
REASONS = 16
OWN_SET_UP = "its own setup"


@dataclass
class StartUp:
    """An environment server that is not built yet."""

    display_name: str
    waits_for: str = OWN_SET_UP
    in_flight: int = 0
    outcomes: Outcomes = field(default_factory=Outcomes)


class Reporting:
    """The heartbeats of `run`, inside `async with`. What it waits for and how many groups it samples come from
    `run.waits_for` and `run.in_flight`.
    """

    def __init__(self, client: AsyncBatchingApi, run: EnvRun[Environment] | StartUp) -> None:
        self._client = client
        self._run = run
        self._link: ApiLink | None = None
        self._process = secrets.token_hex(8)
        self._waits_for, self._since = "", 0.0
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._send_forever(), name="reports")
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop()

    def follow(self, run: EnvRun[Environment], link: ApiLink) -> None:
        """Report on `run` from now on, as the environment that `link` registers."""
        self._run, self._link = run, link

    async def stop(self) -> None:
        """Send no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def send(self) -> None:
        """One report, within seconds."""
        with contextlib.suppress(ApiUnreachable, ApiRefused, TimeoutError):
            async with asyncio.timeout(DEADLINE_S):
                env_id = None if self._link is None else self._link.env_id
                heartbeat = Heartbeat(env_id=env_id, report=self.report())
                await self._client.call(routes.HEARTBEAT, heartbeat)

    def report(self) -> EnvReport:
        """Describe what the environment does now."""
        run, now = self._run, time.monotonic()
        waits_for = (_without_server(run) if isinstance(run, EnvRun) else "") or run.waits_for
        kind = waits_for.partition(" (")[0]  # what is in brackets may change from one moment to the next
        if kind != self._waits_for:
            self._waits_for, self._since = kind, now
        outcomes = run.outcomes
        return EnvReport(
            name=run.display_name[:TEXT],
            process=self._process,
            posted=outcomes.posted,
            dropped=dict(outcomes.dropped.most_common(REASONS)),
            thrown_away=outcomes.thrown_away,
            failed=dict(outcomes.failed.most_common(REASONS)),
            last_drop=outcomes.last_drop[:TEXT],
            in_flight=run.in_flight,
            waits_for=waits_for[:TEXT],
            waited_s=now - self._since if waits_for else 0.0,
        )

    async def _send_forever(self) -> None:
        while True:
            await self.send()
            await asyncio.sleep(INTERVAL_S)


def _without_server(run: EnvRun[Environment]) -> str:
    """The inference servers, when groups are being sampled and none of them is live."""
    servers = run.env.server.servers
    if not run.in_flight or any(server.health.live for server in servers):
        return ""
    return "; ".join(f"the inference server at {server.name} ({server.health.problem})" for server in servers)
