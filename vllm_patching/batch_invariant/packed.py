"""vLLM's linear layers by packed copies of their weights, which is what stock vLLM multiplies by too. CPU only.

Packed and plain weights give the same bits (self_check.py measures it), so vLLM may pack while the trainer does not. The price is memory:
each weight once more, in float32. Who changes the weights says so:

    a commit, other weights loaded    forget: the next product packs anew
    single copy                       hold_once: the plain weights are used, which the trainer steps
"""

from weakref import WeakKeyDictionary

from torch import Tensor

from vllm_patching.batch_invariant import kernels

_packs: "WeakKeyDictionary[PackedLinear, Tensor]" = WeakKeyDictionary()
_packing = True


class PackedLinear:
    """One layer's product; packs its weight at the first, and at the first after `forget`."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        packed = _packs.get(self)
        if packed is None and _packing:
            packed = _packs[self] = kernels.pack(weight)
        return kernels.linear(x, weight, bias, packed)


def forget() -> None:
    """The weights are others now."""
    _packs.clear()


def hold_once(once: bool) -> None:
    """Whether from now on there shall be no copies; those that are there go."""
    global _packing
    _packing = not once
    _packs.clear()
