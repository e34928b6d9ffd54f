"""A guard: all that vLLM computes with must be the parameters that the bridge replaces.

    vLLM loads the weights ──Held──▶ process_weights_after_loading ──expect_unchanged──▶ served, or refused

After loading, vLLM may make further tensors of the parameters, such as the absorbed projections of multi-head latent
attention (W_UK_T and W_UV of kv_b_proj), or write a parameter in another layout. New weights would never reach the
former, and would be wrong in the latter, without any error. Whatever objects of this package hold (memory/packed.py) is
exempt: it is made again for new weights.
"""

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from vllm_patching.memory.mapping import UnsupportedModel, expect_stacked_experts

SAMPLED = 4096  # values of a tensor, spread over all of it: another layout moves nearly all of them
DEPTH = 4  # objects within objects of a module


@contextmanager
def refusing_derived(model: nn.Module) -> Iterator[None]:
    """Raise UnsupportedModel if vLLM, within this context, makes tensors of the loaded weights of `model` beside the
    parameters, or changes these.
    """
    expect_stacked_experts(model)  # before vLLM rewrites them: this refusal has a remedy
    held = Held(model)
    yield
    held.expect_unchanged(model)


class Held:
    """The parameters and other tensors of `model` at one time."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = {name: _sample(parameter) for name, parameter in _parameters(model)}
        self._others: dict[str | int, Tensor] = {}  # samples by name, and by id
        self._kept = list(_others(model))  # so that an id stays one tensor's
        for name, tensor in self._kept:
            self._others[name] = self._others[id(tensor)] = _sample(tensor)

    def expect_unchanged(self, model: nn.Module) -> None:
        """Raise UnsupportedModel for the first tensor that is new, has another content, or shares a parameter's
        memory.
        """
        kind, storages = type(model).__name__, set()
        for name, parameter in _parameters(model):
            storages.add(_address(parameter))
            if name not in self._parameters:
                raise _derived(kind, name, parameter)
            if not torch.equal(self._parameters[name], _sample(parameter)):
                raise UnsupportedModel(
                    f"{kind}: vLLM rewrites {name} after loading, in a layout of its own, so new weights would not fit;"
                    " serve another model, or update this one by --weight-bridge-mode none"
                )
        for name, tensor in _others(model):
            same = self._is_held(name, tensor) and _address(tensor) not in storages
            if tensor.numel() and not same:
                raise _derived(kind, name, tensor)

    def _is_held(self, name: str, tensor: Tensor) -> bool:
        """By itself or, as vLLM replaces its default scales, by another with the same name and content."""
        before = [self._others[key] for key in (name, id(tensor)) if key in self._others]
        return any(torch.equal(sample, _sample(tensor)) for sample in before)


def _derived(kind: str, name: str, tensor: Tensor) -> UnsupportedModel:
    return UnsupportedModel(
        f"{kind}: vLLM makes {name} {list(tensor.shape)} from the loaded weights, and new weights would never reach it;"
        " serve another model, or update this one by --weight-bridge-mode none"
    )


def _parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, each) for name, each in model.named_parameters() if each.numel() and not each.is_meta)


def _others(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that modules hold beside the parameters: buffers, attributes, and what is in attributes that are
    containers, functions or objects.
    """
    seen = {id(parameter) for parameter in model.parameters()}
    for name, module in model.named_modules():
        for attribute, value in {**vars(module), **dict(module.named_buffers(recurse=False))}.items():
            if attribute not in ("_parameters", "_modules", "_buffers"):
                path = f"{name}.{attribute}" if name else attribute
                yield from _within(path, value, seen, DEPTH)


def _within(path: str, value: object, seen: set[int], depth: int) -> Iterator[tuple[str, Tensor]]:
    if id(value) in seen or isinstance(value, (nn.Module, type, ModuleType, str, bytes, int, float)):
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        if not value.is_meta:
            yield path, value
    elif depth:
        for part, held in _parts(value):
            yield from _within(f"{path}{part}", held, seen, depth - 1)


def _parts(value: object) -> Iterable[tuple[str, object]]:
    if type(value).__module__.partition(".")[0] == __package__.partition(".")[0]:
        return ()
    if isinstance(value, dict):
        return [(f"[{key!r}]", held) for key, held in list(value.items())]
    if isinstance(value, (list, tuple, set, frozenset)):
        return [(f"[{index}]", held) for index, held in enumerate(value)]
    if isinstance(value, functools.partial):
        return [(f"({index})", held) for index, held in enumerate([value.func, *value.args, *value.keywords.values()])]
    if isinstance(value, MethodType):
        return [("", value.__self__)]
    if isinstance(value, FunctionType):
        names, cells = value.__code__.co_freevars, value.__closure__ or ()
        return [(f".{name}", cell.cell_contents) for name, cell in zip(names, cells, strict=True) if _is_set(cell)]
    return [(f".{name}", held) for name, held in list(getattr(value, "__dict__", {}).items())]


def _is_set(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # a variable that has no value yet
        return False


def _sample(tensor: Tensor) -> Tensor:
    """Up to SAMPLED values of a tensor, as bytes, so that NaN equals itself; on the host, as vLLM puts some of its
    default scales there and their replacements on the GPU.
    """
    flat = tensor.detach().flatten()
    return flat[:: max(1, flat.numel() // SAMPLED)].clone().view(torch.uint8).cpu()


def _address(tensor: Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())
