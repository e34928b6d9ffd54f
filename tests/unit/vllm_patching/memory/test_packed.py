"""Packed copies of weights: made once, and dropped with the weights they copy."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from vllm_patching.compat import vllm_layers
from vllm_patching.memory import packed
from vllm_patching.memory.packed import PackedLinear, Product


@pytest.fixture(autouse=True)
def _packing() -> Iterator[None]:
    packed.hold_once(False)
    yield
    packed.hold_once(False)


class Packing:
    """Makes layers, and counts how often one is packed."""

    def __init__(self) -> None:
        self.packed = 0

    def layer(self) -> PackedLinear:
        def pack(weight: Tensor) -> Product:
            self.packed += 1
            copy = weight.clone()
            return lambda x, weight, bias: linear(x, copy, bias)

        return PackedLinear(linear, pack)


def test_a_layer_packs_once_until_the_weights_are_others() -> None:
    x, weight = torch.randn(3, 64), torch.randn(40, 64)
    packing = Packing()
    layer = packing.layer()
    before = layer(x, weight)
    assert torch.equal(before, linear(x, weight))
    weight.mul_(2)
    assert torch.equal(layer(x, weight), before)  # so it was the copy that was multiplied
    packed.forget()
    assert torch.equal(layer(x, weight), linear(x, weight))
    assert packing.packed == 2


def test_weights_that_are_held_once_are_not_copied() -> None:
    x, weight = torch.randn(3, 64), torch.randn(40, 64)
    packing = Packing()
    layer = packing.layer()
    layer(x, weight)
    packed.hold_once(True)
    for _ in range(2):
        weight.mul_(2)
        assert torch.equal(layer(x, weight), linear(x, weight))
    assert packing.packed == 1


def test_all_layers_are_packed_in_the_first_pass_after_a_change() -> None:
    x, weight, packing = torch.randn(3, 64), torch.randn(40, 64), Packing()
    model = [packing.layer() for _ in range(3)]
    for passes in range(1, 4):
        weight.mul_(2)
        packed.forget()
        for _ in range(2):
            assert all(torch.equal(layer(x, weight), linear(x, weight)) for layer in model)
            assert packing.packed == 3 * passes


@pytest.mark.parametrize("has_bfloat16", [True, False])
def test_bfloat16_layers_round_once_on_every_processor(has_bfloat16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_bfloat16:
        monkeypatch.setattr(vllm_layers, "has_bfloat16", lambda: False)
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(*shape).bfloat16() for shape in ((7, 64), (32, 64), (32,)))
    exact = linear(x.double(), weight.double(), bias.double())
    for product in (vllm_layers.plain_linear, vllm_layers.onednn_linear(weight)):
        found = product(x, weight, bias)
        assert found.dtype == torch.bfloat16
        assert (found - exact).abs().max() <= exact.abs().max() / 256
