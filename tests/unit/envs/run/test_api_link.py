"""What an environment does with the batching API's answers: its token, a full queue, the format that it reads."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest

from atroposlib.clients.batching_api import ApiRefused, ApiUnreachable, AsyncBatchingApi
from atroposlib.envs.errors import PeerError
from atroposlib.envs.run import api_link
from atroposlib.envs.run.api_link import ApiLink
from atroposlib.wire.batching import EnvRegistration, PostedData
from atroposlib.wire.routes import ROOT, SCORED_DATA
from tests.unit.api.support import api_settings
from tests.unit.envs.fakes import Api, running_api

TOKEN = "correct-horse"
ANNOUNCEMENT = EnvRegistration(max_token_length=8, desired_name="env", weight=1.0, group_size=1)
RUN: dict[str, Any] = {
    "wandb_group": "",
    "wandb_project": "",
    "batch_size": 1,
    "max_token_len": 8,
    "checkpoint_dir": "",
    "save_checkpoint_interval": 0,
    "starting_step": 0,
    "num_steps": 9,
}

pytestmark = pytest.mark.timeout(60)


def group(mark: int) -> PostedData:
    return PostedData(tokens=[[mark, 2]], masks=[[-100, 2]], scores=[0.5])


def api_client(url: str, token: str | None = None) -> contextlib.aclosing[AsyncBatchingApi]:
    return contextlib.aclosing(AsyncBatchingApi(url, token))


async def ask(method: str, url: str, body: Any = None, **headers: str) -> tuple[str, bytes]:
    """Content type and body of a reply."""
    async with aiohttp.ClientSession() as session, session.request(method, url, json=body, headers=headers) as reply:
        assert reply.status == 200, await reply.text()
        return reply.content_type, await reply.read()


async def start_run(url: str, name: str | None = None, **headers: str) -> None:
    await ask("POST", f"{url}/register", RUN | {"run": name}, **headers)
    await ask("GET", f"{url}/batch", **headers)


async def metric(url: str, line: str) -> float:
    _, text = await ask("GET", f"{url}/metrics")
    return next((float(each.split()[-1]) for each in text.decode().splitlines() if each.startswith(line)), 0.0)


async def test_with_the_token_it_joins_and_posts_and_without_it_says_which_variable_to_set() -> None:
    authorized = {"Authorization": f"Bearer {TOKEN}"}
    async with running_api(api_settings(api_token=TOKEN)) as api:
        await start_run(api.url, **authorized)
        for wrong in (None, "wrong-horse"):
            async with api_client(api.url, wrong) as client:
                with pytest.raises(ApiRefused, match="set ATROPOS_API_TOKEN"):
                    await ApiLink(client, ANNOUNCEMENT, timeout_s=5).join()
        async with api_client(api.url, TOKEN) as client:
            link = ApiLink(client, ANNOUNCEMENT, timeout_s=5)
            await link.join()
            await link.post_groups([group(7)])
            assert (await link.status()).queue_size == 1


@contextlib.asynccontextmanager
async def full_queue(timeout_s: float) -> AsyncIterator[tuple[Api, ApiLink]]:
    """An API that takes one group and holds it, and an environment's link to it."""
    async with running_api(api_settings(max_queued_groups=1)) as api, api_client(api.url) as client:
        await start_run(api.url)
        link = ApiLink(client, ANNOUNCEMENT, timeout_s=timeout_s)
        await link.join()
        await link.post_groups([group(1)])
        yield api, link


@pytest.mark.parametrize(("after", "accuracies"), [("one", [0.5]), ("another", [])])
async def test_an_evaluation_is_told_again_to_an_api_that_forgot_it_in_the_same_run(
    after: str, accuracies: list[float]
) -> None:
    async with running_api() as api, api_client(api.url) as client:
        link = ApiLink(client, ANNOUNCEMENT, 10)
        await start_run(api.url, "one")
        await link.join()
        await link.post_evaluation(2, 0.5, {})
        await api.stop()
        await api.start()
        await start_run(api.url, after)
        await link.status()
        _, reply = await ask("GET", f"{api.url}/evaluations?policy_version=2")
        assert [each["accuracy"] for each in msgspec.json.decode(reply)["results"]] == accuracies


