"""What top-k and top-p keep: by the likeliest tokens alone, as by sorting all, and as vLLM's own function does."""

import math

import pytest
import torch
from torch import Tensor

from vllm_patching.sampling import truncation
from vllm_patching.sampling.truncation import without_excluded

ALL = 1 << 20
ROWS = [  # top-k, top-p
    (ALL, 1.0),
    (ALL, 0.95),
    (ALL, 0.5),
    (ALL, 1e-9),
    (ALL, 0.9999),
    (1, 1.0),
    (5, 1.0),
    (5, 0.6),
    (16, 0.9),
    (17, 0.9),
    (200, 1.0),
    (200, 0.99),
    (ALL, 1e-300),  # 0 in float32
    (5, 1e-300),
]


def rows(vocabulary: int, scale: float = 3.0, count: int = len(ROWS)) -> Tensor:
    return torch.randn(count, vocabulary, generator=torch.Generator().manual_seed(4)) * scale


def kept(logits: Tensor, top_k: int, top_p: float) -> set[int]:
    """The rule in Python's floats: the likeliest k with their equals, of those the likeliest until they reach p."""
    order = sorted(range(len(logits)), key=lambda token: -logits[token].item())
    least = logits[order[min(top_k, len(order)) - 1]].item()
    order = [token for token in order if logits[token].item() >= least]
    shares = [math.exp(logits[token].item() - logits[order[0]].item()) for token in order]
    total, before, result = sum(shares), 0.0, set()
    for token, share in zip(order, shares, strict=True):
        if top_p < 1 and before >= top_p * total:
            break
        result.add(token)
        before += share
    return result


def of(values: list[tuple[int, float]]) -> tuple[Tensor, Tensor]:
    return torch.tensor([k for k, _ in values]), torch.tensor([p for _, p in values])


@pytest.mark.parametrize("candidates", [(16,), (8, 64), (1024, 2048)])
@pytest.mark.parametrize(("vocabulary", "scale"), [(40, 3.0), (1000, 3.0), (1000, 0.3)])
def test_what_is_kept(
    vocabulary: int, scale: float, candidates: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(truncation, "CANDIDATES", candidates)
    logits = rows(vocabulary, scale)
    result = without_excluded(logits.clone(), *of(ROWS))
    for given, row, (top_k, top_p) in zip(logits, result, ROWS, strict=True):
        finite = row.isfinite().nonzero().flatten()
        assert set(finite.tolist()) == kept(given, top_k, top_p)
        assert torch.equal(row[finite], given[finite])


@pytest.mark.parametrize("candidates", [(2,), (1, 4), (1024,)])
def test_tokens_that_equal_the_last_of_top_k_are_kept(
    candidates: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(truncation, "CANDIDATES", candidates)
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 0.0, 2.0]])
    assert without_excluded(logits, *of([(2, 1.0)])).isfinite().tolist() == [[False, True, True, True, False, True]]


def test_a_row_keeps_what_it_would_keep_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(truncation, "CANDIDATES", (16, 128))
    logits, (top_k, top_p) = rows(49_152), of(ROWS)
    together = without_excluded(logits, top_k, top_p)
    for row in range(len(ROWS)):
        one = slice(row, row + 1)
        assert torch.equal(without_excluded(logits[one], top_k[one], top_p[one]), together[one])


def test_what_another_processor_has_masked_stays_masked() -> None:
    logits = rows(1000)
    logits[:, 10:] = -torch.inf
    result = without_excluded(logits, *of(ROWS))
    assert result[:, 10:].isneginf().all()
    assert result[:, :10].isfinite().any(-1).all()


@pytest.mark.services  # vLLM asks the machine for its cores
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_vllms_own_function_keeps_the_same_but_for_its_rounding(scale: float) -> None:
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    logits, (top_k, top_p) = rows(49_152, scale), of(ROWS)
    expected = apply_top_k_top_p_pytorch(logits.clone(), top_k.clamp(max=49_152), top_p, allow_cpu_sync=True)
    differs = without_excluded(logits, top_k, top_p) != expected
    assert (logits.softmax(-1) * differs).sum(-1).max() < 2e-6  # it cumulates 49,152 shares in float32
