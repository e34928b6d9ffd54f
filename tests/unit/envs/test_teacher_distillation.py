import asyncio
from pathlib import Path
from typing import Any

import pytest

from atroposlib.envs.base import APIServerConfig
from atroposlib.envs.commands.cli import TeacherTree, build, load_tree
from atroposlib.envs.commands.serve import serve
from atroposlib.envs.payloads import ScoredDataGroup
from atroposlib.envs.server_handling.dispatching.dispatch import RetryPolicy
from atroposlib.envs.server_handling.server_manager import ServerManager
from atroposlib.envs.teacher_distillation_env import TeacherDistillationConfig, TeacherDistillationEnv, TeacherServers
from atroposlib.testing.fake_inference_server import FakeInferenceServer
from atroposlib.testing.tiny_tokenizer import save_tiny_tokenizer
from tests.unit.envs.fakes import CountingEnv, Trainer, config, running_api, server_config


class TaughtEnv(CountingEnv, TeacherDistillationEnv):
    """The constructor of CountingEnv knows of no teacher."""

    name = "taught"
    env_config_cls = TeacherDistillationConfig


def taught(folder: Path, api_url: str = "", **fields: Any) -> TeacherDistillationConfig:
    plain = config(folder, api_url, max_batches_offpolicy=1).model_dump(exclude_unset=True)
    return TeacherDistillationConfig(**plain | {"teacher_enabled": True} | fields)


def teacher_config(server: FakeInferenceServer, folder: Path) -> APIServerConfig:
    name = str(folder / "tokenizer")
    return APIServerConfig(server_type="vllm", base_url=server.base_url, model_name="teacher", tokenizer_name=name)


def whole_group(**fields: Any) -> ScoredDataGroup:
    group = ScoredDataGroup(tokens=[[5, 6, 7]] * 4, masks=[[-100, 6, 7]] * 4, scores=[0.0, 1.0, 2.0, 3.0])
    return ScoredDataGroup(**{**group, **fields})  # type: ignore[typeddict-item]


async def asked(env: TeacherDistillationEnv, **fields: Any) -> ScoredDataGroup:
    async with env._env_run:
        group = await env._before_sending(whole_group(**fields))
    return group


async def test_teacher_given_by_flags_reaches_the_trainer(tmp_path: Path) -> None:
    async with running_api() as api, FakeInferenceServer() as student, FakeInferenceServer() as teacher:
        tokenizer = str(save_tiny_tokenizer(tmp_path / "tokenizer"))
        fields = {
            "tokenizer_name": tokenizer,
            "rollout_server_url": api.url,
            "teacher_enabled": "true",
            "teacher_top_k": "2",
        }
        env_flags = [
            f"--env.{name}={value}" for name, value in {**fields, "max_batches_offpolicy": 1, "total_steps": 1}.items()
        ]
        servers = {"openai": student, "teacher": teacher}
        server_flags = [
            f"--{name}.{key}={value}"
            for name, server in servers.items()
            for key, value in flags_of(server, tokenizer).items()
        ]
        env = build(TaughtEnv, load_tree(TaughtEnv, "serve", [*env_flags, *server_flags], "taught.py"))
        trainer = Trainer(api.url, batch_size=4, num_steps=1)
        await trainer.register()
        serving = asyncio.create_task(serve(env))
        (item,) = await asyncio.wait_for(trainer.fetch(), 30)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
    tokens = item["tokens"][0]
    assert item["distill_token_ids"][0] == [[], *([token, token + 1] for token in tokens[1:])]
    assert item["distill_logprobs"][0] == [[], *([-0.5, -1.0] for _ in tokens[1:])]
    assert teacher.requests[0][1]["prompt_logprobs"] == 2
    assert student.hits["/generate"] > 0


def flags_of(server: FakeInferenceServer, tokenizer: str) -> dict[str, str]:
    return {"base_url": server.base_url, "model_name": "m", "server_type": "vllm", "tokenizer_name": tokenizer}


