"""`--compat`, and the values that 0.4.0 accepted, with and without it."""

import json
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.authors.author_errors import ErrorBudget
from atroposlib.envs.base import BaseEnvConfig
from atroposlib.envs.commands import compat_mode
from atroposlib.envs.commands.process import process
from atroposlib.envs.errors import ProcessError
from atroposlib.testing.fake_inference_server import FakeInferenceServer
from tests.unit.envs.commands.test_env_cli import load, refused
from tests.unit.envs.fakes import CountingEnv, config, server_config

OLD_FILE = "env: {grup_size: 2, base_url: http://x/v1, group_size: 3}\nopenai: [{bas_url: x}]\nenf: {}\n"


@pytest.mark.parametrize(
    ("flags", "in_file"), [(["--compat"], ""), (["--compat", "true"], ""), ([], "compat: true\n"), (["--compat=1"], "")]
)
def test_unknown_yaml_keys_are_warnings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, flags: list[str], in_file: str
) -> None:
    (tmp_path / "c.yaml").write_text(OLD_FILE + in_file)
    tree = load("--config", str(tmp_path / "c.yaml"), *flags)
    assert tree.compat
    assert tree.env.group_size == 3
    assert sorted(record.getMessage() for record in caplog.records) == [
        f"Ignoring the unknown key '{key}' (compat mode)" for key in ("enf", "env.base_url", "env.grup_size")
    ] + ["Ignoring the unknown key 'openai.bas_url' (compat mode)"]


@pytest.mark.parametrize("flags", [[], ["--compat", "false"], ["--no-compat"]])
def test_without_it_they_are_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str]) -> None:
    (tmp_path / "c.yaml").write_text(OLD_FILE + ("compat: true\n" if flags else ""))
    assert "unknown key" in refused(capsys, "--config", str(tmp_path / "c.yaml"), *flags)


def test_it_lifts_the_limits_of_failures_unless_they_are_given() -> None:
    env = load("--compat").env
    assert (env.max_failed_items, env.max_fruitless_items) == (100, 0)
    assert load("--compat", "--env.max_failed_items", "5").env.max_failed_items == 5
    assert (load().env.max_failed_items, load().env.max_fruitless_items) == (32, 100)
    assert env.group_size == 6  # of config_init


def test_a_budget_of_a_hundred_is_never_spent() -> None:
    budget = ErrorBudget(compat_mode.DEFAULTS["max_failed_items"])
    for number in range(300):
        budget.note_failure(ValueError(), str(number))


def test_minus_one_is_no_limit_wherever_it_was() -> None:
    fields = "total_steps steps_per_eval min_items_sent_before_logging rollout_timeout worker_timeout max_num_workers"
    fields += " num_rollouts_per_group_for_logging inference_weight batch_size"
    unlimited: dict[str, Any] = dict.fromkeys(fields.split(), -1)
    settings = BaseEnvConfig(**unlimited)
    assert {name: getattr(settings, name) for name in unlimited} == unlimited
    assert settings.rollout_limit_s <= 0
    assert load("--env.total_steps", "-1", "--env.steps_per_eval=-1").env.total_steps == -1


class SeldomEnv(CountingEnv):
    """The first `fruitless` items give no group; the others give one with the required keys alone."""

    fruitless = 0

    async def collect_trajectories(self, item: Any) -> Any:
        type(self).fruitless -= 1
        group: Any
        group, more = await super().collect_trajectories(item)
        return {key: group[key] for key in ("tokens", "masks", "scores")} if self.fruitless < 0 else None, more


async def test_process_ends_after_as_many_items_without_a_group_as_are_allowed(tmp_path: Path) -> None:
    async with FakeInferenceServer() as server:

        def env(limit: int, fruitless: int) -> SeldomEnv:
            SeldomEnv.fruitless = fruitless
            path = str(tmp_path / f"{limit}_{fruitless}.jsonl")
            settings = config(tmp_path, "", total_steps=1, max_fruitless_items=limit, data_path_to_save_groups=path)
            return SeldomEnv(settings, server_config(server))

        with pytest.raises(ProcessError, match=r"^2 items in a row gave no group \(limit --env.max_fruitless_items\)"):
            await process(env(limit=2, fruitless=2))
        await process(env(limit=3, fruitless=2))
        await process(env(limit=0, fruitless=150))
    row = json.loads((tmp_path / "0_150.jsonl").read_text())
    # what ScoredDataGroup of 0.4.0 held: its readers index every key
    keys = "tokens masks scores advantages ref_logprobs messages generation_params inference_logprobs group_overrides"
    assert row.keys() >= {*keys.split(), "overrides", "images", "distill_token_ids", "distill_logprobs"}
    assert (row["overrides"], row["distill_logprobs"]) == (None, None)
    assert len(row["tokens"]) == len(row["scores"]) > 1
