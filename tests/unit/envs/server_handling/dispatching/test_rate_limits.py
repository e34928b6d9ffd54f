"""A server that takes so many calls a second: every call is answered in the end, and few are refused."""

import asyncio
import email.utils
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from aiohttp import web

from atroposlib.envs.server_handling.dispatching.dispatch import RetryPolicy
from atroposlib.envs.server_handling.dispatching.throttle import FIRST_INTERVAL_S, Throttle
from atroposlib.envs.server_handling.errors import RetryableServerError, asked_pause_s, status_error
from atroposlib.envs.server_handling.openai_server import OpenAIServer
from atroposlib.envs.server_handling.server_config import APIServerConfig
from atroposlib.testing.fake_inference_server import FakeInferenceServer
from tests.serving import serving

CHAT = [{"role": "user", "content": "hi"}]
ANSWER = {"choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "hello"}}]}


@dataclass
class Limited:
    """An OpenAI server that answers `calls` in each `window_s`, and refuses the others by `refuse`."""

    calls: int
    window_s: float
    refuse: Callable[[float], web.Response]
    answered: int = 0
    refused: int = 0
    _taken: list[float] = field(default_factory=list)

    @property
    def routes(self) -> list[web.RouteDef]:
        return [web.post("/v1/chat/completions", self.answer), web.get("/v1/models", self.models)]

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": []})

    async def answer(self, request: web.Request) -> web.Response:
        now = time.monotonic()
        self._taken = [at for at in self._taken if now - at < self.window_s]
        if len(self._taken) >= self.calls:
            self.refused += 1
            return self.refuse(self._taken[0] + self.window_s - now if self._taken else self.window_s)
        self._taken.append(now)
        self.answered += 1
        return web.json_response(ANSWER)


def client(url: str, **settings: object) -> OpenAIServer:
    return OpenAIServer(APIServerConfig(base_url=f"{url}/v1", model_name="m", **settings))


def refusal(status: int, wish: Callable[[float], str] | None = None) -> Callable[[float], web.Response]:
    return lambda left_s: web.Response(status=status, headers={"Retry-After": wish(left_s)} if wish else {})


FRACTION = refusal(429, lambda left_s: f"{left_s:.3f}")


@pytest.mark.rotating
@pytest.mark.parametrize(
    "refuse", [FRACTION, refusal(503, lambda left_s: f"{left_s:.3f}"), refusal(429)], ids=["429", "503", "no wish"]
)
@pytest.mark.parametrize("health_check", [True, False])
async def test_more_calls_than_a_server_takes_are_all_answered(
    refuse: Callable[[float], web.Response], health_check: bool
) -> None:
    limited = Limited(20, 0.5, refuse)
    async with serving(limited.routes) as url:
        server = client(url, health_check=health_check)
        server.retry = RetryPolicy(base_s=0.1, dead_interval_s=0.05)
        await asyncio.gather(*(server.chat_completion(messages=CHAT, split="eval") for _ in range(80)))
        await server.close()
    assert limited.answered == 80
    assert limited.refused < 160


async def test_a_refusal_holds_up_the_calls_that_were_not_refused() -> None:
    limited = Limited(1, 0.3, FRACTION)
    async with serving(limited.routes) as url:
        server = client(url, num_requests_for_eval=2)
        await asyncio.gather(*(server.chat_completion(messages=CHAT, split="eval") for _ in range(4)))
        await server.close()
    assert limited.answered == 4
    assert limited.refused <= 6


async def test_a_server_that_only_refuses_is_named_after_six_tries() -> None:
    async def at_once(seconds: float) -> None:
        await asyncio.sleep(0)

    limited = Limited(0, 1.0, lambda left_s: web.Response(status=429, text="no more today"))
    async with serving(limited.routes) as url:
        server = client(url)
        server.retry = RetryPolicy(sleep=at_once)
        with pytest.raises(RetryableServerError, match=r"failed 6 times, most recently: .*429: no more today"):
            await server.chat_completion(messages=CHAT)
        await server.close()
    assert limited.refused == 6


async def test_a_server_without_a_limit_is_never_slowed_down() -> None:
    async with FakeInferenceServer() as fake:
        server = client(fake.base_url.removesuffix("/v1"))
        await asyncio.gather(*(server.chat_completion(messages=CHAT) for _ in range(20)))
        assert (server.throttle.interval_s, server.throttle.is_open) == (0.0, True)
        await server.close()


def test_pauses_after_a_refusal_outlast_a_limit_per_minute_within_six_tries() -> None:
    policy = RetryPolicy()
    assert sum(policy.refused_pause_s(refused, 0.0) for refused in range(1, policy.attempts)) >= 60
    assert policy.refused_pause_s(1, 7.5) == 7.5
    assert policy.refused_pause_s(1, 1e6) == 60.0


async def test_the_interval_doubles_once_a_burst_and_shrinks_with_answers() -> None:
    clock = [0.0]
    throttle, policy = Throttle("there", lambda: clock[0]), RetryPolicy()
    for _ in range(5):
        throttle.note_refusal(0.0 if clock[0] else -1.0, 1.0, policy, "")
        clock[0] = 1.0
    assert throttle.interval_s == FIRST_INTERVAL_S
    clock[0] = 9.0
    throttle.note_refusal(8.0, 1.0, policy, "")
    assert throttle.interval_s == 2 * FIRST_INTERVAL_S
    fast: list[float] = []
    slow: list[float] = []
    for _ in range(40):
        before = throttle.interval_s
        throttle.note_answer()
        (fast if before >= 1.25 * FIRST_INTERVAL_S else slow).append(throttle.interval_s / before)
    assert fast == pytest.approx([0.9] * len(fast))
    assert slow == pytest.approx([0.99] * len(slow))
    assert min(len(fast), len(slow)) > 3
    await throttle.close()


async def test_the_log_has_the_words_of_a_refusal_which_need_not_be_about_a_rate(
    caplog: pytest.LogCaptureFixture,
) -> None:
    throttle = Throttle("there")
    waits = status_error("http://there/generate", 503, "--await-sync: older than the policy", {"Retry-After": "5"})
    assert isinstance(waits, RetryableServerError)
    throttle.note_refusal(time.monotonic(), waits.retry_after_s, RetryPolicy(), str(waits))
    await throttle.close()
    (line,) = caplog.messages
    assert line.startswith("there refuses calls (1 since the last such line): sending it none for 5.")
    assert line.endswith("a second (http://there/generate replied 503: --await-sync: older than the policy)")


NOW = 1_700_000_000.0


def date(seconds: float) -> str:
    return email.utils.formatdate(seconds, usegmt=True)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"Retry-After": "7"}, 7.0),
        ({"Retry-After": "0.25"}, 0.25),
        ({"Retry-After": date(NOW + 30)}, 30.0),
        (
            {"Retry-After": date(90), "Date": date(60)},
            30.0,
        ),
        ({"Retry-After": date(NOW - 30)}, 0.0),
        ({"retry-after-ms": "1500"}, 1.5),
        ({}, 0.0),
        *(({"Retry-After": odd}, 0.0) for odd in ("", "soon", "nan", "inf", "-3", "1e400", "Mon, 99 Foo 2000")),
    ],
)
def test_a_wish_to_be_left_alone_is_read_in_each_of_its_forms(headers: dict[str, str], seconds: float) -> None:
    assert asked_pause_s(headers, NOW) == seconds


def test_a_refusal_is_told_from_a_failure() -> None:
    refused = [status_error("u", status, "", headers) for status, headers in ((429, {}), (503, {"Retry-After": "1"}))]
    failed = [status_error("u", status, "", {}) for status in (500, 503)]
    assert [error.is_refusal for error in refused + failed] == [True, True, False, False]  # type: ignore[attr-defined]