@pytest.mark.parametrize(
    ("overrides", "top_k"),
    [(None, 0), ({"teacher_top_k": 3}, 3), ({"teacher_top_k": -1}, None), ({"skip_teacher_top_k": True}, None)],
)
async def test_group_says_how_much_the_teacher_is_asked(tmp_path: Path, overrides: Any, top_k: int | None) -> None:
    async with FakeInferenceServer() as server:
        settings = taught(tmp_path)
        env = TeacherlessEnv(settings, server_config(server), teacher_server_configs=[teacher_config(server, tmp_path)])
        group = await asked(env, group_overrides=overrides)
    assert {request["prompt_logprobs"] for _, request in server.requests} == (set() if top_k is None else {top_k})
    assert (group["distill_token_ids"] is None) == (group["distill_logprobs"] is None) == (top_k is None)
    if top_k == 0:
        assert group["distill_token_ids"] == [[[], [6], [7]]] * 4


class TeacherlessEnv(TeacherDistillationEnv):
    """No method of its own but what must be."""

    async def get_next_item(self) -> Any:
        return None

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        return None


async def test_group_goes_without_a_teacher_that_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ServerManager, "retry", RetryPolicy(attempts=1))
    async with FakeInferenceServer() as server:
        servers = [teacher_config(server, tmp_path)]
        env = TeacherlessEnv(taught(tmp_path), server_config(server), teacher_server_configs=servers)
        server.fail_next(1, status=400)
        group = await asked(env)
    assert group["distill_token_ids"] is None
    assert group["distill_logprobs"] is None
    assert "without the teacher, which failed on 1 of 4 sequences" in caplog.text


async def test_teacher_must_be_configured_and_share_the_vocabulary(tmp_path: Path) -> None:
    async with FakeInferenceServer() as server:
        settings = taught(tmp_path)
        with pytest.raises(ValueError, match=r"no teacher server configuration was provided.*--teacher.base_url"):
            TeacherlessEnv(settings, server_config(server))
        other = save_tiny_tokenizer(tmp_path / "other")
        content = (other / "tokenizer.json").read_text()
        (other / "tokenizer.json").write_text(content.replace("<|im_start|>", "<|other|>"))
        teacher = teacher_config(server, tmp_path).model_copy(update={"tokenizer_name": str(other)})
        with pytest.raises(ValueError, match=r"Cross-tokenizer distillation is not supported.*another vocabulary"):
            TeacherlessEnv(settings, server_config(server), teacher_server_configs=teacher)


class TaughtByDefault(TaughtEnv):
    @classmethod
    def teacher_config_init(cls) -> TeacherServers:
        return APIServerConfig(base_url="http://teacher/v1", model_name="big", server_type="vllm")


def teacher_of(env_cls: type[TeacherDistillationEnv], *arguments: str) -> Any:
    tree = load_tree(env_cls, "serve", list(arguments), "taught.py")
    assert isinstance(tree, TeacherTree)
    return tree.teacher


def test_flags_beat_yaml_beats_teacher_config_init(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("teacher: {model_name: bigger, timeout: 7}\n")
    (teacher,) = teacher_of(TaughtByDefault, "--config", str(file), "--teacher.timeout", "9")
    assert (teacher.base_url, teacher.model_name, teacher.timeout) == ("http://teacher/v1", "bigger", 9)
    file.write_text("teacher: [{base_url: http://a/v1}, {base_url: http://b/v1}]\n")
    assert [server.base_url for server in teacher_of(TaughtEnv, "--config", str(file))] == [
        "http://a/v1",
        "http://b/v1",
    ]
    assert teacher_of(TaughtEnv) is None


def test_environment_without_a_teacher_knows_no_such_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_tree(CountingEnv, "serve", ["--teacher.base_url", "http://a/v1"], "counting.py")
    assert "--teacher.base_url" in capsys.readouterr().err
