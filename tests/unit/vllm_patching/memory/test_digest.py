"""The digest probe: one changed word of one rank is found and named, in any dtype; and nothing else is."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from atroposlib.wire.bridge import Bucket, LiveShard, LiveWeights
from example_trainer.bridges.base import BridgeError
from example_trainer.bridges.digest import differing
from example_trainer.weights.source import WeightSource
from tests.unit.vllm_patching.engine_with_workers import EngineWithWorkers
from tests.unit.vllm_patching.memory.test_arena import expected, manifest, new_weights, wire_image
from vllm_patching.engines import engines_of
from vllm_patching.engines.base import Refused, Serving
from vllm_patching.engines.session import Sessions
from vllm_patching.http.gate import Gate
from vllm_patching.memory import digest as digests
from vllm_patching.memory.digest import digest


class Image(WeightSource):
    """A trainer whose weights are a wire image."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        self._image = wire_image(weights)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {tensor.name: tensor.shape for tensor in manifest().tensors}

    def bucket(self, bucket: Bucket) -> torch.Tensor:
        return self._image[bucket.start : bucket.end]


class Server:
    """What the probe asks of a vLLM server, answered by real workers over the model of test_arena."""

    url = "http://vllm"

    def __init__(self, folder: Path, tp: int, weights: dict[str, torch.Tensor]) -> None:
        self.engine = EngineWithWorkers(folder, tp)
        for rank, worker in enumerate(self.engine.workers):
            live = dict(worker._arena._parameters)
            for name, value in expected(weights, rank, tp).items():
                live[name].data[: len(value)] = value
        self.version = 3

    def ask(self, kind: type[LiveWeights], method: str, path: str) -> LiveWeights:
        assert (method, path) == ("GET", "/v1/bridge/digest")
        return LiveWeights(self.version, [worker._arena.digests() for worker in self.engine.workers])


def probe(server: Server, weights: dict[str, torch.Tensor], version: int = 3) -> list[str]:
    return differing(Image(weights), manifest(), server, version)  # type: ignore[arg-type]


@pytest.mark.parametrize("tp", [1, 2])
def test_what_is_served_as_it_was_sent_differs_nowhere(tmp_path: Path, tp: int) -> None:
    assert probe(Server(tmp_path, tp, new_weights()), new_weights()) == []


@pytest.mark.parametrize("tp", [1, 2])
def test_one_element_that_was_missed_on_one_rank_is_named(tmp_path: Path, tp: int) -> None:
    weights = new_weights()
    server = Server(tmp_path, tp, weights)
    arena = server.engine.workers[-1]._arena
    for name, shard in ((name, shard) for name, several in arena.shards.items() for shard in several):
        live = arena._parameters[shard.vllm_name].data.narrow(shard.dim, shard.start, shard.length)
        first = live[(0,) * live.dim()]
        before = first.clone()
        first.view(torch.int32).bitwise_xor_(1)  # the last bit of the part's first number
        assert probe(server, weights) == [name]
        first.copy_(before)
    assert probe(server, weights) == []


def test_rows_that_changed_places_are_seen() -> None:
    rows = torch.randn(6, 4)
    assert digest(rows) != digest(rows[[1, 0, 2, 3, 4, 5]])
    assert digest(rows) == digest(rows.clone())
    assert digest(rows.T) == digest(rows.T.contiguous()) != digest(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_single_bit_counts(dtype: torch.dtype) -> None:
    values = torch.randn(3, 5).to(dtype)
    bits = 8 * values.element_size()
    words = values.view(digests.WORDS[values.element_size()]).flatten()
    found = {digest(values)}
    for place in range(len(words)):
        for bit in range(bits):
            word = words[place].clone()
            words[place] ^= 1 << bit if bit < bits - 1 else -(1 << bit)
            found.add(digest(values))
            words[place] = word
    assert len(found) == 1 + 15 * bits


def test_the_number_does_not_depend_on_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(1000)
    whole = digest(values)
    monkeypatch.setattr(digests, "CHUNK", 7)
    assert digest(values) == whole


def test_zeros_have_a_length() -> None:
    assert len({digest(torch.zeros(length)) for length in range(5)}) == 5


def test_another_version_than_the_one_that_was_synced_is_no_proof(tmp_path: Path) -> None:
    with pytest.raises(BridgeError, match="http://vllm serves policy version 3, not 4"):
        probe(Server(tmp_path, 1, new_weights()), new_weights(), 4)


def test_a_tensor_that_no_rank_holds_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(tmp_path, 1, new_weights())
    asked: Any = server.ask
    name = manifest().tensors[0].name

    def without_one(*arguments: Any) -> LiveWeights:
        live: LiveWeights = asked(*arguments)
        kept: Sequence[LiveShard] = [shard for shard in live.ranks[0] if shard.name != name]
        return LiveWeights(live.policy_version, [list(kept)])

    monkeypatch.setattr(server, "ask", without_one)
    assert probe(server, new_weights()) == [name]


async def test_the_server_answers_with_every_rank(tmp_path: Path) -> None:
    engine = EngineWithWorkers(tmp_path, 2)
    serving = Serving(engine, Gate(), model="m", tp_size=2)
    live = await Sessions(serving, engines_of(serving)).live()
    assert live == LiveWeights(0, [worker._arena.digests() for worker in engine.workers])
    without = Serving(engine, Gate(), model="m", bridge_on=False)
    with pytest.raises(Refused, match="has the weight bridge off"):
        await Sessions(without, engines_of(without)).live()
