"""Packed copies of weights: made once, dropped with the weights they copy, and never for long at a time."""

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from tests.waiting import Clock
from vllm_patching.compat import vllm_layers
from vllm_patching.memory import packed
from vllm_patching.memory.packed import PackedLinear, Product


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock(100.0)  # it passes only where a layer is packed: two seconds each
    monkeypatch.setattr(packed, "time", clock)
    packed.hold_once(False)
    yield clock
    packed.hold_once(False)


def layers(clock: Clock, count: int) -> list[PackedLinear]:
    def pack(weight: Tensor) -> Product:
        clock.now += 2
        copy = weight.clone()
        return lambda x, weight, bias: linear(x, copy, bias)

    return [PackedLinear(linear, pack) for _ in range(count)]


def test_a_layer_packs_once_until_the_weights_are_others(clock: Clock) -> None:
    x, weight = torch.randn(3, 64), torch.randn(40, 64)
    (layer,) = layers(clock, 1)
    before = layer(x, weight)
    assert torch.equal(before, linear(x, weight))
    weight.mul_(2)
    assert torch.equal(layer(x, weight), before)  # so it was the copy that was multiplied
    packed.forget()
    assert torch.equal(layer(x, weight), linear(x, weight))
    assert clock.now == 104


def test_weights_that_are_held_once_are_not_copied(clock: Clock) -> None:
    x, weight = torch.randn(3, 64), torch.randn(40, 64)
    (layer,) = layers(clock, 1)
    layer(x, weight)
    packed.hold_once(True)
    for _ in range(2):
        weight.mul_(2)
        assert torch.equal(layer(x, weight), linear(x, weight))
    assert clock.now == 102


def test_packing_takes_a_quarter_of_the_time_at_most_and_gives_right_products_meanwhile(clock: Clock) -> None:
    x, weight = torch.randn(3, 64), torch.randn(40, 64)
    model = layers(clock, 3)
    packings = []
    for _ in range(40):
        before = clock.now
        assert all(torch.equal(layer(x, weight), linear(x, weight)) for layer in model)
        if clock.now > before:
            packings.append(before)
        clock.now += 1  # the rest of a forward pass
    assert len(packings) == 3
    assert all(later - earlier >= 8 for earlier, later in itertools.pairwise(packings))


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