async def test_a_full_queue_is_posted_to_again_when_it_said_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_link, "REPOST_PAUSE_S", 0.01)  # without Retry-After it would ask a hundred times
    monkeypatch.setattr("atroposlib.api.http.messages.RETRY_AFTER_S", 1)
    async with full_queue(timeout_s=20) as (api, link):
        start = time.monotonic()
        waiting = asyncio.create_task(link.post_groups([group(2)]))
        await api.answers("/scored_data", 1)  # with 429
        await ask("GET", f"{api.url}/batch")
        await waiting
        assert time.monotonic() - start >= 1
        assert await metric(api.url, 'atropos_refused_total{status="429"}') == 1
        _, batch = await ask("GET", f"{api.url}/batch")
        assert [item["tokens"] for item in msgspec.json.decode(batch)["batch"]] == [[[2, 2]]]


async def test_a_queue_that_stays_full_ends_the_wait_at_its_deadline() -> None:
    async with full_queue(timeout_s=0.5) as (_api, link):
        start = time.monotonic()
        with pytest.raises(PeerError, match="1 groups wait, at most 1 are allowed"):
            await link.post_groups([group(2)])
        assert time.monotonic() - start < 2  # Retry-After says 2 s, the deadline comes first


async def test_groups_travel_as_messagepack_once_the_api_has_said_that_it_reads_it() -> None:
    packed = "application/msgpack"
    async with running_api() as api, api_client(api.url) as client:
        await start_run(api.url)
        await client.call(SCORED_DATA, group(1))  # it has not joined, so it cannot know
        link = ApiLink(client, ANNOUNCEMENT, timeout_s=5)
        await link.join()
        arrays: Any = [np.array([2, 2])], [np.array([-100, 2])], np.array([0.5])
        await link.post_groups([PostedData(*arrays)])
        await link.post_groups([group(3), group(4)])
        replies = [await ask("GET", f"{api.url}/batch", Accept=packed) for _ in range(4)]
    assert [kind for kind, _ in replies] == ["application/json", packed, packed, packed]
    batches = [msgspec.json.decode(replies[0][1])] + [msgspec.msgpack.decode(body) for _, body in replies[1:]]
    assert [batch["batch"][0]["tokens"][0][0] for batch in batches] == [1, 2, 3, 4]
    assert batches[1]["batch"][0]["scores"] == [0.5]
    assert batches[1]["batch"][0]["env_id"] == 0


async def test_an_id_outside_the_vocabulary_that_the_trainer_registered_is_refused_with_its_position() -> None:
    async with running_api() as api, api_client(api.url) as client:
        await ask("POST", f"{api.url}/register", RUN | {"vocab_size": 100})
        await ask("GET", f"{api.url}/batch")
        link = ApiLink(client, ANNOUNCEMENT, timeout_s=5)
        await link.join()
        await link.post_groups([group(99)])
        with pytest.raises(ApiRefused, match=r"tokens\[0\]\[0\]: 100 is not an id of the vocabulary of 100"):
            await link.post_groups([group(100)])


async def test_an_api_that_is_asked_too_often_is_asked_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atroposlib.api.http.admission.BURST_S", 0.0)
    async with running_api(api_settings(max_requests_per_second=0.5)) as api, api_client(api.url) as client:

        async def ask_too_often() -> None:
            for _ in range(5):
                await client.call(ROOT)

        with pytest.raises(ApiUnreachable) as refused:
            await ask_too_often()
        assert refused.value.after_s in (1, 2)
        link = ApiLink(client, ANNOUNCEMENT, timeout_s=20)
        assert (await link.batch_limits()).batch_size == -1  # it waits, and asks again
