"""Our recorder of routed experts, between vLLM's own recorder and its scheduler's half; the model and its runner are
fakes whose tokens have experts of their own.
"""

import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed.aux_output_connector import worker as vllm_worker
from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector
from vllm.model_executor.layers.fused_moe import routed_experts_capturer
from vllm.platforms import current_platform

from vllm_patching.compat import vllm_engine
from vllm_patching.routing import RoutingRecorder

LAYERS, TOP_K, EXPERTS, BLOCK = 3, 2, 300, 4
MOE_LAYERS = (0, 2)


def experts_of(tokens: list[int]) -> NDArray[np.int64]:
    """[tokens, layers, top_k]; the layer between has none."""
    layers, ranks = np.arange(LAYERS)[:, None], np.arange(TOP_K)
    found: NDArray[np.int64] = (np.asarray(tokens)[:, None, None] + 10 * layers + ranks) % EXPERTS
    found[:, 1] = 0
    return found


class Router(nn.Module):
    """A layer of the kind that vLLM's recorder finds by its two names."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer_id = layer
        self.capture_fn: Any = None


class Request:
    """A request as the scheduler knows it; blocks are named by the tokens up to their end."""

    def __init__(self, name: str, prompt: list[int]) -> None:
        self.request_id, self.tokens, self.num_prompt_tokens = name, list(prompt), len(prompt)
        self.computed, self.rows, self.finished = 0, [np.empty((0, LAYERS, TOP_K), int)], False
        self.sampling_params = SimpleNamespace(routed_experts_prompt_start=0)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def block_hashes(self) -> list[bytes]:
        ends = range(BLOCK, len(self.tokens) + 1, BLOCK)
        return [hash(tuple(self.tokens[:end])).to_bytes(8, "little", signed=True) for end in ends]

    def is_finished(self) -> bool:
        return self.finished


class Engine:
    """Steps of a scheduler and of one worker around a model that samples the next number."""

    def __init__(self) -> None:
        self.routers = nn.ModuleList([Router(layer) for layer in MOE_LAYERS])
        config: Any = SimpleNamespace(
            model_config=SimpleNamespace(
                get_total_num_hidden_layers=lambda: LAYERS,
                get_num_experts=lambda: EXPERTS,
                get_num_experts_per_tok=lambda: TOP_K,
                hf_text_config=SimpleNamespace(model_type="fake"),
            ),
            parallel_config=SimpleNamespace(data_parallel_rank=0, tensor_parallel_size=1),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=64, max_num_seqs=8),
            aux_output_config=SimpleNamespace(max_bytes=None),
            max_concurrent_batches=1,
        )
        self.connector = vllm_worker.get_aux_output_connector(self.routers, config, SimpleNamespace(num_blocks=64))  # type: ignore[arg-type]
        self.recorder = RoutingRecorder(self.connector)
        self.scheduler = AuxOutputSchedulerConnector()
        self.requests: dict[str, Request] = {}

    def step(self, scheduled: dict[str, int]) -> None:
        """Compute so many tokens of each request, and sample where a request's last token was read."""
        metadata = self.scheduler.build_connector_meta(
            SimpleNamespace(num_scheduled_tokens=scheduled),  # type: ignore[arg-type]
            self.requests,  # type: ignore[arg-type]
        )
        batch = [self.requests[name] for name in scheduled]
        self.recorder.begin(SimpleNamespace(num_scheduled_tokens=scheduled), metadata)
        fed = [each.tokens[each.computed : each.computed + scheduled[each.request_id]] for each in batch]
        ids = experts_of([token for tokens in fed for token in tokens])
        for router in self.routers:
            router.capture_fn(torch.from_numpy(ids[:, router.layer_id]))  # type: ignore[operator, index]
        starts = np.array([each.computed for each in batch])
        ends = [each.computed + scheduled[each.request_id] for each in batch]
        sampled = [
            [each.tokens[-1] + 7] if end == each.num_tokens else [] for each, end in zip(batch, ends, strict=True)
        ]
        output = SimpleNamespace(req_ids=list(scheduled), sampled_token_ids=sampled)
        runner = SimpleNamespace(input_batch=SimpleNamespace(num_computed_tokens_cpu=np.append(starts, 99)))
        rows = self.recorder.rows_of(runner, output)
        for each, end, new in zip(batch, ends, sampled, strict=True):
            each.computed = end
            each.tokens += new
            if new:
                taken = self.scheduler.take_output(each, rows)  # type: ignore[arg-type]
                assert taken is not None
                each.rows.append(taken)

    def add(self, name: str, prompt: list[int], cached: int = 0) -> Request:
        self.requests[name] = request = Request(name, prompt)
        request.computed = cached
        return request

    def finish(self, request: Request) -> None:
        request.finished = True
        self.scheduler.request_finished(request)  # type: ignore[arg-type]
        del self.requests[request.request_id]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setattr(vllm_worker, "get_tp_group", lambda: SimpleNamespace(is_first_rank=True))
    monkeypatch.setattr(vllm_worker, "resolve_kv_cache_block_sizes", lambda *arguments: (BLOCK, BLOCK))
    no_ranks = SimpleNamespace(dp_metadata=None)
    monkeypatch.setattr(routed_experts_capturer, "get_forward_context", lambda: no_ranks)
    made = Engine()
    yield made
    made.connector.close()


