"""What /v1/bridge/decode answers: each prompt's tokens and rows of one policy version, or why not."""

from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest
import torch

from atroposlib.wire.bridge import Decoded
from tests.unit.vllm_patching.fake_engine import VOCABULARY, FakeEngine, FakeRank, serving

ROW = torch.arange(VOCABULARY, dtype=torch.float32)


class WatchingRank(FakeRank):
    """Has a row for each step that it was told to watch, if it computes logits."""

    def __init__(self, rank: int, sees: bool = True) -> None:
        super().__init__(rank)
        self.sees = sees
        self.watched: dict[str, tuple[int, list[int]]] = {}

    def bridge_watch(self, requests: dict[str, tuple[int, list[int]]]) -> None:
        self.watched = requests

    def bridge_watched(self) -> dict[str, list[bytes]]:
        if not self.sees:
            return {}
        return {sent: [(ROW + step).numpy().tobytes() for step in steps] for sent, (_, steps) in self.watched.items()}


def engine_of(*ranks: WatchingRank) -> FakeEngine:
    engine = FakeEngine(len(ranks))
    engine.ranks = list(ranks)
    engine.output = SimpleNamespace(outputs=[SimpleNamespace(token_ids=(7, 8, 9))], num_cached_tokens=None)
    return engine


async def decode(engine: FakeEngine, **changes: Any) -> httpx.Response:
    probe = {"prompts": [[5, 6], [4]], "answer_tokens": 3, "steps": [[0, 2], [1]], "cache_salt": "s"} | changes
    async with serving(engine) as client:
        return await client.post("/v1/bridge/decode", json=probe)


async def test_answers_come_with_the_rows_of_their_steps() -> None:
    first = WatchingRank(0)
    reply = await decode(engine_of(first, WatchingRank(1, sees=False)))
    decoded = msgspec.json.decode(reply.content, type=Decoded)
    assert (decoded.policy_version, decoded.token_ids, decoded.cached_tokens) == (0, [[7, 8, 9]] * 2, [0, 0])
    rows = [[torch.frombuffer(bytearray(row), dtype=torch.float32) for row in of_one] for of_one in decoded.logits]
    assert [[float(row[0]) for row in of_one] for of_one in rows] == [[0, 2], [1]]
    assert torch.equal(rows[0][1], ROW + 2)
    assert sorted(watched[0] for watched in first.watched.values()) == [1, 2]  # tokens of the prompts


async def test_a_server_on_which_no_rank_sees_logits_says_so() -> None:
    reply = await decode(engine_of(WatchingRank(0, sees=False)))
    assert reply.status_code == 501
    assert "no rank saw the logits" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"steps": [[0]]}, "steps has 1 lists, expected one for each of 2 prompts"),
        ({"steps": [[0], [3]]}, "steps has 3, expected numbers below answer_tokens=3"),
        ({"prompts": [[5], [VOCABULARY]]}, f"token id {VOCABULARY}, expected ids below {VOCABULARY}"),
        ({"prompts": [[5] * 600, [4]]}, "603 tokens of a prompt with its answer, expected at most 512"),
        ({"prompts": [[5]] * 9}, "length <= 8"),
        ({"prompts": [[], [4]]}, "length >= 1"),
        ({"answer_tokens": 65}, "<= 64"),
        ({"answer_tokens": "three"}, "answer_tokens"),
        ({"more": 1}, "missing or unknown fields"),
    ],
)
async def test_a_probe_that_cannot_be_is_refused_with_value_and_limit(changes: dict[str, Any], says: str) -> None:
    engine = engine_of(WatchingRank(0))
    reply = await decode(engine, **changes)
    assert reply.status_code == 400
    assert says in reply.json()["error"]["message"]
    assert not engine.ranks[0].watched  # type: ignore[attr-defined]
