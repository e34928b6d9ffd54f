"""vLLM's worker, extended to receive weights; `--worker-cls` selects it. BridgeWorker receives whole weights, with an
arena and an updater thread. AdapterWorker loads LoRA adapters (--enable-lora). ProbedWorker is both without a bridge.

Their `bridge_*` methods are called on every rank through `collective_rpc`; the engine runs such a call between two
forward steps, in the same order on all ranks, which is what makes a commit atomic. They return an error as {"failed":
why} and never raise: vLLM stops reading at the first rank that raises, and every later call would get the replies that
were left behind.
"""

import functools
import json
import os
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import torch
from packaging.version import Version
from torch import Tensor

from atroposlib.files import write_whole
from atroposlib.processes.identity import this_process
from atroposlib.processes.malloc import keep_freed_blocks
from atroposlib.wire.bridge import AnyOffer, LiveShard, Manifest, Offer, SharedRank, WorkerStatus
from vllm_patching import adapter_rows, refusal, vllm_types
from vllm_patching.compat import vllm_engine, vllm_layers, vllm_server
from vllm_patching.decode_watch import DecodeWatch, Watched
from vllm_patching.engines import RECEIVERS
from vllm_patching.engines.adapter_files import Pairs
from vllm_patching.engines.updater import WeightUpdater
from vllm_patching.memory import cuda_ipc, mapping, packed
from vllm_patching.memory.arena import Arena
from vllm_patching.memory.derived import refusing_derived
from vllm_patching.memory.mapping import UnsupportedModel
from vllm_patching.memory.shared_buffer import SharedBuffer
from vllm_patching.routing import RoutingRecorder
from vllm_patching.version import VERSION

log = vllm_engine.init_logger("vllm.atropos_bridge")


def linear_for(enforce_eager: bool) -> Callable[[Tensor], packed.Product]:
    """Returns the function that computes a layer from its weight: vLLM's product with a packed weight, which is packed
    again for new weights. A compiled model would keep the first packed weight forever, so it gets torch's product.
    """
    if enforce_eager and vllm_layers.has_onednn_linear():
        return lambda weight: packed.PackedLinear(vllm_layers.plain_linear, vllm_layers.onednn_linear)
    return lambda weight: vllm_layers.plain_linear


def _answered(method: Callable[..., object]) -> Callable[..., object]:
    """`method` with its reply in plain types, as vLLM transports them, or {"failed": why} if it raises."""

    @functools.wraps(method)
    def answer(self: object, *args: object) -> object:
        try:
            return msgspec.to_builtins(method(self, *args))
        except Exception as error:
            log.exception("%s failed", method.__name__)
            return {"failed": f"{type(error).__name__}: {error}"}

    return answer


class ProbedWorker(vllm_engine.worker_class()):  # type: ignore[misc]
    """Keeps the logits of a trainer's probe (decode_watch.py). On CPUs it records the experts of each token, if the
    server returns them. CUDA's model runner does so itself.
    """

    _recorder: RoutingRecorder | None = None
    _watch: DecodeWatch | None = None  # of a rank that computes logits, once it has a model and a cache

    def load_model(self, **kwargs: object) -> None:
        super().load_model(**kwargs)
        vllm_engine.unlink_collective_files()

    def initialize_from_config(self, kv_cache_config: object) -> None:
        super().initialize_from_config(kv_cache_config)
        model = self.model_runner.get_model()
        if hasattr(model, "compute_logits"):
            self._watch = DecodeWatch(model)
        connector = None
        if vllm_layers.on_cpu():
            keep_freed_blocks()  # from now on: the copies that loading made are given back
            if self.model_config.enforce_eager:
                vllm_layers.call_attention_directly(model)
            connector = vllm_engine.routing_connector(self.vllm_config, model, kv_cache_config)
        if connector is not None:
            self._recorder = RoutingRecorder(connector)
            log.info("[vLLM Patch] ✓ Routed experts of each token are recorded")

    def execute_model(self, scheduler_output: vllm_types.SchedulerOutput) -> object:
        if VERSION >= Version("0.32") and self._recorder is not None:
            self._recorder.begin(scheduler_output, scheduler_output.aux_output_connector_metadata)
        if self._watch is not None:
            self._watch.begin(scheduler_output)
        return super().execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: object) -> object:
        output: vllm_types.ModelRunnerOutput = super().sample_tokens(grammar_output)
        if self._watch is not None:
            self._watch.end(output)
        if VERSION >= Version("0.32") and self._recorder is not None:
            output.aux_output_connector_output = self._recorder.rows_of(self.model_runner, output)
        return output

    @_answered
    def bridge_watch(self, requests: dict[str, tuple[int, list[int]]]) -> None:
        """Keep the logits of these requests: of each, its prompt's tokens and the steps of its answer."""
        if self._watch is not None:
            self._watch.watch({sent: Watched(tokens, tuple(steps)) for sent, (tokens, steps) in requests.items()})

    @_answered
    def bridge_watched(self) -> dict[str, list[bytes]]:
        """Return the logits that were kept, float32, and keep no more."""
        return {} if self._watch is None else self._watch.taken()


