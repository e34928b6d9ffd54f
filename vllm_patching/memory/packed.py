"""Linear layers and experts of vLLM that multiply by packed copies of their weights, in the layout that the kernels of
vLLM-CPU read directly. CPU only.

Stock vLLM packs each weight once and discards the original. Here the originals stay, because new weights will come, and
are packed again after each change:

    a commit, other weights loaded    forget: each layer is packed again when it multiplies next
    single copy                       hold_once: the plain weights, which the trainer steps

The cost is memory for a second copy of each weight.
"""

from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

# of a layer's input and weights: of a linear layer x [..., in], weight [out, in] and bias [out] to [..., out]
Product = Callable[..., Tensor]

_products: "WeakKeyDictionary[Packed, Product]" = WeakKeyDictionary()
_packing = True


@dataclass(eq=False)
class Packed:
    """One layer's product: the result of `pack(*weights)`, which must not read the weights again, or `plain` where
    copies are not to be made.
    """

    plain: Product
    pack: Callable[..., Product]

    def product(self, *weights: Tensor) -> Product:
        """Return what multiplies now."""
        if not _packing:
            return self.plain
        product = _products.get(self)
        if product is None:
            product = _products[self] = self.pack(*weights)
        return product


class PackedLinear(Packed):
    """Multiplies by the weight of a linear layer."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.product(weight)(x, weight, bias)


class PackedExperts(Packed):
    """Multiplies by a layer's experts, as `plain_experts` does."""

    def __call__(self, x: Tensor, w13: Tensor, w2: Tensor, shares: Tensor, chosen: Tensor, **how: object) -> Tensor:
        return self.product(w13, w2)(x, w13, w2, shares, chosen, **how)


def plain_experts(x: Tensor, w13: Tensor, w2: Tensor, shares: Tensor, chosen: Tensor, **how: object) -> Tensor:
    """The sum of what each token's `chosen` experts [tokens, k] make of it, times their `shares` [tokens, k].

    x is [tokens, in], w13 [experts, 2 width, in] gate over up, w2 [experts, in, width]; the result is [tokens, in].
    """
    sums = torch.zeros(x.shape)
    for expert in chosen.unique().tolist():
        token, place = torch.where(chosen == expert)
        gate, up = linear(x[token], w13[expert]).chunk(2, -1)
        output = linear(silu(gate) * up, w2[expert])
        sums.index_add_(0, token, output.float() * shares[token, place, None])
    return sums.to(x.dtype)


def forget() -> None:
    """The weights have changed: discard all packed copies."""
    _products.clear()


def hold_once(once: bool) -> None:
    """With `once`, discard all packed copies and make no new ones; else make them again."""
    global _packing
    _packing = not once
    forget()
