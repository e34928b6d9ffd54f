"""Whether this machine's matrix products are independent of the batch: measured at start-up, once per shape of the
model.

oneDNN's AVX-512 and AVX2 kernels sum in the same order for every row count, but oneDNN does not promise this. So each
process checks it on every shape of the model and with its own threads, and refuses a machine where it fails.
"""

from collections.abc import Callable
from functools import cache

import torch

from vllm_patching.batch_invariant import kernels
from vllm_patching.batch_invariant.switch import NotInvariant

ROWS = (1, 2, 3, 5, 8, 16, 17, 33, 64)
MOST_OUTPUTS = (
    4096  # outputs are split among threads and change nothing else, so of larger weights only these are tried
)


def check_weight(weight: torch.Tensor) -> None:
    """Raise NotInvariant unless products with a weight of this shape [out, in] have the same bits in every batch."""
    _check(min(weight.shape[0], MOST_OUTPUTS), weight.shape[1])


@cache
def _check(out: int, width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(out, width, generator=generator)
    rows = torch.randn(ROWS[-1], width, generator=generator)
    whole = kernels.linear(rows, weight)
    wrong = [
        f"{count} rows" for count in ROWS if not torch.equal(kernels.linear(rows[-count:], weight), whole[-count:])
    ]
    part = (out + 1) // 2
    if not torch.equal(kernels.linear(rows, weight[:part]), whole[:, :part]):
        wrong.append(f"{part} outputs")
    if wrong:
        raise NotInvariant(
            f"on this machine products with a weight [{out}, {width}] depend on the batch: {', '.join(wrong)} give"
            f" other bits than {ROWS[-1]} rows (oneDNN of PyTorch {torch.__version__}, {torch.get_num_threads()}"
            " threads); use fewer threads, use PyTorch 2.13, or drop --batch-invariant"
        )


def packing_is_exact(weight: torch.Tensor, pack: Callable[[torch.Tensor], Callable[..., torch.Tensor]]) -> bool:
    """Return whether `pack(weight)`, a product by a copy of a weight of this shape, has the bits of the product by
    the weight, in every batch.
    """
    return _packing_is_exact(min(weight.shape[0], MOST_OUTPUTS), weight.shape[1], pack)


@cache
def _packing_is_exact(out: int, width: int, pack: Callable[[torch.Tensor], Callable[..., torch.Tensor]]) -> bool:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(out, width, generator=generator)
    rows = torch.randn(ROWS[-1], width, generator=generator)
    bias = torch.randn(out, generator=generator)
    whole, product = kernels.linear(rows, weight, bias), pack(weight)
    return all(torch.equal(product(rows[-count:], weight, bias), whole[-count:]) for count in ROWS)