class BridgeWorker(ProbedWorker):
    """Loads the model with plain weights, exports its mapping, and starts `WeightUpdater_TP{rank}`."""

    def load_model(self, **kwargs: object) -> None:
        if vllm_layers.on_cpu():
            vllm_layers.keep_plain_linears(linear_for(self.model_config.enforce_eager))
            vllm_layers.keep_plain_experts()
        vllm_layers.watch_processing(refusing_derived)
        try:
            super().load_model(**kwargs)
            self._map_weights()
        except UnsupportedModel as error:
            refusal.write(Path(self._settings["config_path"]), str(error))
            raise

    def _map_weights(self) -> None:
        group = vllm_engine.get_tp_group()
        self._tp_rank, tp_size = group.rank_in_group, group.world_size
        model = self.model_runner.get_model()
        shards = mapping.shards_of(model, self._tp_rank, tp_size)
        self._manifest = mapping.manifest_of(model, self.model_config.model, shards, tp_size)
        on_host = self._settings["staging"] == "host"
        self._arena = Arena(model, self._manifest, shards, staging_on_host=on_host)
        path = self._write_config()
        log.info(
            "[vLLM Patch] ✓ Exported %d params (%.1f MB on rank %d) to %s",
            len(self._arena.shards),
            self._arena.nbytes / 1e6,
            self._tp_rank,
            path,
        )
        self._updater = WeightUpdater(self._arena, self._tp_rank)
        log.info("[vLLM Patch] ✓ Weight updater thread started (name: %s)", self._updater.thread_name)
        log.info("[vLLM Patch] ✓ Shared memory setup complete!")

    def determine_available_memory(self) -> int:
        """Bytes for the KV cache: on a GPU what vLLM finds, less the staging buffer, which is made when a trainer
        joins; where it is in host memory, less one bucket, which passes through the GPU. A size that the user gave
        stays. Raises RuntimeError where nothing is left.
        """
        free = int(super().determine_available_memory())
        given = self.cache_config.kv_cache_memory_bytes is not None
        if self._arena.device.type == "cpu" or given or self._settings["staging"] == "none":
            return free
        on_host = self._arena.staging_on_host
        staging = self._manifest.largest_bucket if on_host else self._arena.nbytes
        log.info(
            "[vLLM Patch] Rank %d keeps %.1f of %.1f GB of GPU memory free for %s (--bridge-staging)",
            self._tp_rank,
            staging / 1e9,
            free / 1e9,
            "a bucket of weights on its way to host memory" if on_host else "the staging buffer",
        )
        if free <= staging:
            what, elsewhere = ("a bucket", "") if on_host else ("the staging buffer", ", --bridge-staging host")
            raise RuntimeError(
                f"rank {self._tp_rank}: {free / 1e9:.1f} GB of GPU memory are left for the KV cache, and {what} of the"
                f" weight bridge takes {staging / 1e9:.1f} GB of them: use more GPUs (--tensor-parallel-size)"
                f"{elsewhere} or a higher --gpu-memory-utilization; a single copy needs no staging"
                " (--bridge-staging none)"
            )
        return free - staging

    @property
    def _settings(self) -> dict[str, Any]:
        """Return what the launcher decided: `config_path` and `staging`: device | host | none."""
        settings: dict[str, object] = self.vllm_config.additional_config["atropos_bridge"]
        return settings

    @_answered
    def bridge_manifest(self) -> Manifest:
        return self._manifest

    @_answered
    def bridge_digest(self) -> list[LiveShard]:
        return self._arena.digests()

    @_answered
    def bridge_status(self) -> WorkerStatus:
        return self._updater.now()

    @_answered
    def bridge_open(self, offer: object) -> WorkerStatus:
        """Let the receiver of the offer's kind join the session, in the background."""
        typed: Offer = msgspec.convert(offer, AnyOffer)
        self._updater.open(RECEIVERS[type(typed)](typed, self._tp_rank))
        packed.hold_once(False)
        return self._updater.now()

    @_answered
    def bridge_request(self, session: str, version: int, request: object) -> None:
        """Let the session's receiver stage what the server was asked for, in the background."""
        self._updater.request(session, version, request)

    @_answered
    def bridge_leave(self) -> None:
        self._updater.leave()

    @_answered
    def bridge_attach(self) -> SharedRank | dict[str, str]:
        """Location and layout of this rank's live weights, or {"refused": why they cannot be shared}."""
        if refused := self._why_not_shared():
            return {"refused": f"rank {self._tp_rank}: {refused}"}
        self._updater.leave()
        packed.hold_once(True)
        self._write_config()
        return SharedRank(
            rank=self._tp_rank,
            nbytes=self._arena.nbytes,
            process=this_process(),
            layout=self._arena.layout(),
            shards=list(chain.from_iterable(self._arena.shards.values())),
            **self._memory(),
        )

    @_answered
    def bridge_quiesce(self) -> None:
        """Return when this rank's GPU has done all that was asked of it, so that another process may write."""
        torch.cuda.synchronize(self._arena.device)

    @_answered
    def bridge_renew(self) -> str | None:
        """Move the live weights to memory that a former trainer cannot write. Returns why it cannot, else None."""
        if isinstance(self._arena.live, SharedBuffer):
            self._arena.renew()
            return None
        return "captured CUDA graphs hold the addresses of the weights"

    @_answered
    def bridge_staged(self, session: str, version: int) -> bool:
        return self._updater.take(session, version) is not None

    @_answered
    def bridge_apply(self, session: str, version: int) -> float:
        """Swap the staged weights in, and return how many seconds it took. Fails if that version is not staged here."""
        staging = self._updater.take(session, version)
        if staging is None:
            raise RuntimeError(f"policy version {version} of session {session} is not staged on rank {self._tp_rank}")
        seconds = self._arena.commit(staging)
        self._updater.committed()
        packed.forget()
        return seconds

    def _why_not_shared(self) -> str | None:
        if self._arena.live is None:
            return (
                f"its {self._arena.nbytes / 1e6:.0f} MB of weights are not in one allocation, because too little "
                "GPU memory was free when they were loaded: use a smaller model or a larger GPU"
            )
        if isinstance(self._arena.live, SharedBuffer):
            return None
        if self.model_config.enable_sleep_mode:
            return "--enable-sleep-mode moves the weights while the trainer uses them: start vLLM without it"
        return cuda_ipc.refusal(self._arena.live.tensor)

    def _memory(self) -> dict[str, Any]:
        live = self._arena.live
        assert live is not None
        return {"fd": live.fd} if isinstance(live, SharedBuffer) else {"ipc": cuda_ipc.export(live.tensor)}

    def _write_config(self) -> Path:
        """Write `vllm_bridge_config.json` with the ancestor's keys: one file per rank, each renamed into place.

        If the live arena can be shared, the file names it: by a file descriptor of this process (it changes with each
        broadcast), or by a CUDA IPC handle.
        """
        arena, rank = self._arena, self._tp_rank
        path = Path(self._settings["config_path"])
        if rank > 0:
            path = path.with_name(f"{path.name}.tp{rank}")
        shared = self._why_not_shared() is None
        dtypes = {tensor.name: tensor.dtype for tensor in arena.manifest.tensors}
        config = {
            "model": arena.manifest.model,
            "tp_degree": arena.manifest.tp_size,
            "tp_rank": rank,
            "dp_shard_degree": 1,
            "param_mappings": {
                name: {
                    "vllm_name": shard.vllm_name,
                    "shape": list(shard.full_shape),
                    "dtype": dtypes[name],
                    "device": str(arena.device),
                    "dim": shard.dim,
                    "start": shard.start,
                    "length": shard.length,
                    "full_start": shard.full_start,
                    "offset": arena.offsets[shard.vllm_name],
                    **({"more": [[each.start, each.length, each.full_start] for each in others]} if others else {}),
                }
                for name, (shard, *others) in arena.shards.items()
            },
            "param_names": sorted(arena.shards),
            "ipc_handles": {"arena": {"pid": os.getpid(), "nbytes": arena.nbytes, **self._memory()}} if shared else {},
            "shared_weights_enabled": True,
            "num_params": len(arena.shards),
            "single_copy_enabled": shared,
        }
        write_whole(path, json.dumps(config, indent=1, default=msgspec.to_builtins).encode())
        return path


