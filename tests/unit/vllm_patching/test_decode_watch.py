"""The logits that are kept are those of the watched requests' steps, and no others."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_patching.decode_watch import DecodeWatch, Watched

VOCABULARY = 5


class Model:
    """Its logits count the calls, so that no two rows are alike."""

    def __init__(self) -> None:
        self.calls = 0

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return hidden[:, None] * 100 + torch.arange(VOCABULARY) + 1000 * self.calls


def step(**tokens: tuple[int, int]) -> Any:
    """A step in which each request has (tokens computed before, tokens of this step)."""
    first = {name: each for name, each in tokens.items() if each[0] == 0}
    later = {name: each for name, each in tokens.items() if each[0] > 0}
    return SimpleNamespace(
        num_scheduled_tokens={name: count for name, (_, count) in tokens.items()},
        scheduled_new_reqs=[SimpleNamespace(req_id=name, num_computed_tokens=0) for name in first],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(later), num_computed_tokens=[computed for computed, _ in later.values()]
        ),
    )


def run(watch: DecodeWatch, model: Any, order: list[str], **tokens: tuple[int, int]) -> torch.Tensor:
    """One forward pass whose rows have this order; its logits, as they were before the sampler wrote into them."""
    watch.begin(step(**tokens))
    logits: torch.Tensor = model.compute_logits(torch.arange(len(order), dtype=torch.float32))
    before = logits.clone()
    model.compute_logits(torch.zeros(7))  # of prompts' log-probabilities
    logits.zero_()
    watch.end(SimpleNamespace(req_ids=order))
    return before


def values(raw: list[bytes]) -> list[list[float]]:
    return [torch.frombuffer(bytearray(row), dtype=torch.float32).tolist() for row in raw]


def test_rows_of_the_steps_are_kept_whatever_the_order_of_the_batch() -> None:
    model = Model()
    watch = DecodeWatch(model)
    watch.watch({"probe-a": Watched(3, (0, 2)), "probe-b": Watched(4, (1,))})
    names = {"a": "probe-a-7f", "b": "probe-b-11", "other": "chat-1"}  # vLLM extends ids
    a, b, other = names.values()
    first = run(watch, model, [other, a], **{a: (0, 3), other: (0, 9)})
    run(watch, model, [b, a, other], **{b: (0, 2), a: (3, 1), other: (9, 1)})  # b's prompt in two parts
    third = run(watch, model, [a, b], **{b: (2, 2), a: (4, 1)})
    fourth = run(watch, model, [b, a], **{b: (4, 1), a: (5, 1)})
    taken = watch.taken()
    assert values(taken["probe-a"]) == [first[1].tolist(), third[0].tolist()]
    assert values(taken["probe-b"]) == [fourth[0].tolist()]
    assert watch.taken() == {}


def test_a_step_that_was_not_seen_is_an_error_and_a_rank_that_saw_none_says_nothing() -> None:
    model = Model()
    watch = DecodeWatch(model)
    watch.watch({"probe-a": Watched(3, (0, 1))})
    run(watch, model, ["probe-a"], **{"probe-a": (0, 3)})
    with pytest.raises(RuntimeError, match=r"1 of the watched steps were not seen, among them \('probe-a', 1\)"):
        watch.taken()
    watch.watch({"probe-b": Watched(3, (0,))})
    assert watch.taken() == {}


def test_rows_of_drafts_are_not_taken_for_a_requests_own() -> None:
    model = Model()
    watch = DecodeWatch(model)
    watch.watch({"probe-a": Watched(3, (0,))})
    watch.begin(step(**{"probe-a": (0, 3)}))
    model.compute_logits(torch.zeros(2))
    watch.end(SimpleNamespace(req_ids=["probe-a"]))
    assert watch.taken() == {}


def test_an_output_that_is_still_being_copied_is_read_through() -> None:
    model = Model()
    watch = DecodeWatch(model)
    for name in ("_model_runner_output", "model_runner_output"):
        watch.watch({"probe-a": Watched(3, (0,))})
        watch.begin(step(**{"probe-a": (0, 3)}))
        model.compute_logits(torch.zeros(1))
        watch.end(SimpleNamespace(**{name: SimpleNamespace(req_ids=["probe-a"])}))
        assert len(watch.taken()["probe-a"]) == 1
