"""Linear layers and embeddings whose weight is in several pieces, one in each vLLM rank's memory. They compute what a
whole layer would.

    outputs split (dim 0)   y = [x W0ᵀ | x W1ᵀ]          inputs split (dim 1)   y = x0 W0ᵀ + x1 W1ᵀ
    vocabulary split        each piece looks up the ids that it holds

A piece on another device computes there. A tied head shares the embedding's parameters.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from example_trainer.optim.bf16_masters import exact_value
from example_trainer.ranks.partition import Part, part


class ShardedLinear(nn.Module):
    """`weights` in order along `dim`; `biases` are split like the outputs, or one whole, or none."""

    def __init__(self, weights: Sequence[nn.Parameter], dim: int, biases: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(weights)
        self.biases = nn.ParameterList(biases)
        self.dim = dim

    @property
    def out_features(self) -> int:
        return sum(weight.shape[0] for weight in self.weights) if self.dim == 0 else self.weights[0].shape[0]

    def forward(self, x: Tensor) -> Tensor:
        if self.dim == 0:
            biases = list(self.biases) or [None] * len(self.weights)
            return torch.cat(
                [F.linear(x.to(w.device), w, b).to(x.device) for w, b in zip(self.weights, biases, strict=True)], -1
            )
        inputs = x.split([weight.shape[1] for weight in self.weights], -1)
        partial = [F.linear(part.to(w.device), w).to(x.device) for part, w in zip(inputs, self.weights, strict=True)]
        return sum((*partial[1:], *self.biases), partial[0])


class ShardedEmbedding(nn.Module):
    """`weights` are consecutive vocabulary rows; every row gets a gradient, that of a padding token, too."""

    def __init__(self, weights: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(weights)

    def forward(self, ids: Tensor) -> Tensor:
        parts: list[Tensor] = []
        first = 0
        for weight in self.weights:
            rows = weight.shape[0]
            inside = (ids >= first) & (ids < first + rows)
            held = F.embedding((ids - first).clamp(0, rows - 1).to(weight.device), weight).to(ids.device)
            parts.append(torch.where(inside[..., None], held, 0))
            first += rows
        return sum(parts[1:], parts[0])


def whole_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter under its Hugging Face name, whole and exact (float32 where a bfloat16 one has a master); tied
    ones once.
    """
    for name, parts, dim in _in_pieces(model):
        values = [exact_value(part).detach() for part in parts]
        yield name, values[0] if len(values) == 1 else torch.cat([value.to(values[0].device) for value in values], dim)


def parts_of(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, Part]]:
    """Every parameter of this process under its Hugging Face name, with the part that it is of the whole one; tied ones
    once.
    """
    for name, parts, dim in _in_pieces(model):
        if len(parts) == 1:
            yield name, parts[0], part(parts[0])
            continue
        start = 0
        for parameter in parts:
            own = range(start, start + parameter.shape[dim])
            yield name, parameter, Part(range(parameter.shape[0]), own) if dim else Part(own)
            start = own.stop


def _in_pieces(model: nn.Module) -> Iterator[tuple[str, list[nn.Parameter], int]]:  # name, pieces, dim
    seen: set[int] = set()
    for module_name, module in model.named_modules():
        for leaf, parts, dim in _own(module):
            if parts and id(parts[0]) not in seen:
                seen.add(id(parts[0]))
                yield f"{module_name}.{leaf}" if module_name else leaf, parts, dim


def whole_tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that the model's files have: the parameters, and the buffers that no code computes, such as the
    bias that DeepSeek's routers add to their scores. Training never changes those.
    """
    yield from whole_parameters(model)
    computed = {name for name, _ in model.named_non_persistent_buffers()}
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name not in computed)


def _own(module: nn.Module) -> Iterator[tuple[str, list[nn.Parameter], int]]:  # leaf, pieces, dim
    if isinstance(module, ShardedLinear):
        yield "weight", list(module.weights), module.dim
        yield "bias", list(module.biases), 0
    elif isinstance(module, ShardedEmbedding):
        yield "weight", list(module.weights), 0
    elif not isinstance(module, nn.ParameterList):
        for leaf, parameter in module.named_parameters(recurse=False):
            yield leaf, [parameter], 0
