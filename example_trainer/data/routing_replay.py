"""Routing replay: the experts that vLLM read each token with, used by the trainer too (R3, arXiv:2510.11370).

    MicroBatch.routing [T, layers, top_k] ──▶ each router: its own scores, at the experts given ──▶ experts' weights
                                                           └─ rows whose own top-k is another set ──▶ metric

A router runs as transformers wrote it; inside it, `torch.topk` returns the scores at the given experts. So its weights
are normalised as ever and their gradients reach the router. Experts that are the router's own choice keep its order,
and with it every bit.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from atroposlib.wire.batching import RoutingShape
from example_trainer.errors import TrainerError

_LAYER = re.compile(r"\.layers\.(\d+)\.")
_TOP_K = (torch.topk, Tensor.topk)
UNKNOWN = -1  # in a row of MicroBatch.routing that no server returned


class Routing:
    """The routers of one model, by layer. With `replays` they use the experts given; without, only the disagreement is
    counted.
    """

    def __init__(self, routers: Mapping[int, nn.Module], replays: bool) -> None:
        self._replays = replays
        self._given: Tensor | None = None  # [T, layers, top_k]; stays for what the backward pass computes again
        self._counts = False
        self._different: list[Tensor] = []
        self._compared: list[Tensor] = []
        for layer, router in routers.items():
            router.forward = partial(self._route, layer, router.forward)

    @contextmanager
    def of(self, given: Tensor | None, *, counted: bool) -> Iterator[None]:
        """Wrap a forward pass: set the experts of its tokens, if known, until the next one, and whether they are
        compared.
        """
        self._given, self._counts = given, counted and given is not None
        try:
            yield
        finally:
            self._counts = False

    def take_counts(self) -> tuple[int, int]:
        """Return how many pairs of token and layer had another set of experts, and how many were compared, since the
        last call.
        """
        different, compared = (int(sum(counts, start=torch.zeros(()))) for counts in (self._different, self._compared))
        self._different, self._compared = [], []
        return different, compared

    def _route(self, layer: int, forward: Callable[[Tensor], object], hidden: Tensor) -> object:
        if self._given is None:
            return forward(hidden)
        chosen = _Choice(self._given[:, layer].long(), self._replays)
        with chosen:
            routed = forward(hidden)
        if chosen.calls != 1:
            raise TrainerError(
                f"the router of layer {layer} chooses experts {chosen.calls} times, not once: its routing cannot be"
                " replayed; start vLLM without --enable-return-routed-experts"
            )
        if self._counts:
            self._different.append(chosen.different)
            self._compared.append(chosen.known)
        return routed


class _Choice(TorchFunctionMode):
    """Makes the top-k over experts choose `given` [tokens, top_k], where it is known."""

    def __init__(self, given: Tensor, replays: bool) -> None:
        super().__init__()
        self._given, self._replays = given, replays
        self.calls = 0
        self.different = self.known = torch.zeros(())

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if func not in _TOP_K or result[1].shape != self._given.shape:
            return result
        self.calls += 1
        scores, own, given = args[0], result[1], self._given
        known = given[:, 0] != UNKNOWN
        other = (own.sort(-1)[0] != given.sort(-1)[0]).any(-1) & known
        self.different, self.known = other.sum(), known.sum()
        if not self._replays:
            return result
        experts = torch.where(other[:, None], given, own)
        return torch.return_types.topk((scores.gather(-1, experts), experts))


def routers_of(model: nn.Module) -> dict[int, nn.Module]:
    """The routers of a model's layers, none for one without experts."""
    return {
        int(layer[1]): module
        for name, module in model.named_modules()
        if type(module).__name__.lower().endswith("topkrouter") and (layer := _LAYER.search(f".{name}"))
    }


def shape_of(model: Any) -> RoutingShape | None:
    """Return the shape that `routed_experts` of a group must have for this model; None for a model without experts."""
    routers = routers_of(model)
    if not routers:
        return None
    config = model.config.get_text_config()
    experts = {int(dict(router.named_parameters())["weight"].shape[0]) for router in routers.values()}
    return RoutingShape(config.num_hidden_layers, config.num_experts_per_tok, max(experts))


def routing_of(model: nn.Module, replay: str) -> Routing | None:
    """A model's routing under --routing-replay; None for one without experts. Raises TrainerError if those are
    required.
    """
    routers = routers_of(model)
    if not routers and replay == "required":
        raise TrainerError(
            f"--routing-replay required: {type(model).__name__} has no router that is known; give auto or off"
        )
    return Routing(routers, replay != "off") if routers else None
