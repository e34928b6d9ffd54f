"""The optimizer's state by parameter: in shards, whole, and from either back into this rank's part.

What has a parameter's shape (AdamW's moments) is split as the parameter is. The rest is one number for each
parameter (its count of steps), the same on every rank.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from example_trainer.optim.bf16_masters import exact_value
from example_trainer.ranks.partition import is_first_holder, local, part
from example_trainer.weights.shards import WEIGHTS, Rows, ShardFiles

MOMENTS = "optim.state."
GENERATORS = "generators."
State = dict[int, dict[str, object]]  # by the parameters' order


def parts(model: nn.Module, optimizer: Optimizer, mesh: DeviceMesh | None, rank: int) -> dict[str, Rows]:
    """This rank's part of a sharded checkpoint, by its name there: weights, moments and generators."""
    rows = {f"{GENERATORS}{name}.{rank}": Rows(0, state) for name, state in generators().items()}

    def own(parameter: Tensor, value: Tensor) -> Rows:
        row, column = part(parameter).start
        return Rows(row, local(value), column)

    for name, parameter in model.named_parameters():
        if is_first_holder(parameter, mesh):
            rows[WEIGHTS + name] = own(parameter, exact_value(parameter).detach())
    for name, parameter in stepped(model, optimizer).items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if _is_split(value, parameter) and is_first_holder(parameter, mesh):
                rows[f"{MOMENTS}{name}.{key}"] = own(parameter, value)
    return rows


def rest(optimizer: Optimizer) -> State:
    """Return what `parts` leaves out."""
    return {
        index: {
            key: value for key, value in optimizer.state.get(parameter, {}).items() if not _is_split(value, parameter)
        }
        for index, parameter in enumerate(_parameters(optimizer))
    }


def whole(optimizer: Optimizer, *, keep: bool) -> State:
    """All of it, whole and on the CPU; nothing unless `keep`. Where ranks share the moments, every rank calls this."""
    state: State = {}
    for index, parameter in enumerate(_parameters(optimizer)):
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(parameter, DTensor) and _is_split(value, parameter):
                value = _like(parameter, local(value)).full_tensor()
            if keep:
                state.setdefault(index, {})[key] = value.cpu() if isinstance(value, Tensor) else value
    return state


def from_whole(state: State, optimizer: Optimizer) -> State:
    """Take from whole moments what this rank's optimizer needs."""
    parameters = _parameters(optimizer)

    def own(value: object, parameter: nn.Parameter) -> object:
        if not isinstance(parameter, DTensor) or not isinstance(value, Tensor) or value.shape != parameter.shape:
            return value
        return _like(parameter, part(parameter).of(value).to(local(parameter).device, copy=True).contiguous())

    return {
        index: {key: own(value, parameters[index]) for key, value in values.items()} for index, values in state.items()
    }


def from_shards(folder: Path, of_rest: State, model: nn.Module, optimizer: Optimizer) -> State:
    """Read from a sharded checkpoint what this rank's optimizer needs. Raises ModelError."""
    files = ShardFiles(folder, MOMENTS)
    state: State = {}
    for index, (name, parameter) in enumerate(stepped(model, optimizer).items()):
        values = dict(of_rest.get(index, {}))
        held = part(parameter)
        for key in [each.removeprefix(f"{name}.") for each in files.shapes if each.rpartition(".")[0] == name]:
            files.expect(f"{name}.{key}", tuple(parameter.shape))
            own = files.block(f"{name}.{key}", held.rows, held.columns)
            values[key] = _like(parameter, own.to(local(parameter).device))
        if values:
            state[index] = values
    return state


def stepped(model: nn.Module, optimizer: Optimizer) -> dict[str, nn.Parameter]:
    """Return what the optimizer steps, in its order, by the names of the model's parameters."""
    names = {id(exact_value(parameter)): name for name, parameter in model.named_parameters()}
    return {names[id(parameter)]: parameter for parameter in _parameters(optimizer)}


def generators() -> dict[str, Tensor]:
    """The state of this process's generators: of its CPU, and of its GPU where it has one."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_generators(folder: Path, rank: int) -> None:
    """Set the random generators to those of `rank` in a sharded checkpoint; of rank 0 where there were fewer."""
    files = ShardFiles(folder, GENERATORS)
    for name, use in (("cpu", torch.set_rng_state), ("cuda", torch.cuda.set_rng_state)):
        saved = next((f"{name}.{of}" for of in (rank, 0) if f"{name}.{of}" in files.shapes), None)
        if saved is not None and (name == "cpu" or torch.cuda.is_available()):
            use(files.part(saved, 0, 0, files.shapes[saved][0]))


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _is_split(value: object, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and local(value).shape == local(parameter).shape


def _like(parameter: Tensor, rows: Tensor) -> Any:
    """`rows` as the parameter is: a DTensor where it is one."""
    if not isinstance(parameter, DTensor):
        return rows
    return DTensor.from_local(
        rows, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
    )
