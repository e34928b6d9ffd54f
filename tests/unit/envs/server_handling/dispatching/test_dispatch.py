"""The queue for slots, where a mistake would lose one for good."""

import asyncio
import contextlib

import pytest

from atroposlib.envs.server_handling.dispatching.dispatch import Dispatcher, RetryPolicy, gather_or_cancel
from atroposlib.envs.server_handling.server_config import APIServerConfig
from atroposlib.envs.server_handling.server_harness import ServerHarness


def server_with(slots: int) -> ServerHarness:
    return ServerHarness(APIServerConfig(num_max_requests_at_once=slots, health_check=False))


async def test_slots_are_handed_out_first_come_first_served() -> None:
    server = server_with(1)
    dispatcher = Dispatcher([server], "train")
    served: list[int] = []

    async def call(number: int) -> None:
        async with dispatcher.slot():
            served.append(number)
            await asyncio.sleep(0)

    await asyncio.gather(*(call(number) for number in range(20)))
    assert served == list(range(20))
    assert server.gates["train"].in_use == 0


async def test_a_call_cancelled_at_the_moment_it_is_served_gives_its_slot_back() -> None:
    server = server_with(1)
    dispatcher = Dispatcher([server], "train")
    gate = server.gates["train"]

    async def call() -> None:
        async with dispatcher.slot():
            pytest.fail("the call was cancelled before it could run")

    gate.take()
    waiting = asyncio.create_task(call())
    await asyncio.sleep(0)
    gate.give_back()  # grants the slot to the waiting call, which has not run yet
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting
    assert gate.in_use == 0


async def test_a_call_that_avoids_a_server_does_not_hold_up_those_behind_it() -> None:
    busy, free = server_with(1), server_with(2)
    dispatcher = Dispatcher([busy, free], "train")
    busy.gates["train"].take()

    async def call(avoid: ServerHarness | None) -> object:
        async with dispatcher.slot(avoid=avoid) as server:
            return server

    picky = asyncio.create_task(call(avoid=free))
    await asyncio.sleep(0)
    assert await asyncio.wait_for(call(avoid=None), 1) is free
    assert not picky.done()
    busy.gates["train"].give_back()
    assert await asyncio.wait_for(picky, 1) is busy


def test_pauses_double_up_to_the_cap_with_jitter_and_heed_the_server() -> None:
    policy = RetryPolicy(base_s=1.0, cap_s=4.0)
    for failed, longest_s in ((1, 1.0), (2, 2.0), (3, 4.0), (9, 4.0)):
        pauses = {policy.pause_s(failed) for _ in range(50)}
        assert len(pauses) > 1
        assert all(longest_s / 2 <= pause <= longest_s for pause in pauses)
    assert policy.pause_s(1, asked_s=7.0) == 7.0
    assert policy.pause_s(1, asked_s=1e6) == 60.0


async def test_the_first_failure_of_several_cancels_the_others() -> None:
    ended: list[str] = []

    async def long() -> None:
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    async def fail() -> None:
        raise LookupError("first")

    with pytest.raises(LookupError, match="first"):
        await gather_or_cancel([long(), fail(), long()])
    assert ended == ["cancelled", "cancelled"]
