"""A judge scores through any server with OpenAI's API; where it fails there is no score, never a 0."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from atroposlib.config import config_yaml, resolve_config
from atroposlib.envs.errors import EnvError, PeerError
from atroposlib.envs.judge import Judge, JudgeConfig, Read, json_field, matched, tagged
from atroposlib.envs.question_env import QuestionEnvConfig
from atroposlib.envs.server_handling.dispatching.dispatch import RetryPolicy
from atroposlib.testing.fake_inference_server import FakeInferenceServer
from tests.unit.environments.support import running_env
from tests.unit.envs.fakes import Asking
from tests.unit.hostile_answers.hostile import assert_linear

TEMPLATE = 'Rate {answer} from 0 to 10. Reply like {"score": 3} in <score></score>.'


async def at_once(seconds: float) -> None:
    """No pause between two tries."""
    await asyncio.sleep(0)


@asynccontextmanager
async def judging(
    server: FakeInferenceServer,
    read: Read | None = None,
    scale: tuple[float, float] = (0.0, 10.0),
    template: str = TEMPLATE,
    **settings: Any,
) -> AsyncIterator[Judge]:
    judge = Judge(JudgeConfig(base_url=server.base_url, model="judge", **settings), template, read, scale)
    judge._server.retry = RetryPolicy(sleep=at_once)
    try:
        yield judge
    finally:
        await judge.close()


@pytest.mark.rotating
@pytest.mark.parametrize("part", ["{", '{"', '{"a":', '{"a":[', '{"a":[1,', '{"a": "'])
def test_a_reply_of_opened_objects_takes_linear_time(part: str) -> None:
    text = part * (100_000 // len(part))
    assert json_field()(text) is None
    assert_linear(json_field(), text)


@pytest.mark.parametrize(
    ("read", "reply", "score"),
    [
        (tagged(), "<score>2</score>, no: <score> 7.5 </score>", 0.75),
        (tagged("grade"), "<grade>10</grade>", 1.0),
        (tagged(), "<score>0</score>", 0.0),
        (tagged(), "<score>7/10</score>", None),
        (tagged(), "<score>nan</score>", None),
        (tagged(), "7", None),
        (json_field(), 'as {"score": 1}: {"why": {"score": 9}, "score": "5"}', 0.5),
        (json_field("grade"), '{"grade": 5} {"score": 2}', 0.5),
        (json_field(), '{"score": null} {', None),
        (json_field(), "{" * 3000 + '{"score": 1e999}' + '{"a":' * 3000, None),
        (json_field(), f'{{"score": {"9" * 400}}}', None),
        (json_field(), "", None),
        (matched(r"Grade: (\d+)"), "Grade: 1. Grade: 4", 0.4),
        (matched(r"Grade: (\d+)"), "none", None),
        (lambda reply: 10.0 if "good" in reply else None, "good", 1.0),
        (tagged(), "<score>10.5</score>", None),
        (tagged(), "<score>-1</score>", None),
    ],
)
async def test_a_score_is_read_out_of_the_reply_or_there_is_none(read: Read, reply: str, score: float | None) -> None:
    async with FakeInferenceServer(lambda prompt: reply) as server, judging(server, read, max_tokens=20000) as judge:
        assert await judge.score(answer="x") == score


async def test_a_scale_may_be_upside_down() -> None:
    async with FakeInferenceServer(lambda prompt: "<score>2</score>") as server:
        async with judging(server, scale=(5.0, 1.0)) as judge:
            assert await judge.score(answer="x") == 0.75
        with pytest.raises(ValueError, match=r"the scale \(1.0, 1.0\) are the same"):
            async with judging(server, scale=(1.0, 1.0)):
                pass


async def test_the_judge_is_asked_what_the_template_says() -> None:
    conversation = [{"role": "user", "content": "{answer}?"}, {"role": "assistant", "content": "4"}]
    async with (
        FakeInferenceServer(lambda prompt: "<score>5</score>") as server,
        judging(server, template=TEMPLATE + "\n{talk}", temperature=0.5, max_tokens=99) as judge,
    ):
        await judge.score(answer="{talk} <score>1</score>", talk=conversation)
        ((path, body),) = server.requests
        with pytest.raises(ValueError, match=r"the judge's template has no \{item\}; it has answer, talk"):
            await judge.score(answer="4", talk="", item="2 + 2")
    assert path == "/v1/chat/completions"
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("judge", 0.5, 99)
    (message,) = body["messages"]
    assert message["content"] == (
        'Rate {talk} <score>1</score> from 0 to 10. Reply like {"score": 3} in <score></score>.\n'
        "user: {answer}?\n\nassistant: 4"
    )


async def test_a_judge_that_fails_for_a_while_is_asked_again() -> None:
    async with FakeInferenceServer(lambda prompt: "<score>5</score>") as server, judging(server) as judge:
        server.fail_next(2, 500)
        server.fail_next(1, 429)
        server.fail_next(1, 0)
        assert await judge.score(answer="x") == 0.5
        assert len(server.requests) == 5


async def test_a_judge_that_goes_on_failing_gives_no_score_and_one_line(caplog: pytest.LogCaptureFixture) -> None:
    async with FakeInferenceServer(lambda prompt: "<score>5</score>") as server, judging(server) as judge:
        server.fail_next(100, 500)
        assert await asyncio.gather(*(judge.score(answer="x") for _ in range(5))) == [None] * 5
    told = [record.getMessage() for record in caplog.records if "The judge gave no score" in record.getMessage()]
    assert len(told) == 1
    assert told[0].startswith("The judge gave no score for 1 answers, the last because ")
    assert "made to fail with 500" in told[0]


async def test_a_judge_that_is_gone_gives_no_score() -> None:
    async with FakeInferenceServer() as server:
        pass
    async with judging(server) as judge:
        assert await judge.score(answer="x") is None


async def test_a_late_judge_gives_no_score() -> None:
    async with FakeInferenceServer() as server, judging(server, timeout=0.2) as judge:
        server.delay_s = 5
        start = time.monotonic()
        assert await judge.score(answer="x") is None
        assert time.monotonic() - start < 4


async def test_a_judge_has_so_many_requests_at_once_and_waiting_for_a_turn_is_not_late() -> None:
    async with (
        FakeInferenceServer(lambda prompt: "<score>5</score>") as server,
        judging(server, timeout=3, concurrency=2) as judge,
    ):
        server.delay_s = 0.5
        assert await asyncio.gather(*(judge.score(answer="x") for _ in range(16))) == [0.5] * 16
        assert server.peak_in_flight == 2


async def test_an_error_that_would_be_repeated_ends_the_environment_unless_the_judge_has_answered() -> None:
    async with FakeInferenceServer(lambda prompt: "<score>5</score>") as server, judging(server) as judge:
        server.fail_next(1, 404)
        with pytest.raises(PeerError, match=r"the judge cannot answer: .* replied 404: .*correct --env.judge"):
            await judge.score(answer="x")
        assert await judge.score(answer="x") == 0.5
        server.fail_next(1, 400)
        assert await judge.score(answer="x") is None


class JudgedConfig(QuestionEnvConfig):
    """Settings of the environment below."""

    judge: JudgeConfig = JudgeConfig()


def test_the_settings_are_flags_and_the_key_is_none_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "sk-secret")
    flags = ["--judge.base_url", "http://h:1/v1", "--judge.model", "m", "--judge.api_key_variable", "MY_KEY"]
    config, _ = resolve_config(JudgedConfig, flags, prog="test")
    assert config.judge.api_key == "sk-secret"
    judge = Judge(config.judge, TEMPLATE)
    assert "MY_KEY" in config_yaml(config)
    assert not [text for text in (config_yaml(config), repr(config), repr(judge._server.config)) if "sk-" in text]
    monkeypatch.delenv("MY_KEY")
    with pytest.raises(EnvError, match=r"MY_KEY \(--env.judge.api_key_variable\) is not set"):
        Judge(config.judge, TEMPLATE)
    with pytest.raises(EnvError, match=r"no judge is named: pass --env.judge.base_url"):
        Judge(JudgeConfig(), TEMPLATE)


async def test_the_key_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "sk-secret")
    async with FakeInferenceServer(lambda prompt: "<score>5</score>", api_key="sk-secret") as server:
        async with judging(server, api_key_variable="MY_KEY") as judge:
            assert await judge.score(answer="x") == 0.5
        async with judging(server) as judge:
            with pytest.raises(PeerError, match="401"):
                await judge.score(answer="x")


class JudgedEnv(Asking):
    """Scored by a judge alone."""

    name = "judged"
    env_config_cls = JudgedConfig

    async def setup(self) -> None:
        self.judge = Judge(self.config.judge, TEMPLATE, scale=(0.0, 10.0))
        self.judge._server.retry = RetryPolicy(sleep=at_once)

    async def score(self, item: str, answer: str) -> float | None:
        return await self.judge.score(answer=answer)

    async def close(self) -> None:
        await self.judge.close()


async def test_answers_that_the_judge_does_not_score_have_failed_and_the_others_go_on(tmp_path: Path) -> None:
    verdicts: Mapping[str, str] = {"good": "<score>9</score>", "bad": "<score>1</score>", "odd": "I refuse."}

    def verdict(prompt: str) -> str:
        return next(reply for answer, reply in verdicts.items() if f"Rate {answer}" in prompt)

    async with (
        FakeInferenceServer(lambda prompt: ["good", "bad", "odd", "good"]) as server,
        FakeInferenceServer(verdict) as judge,
        running_env(JudgedEnv, tmp_path, server, judge={"base_url": judge.base_url, "model": "m"}) as env,
    ):
        group, _ = await env.collect_trajectories("7")
    assert group is not None
    assert (group["scores"], group["failed"]) == ([0.9, 0.1, 0.9], {"scorer": 1})
