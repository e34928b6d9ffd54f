"""vLLM's linear layers by packed copies of their weights, in the layout that oneDNN reads as it is. CPU only.

Stock vLLM packs each weight once and throws it away. Here the weights stay, as others will come, and are packed
again after each change:

    a commit, other weights loaded    forget: packed again, a layer at a time between other work; until then the plain
                                      weights are used
    single copy                       hold_once: the plain weights, which the trainer steps

The price is memory: each weight once more.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from torch import Tensor

# of x [..., in], weight [out, in] and bias [out]: [..., out]
Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]

PACKING_SHARE = 0.25  # of the time, while any layer is not packed: new weights must not stop generation

_products: "WeakKeyDictionary[PackedLinear, Product]" = WeakKeyDictionary()
_packing = True
_due = 0.0  # time.monotonic() from which on a layer may be packed


@dataclass(eq=False)
class PackedLinear:
    """One layer's product: `pack(weight)` once that is due, which must not look at the weight again; `plain` until
    then.
    """

    plain: Product
    pack: Callable[[Tensor], Product]

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        global _due
        product = _products.get(self, self.plain)
        if product is self.plain and _packing and (start := time.monotonic()) >= _due:
            product = _products[self] = self.pack(weight)
            end = time.monotonic()
            _due = end + (end - start) * (1 / PACKING_SHARE - 1)
        return product(x, weight, bias)


def forget() -> None:
    """The weights are others now."""
    global _due
    _products.clear()
    _due = 0.0


def hold_once(once: bool) -> None:
    """Whether from now on there shall be no copies; those that are there go."""
    global _packing
    _packing = not once
    forget()