class AdapterWorker(ProbedWorker):
    """Loads adapters beside the one that is served."""

    def load_model(self, **kwargs: object) -> None:
        if vllm_layers.on_cpu():
            if self.model_config.is_moe:
                raise RuntimeError(
                    f"{self.model_config.model} is a mixture of experts, for which vLLM has no adapters on CPUs: train"
                    " its weights (--weight-bridge-mode shared_vllm), or serve it on a GPU"
                )
            vllm_layers.replace_adapter_products(adapter_rows.shrink, adapter_rows.expand, adapter_rows.expand_slice)
        super().load_model(**kwargs)

    @_answered
    def bridge_add_adapter(self, name: str, lora_id: int, path: str, pairs: Pairs) -> None:
        """Load the adapter directory `path`, which has `pairs`. If this fails, AdapterEngine removes what was loaded.

        Sizes are compared here, because vLLM would copy a matrix of another shape into a corner of its own.
        """
        model = self.model_runner.get_model()
        layers = mapping.adaptable_layers(model)
        for tensors, (rank, inputs, outputs) in pairs.items():
            layer = vllm_layers.adapted_layer(model, f"{tensors}.lora_A.weight")
            if layer not in layers:
                raise ValueError(f"the served model has no layer {layer} that takes an adapter")
            sizes = layers[layer]
            if sizes is not None and sizes != (inputs, outputs):
                raise ValueError(
                    f"{layer} has lora_A {[rank, inputs]} and lora_B {[outputs, rank]}, "
                    f"the served model's layer has {sizes[0]} inputs and {sizes[1]} outputs"
                )
        self.add_lora(vllm_server.adapter_request(name, lora_id, path))
