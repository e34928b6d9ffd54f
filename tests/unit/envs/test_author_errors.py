import asyncio
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.author_errors import ErrorBudget, TooManyFailures, origin
from atroposlib.envs.process import process
from atroposlib.envs.server_handling.errors import NoLiveServerError
from atroposlib.testing.fake_inference_server import FakeInferenceServer
from tests.unit.envs.fakes import CountingEnv, Trainer, config, running_api, server_config


def test_origin_is_the_authors_line_not_the_librarys() -> None:
    from atroposlib.grading.arithmetic import compute

    try:
        compute("1 / 0")  # raised inside the library, called here
    except ValueError as error:
        said = origin(error)
    assert (
        said.startswith("ExpressionError: division by zero at ")
        and f"{Path(__file__).name}:" in said
        and said.endswith("in " + origin_name())
    )


def origin_name() -> str:
    return test_origin_is_the_authors_line_not_the_librarys.__name__


def test_budget_counts_the_last_hundred_items_and_forgives_servers() -> None:
    budget = ErrorBudget(allowed=2)
    for _ in range(3):
        budget.note_failure(ValueError("bad"), "a")
        for _ in range(60):
            budget.note_success()
        budget.note_failure(NoLiveServerError("away"), "a")
    budget.note_failure(ValueError("bad"), "b")
    with pytest.raises(TooManyFailures, match="3 of the last 100 items.*max_failed_items.*c: ValueError: worse"):
        budget.note_failure(ValueError("worse"), "c")


class FailingEnv(CountingEnv):
    async def get_next_item(self) -> Any:
        item = await super().get_next_item()
        if item % 2:
            raise KeyError(f"no row {item}")
        return item

    async def collect_trajectory(self, item: Any) -> Any:
        raise ZeroDivisionError("not my day")


async def test_environment_that_keeps_failing_ends_and_names_item_and_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with running_api() as api, FakeInferenceServer() as server:
        env = FailingEnv(config(tmp_path, api.url, max_failed_items=1), server_config(server))
        trainer = Trainer(api.url)
        await trainer.register()
        with pytest.raises(
            TooManyFailures, match=r"[23] of the last [23] items .*test_author_errors.py:\d+ in (get_next_item|collect_trajectory)"
        ):
            await asyncio.wait_for(env.env_manager(), 60)
    assert "no row 1" in caplog.text and env.counts["items_failed"] >= 2


async def test_process_ends_likewise(tmp_path: Path) -> None:
    async with FakeInferenceServer() as server:
        groups = str(tmp_path / "groups.jsonl")
        env = FailingEnv(config(tmp_path, "", max_failed_items=0, data_path_to_save_groups=groups), server_config(server))
        env.taken = 1
        with pytest.raises(TooManyFailures, match="2: ZeroDivisionError: not my day at"):
            await process(env)
