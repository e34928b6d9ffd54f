import asyncio
import copy
import functools
import json
import math
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from atroposlib.clients.activity import TEACHER_FAILED
from atroposlib.envs.authors.author_errors import AuthorError, MalformedGroup
from atroposlib.envs.base import APIServerConfig, BaseEnvConfig
from atroposlib.envs.commands.cli import TeacherTree, build, load_tree, with_teacher_if_given
from atroposlib.envs.commands.serve import serve
from atroposlib.envs.errors import OtherTokenizer, WrongSetting
from atroposlib.envs.failures import GroupLost
from atroposlib.envs.payloads import ScoredDataGroup
from atroposlib.envs.server_handling.dispatching.dispatch import RetryPolicy
from atroposlib.envs.server_handling.server_manager import ServerManager
from atroposlib.envs.teacher_distillation_env import TeacherDistillationConfig, TeacherDistillationEnv, TeacherServers
from atroposlib.groups import check
from atroposlib.testing.fake_inference_server import FakeInferenceServer
from atroposlib.testing.tiny_tokenizer import save_tiny_tokenizer
from atroposlib.wire.batching import GroupRequirements
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


@pytest.mark.parametrize("distilling", [False, True], ids=["another trainer", "one that distils"])
async def test_teacher_given_by_flags_reaches_the_trainer(distilling: bool, tmp_path: Path) -> None:
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
        if distilling:
            trainer.registration |= {"trainable_only": True, "logprobs_optional": True, "teacher_top_k": 2}
        await trainer.register()
        serving = asyncio.create_task(serve(env))
        (item,) = await asyncio.wait_for(trainer.fetch(), 30)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
    tokens, masks = item["tokens"][0], item["masks"][0]
    asked = [place > 0 and (mask != -100 or not distilling) for place, mask in enumerate(masks)]
    named = [[token, token + 1] if said else [] for token, said in zip(tokens, asked, strict=True)]
    assert item["distill_token_ids"][0] == named
    assert item["distill_logprobs"][0] == [[-0.5, -1.0] if said else [] for said in asked]
    assert 0 < sum(asked) < len(tokens) or not distilling
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


# --- a trainer that distils -------------------------------------------------------------------------------------------


def distils(top_k: int | None = 0, **fields: Any) -> GroupRequirements:
    return GroupRequirements(trainable_only=True, logprobs_optional=True, teacher_top_k=top_k, **fields)


def asks_teacher(folder: Path, server: FakeInferenceServer, **fields: Any) -> TeacherlessEnv:
    settings = taught(folder, **fields)
    return TeacherlessEnv(settings, server_config(server), teacher_server_configs=[teacher_config(server, folder)])


@pytest.mark.parametrize(("own", "needed", "asked_for"), [(0, 0, 0), (0, 3, 3), (4, 3, 4)])
async def test_the_teacher_is_asked_for_what_the_trainer_needs(
    tmp_path: Path, own: int, needed: int, asked_for: int
) -> None:
    async with FakeInferenceServer() as server:
        env = asks_teacher(tmp_path, server, teacher_top_k=own)
        env._env_run.needs = distils(needed)
        group = await asked(env)
    assert {request["prompt_logprobs"] for _, request in server.requests} == {asked_for}
    assert len(server.requests) == 4  # one request per sequence
    ids, logprobs = group["distill_token_ids"], group["distill_logprobs"]
    assert ids is not None
    assert logprobs is not None
    assert ids == [[[], *([token + rank for rank in range(max(1, asked_for))] for token in (6, 7))]] * 4
    assert [len(each) for each in logprobs[0]] == [0, max(1, asked_for), max(1, asked_for)]
    check(group, distils(needed))


async def test_positions_that_are_not_trained_stay_empty_where_the_trainer_distils(tmp_path: Path) -> None:
    async with FakeInferenceServer() as server:
        env = asks_teacher(tmp_path, server)
        env._env_run.needs = distils()
        group = await asked(env, tokens=[[5, 6, 7, 8]] * 4, masks=[[-100, -100, 7, 8]] * 4)
    assert group["distill_token_ids"] == [[[], [], [7], [8]]] * 4


async def test_a_trainer_that_does_not_distil_ends_the_environment(tmp_path: Path) -> None:
    async with FakeInferenceServer() as server:
        env = asks_teacher(tmp_path, server)
        env._env_run.needs = distils(None)
        with pytest.raises(WrongSetting, match=r"--env.teacher_enabled: .*give the trainer --distill-coef"):
            await asked(env)
    assert not server.requests


async def says(reply: dict[str, Any], request: Any) -> Any:
    body = await request.json()
    ids = body["prompt"]["prompt_token_ids"]
    whole = {"prompt_token_ids": ids, "prompt_logprobs": [None, *({token: -0.5} for token in ids[1:])]}
    return web.Response(text=json.dumps(whole | {name: change(whole[name]) for name, change in reply.items()}))


