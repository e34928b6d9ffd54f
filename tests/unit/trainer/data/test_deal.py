"""Which rank computes which sequences: every rank makes as many passes, and little is computed twice."""

import random

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from example_trainer.data.batching import Sequence
from example_trainer.data.packing import deal, micro_batches, pack

CPU = torch.device("cpu")
lengths_of_a_batch = st.lists(st.integers(1, 50), min_size=1, max_size=60)
ranks_of_a_trainer = st.integers(1, 5)
budgets = st.integers(1, 120)


def tokens(lengths: list[int], members: list[int]) -> int:
    return sum(lengths[index] for index in members)


@given(lengths_of_a_batch, ranks_of_a_trainer, budgets)
def test_every_sequence_is_dealt_once_within_the_budget(lengths: list[int], ranks: int, budget: int) -> None:
    shares = deal(lengths, ranks, budget)
    assert sorted(index for share in shares for members in share for index in members) == list(range(len(lengths)))
    assert all(len(members) <= 1 or tokens(lengths, members) <= budget for share in shares for members in share)


@given(lengths_of_a_batch, ranks_of_a_trainer, budgets)
def test_every_rank_makes_as_many_passes_and_no_more_than_packing_needs(
    lengths: list[int], ranks: int, budget: int
) -> None:
    shares = deal(lengths, ranks, budget)
    assert len(shares) == ranks
    assert {len(share) for share in shares} == {-(-len(pack(lengths, budget)) // ranks)}


@given(lengths_of_a_batch, ranks_of_a_trainer, budgets)
def test_ranks_that_deal_by_themselves_agree(lengths: list[int], ranks: int, budget: int) -> None:
    assert deal(lengths, ranks, budget) == deal(list(lengths), ranks, budget)


@given(lengths_of_a_batch, budgets)
def test_one_rank_packs_as_it_always_did(lengths: list[int], budget: int) -> None:
    assert deal(lengths, 1, budget) == [pack(lengths, budget)]


@given(lengths_of_a_batch, st.integers(2, 5), budgets)
def test_no_rank_is_without_work_that_another_could_share(lengths: list[int], ranks: int, budget: int) -> None:
    bins = [members for share in deal(lengths, ranks, budget) for members in share]
    assert all(bins) or all(len(members) <= 1 for members in bins)


def test_few_passes_are_copies_and_ranks_wait_little() -> None:
    dummies = passes = 0
    waits = []
    for seed in range(300):
        generator = random.Random(seed)
        lengths = [generator.randint(200, 1200) for _ in range(64)]
        ranks = generator.choice([2, 3, 4])
        shares = deal(lengths, ranks, 4096)
        sums = [sum(tokens(lengths, members) for members in share) for share in shares]
        waits.append(max(sums) / (sum(sums) / ranks) - 1)
        passes += sum(map(len, shares))
        dummies += sum(not members for share in shares for members in share)
    assert dummies == 0  # of "first fit, then deal" one in six
    assert passes > 3000
    assert max(waits) < 0.05
    assert sum(waits) / len(waits) < 0.01


def make_sequence(length: int, value: float) -> Sequence:
    return Sequence(
        tokens=np.full(length, 1),
        trained=np.arange(length) > 0,
        sampler_logprobs=np.full(length, value, np.float32),
        advantages=np.ones(length, np.float32),
        reference_logprobs=None,
        temperature=1.0,
    )


@given(st.lists(st.integers(2, 40), min_size=1, max_size=12), ranks_of_a_trainer, budgets)
def test_what_ranks_count_is_every_sequence_once(lengths: list[int], ranks: int, budget: int) -> None:
    sequences = [make_sequence(length, float(place)) for place, length in enumerate(lengths)]
    shares = [micro_batches(sequences, budget, CPU, rank, ranks) for rank in range(ranks)]
    assert len({len(share) for share in shares}) == 1
    counted = torch.cat([batch.sampler_logprobs for share in shares for batch in share if batch.counted])
    expected = torch.cat([torch.full((length - 1,), float(place)) for place, length in enumerate(lengths)])
    assert torch.equal(counted.sort().values, expected)
    copies = [batch for share in shares for batch in share if not batch.counted]
    assert all(sum(batch.lengths) == min(lengths) - 1 for batch in copies)  # the cheapest that there is
