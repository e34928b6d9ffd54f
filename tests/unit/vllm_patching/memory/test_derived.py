"""What vLLM makes of the weights after it has loaded them would stay as it was when new weights come."""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from vllm_patching.memory.derived import refusing_derived
from vllm_patching.memory.mapping import UnsupportedModel
from vllm_patching.memory.packed import PackedLinear, Product


class Attention(nn.Module):
    """Heads whose keys and values come of one latent vector."""

    def __init__(self) -> None:
        super().__init__()
        self.kv_b_proj = nn.Linear(4, 6, bias=False)
        self.impl = SimpleNamespace(scale=torch.ones(1))
        self.quant_method = SimpleNamespace(config=None)
        self.register_buffer("k_scale", torch.ones(()))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Attention(), Attention()])


def processed(change: Callable[[Any], object]) -> None:
    """A model whose last layer vLLM changes so after loading."""
    model = Model()
    with refusing_derived(model):
        change(model.layers[1])


def absorb(layer: Any) -> Tensor:
    product: Tensor = layer.kv_b_proj.weight.detach().T.contiguous()
    return product


def rotate(layer: Any) -> None:
    layer.kv_b_proj.weight.data = layer.kv_b_proj.weight.data.roll(1, 0)


MAKES: dict[str, Callable[[Any], object]] = {
    "W_UV": lambda layer: setattr(layer, "W_UV", absorb(layer)),
    "W_UK": lambda layer: setattr(layer, "W_UK", nn.Parameter(absorb(layer))),  # vLLM's replace_parameter does so
    "table": lambda layer: layer.register_buffer("table", absorb(layer)),
    "impl.W_UK_T": lambda layer: setattr(layer.impl, "W_UK_T", absorb(layer)),
    "impl.parts['k'][0]": lambda layer: setattr(layer.impl, "parts", {"k": [absorb(layer)]}),
    "quant_method.apply(1)": lambda layer: setattr(
        layer.quant_method, "apply", functools.partial(torch.mm, absorb(layer))
    ),
    "product.kept": lambda layer: setattr(layer, "product", closing_over(absorb(layer))),
    "view": lambda layer: setattr(layer, "view", layer.kv_b_proj.weight.data[:2]),
    "impl.scale": lambda layer: layer.impl.scale.mul_(layer.kv_b_proj.weight.sum()),
    "k_scale": lambda layer: layer.k_scale.fill_(2.0),
}


def closing_over(kept: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: x @ kept


def product_with(packed: Tensor) -> Product:
    return lambda x, weight, bias: linear(x, packed, bias)


@pytest.mark.parametrize("name", MAKES)
@torch.no_grad()
def test_a_tensor_made_of_the_weights_is_refused_by_module_and_name(name: str) -> None:
    with pytest.raises(UnsupportedModel) as refused:
        processed(MAKES[name])
    assert str(refused.value).startswith(f"Model: vLLM makes layers.1.{name} [")


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: setattr(layer.kv_b_proj, "weight", nn.Parameter(layer.kv_b_proj.weight.roll(1, 0))),
        lambda layer: setattr(layer.kv_b_proj, "weight", nn.Parameter(layer.kv_b_proj.weight.T.contiguous())),
        rotate,
    ],
)
def test_a_parameter_in_another_layout_is_refused(change: Callable[[Any], object]) -> None:
    with pytest.raises(UnsupportedModel, match=r"Model: vLLM rewrites layers\.1\.kv_b_proj\.weight after loading"):
        processed(change)


def test_a_view_that_was_there_before_is_refused() -> None:
    """The arena moves the parameter to other memory, and the view would stay behind."""
    model = Model()
    first: Any = model.layers[0]
    first.view = first.kv_b_proj.weight.data[:2]
    with pytest.raises(UnsupportedModel, match=r"layers\.0\.view"), refusing_derived(model):
        pass


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: None,
        lambda layer: layer.k_scale.fill_(1.0),  # as vLLM does with its default scales
        lambda layer: setattr(layer.impl, "scale", torch.ones(1)),
        lambda layer: setattr(layer.impl, "weight", layer.kv_b_proj.weight),  # moves with the parameter
        lambda layer: setattr(layer.kv_b_proj, "weight", nn.Parameter(layer.kv_b_proj.weight.detach().clone())),
        lambda layer: setattr(layer, "scale", 0.5),
        lambda layer: setattr(layer, "empty", torch.empty(0)),
        lambda layer: setattr(layer, "cpu_linear", PackedLinear(linear, product_with)),
        lambda layer: setattr(layer, "owner", SimpleNamespace(layer=layer)),  # a circle
    ],
)
def test_what_new_weights_reach_is_served(change: Callable[[Any], object]) -> None:
    processed(change)


def test_products_that_this_package_packs_again_are_exempt() -> None:
    """With a packed copy inside, as packed linear layers have."""

    def pack(layer: Any) -> None:
        layer.cpu_linear = PackedLinear(product_with(absorb(layer)), product_with)

    processed(pack)


def test_nan_that_stays_nan_is_no_change() -> None:
    model = Model()
    model.layers[0].register_buffer("uninitialised", torch.full((3,), float("nan")))
    with refusing_derived(model):
        pass
