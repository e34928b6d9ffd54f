"""Which part of a parameter each trainer rank holds: rows of it where FSDP2 alone shares it, and rows and columns where
tensor parallelism does, too.

    mesh (replicate, shard, tp): "tp" cuts a parameter into columns or into blocks of rows, "shard" the rows of each
    block into even chunks, the last ones shorter or empty; "replicate" holds all of it again

Where there are fewer key-value heads than ranks along "tp", keys and values are over (replicate, shard, heads, copies)
instead: "heads" cuts them into blocks of rows, "copies" holds each block again.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

REPLICATE, SHARD, TP = "replicate", "shard", "tp"  # the dimensions of the mesh
HEADS, COPIES = "heads", "copies"  # those of keys and values in the place of "tp": heads x copies ranks


@dataclass(frozen=True)
class Part:
    """Rows of a parameter, and columns of these rows: None for all of them, or where it has no columns."""

    rows: range
    columns: range | None = None

    def of(self, whole: Tensor) -> Tensor:
        """This part of a whole tensor, as a view."""
        own = whole[self.rows.start : self.rows.stop]
        return own if self.columns is None else own[:, self.columns.start : self.columns.stop]

    @property
    def start(self) -> tuple[int, int]:
        """Return the part's first row and column."""
        return self.rows.start, 0 if self.columns is None else self.columns.start


def local(parameter: Tensor) -> Tensor:
    """This rank's part of a parameter, which it shares memory with."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def part(parameter: Tensor) -> Part:
    """Return the part that this rank holds."""
    if not isinstance(parameter, DTensor):
        return Part(range(parameter.shape[0]) if parameter.ndim else range(0, 1))
    return _part(parameter, _own_place(parameter.device_mesh))


def holders(parameter: Tensor, mesh: DeviceMesh) -> Iterator[tuple[int, Part]]:
    """The global ranks that together hold all of it once, the first of those that hold the same, and their parts."""
    names = mesh.mesh_dim_names or ()
    split = _split_over(parameter)
    for place in torch.cartesian_prod(*(torch.arange(size) for size in mesh.shape)).view(-1, mesh.ndim).tolist():
        where = _place_of(parameter, dict(zip(names, place, strict=True)))
        if not any(index for name, index in where.items() if name not in split):
            yield int(mesh.mesh[tuple(place)]), _part(parameter, where)


def has_tp(mesh: DeviceMesh | None) -> bool:
    """Return whether layers are split over ranks."""
    return mesh is not None and TP in (mesh.mesh_dim_names or ())


def is_first_holder(parameter: Tensor, mesh: DeviceMesh | None, *but: str) -> bool:
    """Return whether no lower rank holds the same part; along the dimensions `but` others may."""
    split = _split_over(parameter) | {*but}
    where = {} if mesh is None else _place_of(parameter, _own_place(mesh))
    return not any(index for name, index in where.items() if name not in split)


def copies(parameter: Tensor) -> int:
    """Count the neighbours along "tp" that hold the same part of what "tp" cuts."""
    if not isinstance(parameter, DTensor) or COPIES not in (names := parameter.device_mesh.mesh_dim_names or ()):
        return 1
    return parameter.device_mesh.size(names.index(COPIES))


def _own_place(mesh: DeviceMesh) -> dict[str, int]:
    return {name: mesh.get_local_rank(name) for name in mesh.mesh_dim_names or ()}


def _place_of(parameter: Tensor, where: Mapping[str, int]) -> dict[str, int]:
    """A place of the ranks' mesh, by the dimensions that the parameter's own has."""
    if (count := copies(parameter)) == 1:
        return dict(where)
    head, copy = divmod(where[TP], count)
    return {name: index for name, index in where.items() if name != TP} | {HEADS: head, COPIES: copy}


def _split_over(parameter: Tensor) -> set[str]:
    if not isinstance(parameter, DTensor):
        return set()
    names = parameter.device_mesh.mesh_dim_names or ()
    return {name for name, how in zip(names, parameter.placements, strict=True) if not how.is_replicate()}


def _part(parameter: Tensor, where: Mapping[str, int]) -> Part:
    """Return what the rank at these places of the mesh's dimensions holds."""
    rows = parameter.shape[0]
    if not isinstance(parameter, DTensor):
        return Part(range(rows))
    mesh, start, columns = parameter.device_mesh, 0, None
    names = mesh.mesh_dim_names or ()
    if cut := {TP, HEADS}.intersection(names):
        (name,) = cut
        index = names.index(name)
        dim = cast(Shard, parameter.placements[index]).dim
        size = parameter.shape[dim] // mesh.size(index)  # tensor_parallel.py splits evenly
        if dim == 0:
            start, rows = size * where[name], size
        else:
            columns = range(size * where[name], size * (where[name] + 1))
    if SHARD in names:
        chunk = -(-rows // mesh.size(names.index(SHARD)))
        low, high = (min(rows, chunk * (where[SHARD] + each)) for each in (0, 1))
        start, rows = start + low, high - low
    return Part(range(start, start + rows), columns)
