"""What conversations read on two vLLM servers: each turn at the server of the turn before, or at the least loaded one.

    python -m benchmarks.session_routing [--conversations 16] [--turns 6] [--rounds 2] [--pause 1]

Two real vLLM servers with the quickstart's model serve eight conversations at a time, through an environment's own
client: `managed_server`, whose requests stay with one server while it lives, against single calls, which go to the
server with the most free slots. Each turn sends the whole conversation so far. Before each but the first something else
takes a while, as a tool does: without a pause the most slots are free where the turn before has just ended, and both
arms are one. The servers count the prompt tokens that they find in their caches; the rest is computed. Arms alternate,
with other conversations in each round and arm. Prints what each has seen.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any, Literal

import httpx
import torch
from pydantic import Field

from atroposlib.config import Config, load_config
from atroposlib.envs.server_handling.server_config import APIServerConfig
from atroposlib.envs.server_handling.server_manager import ServerManager
from atroposlib.logs import configure_logging
from atroposlib.utils.tokenizers import load_tokenizer
from benchmarks.shared.vllm_server import free_port, vllm_server
from example_trainer.quickstart_model import cached_model

Arm = Literal["sticky", "least loaded"]
ARMS: tuple[Arm, ...] = ("sticky", "least loaded")
AT_ONCE = 8
PROMPT_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 256, 32, 16


class Flags(Config):
    """Measure what staying with one server saves."""

    conversations: int = Field(16, ge=1, description="Conversations of each arm and round.")
    turns: int = Field(6, ge=1, description="Turns of each conversation.")
    rounds: int = Field(2, ge=1, description="Rounds of both arms.")
    pause: float = Field(1.0, ge=0, description="Most seconds between two turns, each as likely as the others.")


async def converse(manager: ServerManager, tokenizer: Any, arm: Arm, seed: int, flags: Flags) -> None:
    """Ask for each turn of one conversation."""
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(100, 40_000, (PROMPT_TOKENS,), generator=draw).tolist()
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(manager.managed_server(tokenizer)) if arm == "sticky" else None
        for turn in range(flags.turns):
            if turn:
                await asyncio.sleep(flags.pause * float(torch.rand((), generator=draw)))
            route = manager if client is None else client.server
            sampled = await route.sample_tokens(input_ids=tokens, max_tokens=ANSWER_TOKENS, ignore_eos=True)
            question = torch.randint(100, 40_000, (QUESTION_TOKENS,), generator=draw).tolist()
            tokens = [*tokens, *sampled.sequences[0].token_ids, *question]


async def counted(ports: list[int]) -> tuple[int, int]:
    """Return the prompt tokens of all servers so far, and those of them that were found in a cache."""
    async with httpx.AsyncClient(trust_env=False) as client:
        replies = [(await client.get(f"http://127.0.0.1:{port}/v1/bridge/activity")).json() for port in ports]
    return sum(each["prompt_tokens"] for each in replies), sum(each["cached_tokens"] for each in replies)


@contextlib.asynccontextmanager
async def two_servers(model: str) -> AsyncIterator[list[int]]:
    """Start both, and end them."""
    with contextlib.ExitStack() as stack:
        ports = []
        for _ in range(2):
            ports.append(free_port())
            stack.enter_context(vllm_server(model, ports[-1], ["--max-model-len", "1024"]))
        yield ports


async def measure(flags: Flags) -> None:
    """Run both arms in turn."""
    model = str(cached_model())
    tokenizer = load_tokenizer(model)
    async with two_servers(model) as ports:
        configs = [
            APIServerConfig(server_type="vllm", base_url=f"http://127.0.0.1:{port}/v1", model_name=model)
            for port in ports
        ]
        async with contextlib.aclosing(ServerManager(configs)) as manager:
            slots = asyncio.Semaphore(AT_ONCE)

            async def one(arm: Arm, seed: int) -> None:
                async with slots:
                    await converse(manager, tokenizer, arm, seed, flags)

            for number in range(2 * flags.rounds):
                arm = ARMS[(number + number // 2) % 2]  # sticky, least loaded, least loaded, sticky, ...
                before, start = await counted(ports), time.monotonic()
                seeds = range(1000 * number, 1000 * number + flags.conversations)
                await asyncio.gather(*(one(arm, seed) for seed in seeds))
                asked, cached = (after - old for after, old in zip(await counted(ports), before, strict=True))
                print(
                    f"Round {number // 2 + 1}, {arm}: {time.monotonic() - start:.1f} s, {asked - cached} of {asked}"
                    f" prompt tokens computed ({(asked - cached) / asked:.2f})",
                    flush=True,
                )


def main() -> None:
    flags = load_config(Flags, prog="session_routing")
    configure_logging("benchmark")
    asyncio.run(measure(flags))


if __name__ == "__main__":
    main()
