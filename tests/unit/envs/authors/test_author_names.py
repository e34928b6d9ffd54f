"""Names that an author may use are theirs: BaseEnv adds none to the ancestor's, and touches none but those."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field

from atroposlib.envs.base import BaseEnv, BaseEnvConfig
from atroposlib.envs.commands import cli
from atroposlib.envs.commands.process import process
from atroposlib.envs.question_env import QuestionEnv
from atroposlib.testing.fake_inference_server import FakeInferenceServer
from tests.unit.envs.fakes import CountingEnv, Trainer, config, running_api, served, server_config

pytestmark = pytest.mark.timeout(60)

# What environments of the archived ancestor override, call or read on themselves (its v0.4.0).
ANCESTORS = """
name env_config_cls server_cls config_init collect_trajectory collect_trajectories postprocess_histories get_next_item
evaluate load_checkpoint save_checkpoint setup setup_wandb register_env get_server_info perf_stats create_rollout_table
add_rollouts_for_wandb wandb_log handle_send_to_api handle_env cleanup get_status env_step_checks add_train_workers
env_manager process_manager cli evaluate_log derived_batch_size
items_sent_this_step eval_workers config server workers backlog rollouts_for_wandb curr_step max_token_len tokenizer
completion_lengths max_num_workers wandb_prepend checkpoint_dir checkpoint_interval jsonl_writer status_dict
process_mode
env_id wandb_group wandb_project running_items last_completed_item eval_runner last_loop_time task_duration
succeeded_task_duration failed_task_duration mainloop_timings workers_added_list task_successful n_groups_to_process
group_size_to_process
""".split()
# What BaseEnv had besides, and names that its run has.
FORMERLY_PUBLIC = """
link policy_version total_steps needs registered_name counts durations eval_results sinks wandb_is_open before_sending
groups_of note_unscored display_name announcement note_registration close start_groups run pool schedule env status
handle take open_wandb write_metrics read_batch_limits release env_run stats metrics metrics_path scores taken reasoning
evaluation_interval client rejected unscored
""".split()


async def build(env_cls: type[BaseEnv], folder: Path, server: FakeInferenceServer, url: str = "", **fields: Any) -> Any:
    settings = config(folder, url or "http://127.0.0.1:9", **fields)
    return env_cls(settings, server_config(server))


async def test_base_env_has_the_ancestors_public_names_alone(tmp_path: Path) -> None:
    async with FakeInferenceServer() as server:
        env = await build(CountingEnv, tmp_path, server)
        own = {"taken", "evaluated", "samples"}  # of CountingEnv
        public = {name for name in dir(env) if not name.startswith("_")} - own
        await env.server.close()
    assert public == set(ANCESTORS)
    private = {name for name in dir(BaseEnv) if name.startswith("_") and not name.startswith("__")} | vars(env).keys()
    assert {name for name in private if name.startswith("_")} == {
        "_abc_impl",
        "_awaits_teacher",
        "_before_sending",
        "_check_installed",
        "_decided",
        "_env_run",
        "_evaluate_samples",
        "_expect_teacher",
        "_further_servers",
        "_keep_answers",
        "_leave_out_long",
        "_numbered_item",
        "_prompt_of",
        "_reference_of",
        "_release",
        "_resolved_servers",
    }


def as_data(name: str) -> Any:
    """A class attribute of the author's."""
    return f"the author's {name}"


def as_property(name: str) -> Any:
    """A property that cannot be set."""
    return property(lambda self: as_data(name))


def as_method(name: str) -> Any:
    """A plain method, whose call would fail: nobody is to call it."""

    def mine(self: Any, needed: int) -> None:
        raise AssertionError(f"{name} is the author's, and was called")

    return mine


def as_coroutine(name: str) -> Any:
    """The same, to be awaited."""

    async def mine(self: Any, needed: int) -> None:
        raise AssertionError(f"{name} is the author's, and was called")

    return mine


NAMED_CONFIG: Any = type(
    "NamedConfig",
    (BaseEnvConfig,),
    {
        "__annotations__": dict.fromkeys(set(FORMERLY_PUBLIC) - {"total_steps", "metrics_path"}, str),
        **{name: Field(default=as_data(name)) for name in set(FORMERLY_PUBLIC) - {"total_steps", "metrics_path"}},
    },
)

