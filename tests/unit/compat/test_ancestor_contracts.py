"""What programs of the archived ancestor rely on, and a move inside this project once broke."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.base import APIServerConfig
from atroposlib.envs.commands.cli import TeacherTree, load_tree
from atroposlib.envs.payloads import ScoredDataGroup
from atroposlib.testing.fake_inference_server import FakeInferenceServer
from tests.unit.envs.test_teacher_distillation import TaughtEnv, taught, teacher_config, whole_group

ROOT = Path(__file__).parents[3]


@pytest.mark.services
@pytest.mark.parametrize("theirs_first", [True, False])
def test_environments_of_another_checkout_are_in_the_same_package(tmp_path: Path, theirs_first: bool) -> None:
    theirs = tmp_path / "environments"
    (theirs / "eval_environments").mkdir(parents=True)
    (theirs / "eval_environments" / "eval_helpers.py").write_text("NAME = 'theirs'\n")
    (theirs / "template_server.py").write_text("NAME = 'theirs'\n")
    program = (
        "import environments.eval_environments.eval_helpers as helpers, environments.gsm8k_server as gsm8k\n"
        "import environments.template_server as both, json\n"
        "print(json.dumps([helpers.NAME, gsm8k.GSM8kEnv.name, hasattr(both, 'NAME')]))"
    )
    path = [str(tmp_path), str(ROOT)] if theirs_first else [str(ROOT), str(tmp_path)]
    ran = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        cwd=tmp_path.parent,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == ["theirs", "gsm8k", theirs_first]


def item(env_id: int, sequences: int) -> dict[str, Any]:
    return {"env_id": env_id, "tokens": [[1]] * sequences}


def test_the_functions_of_the_queue_have_their_old_address() -> None:
    utils = importlib.import_module("atroposlib.api.utils")
    queue = [item(0, 4), item(0, 2), item(1, 4), item(0, 2)]
    assert utils.find_groups_summing_to_target(queue, 8) == [0, 1, 3]
    batch, rest = utils.grab_exact_from_heterogeneous_queue(queue, 8)
    assert batch is not None
    assert sum(len(each["tokens"]) for each in batch) == 8
    assert len(batch) + len(rest) == 4
    assert utils.grab_exact_from_heterogeneous_queue(queue[:1], 8) == (None, queue[:1])
    minimum = [{"registered_id": 1, "connected": True, "min_batch_allocation": 0.5}]
    batch, _ = utils.grab_batch_with_minimum_allocations(queue, 8, minimum)
    assert batch is not None
    assert sum(len(each["tokens"]) for each in batch if each["env_id"] == 1) == 4


async def test_an_override_of_the_teachers_hook_is_called_for_every_group(tmp_path: Path) -> None:
    class Hooked(TaughtEnv):
        async def _attach_teacher_distillation(self, group: ScoredDataGroup) -> ScoredDataGroup:
            group["distill_token_ids"] = [[[9]]]
            return group

    async with FakeInferenceServer() as student, FakeInferenceServer() as teacher:
        settings = taught(tmp_path)
        Hooked.teacher_servers = teacher_config(teacher, tmp_path)
        env = Hooked(settings, [teacher_config(student, tmp_path)])
        async with env._env_run:
            group = await env._before_sending(whole_group())
    assert group["distill_token_ids"] == [[[9]]]
    assert not teacher.requests


def test_an_override_of_the_teachers_resolution_is_called_with_yaml_and_flags(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Resolving(TaughtEnv):
        @classmethod
        def _resolve_teacher_server_configs(cls, default: Any, yaml_config: Any, cli_passed_flags: Any) -> Any:
            seen.append((default, yaml_config["teacher"], cli_passed_flags))
            return APIServerConfig(base_url="http://mine/v1", model_name="mine")

    (tmp_path / "c.yaml").write_text("teacher: {model_name: of-yaml}\n")
    arguments = ["--teacher.base_url", "http://flag/v1", "--config", str(tmp_path / "c.yaml"), "--teacher.timeout=9"]
    tree = load_tree(Resolving, "serve", arguments, "env.py")
    assert isinstance(tree, TeacherTree)
    (used,) = tree.teacher
    assert used.base_url == "http://mine/v1"
    assert seen == [(None, {"model_name": "of-yaml"}, {"teacher.base_url": "http://flag/v1", "teacher.timeout": "9"})]


def test_the_teachers_own_resolution_merges_as_it_did() -> None:
    default = APIServerConfig(model_name="m", base_url="http://teacher/v1", server_type="vllm")
    found: Any = TaughtEnv._resolve_teacher_server_configs(
        default, {"teacher": {"tokenizer_name": "t"}}, {"teacher.base_url": "http://override/v1"}
    )
    assert (found.model_name, found.base_url, found.tokenizer_name) == ("m", "http://override/v1", "t")
    assert TaughtEnv._resolve_teacher_server_configs(None, {}, {}) is None


def test_the_teachers_module_has_its_server_manager() -> None:
    module = importlib.import_module("atroposlib.envs.teacher_distillation_env")
    assert (
        module.ServerManager is importlib.import_module("atroposlib.envs.server_handling.server_manager").ServerManager
    )


def test_one_server_in_a_list_of_yaml_takes_flags(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(
        "openai:\n  - {model_name: m, base_url: 'http://yaml/v1', num_requests_for_eval: 5}\n"
    )
    arguments = ["--config", str(tmp_path / "c.yaml"), "--openai.timeout", "30"]
    tree = load_tree(TaughtEnv, "serve", arguments, "env.py")
    (server,) = tree.openai
    assert (server.base_url, server.timeout, server.num_requests_for_eval) == ("http://yaml/v1", 30, 5)