def check(request: Request) -> None:
    assert np.array_equal(np.concatenate(request.rows), experts_of(request.tokens[:-1]))


def test_prompts_read_in_parts_beside_others_have_the_experts_of_all_their_tokens(engine: Engine) -> None:
    long, short = engine.add("long", list(range(100, 111))), engine.add("short", [5, 6, 7])
    engine.step({"long": 6})
    engine.step({"short": 3, "long": 5})
    for _ in range(6):
        engine.step({"long": 1, "short": 1})
    check(long)
    check(short)
    assert len(np.concatenate(long.rows)) == 11 + 6


def test_tokens_of_the_prefix_cache_have_the_experts_that_computed_them(engine: Engine) -> None:
    prompt = list(range(50, 62))
    first = engine.add("first", prompt)
    engine.step({"first": 12})
    check(first)
    again, sibling = engine.add("again", [*prompt[:8], 1, 2], cached=8), engine.add("sibling", prompt, cached=8)
    engine.step({"again": 2, "sibling": 4, "first": 1})
    for each in (first, again, sibling):
        check(each)
    engine.finish(first)
    late = engine.add("late", [*prompt, 3], cached=12)
    engine.step({"late": 1, "again": 1})
    check(late)
    check(again)


def test_a_preempted_request_keeps_what_it_returned_and_adds_what_comes_after(engine: Engine) -> None:
    one, other = engine.add("one", list(range(9))), engine.add("other", [40, 41])
    engine.step({"one": 9, "other": 2})
    engine.step({"one": 1, "other": 1})
    one.computed = 0  # preempted: its blocks are gone
    engine.scheduler.request_finished(one)  # type: ignore[arg-type]  # as vLLM's scheduler does
    engine.step({"other": 1})
    engine.step({"one": one.num_tokens, "other": 1})
    engine.step({"one": 1, "other": 1})
    check(one)
    check(other)


def test_a_reset_of_the_cache_forgets_its_rows(engine: Engine) -> None:
    request = engine.add("before", list(range(8)))
    engine.step({"before": 8})
    engine.finish(request)
    engine.scheduler.reset()
    after = engine.add("after", [*range(8), 9])
    engine.step({"after": 9})
    check(after)


def test_a_step_without_tokens_returns_nothing(engine: Engine) -> None:
    engine.recorder.begin(
        SimpleNamespace(num_scheduled_tokens={}),
        engine.scheduler.build_connector_meta(SimpleNamespace(num_scheduled_tokens={}), {}),  # type: ignore[arg-type]
    )
    assert engine.recorder.rows_of(SimpleNamespace(), SimpleNamespace(req_ids=[])) is None


def test_vllm_cpu_takes_the_flag_and_refuses_what_it_refuses_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    # another test of this process may have loaded the plugin
    stock = inspect.unwrap(VllmConfig._verify_aux_output_compatibility)
    monkeypatch.setattr(VllmConfig, "_verify_aux_output_compatibility", stock)  # put back after the test
    dense: Any = SimpleNamespace(
        aux_output_config=SimpleNamespace(enabled=True),
        use_v2_model_runner=False,
        model_config=SimpleNamespace(runner_type="generate", is_moe=False),
    )
    vllm_engine.accept_routed_experts()
    vllm_engine.accept_routed_experts()
    with pytest.raises(ValueError, match="only supports MoE models"):
        VllmConfig._verify_aux_output_compatibility(dense)
    assert not current_platform.is_out_of_tree()
    with pytest.raises(ValueError, match="requires Model Runner V2"):
        stock(dense)