NONSENSE: dict[str, Any] = {
    "fewer tokens": {"prompt_logprobs": lambda said: said[:-1]},
    "fewer of both": {"prompt_logprobs": lambda said: said[:-1], "prompt_token_ids": lambda ids: ids[:-1]},
    "other tokens": {
        "prompt_logprobs": lambda said: [None, *({99: -0.5} for _ in said[1:])],
        "prompt_token_ids": lambda ids: [99] * len(ids),
    },
    "NaN": {"prompt_logprobs": lambda said: [None, *({token: float("nan") for token in each} for each in said[1:])]},
    "-inf": {"prompt_logprobs": lambda said: [None, *({token: -math.inf for token in each} for each in said[1:])]},
    "1e300": {"prompt_logprobs": lambda said: [None, *({token: -1e300 for token in each} for each in said[1:])]},
    "above 0": {"prompt_logprobs": lambda said: [None, *({token: 0.7 for token in each} for each in said[1:])]},
    "nothing": {"prompt_logprobs": lambda said: [None] * len(said)},
}


@pytest.mark.parametrize("kind", NONSENSE)
async def test_nonsense_of_a_teacher_never_becomes_a_number(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with FakeInferenceServer() as student:
        teacher = FakeInferenceServer()
        monkeypatch.setattr(teacher, "_generate", functools.partial(says, NONSENSE[kind]))
        async with teacher:
            env = asks_teacher(tmp_path, student)
            env.teacher_server = ServerManager([teacher_config(teacher, tmp_path)])
            env._env_run.needs = distils()
            with pytest.raises(GroupLost, match="the teacher") as lost:
                await asked(env)
    assert (lost.value.kind, lost.value.count) == (TEACHER_FAILED, "groups_lost")


@pytest.mark.parametrize(("failures", "status"), [(1, 500), (1, 0), (2, 503)])
async def test_a_teacher_that_fails_once_is_asked_again(tmp_path: Path, failures: int, status: int) -> None:
    async with FakeInferenceServer() as server:
        env = asks_teacher(tmp_path, server)
        env._env_run.needs = distils()
        server.fail_next(failures, status=status)
        group = await asked(env)
    assert group["distill_token_ids"] == [[[], [6], [7]]] * 4


@pytest.mark.parametrize("fate", [pytest.param("dead", marks=pytest.mark.slow), "late"])
async def test_a_teacher_that_is_dead_or_late_costs_the_group_within_its_timeout(fate: str, tmp_path: Path) -> None:
    async with FakeInferenceServer() as student, FakeInferenceServer() as teacher:
        env = asks_teacher(tmp_path, student)
        env._env_run.needs = distils()
        impatient = teacher_config(teacher, tmp_path).model_copy(update={"timeout": 1})
        env.teacher_server = ServerManager([impatient], retry=RetryPolicy(attempts=1, dead_interval_s=0.1))
        if fate == "dead":
            await teacher.close()
        teacher.delay_s = 2.0
        with pytest.raises(GroupLost, match="without the teacher, which failed on 4 of 4 sequences: "):
            await asyncio.wait_for(asked(env), 20)


async def test_a_group_whose_teacher_is_gone_is_dropped_with_the_cause_and_its_siblings_are_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ServerManager, "retry", RetryPolicy(attempts=1))
    async with FakeInferenceServer() as server:
        env = asks_teacher(tmp_path, server, ensure_scores_are_not_same=False)
        run = env._env_run
        run.needs = distils()
        sent: list[Any] = []

        async def note(kept: list[Any]) -> None:
            sent.extend(kept)

        monkeypatch.setattr(run, "_send", note)
        async with run:
            server.fail_next(1, status=400)
            fields = {"inference_logprobs": [[1.0, -0.5, -0.5]] * 4}
            await run.take([whole_group(**fields), whole_group(**fields)], "an item", True, False)
    assert len(sent) == 1
    assert sent[0].group["distill_token_ids"] == [[[], [6], [7]]] * 4
    assert run.counts["groups_lost"] == 1
    assert run.outcomes.dropped[TEACHER_FAILED] == 1
    assert "it cannot be trained on without the teacher, which failed on 1 of 4 sequences: " in caplog.text


async def test_groups_of_equal_scores_are_sent_to_a_trainer_that_distils(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Any] = []

    async def note(kept: list[Any]) -> None:
        sent.extend(kept)

    async with FakeInferenceServer() as server:
        env = asks_teacher(tmp_path, server, ensure_scores_are_not_same=True)
        monkeypatch.setattr(env._env_run, "_send", note)
        async with env._env_run as run:
            for needs in (GroupRequirements(), distils()):
                run.needs = needs
                group = whole_group(scores=[1.0] * 4, inference_logprobs=[[1.0, -0.5, -0.5]] * 4)
                await run.take(group, "an item", True, False)
                assert len(sent) == (needs.teacher_top_k is not None)


