"""Tokens that vLLM draws on CPUs: each as often as its probability says, by its row and its number alone."""

import pytest
import torch
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

from vllm_patching.compat import vllm_engine
from vllm_patching.sampling.draws import BLOCK, draw_tokens

pytestmark = pytest.mark.services  # vLLM asks the machine for its cores

LAST = 1 - 2**-53  # the greatest float64 below 1


def rows(count: int, vocabulary: int) -> torch.Tensor:
    logits = torch.randn(count, vocabulary, generator=torch.Generator().manual_seed(5)) * 3
    return logits.softmax(-1)


def numbers(*each: float) -> torch.Tensor:
    return torch.tensor(each, dtype=torch.float64)


@pytest.mark.parametrize("vocabulary", [7, BLOCK, 3 * BLOCK, 3 * BLOCK + 1, 1000])
def test_each_token_is_drawn_as_often_as_its_probability_says(vocabulary: int) -> None:
    draws = 1 << 16
    probabilities = rows(1, vocabulary)
    uniform = (torch.arange(draws, dtype=torch.float64) + 0.5) / draws
    drawn = torch.bincount(draw_tokens(probabilities.expand(draws, -1), uniform), minlength=vocabulary)
    assert (drawn - probabilities[0] * draws).abs().max() <= 1.1


def test_a_row_draws_what_it_would_draw_alone_whatever_the_threads() -> None:
    probabilities = rows(64, 49_152)
    uniform = torch.rand(64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    together = draw_tokens(probabilities, uniform)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1 if threads > 1 else 2)
        alone = [draw_tokens(probabilities[row : row + 1], uniform[row : row + 1]).item() for row in range(64)]
    finally:
        torch.set_num_threads(threads)
    assert together.tolist() == alone


@pytest.mark.parametrize("number", [0.0, 0.5, LAST])
@pytest.mark.parametrize("kept", [(0,), (700,), (999,), (BLOCK - 1, BLOCK), (300, 301, 900)])
def test_what_top_p_took_away_is_never_drawn(kept: tuple[int, ...], number: float) -> None:
    probabilities = torch.zeros(1, 1000)
    probabilities[0, list(kept)] = torch.tensor([0.1, 0.7, 0.2])[: len(kept)]
    assert draw_tokens(probabilities, numbers(number)).item() in kept


def test_a_rare_token_is_drawn_between_the_sums_before_and_after_it() -> None:
    probabilities = torch.zeros(1, 1000)
    probabilities[0, 10], probabilities[0, 500] = 1.0, 1e-12
    drawn = draw_tokens(probabilities.expand(2, -1), numbers(1 - 3e-12, 1 - 5e-13))
    assert drawn.tolist() == [10, 500]


def test_a_row_that_is_not_a_number_gives_a_token_and_leaves_others_alone() -> None:
    probabilities = rows(2, 1000)
    alone = draw_tokens(probabilities[1:], numbers(0.3)).item()
    probabilities[0] = torch.nan
    broken, whole = draw_tokens(probabilities, numbers(0.3, 0.3)).tolist()
    assert 0 <= broken < 1000
    assert whole == alone


def test_a_request_with_a_seed_draws_by_it_beside_requests_without() -> None:
    vllm_engine.draw_by_inversion()
    sampler = TopKTopPSampler("processed_logprobs")
    logits = rows(1, 1000).log()

    def drawn(batch: int, row: int) -> int:
        seeded = {row: torch.Generator().manual_seed(11)}
        tokens, logprobs = sampler.forward(logits.expand(batch, -1).clone(), seeded, None, None)
        torch.testing.assert_close(logprobs, logits.expand(batch, -1))
        return int(tokens[row])

    assert len({drawn(1, 0), drawn(5, 0), drawn(5, 4)}) == 1


def test_requests_without_a_seed_draw_different_tokens() -> None:
    vllm_engine.draw_by_inversion()
    tokens, _ = TopKTopPSampler("raw_logprobs").forward(rows(64, 1000).log(), {}, None, None)
    assert len(set(tokens.tolist())) > 20


def test_requests_with_top_p_or_top_k_draw_of_what_these_keep() -> None:
    vllm_engine.draw_by_inversion()
    sampler = TopKTopPSampler("processed_logprobs")
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(64, -1)
    top_p, top_k = torch.full((64,), 0.7), torch.full((64,), 3)
    kept = [
        set(sampler.forward(logits.clone(), {}, k, p)[0].tolist())
        for k, p in ((None, top_p), (top_k, None), (top_k, top_p))
    ]
    assert kept == [{0, 1}, {0, 1, 2}, {0, 1}]
