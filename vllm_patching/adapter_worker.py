"""AdapterWorker: vLLM's own worker, of a server with --enable-lora, that answers for an adapter it cannot load instead
of raising.

With tensor parallelism vLLM stops reading at the first rank that raises: the other ranks' replies stay behind, and
every later call gets the reply of the one before. So the method that loads a policy never raises; Adapters calls it
through `collective_rpc`.
"""

from typing import Any

from vllm_patching import adapter_rows, compat
from vllm_patching.engines.adapter_files import Pairs
from vllm_patching.memory import mapping

log = compat.init_logger("vllm.atropos_bridge")


class AdapterWorker(compat.worker_class()):  # type: ignore[misc]
    """Chosen by the launcher with `--worker-cls vllm_patching.adapter_worker.AdapterWorker`."""

    def load_model(self, **kwargs: Any) -> None:
        if compat.on_cpu():
            compat.replace_adapter_products(adapter_rows.shrink, adapter_rows.expand, adapter_rows.expand_slice)
        super().load_model(**kwargs)
        if compat.on_cpu() and compat.get_tp_group().world_size > 1:
            compat.unlink_collective_files()

    def bridge_add_adapter(self, name: str, lora_id: int, path: str, pairs: Pairs) -> str | None:
        """Load the adapter folder `path`, which holds `pairs`; why it cannot be, None when it is. A half-loaded one is
        taken out.
        """
        try:
            self._check_layers(pairs)
            self.add_lora(compat.adapter_request(name, lora_id, path))
        except Exception as error:  # whatever is wrong with the files
            log.exception("Cannot load the adapter %s", path)
            self.remove_lora(lora_id)
            return f"{type(error).__name__}: {error}"
        return None

    def _check_layers(self, pairs: Pairs) -> None:
        """vLLM itself copies a matrix of another shape into a corner of its own."""
        model = self.model_runner.get_model()
        layers = mapping.adaptable_layers(model)
        for name, (rank, inputs, outputs) in pairs.items():
            layer = compat.adapted_layer(model, f"{name}.lora_A.weight")
            if layer not in layers:
                raise ValueError(f"the served model has no layer {layer} that takes an adapter")
            sizes = layers[layer]
            if sizes is not None and sizes != (inputs, outputs):
                raise ValueError(
                    f"{layer} has lora_A {[rank, inputs]} and lora_B {[outputs, rank]}, "
                    f"the served model's layer takes {sizes[0]} and gives {sizes[1]}"
                )
