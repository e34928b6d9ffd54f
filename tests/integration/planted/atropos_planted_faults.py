"""Faults of serving that tests plant in a real vLLM server: a general plugin, which vLLM loads in all its processes.

ATROPOS_PLANTED is the path of a file with the name of the current fault. A test may change it while the server runs.
"""

import os
from pathlib import Path
from typing import Any

import torch

from vllm_patching import worker
from vllm_patching.engines import adapters
from vllm_patching.memory import packed

STATE = Path(os.environ["ATROPOS_PLANTED"])


def planted(fault: str) -> bool:
    return STATE.read_text() == fault


def register() -> None:
    of_worker: Any = worker.BridgeWorker
    if getattr(of_worker, "planted", False):
        return
    of_worker.planted = True
    _in_workers()
    _in_scheduler()
    _in_adapters()


def _in_workers() -> None:
    of_worker: Any = worker.BridgeWorker
    load, apply, execute = of_worker.load_model, of_worker.bridge_apply, of_worker.execute_model

    def load_model(self: Any, **kwargs: object) -> None:
        load(self, **kwargs)
        model = self.model_runner.get_model()
        self.before = copies(model)
        compute = model.compute_logits

        def compute_logits(*args: object, **kwargs: object) -> Any:
            logits = compute(*args, **kwargs)
            if planted("row of the head's product"):
                logits[:, 7] *= 1.01
            return logits

        model.compute_logits = compute_logits

    def bridge_apply(self: Any, session: str, version: int) -> object:
        model = self.model_runner.get_model()
        self.before = copies(model)
        seconds = apply(self, session, version)
        if planted("head row"):
            model.lm_head.weight.data[7] *= 1.01
        if planted("norm"):
            name = next(name for name in self.before if "layers.1.input_layernorm" in name)
            dict(model.named_parameters())[name].data.copy_(self.before[name])
        return seconds

    def execute_model(self: Any, scheduler_output: Any) -> object:
        model = self.model_runner.get_model()
        tokens = scheduler_output.num_scheduled_tokens.values()
        if planted("decode version before") and tokens and all(count == 1 for count in tokens):
            return with_weights(model, self.before, lambda: execute(self, scheduler_output))
        if planted("rotary"):
            with_rotary(model, 1.02)
        else:
            with_rotary(model, 1.0)
        return execute(self, scheduler_output)

    of_worker.load_model = load_model
    of_worker.bridge_apply = bridge_apply
    of_worker.execute_model = execute_model


def copies(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@torch.no_grad()
def with_weights(model: Any, other: dict[str, torch.Tensor], act: Any) -> Any:
    own = copies(model)
    for name, parameter in model.named_parameters():
        parameter.data.copy_(other[name])
    packed.forget()
    try:
        return act()
    finally:
        for name, parameter in model.named_parameters():
            parameter.data.copy_(own[name])
        packed.forget()


def with_rotary(model: Any, factor: float) -> None:
    """A table of positions that are stretched by `factor`, as of a model of another length."""
    for module in model.modules():
        table = getattr(module, "cos_sin_cache", None)
        if table is None:
            continue
        if not hasattr(module, "own_table"):
            module.own_table = table.clone()
        if factor == 1.0:
            table.copy_(module.own_table)
            continue
        half = table.shape[1] // 2
        frequency = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.arange(table.shape[0], dtype=torch.float64)[:, None] * frequency / factor
        table.copy_(torch.cat([angles.cos(), angles.sin()], -1))


def _in_scheduler() -> None:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    manager: Any = KVCacheManager
    reset = manager.reset_prefix_cache
    manager.reset_prefix_cache = lambda self: True if planted("stale cache") else reset(self)


def _in_adapters() -> None:
    engine: Any = adapters.AdapterEngine
    resolve = engine.resolve
    history: list[Any] = []

    def resolved(self: Any, name: str | None) -> Any:
        adapter, version = resolve(self, name)
        if adapter is not None and (not history or history[-1] is not adapter):
            history.append(adapter)
        return (history[-2] if planted("adapter version before") and len(history) > 1 else adapter), version

    engine.resolve = resolved
