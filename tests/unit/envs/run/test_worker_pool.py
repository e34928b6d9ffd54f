"""What becomes of the tasks that sample groups."""

import asyncio
import gc

import pytest

from atroposlib.envs.authors.author_errors import ErrorBudget
from atroposlib.envs.errors import EnvError
from atroposlib.envs.payloads import Item
from atroposlib.envs.run.worker_pool import WorkerPool


async def test_every_error_of_a_worker_is_taken_though_the_first_ends_the_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fail(item: Item) -> None:
        raise EnvError(f"no {item}")

    pool = WorkerPool(fail, set(), lambda is_done, seconds: None, ErrorBudget(0))
    for item in ("first", "second"):
        pool.start(item)
    while pool.in_flight:
        await pool.wait(1)
    await asyncio.sleep(0)
    gc.collect()
    assert str(pool.fatal) == "no first"
    assert "never retrieved" not in caplog.text