async def test_an_environment_without_a_teacher_says_what_the_trainer_lacks(tmp_path: Path) -> None:
    async with FakeInferenceServer() as server:
        env = CountingEnv(config(tmp_path, ""), server_config(server))
        env._env_run.needs = distils()
        with pytest.raises(
            MalformedGroup, match=r"distill_token_ids: missing: the trainer distils .*`teacher:` in the"
        ):
            await env._env_run.take(whole_group(), "an item", False, False)


async def test_a_teacher_with_a_shorter_context_is_refused_before_anything_is_sampled(tmp_path: Path) -> None:
    async with FakeInferenceServer() as server, FakeInferenceServer() as student:
        server.max_model_len, server.model_name = 512, "teacher"
        settings, asked = taught(tmp_path), [teacher_config(server, tmp_path)]
        env = TeacherlessEnv(settings, server_config(student), teacher_server_configs=asked)
        student.model_name = env.server.model_name
        async with env._env_run:
            for trainers, students in ((511, None), (512, 511)):  # the student's context bounds what is sampled
                env.max_token_len, student.max_model_len = trainers, students
                await env._expect_teacher()
            for students in (None, 600):
                student.max_model_len = students
                with pytest.raises(WrongSetting, match=r"at most 512 tokens .* may have 512 .*--seq-len 511 or less"):
                    await env._expect_teacher()


async def test_a_teacher_whose_server_reads_other_tokens_is_refused(tmp_path: Path) -> None:
    async with FakeInferenceServer() as server:
        env = asks_teacher(tmp_path, server)
        encode = server.tokenizer.encode
        server.tokenizer = copy.copy(server.tokenizer)
        server.tokenizer.encode = lambda text, **given: [each + 1 for each in encode(text, **given)]
        async with env._env_run:
            with pytest.raises(OtherTokenizer, match=r"Cross-tokenizer .*token 0 of a test text is .*Take a teacher"):
                await env._expect_teacher()


async def test_a_teacher_with_another_chat_template_is_refused_unless_it_is_said(tmp_path: Path) -> None:
    async with FakeInferenceServer() as server:
        other = save_tiny_tokenizer(tmp_path / "other")
        file = next(each for each in (other / "chat_template.jinja", other / "tokenizer_config.json") if each.exists())
        file.write_text(file.read_text().replace("<|im_start|>", "<|im_end|>"))
        servers = [teacher_config(server, tmp_path).model_copy(update={"tokenizer_name": str(other)})]
        with pytest.raises(ValueError, match=r"chat templates differ.*--chat-template.*--env.teacher_other_template"):
            TeacherlessEnv(taught(tmp_path), server_config(server), teacher_server_configs=servers)
        settings = taught(tmp_path, teacher_other_template=True)
        TeacherlessEnv(settings, server_config(server), teacher_server_configs=servers)


def test_a_teacher_finds_what_is_wrong_with_config_init_as_a_run_without_one_does() -> None:
    class StaticEnv(CountingEnv):
        @staticmethod
        def config_init() -> Any:  # legal, too
            return BaseEnvConfig(), APIServerConfig()

    class BrokenEnv(CountingEnv):
        @classmethod
        def config_init(cls) -> Any:
            return BaseEnvConfig()

    flags = ["--teacher.base_url", "http://teacher/v1"]
    taught_config, _ = with_teacher_if_given(StaticEnv, flags).config_init()
    assert isinstance(taught_config, TeacherDistillationConfig)
    with pytest.raises(AuthorError, match="config_init returned BaseEnvConfig"):
        with_teacher_if_given(BrokenEnv, flags)


async def test_any_environment_can_be_given_a_teacher(tmp_path: Path) -> None:
    tokenizer = str(save_tiny_tokenizer(tmp_path / "tokenizer"))
    flags = ["--teacher.base_url", "http://teacher/v1", "--teacher.tokenizer_name", tokenizer]
    assert with_teacher_if_given(CountingEnv, ["--env.group_size", "4"]) is CountingEnv
    assert with_teacher_if_given(TaughtEnv, flags) is TaughtEnv
    (tmp_path / "c.yaml").write_text("teacher: {base_url: 'http://teacher/v1'}\n")
    assert with_teacher_if_given(CountingEnv, ["--config", str(tmp_path / "c.yaml")]) is not CountingEnv
    taught_cls = with_teacher_if_given(CountingEnv, flags)
    given = ["--env.teacher_enabled", "--env.tokenizer_name", tokenizer, "--openai.base_url", "http://student/v1"]
    tree = load_tree(taught_cls, "serve", [*given, "--openai.server_type", "vllm", *flags], "counting.py")
    env = build(taught_cls, tree)
    assert isinstance(env, CountingEnv)
    assert isinstance(env, TeacherDistillationEnv)
    assert env.teacher_server is not None
    assert env.teacher_server.servers[0].name == "http://teacher/v1"
    assert type(env).__name__ == "CountingEnv"
