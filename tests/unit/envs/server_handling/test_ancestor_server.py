"""A server class written for the archived ancestor, by its hooks alone, under this project's routing and retries."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from atroposlib.envs.base import APIServer, APIServerConfig
from atroposlib.envs.commands.process import process
from atroposlib.envs.server_handling.dispatching.dispatch import RetryPolicy
from atroposlib.envs.server_handling.errors import RetryableServerError
from atroposlib.envs.server_handling.reasoning import ReasoningConfig
from atroposlib.envs.server_handling.server_harness import create_chat_completion, create_completion
from atroposlib.envs.server_handling.server_manager import ServerManager
from tests.unit.envs.fakes import CountingEnv, Trainer, config, running_api, served

pytestmark = pytest.mark.timeout(60)
SAMPLED, LOGPROBS = [5, 6, 7], [-0.5, -0.25, -0.125]


class OldServer(APIServer):
    """As the ancestor's own servers are written: the wrappers, and a status task that never ends."""

    calls: list[tuple[str, dict[str, Any]]]

    def __init__(self, config: APIServerConfig, reasoning_config: Any = None):
        super().__init__(config, reasoning_config=reasoning_config)
        self.calls = []
        self.checks = 0
        self.fails = 0

    async def check_server_status_task(self, chat_completion: bool = True) -> None:
        while True:
            self.checks += 1
            self.server_healthy = self.checks > 1
            await asyncio.sleep(0.05)

    async def _chat_completion_wrapper(self, **kwargs: Any) -> ChatCompletion:
        self.calls.append(("chat", kwargs))
        if self.fails:
            self.fails -= 1
            raise OSError("a busy day")
        return create_chat_completion("yes", kwargs.get("n") or 1)

    async def _completion_wrapper(self, **kwargs: Any) -> Completion:
        self.calls.append(("completion", kwargs))
        return create_completion("yes", kwargs.get("n") or 1)

    async def _tokens_and_logprobs_completion_wrapper(self, **kwargs: Any) -> tuple[list, list, list, list]:
        self.calls.append(("tokens", kwargs))
        n = kwargs.get("n") or 1
        return kwargs["input_ids"], [SAMPLED] * n, [LOGPROBS] * n, [{"type": "stop"}] * n

    async def _get_logprobs_wrapper(self, **kwargs: Any) -> dict[str, Any]:
        self.calls.append(("logprobs", kwargs))
        return {"prompt_tokens": [1], "prompt_topk_token_ids": [[1]], "prompt_topk_logprobs": [[-0.1]]}


class OldServerEnv(CountingEnv):
    server_cls = OldServer


def old_servers(count: int = 1, **fields: Any) -> list[APIServerConfig]:
    return [APIServerConfig(model_name="old", base_url=f"http://nowhere:{port}/v1", **fields) for port in range(count)]


async def test_its_wrappers_get_the_arguments_of_a_call_and_the_model() -> None:
    reasoning = ReasoningConfig(enabled=True, effort="high")
    manager = ServerManager(old_servers(), server_class=OldServer, reasoning_config=reasoning)
    server: Any = manager.servers[0]
    chat = await manager.chat_completion(messages=[{"role": "user", "content": "?"}], n=2, split="eval")
    text = await manager.completion(prompt="?")
    tokens = await manager.tokens_and_logprobs_completion(input_ids=[1, 2], n=2, max_tokens=3)
    await manager.get_logprobs(prompt="?")
    await manager.close()
    assert [len(chat.choices), text.choices[0].text] == [2, "yes"]
    assert tokens == ([1, 2], [SAMPLED] * 2, [LOGPROBS] * 2, ["stop"] * 2)
    assert [name for name, _ in server.calls] == ["chat", "completion", "tokens", "logprobs"]
    assert all(given["model"] == "old" and "split" not in given for _, given in server.calls)
    assert server.calls[0][1]["extra_body"] == {"reasoning": {"enabled": True, "effort": "high"}}
    assert server.calls[2][1] == {"model": "old", "input_ids": [1, 2], "n": 2, "max_tokens": 3}


async def test_what_a_hook_raises_is_tried_again_and_at_last_a_servers_failure() -> None:
    quick = RetryPolicy(attempts=3, base_s=0.01)
    manager = ServerManager(old_servers(health_check=False), server_class=OldServer, retry=quick)
    server: Any = manager.servers[0]
    server.fails = 2
    await manager.chat_completion(messages=[])
    server.fails = 3
    with pytest.raises(RetryableServerError, match=r"failed 3 times.*http://nowhere:0/v1: a busy day"):
        await manager.chat_completion(messages=[])
    await manager.close()


async def test_no_call_goes_to_a_server_that_its_status_task_finds_unhealthy() -> None:
    class Unhealthy(OldServer):
        async def check_server_status_task(self, chat_completion: bool = True) -> None:
            self.server_healthy = self.config.base_url.endswith(":1/v1")

    manager = ServerManager(old_servers(2), server_class=Unhealthy)
    servers: list[Any] = list(manager.servers)
    for _ in range(4):
        await manager.completion(prompt="?")
    assert [len(server.calls) for server in servers] == [0, 4]
    assert [server.server_healthy for server in servers] == [False, True]
    await manager.close()


async def test_a_status_task_that_raises_is_a_failed_check_and_begins_again() -> None:
    class Flaky(OldServer):
        async def check_server_status_task(self, chat_completion: bool = True) -> None:
            self.checks += 1
            if self.checks == 1:
                raise OSError("no route")
            self.server_healthy = True

    server = Flaky(old_servers()[0])
    assert await server.probe() == "http://nowhere:0/v1: no route"
    assert await server.probe() is None
    await server.close()


async def test_it_serves_a_trainer(tmp_path: Path) -> None:
    async with running_api() as api:
        env = OldServerEnv(config(tmp_path, api.url), old_servers())
        server: Any = env.server.servers[0]
        trainer = await served(env, Trainer(api.url, batch_size=4, num_steps=2), 2)
    item = trainer.batches[0][0]
    assert [token for token in item["masks"][0] if token != -100] == SAMPLED
    assert item["inference_logprobs"][0][-3:] == LOGPROBS
    checks = server.checks
    await asyncio.sleep(0.1)
    assert server.checks == checks > 1  # its status task has ended with the run


async def test_it_fills_files(tmp_path: Path) -> None:
    path = tmp_path / "groups.jsonl"
    settings = config(tmp_path, "", total_steps=2, data_path_to_save_groups=str(path))
    await asyncio.wait_for(process(OldServerEnv(settings, old_servers())), 20)
    groups = [json.loads(line) for line in path.read_text().splitlines()]
    assert [len(group["tokens"]) for group in groups] == [4, 4]
