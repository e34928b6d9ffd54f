"""Routing, health, limits and retries over real sockets, against fake inference servers."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest

from atroposlib.envs.server_handling.dispatching.dispatch import RetryPolicy
from atroposlib.envs.server_handling.errors import (
    NoLiveServerError,
    PermanentServerError,
    RetryableServerError,
    reason_of,
)
from atroposlib.envs.server_handling.managed_server import DummyManagedServer
from atroposlib.envs.server_handling.server_config import ServerEnvironment
from atroposlib.envs.server_handling.server_manager import APIServerConfig, ServerManager
from atroposlib.testing.fake_inference_server import FakeInferenceServer, fake_logprob
from tests.waiting import until

HASTY = RetryPolicy(attempts=3, base_s=0.01, cap_s=0.02, dead_interval_s=0.02)
CHAT: list[dict[str, str]] = [{"role": "user", "content": "hi"}]


def config_of(server: FakeInferenceServer, **settings: Any) -> APIServerConfig:
    return APIServerConfig.model_validate(
        {"server_type": "vllm", "base_url": server.base_url, "model_name": "fake", **settings}
    )


class Fakes(list[FakeInferenceServer]):
    """Two fake servers, and managers of some of them that are closed with the test."""

    def __init__(self) -> None:
        super().__init__()
        self._managers: list[ServerManager] = []

    def manager(self, configs: Any, **arguments: Any) -> ServerManager:
        self._managers.append(ServerManager(configs, **({"retry": HASTY} | arguments)))
        return self._managers[-1]

    def manager_of_both(self, **settings: Any) -> ServerManager:
        return self.manager([config_of(fake, **settings) for fake in self])

    async def close(self) -> None:
        for manager in self._managers:
            await manager.close()


@pytest.fixture
async def fakes() -> AsyncIterator[Fakes]:
    async with AsyncExitStack() as stack:
        fakes = Fakes()
        stack.push_async_callback(fakes.close)
        for _ in range(2):
            fakes.append(await stack.enter_async_context(FakeInferenceServer(lambda prompt: "hello")))
        yield fakes


def text_of(reply: Any) -> str:
    return str(reply.choices[0].message.content)


async def test_a_single_config_reaches_its_server(fakes: Fakes) -> None:
    manager = fakes.manager(config_of(fakes[0]))
    assert text_of(await manager.chat_completion(messages=CHAT)) == "hello"
    assert (await manager.completion(prompt="x", max_tokens=3)).choices[0].text == "hel"


async def test_tokens_come_back_as_sampled(fakes: Fakes) -> None:
    manager = fakes.manager(config_of(fakes[0]))
    prompt, outputs, logprobs, reasons = await manager.tokens_and_logprobs_completion(
        input_ids=[5, 6, 7], n=2, max_tokens=10
    )
    ids = [*fakes[0].tokenizer.encode("hello"), fakes[0].tokenizer.eos_token_id]
    assert (prompt, outputs, reasons) == ([5, 6, 7], [ids, ids], ["stop", "stop"])
    assert logprobs == [[fake_logprob(token, at) for at, token in enumerate(ids)]] * 2


async def test_sampled_tokens_carry_the_policy_version(fakes: Fakes) -> None:
    fakes[0].policy_version = 7
    sampled = await fakes.manager(config_of(fakes[0])).sample_tokens(input_ids=[5], max_tokens=10)
    assert (sampled.sequences[0].policy_versions, sampled.sequences[0].version_spans) == ((7, 7), [(0, 7)])


async def test_the_request_for_tokens_holds_ids_and_sampling_parameters_alone(fakes: Fakes) -> None:
    await fakes.manager(config_of(fakes[0])).sample_tokens(
        input_ids=[5], max_new_tokens=9, temperature=0.5, extra_body={"top_k": 3}, split="eval"
    )
    path, body = fakes[0].requests[-1]
    assert (path, body) == (
        "/generate",
        {"prompt": {"prompt_token_ids": [5]}, "logprobs": 0, "max_tokens": 9, "temperature": 0.5, "top_k": 3},
    )


async def test_prompt_logprobs_are_ranked_and_the_first_position_is_empty(fakes: Fakes) -> None:
    assert await fakes.manager(config_of(fakes[0])).get_logprobs(input_ids=[5, 6], top_k=2) == {
        "prompt_tokens": [5, 6],
        "prompt_topk_token_ids": [[], [6, 7]],
        "prompt_topk_logprobs": [[], [-0.5, -1.0]],
    }


@pytest.mark.parametrize("call", ["chat_completion", "completion", "sample_tokens"])
async def test_many_completions_are_asked_for_in_parts_and_merged(fakes: Fakes, call: str) -> None:
    fakes[0].answer = lambda prompt: ["a", "b", "c"]
    manager = fakes.manager(config_of(fakes[0]), max_n_completions=3)
    asked: dict[str, Any] = {
        "chat_completion": {"messages": CHAT},
        "completion": {"prompt": "x"},
        "sample_tokens": {"input_ids": [5]},
    }
    reply = await getattr(manager, call)(n=8, **asked[call])
    assert sorted(body["n"] for _, body in fakes[0].requests) == [2, 3, 3]
    if call == "sample_tokens":
        assert len(reply.sequences) == 8
    else:
        assert [choice.index for choice in reply.choices] == list(range(8))
        assert reply.usage.completion_tokens == 8 * 2


async def test_requests_spread_over_the_servers(fakes: Fakes) -> None:
    for fake in fakes:
        fake.delay_s = 0.2
    manager = fakes.manager_of_both()
    # both servers are known to be live by now
    await asyncio.gather(*(manager.chat_completion(messages=CHAT) for _ in range(2)))
    await asyncio.gather(*(manager.chat_completion(messages=CHAT) for _ in range(10)))
    assert [fake.peak_in_flight for fake in fakes] == [5, 5]


async def test_with_one_dead_server_all_requests_go_to_the_live_one(fakes: Fakes) -> None:
    await fakes[0].close()
    manager = fakes.manager_of_both()
    start = time.monotonic()
    replies = await asyncio.gather(*(manager.chat_completion(messages=CHAT) for _ in range(6)))
    assert [text_of(reply) for reply in replies] == ["hello"] * 6
    assert time.monotonic() - start < 5


async def test_a_server_that_dies_during_requests_hands_them_to_the_other(fakes: Fakes) -> None:
    manager = fakes.manager_of_both()
    await manager.chat_completion(messages=CHAT)
    for fake in fakes:
        fake.delay_s = 0.3
    calls = [asyncio.create_task(manager.sample_tokens(input_ids=[5], max_tokens=9)) for _ in range(8)]
    await until(lambda: fakes[0].in_flight > 0)
    await fakes[0].close()
    assert len(await asyncio.gather(*calls)) == 8


async def test_without_health_checks_a_dead_server_is_left_after_one_failure(fakes: Fakes) -> None:
    await fakes[0].close()
    manager = fakes.manager_of_both(health_check=False)
    assert text_of(await manager.chat_completion(messages=CHAT)) == "hello"
    assert fakes[1].hits["/health"] == 0


@pytest.mark.parametrize("status", [500, 503, 429, 0])
async def test_a_passing_failure_is_retried(fakes: Fakes, status: int) -> None:
    fakes[0].fail_next(2, status)
    manager = fakes.manager(config_of(fakes[0]))
    assert len((await manager.sample_tokens(input_ids=[5], max_tokens=9)).sequences) == 1
    assert fakes[0].hits["/generate"] == 3


async def test_a_retry_goes_to_another_server(fakes: Fakes) -> None:
    fakes[0].fail_next(100, 500)
    manager = fakes.manager_of_both(health_check=False)
    for _ in range(4):
        await manager.chat_completion(messages=CHAT)
    assert fakes[1].hits["/v1/chat/completions"] == 4


async def test_retries_are_finite(fakes: Fakes) -> None:
    fakes[0].fail_next(100, 500)
    with pytest.raises(
        RetryableServerError, match=r"chat completion failed 3 times, most recently: .*made to fail with 500"
    ):
        await fakes.manager(config_of(fakes[0])).chat_completion(messages=CHAT)
    assert fakes[0].hits["/v1/chat/completions"] == 3


@pytest.mark.parametrize("status", [400, 404, 422])
@pytest.mark.parametrize("call", ["chat_completion", "sample_tokens"])
async def test_a_permanent_failure_is_not_retried(fakes: Fakes, status: int, call: str) -> None:
    fakes[0].fail_next(1, status)
    asked: dict[str, Any] = {"messages": CHAT} if call == "chat_completion" else {"input_ids": [5]}
    with pytest.raises(PermanentServerError, match=f"replied {status}: .*made to fail"):
        await getattr(fakes.manager(config_of(fakes[0])), call)(**asked)
    assert len(fakes[0].requests) == 1


async def test_retry_after_is_honoured(fakes: Fakes) -> None:
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    policy = replace(HASTY, sleep=pause)
    for asked, server in (("7", fakes[0]), ("90", fakes[1])):
        server.fail_next(1, 429, {"Retry-After": asked})
        await fakes.manager(config_of(server), retry=policy).chat_completion(messages=CHAT)
    assert [seconds for seconds in pauses if seconds > 1] == [7.0, 60.0]  # a minute at most


async def test_calls_leave_a_server_that_refuses_to_generate_for_as_long_as_it_asks(fakes: Fakes) -> None:
    """A server whose weights fell behind answers 503 with Retry-After, while its /health is well."""
    fakes[0].fail_next(1000, 503, {"Retry-After": "60"})
    manager = fakes.manager(
        [config_of(fake, num_max_requests_at_once=8) for fake in fakes], retry=RetryPolicy(attempts=2, base_s=0.01)
    )
    start = time.monotonic()
    await asyncio.gather(*(manager.sample_tokens(input_ids=[5], max_tokens=9) for _ in range(60)))
    assert time.monotonic() - start < 30, "calls wait for a server that they do not go back to"
    assert (fakes[1].hits["/generate"], fakes[0].hits["/generate"] <= 8) == (60, True)
    assert not manager.servers[0].server_healthy


async def test_a_request_that_takes_too_long_fails_with_the_limit(fakes: Fakes) -> None:
    fakes[0].delay_s = 30
    config = config_of(fakes[0]).model_copy(update={"timeout": 0.1})  # no user gives less than 1
    manager = fakes.manager(config, retry=RetryPolicy(attempts=1))
    with pytest.raises(RetryableServerError, match=r"took longer than the timeout of 0.1 s"):
        await manager.sample_tokens(input_ids=[5])


async def test_waiting_for_a_dead_server_is_announced_and_ends_at_the_timeout(
    fakes: Fakes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    manager = fakes.manager(APIServerConfig(server_type="vllm", base_url="http://127.0.0.1:9/v1", timeout=1))
    start = time.monotonic()
    with pytest.raises(
        NoLiveServerError, match=r"no inference server was live within 1 s \(http://127.0.0.1:9/v1: .*; start it"
    ):
        await manager.chat_completion(messages=CHAT)
    assert 0.9 < time.monotonic() - start < 3
    assert "Waiting for an inference server to be live at http://127.0.0.1:9/v1, at most 1 s" in caplog.text


async def test_calls_made_before_the_server_starts_are_served_once_it_does(
    fakes: Fakes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    fakes[0].healthy = False
    call = asyncio.create_task(fakes.manager(config_of(fakes[0])).chat_completion(messages=CHAT))
    await until(lambda: fakes[0].hits["/health"] > 0)
    assert not call.done()
    assert fakes[0].hits["/v1/chat/completions"] == 0
    fakes[0].healthy = True
    assert text_of(await asyncio.wait_for(call, 5)) == "hello"
    assert "An inference server is live after" in caplog.text


async def test_calls_that_wait_for_a_server_tell_why_it_is_not_well(fakes: Fakes) -> None:
    manager = fakes.manager(config_of(fakes[0]))
    await manager.sample_tokens(input_ids=[5])
    fakes[0].healthy = False
    assert (await manager.servers[0].probe() or "").endswith(
        "/health replied 503: the fake server was set to be unhealthy"
    )
    await manager.close()
    manager = fakes.manager(config_of(fakes[0]).model_copy(update={"timeout": 0.1}))
    with pytest.raises(NoLiveServerError, match="/health replied 503: the fake server was set to be unhealthy"):
        await manager.sample_tokens(input_ids=[5])


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"error": {"message": "the engine\\nis deaf"}}', "the engine is deaf"),
        (b"<h1>Bad\n gateway</h1>", "<h1>Bad gateway</h1>"),
        (b"", "no reason given"),
        (b"\xff" * 9999, "\ufffd" * 500),
        (b"[" * 4096, "[" * 500),
        (b'{"error": "full"}', '{"error": "full"}'),
    ],
)
def test_the_reason_is_found_in_every_form_of_an_error(body: bytes, reason: str) -> None:
    assert reason_of(body) == reason


async def test_a_restarted_server_is_used_again(fakes: Fakes) -> None:
    manager = fakes.manager(config_of(fakes[0]))
    await manager.sample_tokens(input_ids=[5])
    await fakes[0].close()
    call = asyncio.create_task(manager.sample_tokens(input_ids=[5]))
    await until(lambda: not manager.servers[0].server_healthy)
    await fakes[0].start()
    assert len((await asyncio.wait_for(call, 10)).sequences) == 1


async def test_health_is_asked_cheaply_and_only_after_the_first_call(fakes: Fakes) -> None:
    vllm, hosted = fakes.manager(config_of(fakes[0])), fakes.manager(config_of(fakes[1], server_type="openai"))
    await asyncio.sleep(0.05)
    assert not fakes[0].hits
    assert not fakes[1].hits
    for manager in (vllm, hosted):
        await asyncio.gather(*(manager.chat_completion(messages=CHAT) for _ in range(5)))
    assert fakes[0].hits == {"/health": 1, "/v1/chat/completions": 5}
    assert fakes[1].hits == {"/v1/models": 1, "/v1/chat/completions": 5}


async def test_close_ends_the_health_checks(fakes: Fakes) -> None:
    manager = ServerManager(config_of(fakes[0]))
    await manager.chat_completion(messages=CHAT)
    assert any("health of" in task.get_name() for task in asyncio.all_tasks())
    await manager.close()
    assert not any("health of" in task.get_name() for task in asyncio.all_tasks())


async def test_train_and_eval_have_their_own_limits(fakes: Fakes) -> None:
    fakes[0].delay_s = 0.1
    manager = fakes.manager(config_of(fakes[0], num_max_requests_at_once=3, num_requests_for_eval=2))
    await asyncio.gather(*(manager.chat_completion(messages=CHAT, split="eval") for _ in range(6)))
    assert fakes[0].peak_in_flight == 2
    await asyncio.gather(*(manager.chat_completion(messages=CHAT) for _ in range(6)))
    assert fakes[0].peak_in_flight == 3


async def test_raising_the_weight_lets_waiting_calls_in(fakes: Fakes) -> None:
    fakes[0].delay_s = 30
    manager = fakes.manager(config_of(fakes[0], num_max_requests_at_once=4))
    await manager.update_weight(0.25)
    calls = [asyncio.create_task(manager.chat_completion(messages=CHAT)) for _ in range(4)]
    await until(lambda: fakes[0].in_flight == 1)
    await asyncio.sleep(0.2)
    assert fakes[0].in_flight == 1
    await manager.update_weight(1.0)
    await until(lambda: fakes[0].in_flight == 4)
    for call in calls:
        call.cancel()


async def test_a_cancelled_call_frees_its_slot(fakes: Fakes) -> None:
    fakes[0].delay_s = 30
    manager = fakes.manager(config_of(fakes[0], num_max_requests_at_once=1))
    calls = [asyncio.create_task(manager.chat_completion(messages=CHAT)) for _ in range(3)]
    await until(lambda: fakes[0].in_flight == 1)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    fakes[0].delay_s = 0
    assert text_of(await asyncio.wait_for(manager.chat_completion(messages=CHAT), 5)) == "hello"


@pytest.mark.parametrize("server_type", ["vllm", "openai"])
async def test_the_api_key_is_sent_as_a_bearer_token(fakes: Fakes, server_type: str) -> None:
    fakes[0].api_key = "right"
    right = fakes.manager(config_of(fakes[0], api_key="right", server_type=server_type))
    assert text_of(await right.chat_completion(messages=CHAT)) == "hello"
    with pytest.raises(PermanentServerError, match="401"):
        await fakes.manager(config_of(fakes[0], api_key="wrong", server_type=server_type)).chat_completion(
            messages=CHAT
        )
    if server_type == "vllm":
        assert len((await right.sample_tokens(input_ids=[5])).sequences) == 1


@pytest.mark.parametrize("configured", [True, False])
async def test_a_server_that_ignores_n_is_asked_n_times(fakes: Fakes, configured: bool) -> None:
    fakes[0].heeds_n = False
    manager = fakes.manager(config_of(fakes[0], server_type="openai", n_kwarg_is_ignored=configured))
    assert len((await manager.chat_completion(messages=CHAT, n=3)).choices) == 3
    assert len(fakes[0].requests) == 3
    await manager.chat_completion(messages=CHAT, n=1)
    assert len(fakes[0].requests) == 4
    assert len((await manager.chat_completion(messages=CHAT, n=3)).choices) == 3
    assert len(fakes[0].requests) == 7


async def test_a_dedicated_server_takes_all_its_calls_and_others_go_elsewhere_first(fakes: Fakes) -> None:
    manager = fakes.manager_of_both(health_check=False)
    async with manager.dedicated_server() as server, manager.dedicated_server() as other:
        assert server is not other
        for _ in range(3):
            await server.chat_completion(messages=CHAT)
    assert [fake.hits["/v1/chat/completions"] for fake in fakes] == [3, 0]


async def test_a_managed_server_stays_with_one_server_and_moves_when_that_dies(fakes: Fakes) -> None:
    manager = fakes.manager_of_both(health_check=False)
    async with (
        manager.managed_server(tokenizer=fakes[0].tokenizer) as managed,
        manager.managed_server(fakes[0].tokenizer) as pinned,
    ):
        for _ in range(3):
            await managed.completion(prompt="x")
        assert [fake.hits["/generate"] for fake in fakes] == [3, 0]
        await fakes[0].close()
        await managed.completion(prompt="x")
        assert [fake.hits["/generate"] for fake in fakes] == [3, 1]
        assert isinstance(pinned.get_state()["nodes"], list)


async def test_all_requests_of_a_conversation_carry_one_session_id_for_a_router(fakes: Fakes) -> None:
    manager = fakes.manager([config_of(fakes[0])])
    for _ in range(2):
        async with manager.managed_server(tokenizer=fakes[0].tokenizer) as managed:
            await managed.completion(prompt="x", n=9)  # in two parts
            await managed.chat_completion(messages=CHAT)
    await manager.chat_completion(messages=CHAT)
    first, second = fakes[0].sessions[:3], fakes[0].sessions[3:6]
    assert (len(set(first)), len(set(second))) == (1, 1)
    assert None not in [*first, *second]
    assert first[0] != second[0]
    assert fakes[0].sessions[6:] == [None]


async def test_base_url_pins_a_managed_server(fakes: Fakes) -> None:
    manager = fakes.manager_of_both()
    async with manager.managed_server(tokenizer=fakes[1].tokenizer, base_url=fakes[1].base_url) as managed:
        await managed.completion(prompt="x")
    assert [fake.hits["/generate"] for fake in fakes] == [0, 1]
    with pytest.raises(ValueError, match="no inference server at http://elsewhere; there are: http://127"):
        async with manager.managed_server(base_url="http://elsewhere"):
            pass


async def test_servers_without_token_ids_give_no_managed_server(fakes: Fakes) -> None:
    with pytest.raises(NotImplementedError, match="ATROPOS_ALLOW_DUMMY_MANAGED_SERVER=1"):
        async with fakes.manager(config_of(fakes[0], server_type="openai")).managed_server():
            pass


async def test_a_dummy_managed_server_exists_on_request_only(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATROPOS_ALLOW_DUMMY_MANAGED_SERVER", "yes")
    async with fakes.manager(config_of(fakes[0], server_type="openai")).managed_server() as managed:
        assert isinstance(managed, DummyManagedServer)
        assert text_of(await managed.chat_completion(messages=CHAT, n=2)) == "hello"
        nodes = managed.get_state()["nodes"]
    assert len(nodes) == 2
    assert nodes[0].tokens == list(range(128))
    assert nodes[0].masked_tokens == [-100, *range(1, 128)]
    assert nodes[0].logprobs == [-0.5] * 128
    assert nodes[0].metadata["dummy_tokens"] is True


async def test_a_reply_of_another_shape_is_a_clear_error(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atroposlib.testing.fake_inference_server.fake_logprob", lambda token, position: "high")
    with pytest.raises(PermanentServerError, match="/generate replied in a format"):
        await fakes.manager(config_of(fakes[0])).sample_tokens(input_ids=[5])


async def test_a_sequence_that_the_server_gave_up_is_sampled_again(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons = ["abort", "error", "stop"]
    monkeypatch.setattr(fakes[0], "_sample", lambda ids, body: [([5], reasons.pop(0))])
    sampled = await fakes.manager(config_of(fakes[0])).sample_tokens(input_ids=[5])
    assert sampled.sequences[0].finish_reason == "stop"
    assert fakes[0].hits["/generate"] == 3


async def test_timings_are_reported_once(fakes: Fakes) -> None:
    manager = fakes.manager(config_of(fakes[0]))
    fakes[0].fail_next(1, 500)
    await manager.chat_completion(messages=CHAT)
    await manager.chat_completion(messages=CHAT, split="eval")
    metrics = await manager.wandb_metrics({"kept": 1})
    assert metrics["kept"] == 1
    assert metrics["server/server_0_average_num_attempts"] == 2
    assert metrics["server/server_0_eval_retry_rate"] == 0
    assert metrics["server/server_0_request_time_avg"] > 0
    assert await manager.wandb_metrics() == {}


@pytest.mark.parametrize("server_type", ["vllm", "sglang", "trl"])
def test_a_server_of_ones_own_needs_an_address(server_type: str) -> None:
    with pytest.raises(
        ValueError, match=f"server_type '{server_type}' needs a base_url, e.g. http://localhost:9001/v1"
    ):
        ServerManager(APIServerConfig.model_validate({"server_type": server_type}))


def test_the_key_of_the_environment_goes_to_openai_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "from-environment")
    hosted, own = (
        ServerManager(APIServerConfig()).servers[0],
        ServerManager(APIServerConfig(base_url="http://x/v1")).servers[0],
    )
    assert hosted.sdk.api_key == "from-environment"  # type: ignore[attr-defined]
    assert own.sdk.api_key == "none"  # type: ignore[attr-defined]


def test_slurm_servers_come_from_the_environment() -> None:
    environment = ServerEnvironment.model_validate(
        {"SLURM_JOB_NODELIST": "n[1-2]", "NUM_TRAINING_NODES": 1, "INFER_TP": 4}
    )
    manager = ServerManager(
        APIServerConfig(server_type="vllm", base_url="http://x/v1"), slurm=True, environment=environment
    )
    assert [server.config.base_url for server in manager.servers] == ["http://n2:9000/v1", "http://n2:9001/v1"]


# --- servers that join and leave --------------------------------------------------------------------------------------


def address(fake: FakeInferenceServer) -> str:
    return fake.base_url.removesuffix("/v1")


async def test_a_server_that_joins_takes_calls_that_wait_and_new_ones(fakes: Fakes) -> None:
    first, second = fakes
    manager = fakes.manager([config_of(first, num_max_requests_at_once=1)])
    first.delay_s = 30.0
    held = asyncio.create_task(manager.chat_completion(messages=CHAT))
    await until(lambda: manager.servers[0].gates["train"].in_use == 1)
    waiting = asyncio.create_task(manager.chat_completion(messages=CHAT))
    await asyncio.sleep(0.05)
    assert not await manager.follow({address(second): "joining"})
    assert await manager.follow({address(second): "serving"})
    assert not await manager.follow({address(second): "serving"})
    assert text_of(await waiting) == "hello"
    assert text_of(await manager.chat_completion(messages=CHAT)) == "hello"
    async with manager.managed_server(tokenizer=second.tokenizer) as conversation:
        await conversation.completion(prompt="x", max_tokens=3)
    held.cancel()
    assert [server.name for server in manager.servers] == [first.base_url, second.base_url]


async def test_a_server_that_leaves_answers_what_it_has_begun_and_gets_nothing_new(fakes: Fakes) -> None:
    first, second = fakes
    manager = fakes.manager_of_both()
    for server in manager.servers:
        server.health.start()
    await until(lambda: all(server.health.live for server in manager.servers))
    first.delay_s = second.delay_s = 0.3
    begun = [asyncio.create_task(manager.chat_completion(messages=CHAT)) for _ in range(4)]
    await until(lambda: manager.servers[0].gates["train"].in_use == 2)
    leaving = manager.servers[0]
    assert await manager.follow({address(first): "leaving"})
    assert [text_of(reply) for reply in await asyncio.gather(*begun)] == ["hello"] * 4
    assert leaving.gates["train"].in_use == 0
    answered = len(first.requests)
    assert {text_of(await manager.chat_completion(messages=CHAT)) for _ in range(3)} == {"hello"}
    assert len(first.requests) == answered
    assert not await manager.follow({address(first): "left", address(second): "leaving"})  # who else would answer?
    assert [server.name for server in manager.servers] == [second.base_url]


async def test_a_conversation_whose_server_leaves_goes_on_at_another(fakes: Fakes) -> None:
    first, second = fakes
    manager = fakes.manager_of_both()
    async with manager.managed_server(tokenizer=first.tokenizer) as conversation:
        await conversation.completion(prompt="x", max_tokens=3)
        served = first if first.requests else second
        other = second if served is first else first
        before = len(served.requests)
        assert await manager.follow({address(served): "leaving"})
        await conversation.completion(prompt="y", max_tokens=3)
        assert len(served.requests) == before
        assert other.requests