HOSTILE = {
    make.__name__: type("HostileEnv", (CountingEnv,), {name: make(name) for name in FORMERLY_PUBLIC if name != "taken"})
    for make in (as_data, as_property, as_method, as_coroutine)
}


class InstanceEnv(CountingEnv):
    """Sets every name on itself, once everything else is built."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        for name in set(FORMERLY_PUBLIC) - {"taken"}:
            setattr(self, name, as_data(name))


class FieldEnv(CountingEnv):
    """Has every name in its configuration."""

    env_config_cls = NAMED_CONFIG


EVERY_WAY = pytest.mark.parametrize(
    "env_cls", [*HOSTILE.values(), InstanceEnv, FieldEnv], ids=[*HOSTILE, "set", "field"]
)


def hostile_config(env_cls: type[BaseEnv], folder: Path, url: str, **fields: Any) -> BaseEnvConfig:
    return env_cls.env_config_cls(**config(folder, url, **fields).model_dump(exclude_unset=True))


@EVERY_WAY
async def test_every_name_of_the_authors_runs_through_serve(tmp_path: Path, env_cls: type[CountingEnv]) -> None:
    async with running_api() as api, FakeInferenceServer() as server:
        files = {name: str(tmp_path / f"{name}.jsonl") for name in ("data_path_to_save_groups", "metrics_path")}
        env = env_cls(hostile_config(env_cls, tmp_path, api.url, eval_at_start=True, **files), server_config(server))
        trainer = await served(env, Trainer(api.url, batch_size=4, num_steps=2), 2)
    assert len(trainer.batches) == 2
    assert trainer.accuracies[2] == 0.5
    assert (tmp_path / "metrics_path.jsonl").read_text()
    if env_cls not in (FieldEnv, HOSTILE["as_method"], HOSTILE["as_coroutine"]):
        assert {getattr(env, name) for name in FORMERLY_PUBLIC if name != "taken"} == {
            as_data(name) for name in FORMERLY_PUBLIC if name != "taken"
        }


@EVERY_WAY
async def test_every_name_of_the_authors_runs_through_process(tmp_path: Path, env_cls: type[CountingEnv]) -> None:
    async with FakeInferenceServer() as server:
        path = tmp_path / "groups.jsonl"
        settings = hostile_config(env_cls, tmp_path, "", total_steps=2, data_path_to_save_groups=str(path))
        await asyncio.wait_for(process(env_cls(settings, server_config(server))), 20)
    assert len(path.read_text().splitlines()) == 2


@EVERY_WAY
async def test_every_name_of_the_authors_runs_through_evaluate(tmp_path: Path, env_cls: type[CountingEnv]) -> None:
    async with FakeInferenceServer() as server:
        settings = hostile_config(env_cls, tmp_path, "", data_dir_to_save_evals=str(tmp_path / "evals"))
        tree = cli.EnvTree(env=settings, openai=server_config(server))
        assert await asyncio.wait_for(cli.run(env_cls, "evaluate", tree), 20) == 0
    assert (tmp_path / "evals/evaluate_config.yaml").is_file()


@pytest.mark.parametrize(
    "make", [lambda calls: calls.append, lambda calls: asyncio_append(calls)], ids=["sync", "async"]
)
async def test_close_of_a_question_env_is_called_once_whether_it_is_async_or_not(
    tmp_path: Path, make: Callable[[list[str]], Any]
) -> None:
    calls: list[str] = []
    close = make(calls)

    class ClosingEnv(QuestionEnv):
        async def training_item(self, number: int) -> str:
            return str(number)

        def prompt(self, item: str) -> list[dict[str, Any]]:
            return [{"role": "user", "content": item}]

        async def score(self, item: str, answer: str) -> float:
            return float(item)

        def close(self) -> Any:
            return close("closed")

    path = tmp_path / "groups.jsonl"
    fields = {"total_steps": 1, "data_path_to_save_groups": str(path), "ensure_scores_are_not_same": False}
    async with FakeInferenceServer() as server:
        settings = ClosingEnv.env_config_cls(**config(tmp_path, "", **fields).model_dump(exclude_unset=True))
        await process(ClosingEnv(settings, server_config(server)))  # type: ignore[arg-type]
    assert calls == ["closed"]
    assert len(json.loads(path.read_text())["scores"]) == 4


def asyncio_append(calls: list[str]) -> Callable[[str], Any]:
    async def append(call: str) -> None:
        calls.append(call)

    return append
