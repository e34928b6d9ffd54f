"""Attributes that environments of 0.4.0 found on themselves hold what they held."""

import asyncio
import logging
import time
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.commands.serve import serve
from atroposlib.testing.fake_inference_server import FakeInferenceServer
from tests.unit.envs.fakes import CountingEnv, Trainer, config, running_api, served, server_config

LISTS = "task_duration succeeded_task_duration failed_task_duration mainloop_timings workers_added_list".split()


class LookingEnv(CountingEnv):
    """Looks at itself while an item is in flight, while it evaluates, and before its metrics are taken."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.seen: dict[str, Any] = {}

    async def collect_trajectories(self, item: Any) -> Any:
        (self.seen["running"],) = [each for each in self.running_items.values() if each["item"] == item]
        return await super().collect_trajectories(item)

    async def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        self.seen["evaluating"] = self.eval_runner is not None and not self.eval_runner.done()
        return await super().evaluate(*args, **kwargs)

    def perf_stats(self, metrics: Any) -> Any:
        self.seen |= {name: self.seen.get(name, []) + getattr(self, name) for name in LISTS}
        return super().perf_stats(metrics)


async def test_they_say_what_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with running_api() as api, FakeInferenceServer() as server:
        settings = config(tmp_path, api.url, steps_per_eval=1, use_wandb=True)
        env = LookingEnv(settings, server_config(server))
        assert (env.env_id, env.wandb_project, env.running_items, env.last_loop_time) == (None, None, {}, None)
        trainer = Trainer(api.url, batch_size=4, num_steps=2, project="")
        started = time.time()
        serving = asyncio.create_task(serve(env))
        await trainer.register()
        await trainer.train(1)
        assert env.env_id == 0
        await trainer.train(1)
        await asyncio.wait_for(serving, 30)
    seen: dict[str, Any] = env.seen
    assert started <= seen["running"]["start_time"] <= time.time()
    assert isinstance(seen["running"]["worker"], asyncio.Task)
    assert seen["evaluating"]
    assert len(seen["succeeded_task_duration"]) == len(seen["task_duration"]) >= 1
    assert all(seconds > 0 for seconds in seen["task_duration"] + seen["mainloop_timings"])
    assert seen["failed_task_duration"] == []
    assert sum(seen["workers_added_list"]) >= 1
    assert env.last_loop_time is not None
    assert started <= env.last_loop_time <= time.time()
    assert env.last_completed_item is not None
    assert env.running_items == {}
    assert sum(env.task_successful) == env._env_run.counts["items_done"] >= 2
    (end,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("Done: ")]
    assert f", {env._env_run.counts['items_done']} items done" in end
    assert "{" not in end
    assert (env.n_groups_to_process, env.group_size_to_process) == (settings.total_steps, settings.group_size)


async def test_the_run_that_the_trainer_named_is_on_them(tmp_path: Path) -> None:
    class Naming(CountingEnv):
        async def get_server_info(self) -> None:
            await super().get_server_info()
            self.named = (self.wandb_group, self.wandb_project)

    async with running_api() as api, FakeInferenceServer() as server:
        env = Naming(config(tmp_path, api.url, use_wandb=True), server_config(server))
        trainer = Trainer(api.url, batch_size=4, num_steps=1, project="sums")
        await served(env, trainer, 1, 30)
    assert env.named == ("g", "sums")


async def test_an_author_may_assign_them(tmp_path: Path) -> None:
    class Owning(CountingEnv):
        wandb_group = "mine"

    async with FakeInferenceServer() as server:
        env = Owning(config(tmp_path, "http://127.0.0.1:9"), server_config(server))
        env.task_duration = [1.0]
        assert (env.wandb_group, env.task_duration) == ("mine", [1.0])
        await env.server.close()
