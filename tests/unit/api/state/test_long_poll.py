"""Requests that wait for a batch: over real connections to an API on the test's own event loop."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi.testclient import TestClient
from starlette.requests import ClientDisconnect

from atroposlib.api.server import create_app
from atroposlib.api.service import RolloutService
from atroposlib.api.settings import RunApiConfig
from atroposlib.api.state.long_poll import LongPoll
from atroposlib.cli.run_api import Server
from tests.unit.api.support import api_settings, environment, group, registration

DEADLINE_S = 20.0


class Api:
    """A served API and its clients. The periodic look is off unless a test turns it on."""

    def __init__(self, service: RolloutService, server: Server, client: httpx.AsyncClient) -> None:
        self.service, self.server, self.client = service, server, client
        self.trainer = 0

    async def post(self, path: str, body: Any) -> Any:
        reply = await self.client.post(path, json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()

    async def register(self, **other: Any) -> None:
        self.trainer = (await self.post("/register", registration(8, **other)))["uuid"]

    def lease(self, wait_s: float, *holding: int) -> "asyncio.Task[httpx.Response]":
        """A request that is under way."""
        body = {"trainer": self.trainer, "holding": list(holding), "wait_s": wait_s}
        return asyncio.create_task(self.client.post("/batch/lease", json=body))

    async def waiting_lease(self, wait_s: float = 20.0, *holding: int) -> "asyncio.Task[httpx.Response]":
        """One that found no batch and waits."""
        before = len(self.service.long_poll._waits)
        lease = self.lease(wait_s, *holding)
        await until(lambda: len(self.service.long_poll._waits) > before)
        await self.post("/batch/ack", {"trainer": self.trainer, "leases": []})  # behind its first look
        assert not lease.done()
        return lease

    async def post_group(self, sequences: int = 4, **other: Any) -> None:
        await self.post("/scored_data", group(sequences, **other))


async def until(fact: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not fact():  # noqa: ASYNC110  no event signals it
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def served(settings: RunApiConfig | None = None) -> AsyncIterator[Api]:
    app = create_app(settings)
    service: RolloutService = app.state.service
    server = Server(uvicorn.Config(app, port=0, log_config=None, access_log=False), service.long_poll)
    serving = asyncio.create_task(server.serve())
    await until(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=DEADLINE_S, trust_env=False) as client:
        yield Api(service, server, client)
    server.should_exit = True
    await serving


def over_http(test: Callable[[Api], Awaitable[None]], settings: RunApiConfig | None = None) -> None:
    async def run() -> None:
        async with served(settings) as api:
            await test(api)

    asyncio.run(run())


@pytest.fixture(autouse=True)
def only_changes_wake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atroposlib.api.state.long_poll.LOOK_EVERY_S", DEADLINE_S)


def test_the_reply_comes_when_the_batch_is_complete() -> None:
    async def test(api: Api) -> None:
        await api.register()
        lease = await api.waiting_lease()
        await api.post_group()
        await asyncio.sleep(0.1)
        assert not lease.done()
        await api.post_group()
        complete = time.monotonic()
        reply = (await lease).json()
        assert time.monotonic() - complete < 1
        assert len(reply["batch"]) == 2
        assert reply["lease"] in api.service.state.leases

    over_http(test)


def test_without_a_batch_the_reply_comes_after_the_time_asked_for() -> None:
    async def test(api: Api) -> None:
        await api.register()
        for wait_s in (0.0, 0.3):
            start = time.monotonic()
            assert (await api.lease(wait_s)).json() == {"batch": None, "lease": None}
            assert wait_s <= time.monotonic() - start < wait_s + 2

    over_http(test)


@pytest.mark.parametrize(
    ("wait_s", "said"),
    [
        (-1, "Expected `float` >= 0.0"),
        (30.5, "Expected `float` <= 30.0"),
        ("soon", "Expected `float`, got `str`"),
        ("nan", "Expected `float` >= 0.0"),
        (None, "Expected `float`, got `null`"),
    ],
)
def test_a_wait_that_makes_no_sense_names_the_limit(client: TestClient, wait_s: Any, said: str) -> None:
    reply = client.post("/batch/lease", json={"trainer": 1, "wait_s": wait_s})
    assert reply.status_code == 422
    (detail,) = reply.json()["detail"]
    assert detail["loc"] == ["body", "wait_s"]
    assert said in detail["msg"]


def test_all_other_requests_are_answered_meanwhile() -> None:
    async def test(api: Api) -> None:
        await api.register()
        lease = await api.waiting_lease()
        assert (await api.client.get("/batch")).json() == {"batch": None}
        env_id = (await api.post("/register-env", environment()))["env_id"]
        await api.post("/status-env", {"env_id": env_id})
        await api.post("/heartbeat", {"trainer": api.trainer})
        await api.post("/trainer-step", {"step": 1, "policy_version": 1})
        assert (await api.client.get("/activity")).json()["asked_s"] < 5
        assert not lease.done()
        lease.cancel()

    over_http(test)


def test_a_client_that_goes_ends_the_wait_and_gets_no_batch() -> None:
    async def test(api: Api) -> None:
        await api.register()
        lease = await api.waiting_lease()
        lease.cancel()
        await until(lambda: not api.service.long_poll._waits)
        await api.post_group()
        await api.post_group()
        assert not api.service.state.leases
        assert len((await api.lease(0)).json()["batch"]) == 2
        assert api.service.counters.redelivered == 0

    over_http(test)


def test_groups_set_aside_are_not_told_to_a_client_that_is_gone() -> None:
    async def test(api: Api) -> None:
        await api.post_group(8)  # cannot be trained on: it has no log-probabilities
        await api.register(trainable_only=True)
        body = {"trainer": api.trainer, "ids": True, "wait_s": 20.0}
        lease = asyncio.create_task(api.client.post("/batch/lease", json=body))
        await until(lambda: api.service.state.rejected == 1)
        lease.cancel()
        await until(lambda: not api.service.long_poll._waits)
        told = (await api.post("/batch/lease", body | {"wait_s": 0}))["rejected"]
        assert len(told) == 1

    over_http(test)


def test_a_trainer_that_is_replaced_while_it_waits_is_told_so_at_once() -> None:
    async def test(api: Api) -> None:
        await api.register()
        lease = await api.waiting_lease()
        await api.register()
        reply = await lease
        assert (reply.status_code, "another has taken over" in reply.text) == (409, True)

    over_http(test)


def test_a_trainer_that_is_forgotten_while_it_waits_is_told_so_at_once() -> None:
    async def test(api: Api) -> None:
        await api.register()
        lease = await api.waiting_lease()
        assert (await api.client.post("/reset_data")).status_code == 200
        assert (await lease).json()["status"] == "error"

    over_http(test)


def test_of_one_trainer_the_newest_request_waits_alone() -> None:
    async def test(api: Api) -> None:
        await api.register()
        older = await api.waiting_lease()
        newer = api.lease(20)
        assert (await older).json()["batch"] is None
        await api.post_group(8)
        assert len((await newer).json()["batch"]) == 1
        assert api.service.counters.batches == 1

        older = await api.waiting_lease(20, *api.service.state.leases)
        assert (await api.lease(0, *api.service.state.leases)).json()["batch"] is None
        assert (await older).json()["batch"] is None

    over_http(test)


def test_a_stranger_does_not_end_the_trainers_wait() -> None:
    async def test(api: Api) -> None:
        await api.register()
        lease = await api.waiting_lease()
        reply = await api.client.post("/batch/lease", json={"trainer": 1, "wait_s": 20})
        assert reply.status_code == 409
        await api.post_group(8)
        assert (await lease).json()["batch"]

    over_http(test)


def test_what_only_time_makes_possible_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The minimum of an environment without groups keeps the batch back until the environment counts as silent."""
    monkeypatch.setattr("atroposlib.api.state.long_poll.LOOK_EVERY_S", 0.05)

    async def test(api: Api) -> None:
        await api.register()
        await api.lease(0)
        await api.post("/register-env", environment(min_batch_allocation=0.5))
        await api.post_group(8)
        lease = await api.waiting_lease()
        assert len((await lease).json()["batch"]) == 1

    over_http(test, api_settings(env_timeout=0.5))


