"""Linear layers of vLLM that multiply by packed copies of their weights, in the layout that oneDNN reads directly. CPU
only.

Stock vLLM packs each weight once and discards the original. Here the originals stay, because new weights will come, and
are packed again after each change:

    a commit, other weights loaded    forget: packed again, one layer at a time between other work; until then the
                                      plain weights are used
    single copy                       hold_once: the plain weights, which the trainer steps

The cost is memory for a second copy of each weight.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from torch import Tensor

# of x [..., in], weight [out, in] and bias [out]: [..., out]
Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]

PACKING_SHARE = 0.25  # of the time goes into packing while any layer is not packed, so that generation continues

_products: "WeakKeyDictionary[PackedLinear, Product]" = WeakKeyDictionary()
_packing = True
_due = 0.0  # time.monotonic() from which on a layer may be packed


@dataclass(eq=False)
class PackedLinear:
    """One layer's product: `plain` until packing is due, then the result of `pack(weight)`, which must not read the
    weight again.
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
    """The weights have changed: discard all packed copies."""
    global _due
    _products.clear()
    _due = 0.0


def hold_once(once: bool) -> None:
    """With `once`, discard all packed copies and make no new ones; else make them again."""
    global _packing
    _packing = not once
    forget()
