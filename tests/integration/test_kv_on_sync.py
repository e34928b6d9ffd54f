"""What a real vLLM's KV cache keeps over a sync, with --kv-on-sync reset, keep and salt.

A conversation's turns carry its X-Session-ID. The server itself counts the tokens that it read and found.
"""

import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from atroposlib.wire.sessions import SESSION_HEADER
from tests.client import http
from tests.integration.conftest import AUTHORIZED, Server, start_server, stop_server
from tests.integration.test_bridge import finish, read_until, start_child
from tests.waiting import wait_until
from vllm_patching.compat import vllm_engine  # noqa: F401  # before a test's time limit begins

PROMPT = [5 + i % 50 for i in range(200)]
BLOCKS = 192  # tokens of PROMPT in whole blocks of 32
LONG = 280


class Sampler:
    """A server, a trainer that syncs when told, and what requests found in the cache."""

    def __init__(self, server: Server, trainer: subprocess.Popen[str]) -> None:
        self.server = server
        self._trainer = trainer
        self.version = 0

    def sync(self) -> None:
        assert self._trainer.stdin is not None
        print(file=self._trainer.stdin, flush=True)
        self.version += 1
        read_until(self._trainer, f"SYNCED {self.version}")

    def counted(self) -> dict[str, int]:
        found: dict[str, int] = self.server.request("GET", "/v1/bridge/activity").json()
        return found

    def ask(self, prompt: list[int], session: str | None = None, **sampling: Any) -> dict[str, Any]:
        headers = AUTHORIZED if session is None else AUTHORIZED | {SESSION_HEADER: session}
        body = {"prompt": {"prompt_token_ids": prompt}, "max_tokens": 4, "ignore_eos": True, **sampling}
        reply = http.request("POST", f"{self.server.url}/generate", headers=headers, json=body, timeout=120)
        assert reply.status_code == 200, reply.text
        generated: dict[str, Any] = reply.json()
        return generated

    def cached(self, prompt: list[int], session: str | None = None) -> int:
        """Tokens of `prompt` that were in the cache, of a request that is alone."""
        before = self.counted()
        reply = self.ask(prompt, session)
        assert reply["policy_versions"] == [[self.version, self.version]]
        wait_until(lambda: self.counted()["prompt_tokens"] == before["prompt_tokens"] + len(prompt))
        return self.counted()["cached_tokens"] - before["cached_tokens"]

    def interrupted(self) -> tuple[int, list[list[int]]]:
        """A sequence that a sync overtakes: its tokens that were read again, and the spans of its versions."""
        with ThreadPoolExecutor(1) as pool:
            for _ in range(5):
                before = self.counted()
                under_way = pool.submit(self.ask, PROMPT, max_tokens=LONG)
                wait_until(lambda: self.counted()["prompt_tokens"] > before["prompt_tokens"])  # noqa: B023
                self.sync()
                spans: list[list[int]] = under_way.result()["version_spans"][0]
                if len(spans) > 1:
                    return self.counted()["tokens_again"] - before["tokens_again"], spans
        raise AssertionError("no sync came in the middle of a sequence")


@pytest.fixture(params=["salt", pytest.param("keep", marks=pytest.mark.nightly), "reset"])
def sampler(request: pytest.FixtureRequest, llama_folder: Path, tmp_path: Path) -> Iterator[tuple[str, Sampler]]:
    kept: str = request.param
    flags = () if kept == "reset" else ("--kv-on-sync", kept)
    shared = request.getfixturevalue("vllm_server") if kept == "reset" else None
    server = shared or start_server(llama_folder, tmp_path, *flags)
    trainer = start_child(server, "told 120")
    try:
        read_until(trainer, "SYNCED 0")
        yield kept, Sampler(server, trainer)
        assert trainer.stdin is not None
        trainer.stdin.close()
        code, _, err = finish(trainer)  # which compares weights and log-probabilities
        assert code == 0, err[-2000:]
    finally:
        trainer.kill()
        trainer.wait()
        if shared is None:
            stop_server(server)


@pytest.mark.rotating
@pytest.mark.timeout(600)
def test_what_requests_find_in_the_cache_after_a_sync(sampler: tuple[str, Sampler]) -> None:
    kept, vllm = sampler
    assert vllm.server.status()["kv_on_sync"] == kept
    vllm.sync()
    assert vllm.cached(PROMPT, "a") == 0
    assert vllm.cached(PROMPT, "b") == BLOCKS  # of the same version
    vllm.sync()
    assert vllm.cached(PROMPT, "c") == {"reset": 0, "keep": BLOCKS, "salt": 0}[kept]  # a new conversation
    vllm.sync()
    assert vllm.cached([*PROMPT, 7, 8, 9], "a") == {"reset": 0, "keep": BLOCKS, "salt": BLOCKS}[kept]  # its next turn
    read_again, spans = vllm.interrupted()
    assert [version for _, version in spans] == [vllm.version - 1, vllm.version]
    assert (read_again > len(PROMPT)) == (kept == "reset"), read_again
    assert kept == "reset" or read_again == 0
