"""LoRA's products by adapter against one product per token."""

import pytest
import torch
from torch import Tensor

from vllm_patching import adapter_rows

RANK, WIDTH, OUT = 4, 6, 5


def by_token(inputs: Tensor, weights: Tensor, slots: list[int]) -> Tensor:
    """[rows, out] with zeros where a row has no adapter."""
    return torch.stack(
        [
            weights[slot, 0] @ row if slot >= 0 else torch.zeros(weights.shape[2])
            for row, slot in zip(inputs, slots, strict=True)
        ]
    )


@pytest.mark.parametrize("slots", [[1, 1, 1, 1], [0, 1, -1, 0], [-1, -1, -1, -1]])
def test_each_row_gets_its_own_adapter_or_none(slots: list[int]) -> None:
    torch.manual_seed(0)
    index = torch.tensor(slots)
    inputs, down, up = torch.randn(4, WIDTH), torch.randn(2, 1, RANK, WIDTH), torch.randn(2, 1, OUT, RANK)

    shrunk = torch.zeros(4, RANK)
    adapter_rows.shrink(inputs, down, shrunk, index, 0.5)
    torch.testing.assert_close(shrunk, 0.5 * by_token(inputs, down, slots))

    base = torch.randn(4, OUT)
    added, replaced = base.clone(), base.clone()
    adapter_rows.expand(shrunk, up, added, index)
    torch.testing.assert_close(added, base + by_token(shrunk, up, slots))
    adapter_rows.expand(shrunk, up, replaced, index, add_inputs=False)
    torch.testing.assert_close(replaced, by_token(shrunk, up, slots))


def test_a_slice_leaves_the_columns_beside_it() -> None:
    torch.manual_seed(0)
    slots = [1, -1, 0]
    inputs, up, base = torch.randn(3, RANK), torch.randn(2, 1, OUT, RANK), torch.randn(3, OUT + 3)
    output = base.clone()
    adapter_rows.expand_slice(inputs, up, output, torch.tensor(slots), 2, OUT)
    expected = base.clone()
    expected[:, 2 : 2 + OUT] += by_token(inputs, up, slots)
    torch.testing.assert_close(output, expected)
    assert torch.equal(output[:, :2], base[:, :2])
    assert torch.equal(output[:, 2 + OUT :], base[:, 2 + OUT :])