def test_the_end_of_the_api_ends_the_wait() -> None:
    async def test(api: Api) -> None:
        await api.register()
        lease = await api.waiting_lease()
        start = time.monotonic()
        api.server.should_exit = True
        assert (await lease).json() == {"batch": None, "lease": None}
        await until(lambda: not api.server.server_state.tasks)
        assert time.monotonic() - start < 3

    over_http(test)


# --- without HTTP ---------------------------------------------------------------------------------------------------


async def stays() -> Any:
    await asyncio.Event().wait()


def test_a_look_is_never_interrupted() -> None:
    """A lease that is half made when the client goes is made, and is then a reply that was lost."""

    async def run() -> None:
        gone, looking, may_end = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def look() -> str:
            looking.set()
            await may_end.wait()
            return "batch"

        async def receive() -> Any:
            await gone.wait()
            return {"type": "http.disconnect"}

        answer = asyncio.create_task(LongPoll().first(look, 20, receive))
        await looking.wait()
        gone.set()
        await asyncio.sleep(0.05)
        may_end.set()
        assert await answer == "batch"

    asyncio.run(run())


def test_a_client_that_is_gone_is_not_looked_for_again() -> None:
    async def run() -> None:
        looks = 0

        async def look() -> None:
            nonlocal looks
            looks += 1
            await asyncio.sleep(0.05)

        async def receive() -> Any:
            return {"type": "http.disconnect"}

        with pytest.raises(ClientDisconnect):
            await LongPoll().first(look, 20, receive)
        assert looks == 1

    asyncio.run(run())


@pytest.mark.parametrize(
    ("changes", "looks"),
    [({1: 1}, 3), ({1: 1000, 2: 1000, 3: 1000}, 5)],  # the first, one after each change, and one at the end
)
def test_a_change_during_a_look_is_not_missed_and_many_changes_cause_one_look(
    changes: dict[int, int], looks: int
) -> None:
    async def run() -> None:
        poll, looked = LongPoll(), 0

        async def look() -> None:
            nonlocal looked
            looked += 1
            for _ in range(changes.get(looked, 0)):
                poll.wake()

        await poll.first(look, 0.3, stays)
        assert looked == looks

    asyncio.run(run())


def test_nobody_waits_once_the_api_ends() -> None:
    async def run() -> None:
        poll, looks = LongPoll(), 0
        poll.close()

        async def look() -> None:
            nonlocal looks
            looks += 1

        async with asyncio.timeout(5):
            await poll.first(look, 20, stays)
        assert looks == 1

    asyncio.run(run())
