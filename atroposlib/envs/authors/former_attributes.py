"""Attributes that `BaseEnv` of the archived ancestor had on itself, read from the run.

A subclass may assign one: its own value then hides this one, as an attribute of its own would. The framework never
reads them.
"""

from collections.abc import Callable
from typing import Any, Protocol


class HasRun(Protocol):
    """An environment; `EnvRun` is in `env_run.py`, which `environment.py` imports beside this module."""

    _env_run: Any


class Former:
    """An attribute of an environment whose value is `read` from its run. Without `__set__`, it can be assigned."""

    def __init__(self, read: Callable[[Any], Any]) -> None:
        self._read = read

    def __get__(self, env: HasRun | None, owner: type) -> Any:
        return self if env is None else self._read(env._env_run)


class FormerAttributes:
    """Gives what API and trainer named, what is in flight, and durations (s) since metrics were last written."""

    env_id = Former(lambda run: run.link.env_id if run.link else None)
    wandb_group = Former(lambda run: run.wandb_info.group)
    wandb_project = Former(lambda run: run.wandb_info.project)

    running_items = Former(lambda run: run.running_items)  # by id: {"item", "worker", "start_time"}
    last_completed_item = Former(lambda run: run.last_completed_item)
    eval_runner = Former(lambda run: run.evaluation)
    last_loop_time = Former(lambda run: run.last_loop_time)  # seconds since the epoch; None before the first turn

    task_duration = Former(lambda run: run.durations.values("task_duration"))
    succeeded_task_duration = Former(lambda run: run.durations.values("succeeded_task_duration"))
    failed_task_duration = Former(lambda run: run.durations.values("failed_task_duration"))
    mainloop_timings = Former(lambda run: run.durations.values("mainloop_timings"))
    workers_added_list = Former(lambda run: run.durations.values("workers_added_per_attempt"))
    task_successful = Former(lambda run: [1] * run.counts["items_done"] + [0] * run.counts["items_failed"])

    n_groups_to_process = Former(lambda run: run.env.config.total_steps)
    group_size_to_process = Former(lambda run: run.env.config.group_size)
