"""BridgeWorker: vLLM's own worker plus an arena and an updater thread, chosen with `--worker-cls vllm_patching.worker.BridgeWorker`.

Its `bridge_*` methods are called on every rank through `collective_rpc`; the engine runs such a call between two forward steps,
in the same order on all ranks, which is what makes a commit atomic.
"""

import json
import os
from pathlib import Path
from typing import Any

from vllm_patching import compat, mapping
from vllm_patching.arena import Arena, Shard
from vllm_patching.protocol import Manifest, SessionOffer
from vllm_patching.updater import WeightUpdater

log = compat.init_logger("vllm.atropos_bridge")


class BridgeWorker(compat.worker_class()):  # type: ignore[misc]
    """Loads the model with plain weights, exports its mapping, and starts `WeightUpdater_TP{rank}`."""

    def load_model(self, **kwargs: Any) -> None:
        if compat.on_cpu():
            compat.keep_plain_linears()
        super().load_model(**kwargs)
        group = compat.get_tp_group()
        self._tp_rank, tp_size = group.rank_in_group, group.world_size
        if compat.on_cpu() and tp_size > 1:
            compat.unlink_collective_files()
        model = self.model_runner.get_model()
        shards = mapping.shards_of(model, self._tp_rank, tp_size)
        self._manifest = mapping.manifest_of(model, self.model_config.model, shards, tp_size)
        self._arena = Arena(model, self._manifest, shards)
        path = _config_path(Path(self.vllm_config.additional_config["atropos_bridge"]["config_path"]), self._tp_rank)
        _write_bridge_config(path, self._manifest, shards, self._tp_rank, str(self._arena.device))
        log.info("[vLLM Patch] ✓ Exported %d params (%.1f MB on rank %d) to %s", len(shards), self._arena.nbytes / 1e6, self._tp_rank, path)
        self._updater = WeightUpdater(self._arena, self._tp_rank)
        log.info("[vLLM Patch] ✓ Weight updater thread started (name: %s)", self._updater.thread_name)
        log.info("[vLLM Patch] ✓ Shared memory setup complete!")

    def bridge_manifest(self) -> dict[str, object]:
        return self._manifest.to_json()

    def bridge_status(self) -> dict[str, object]:
        return self._updater.status()

    def bridge_open(self, offer: dict[str, Any]) -> dict[str, object]:
        self._updater.open(SessionOffer.from_json(offer))
        return self._updater.status()

    def bridge_staged(self, session: str, version: int) -> bool:
        return self._updater.take(session, version) is not None

    def bridge_apply(self, session: str, version: int) -> float:
        """Swap the staged weights in; seconds. Raises RuntimeError if that version is not staged here."""
        staging = self._updater.take(session, version)
        if staging is None:
            raise RuntimeError(f"policy version {version} of session {session} is not staged on rank {self._tp_rank}")
        seconds = self._arena.commit(staging)
        self._updater.committed()
        return seconds


def _config_path(path: Path, tp_rank: int) -> Path:
    return path if tp_rank == 0 else path.with_name(f"{path.name}.tp{tp_rank}")


def _write_bridge_config(path: Path, manifest: Manifest, shards: list[Shard], tp_rank: int, device: str) -> None:
    """`vllm_bridge_config.json` in the ancestor's keys, one file a rank, written whole or not at all."""
    dtypes = {tensor.name: tensor.dtype for tensor in manifest.tensors}
    config = {
        "model": manifest.model,
        "tp_degree": manifest.tp_size,
        "tp_rank": tp_rank,
        "dp_shard_degree": 1,
        "param_mappings": {
            shard.name: {
                "vllm_name": shard.vllm_name,
                "shape": list(shard.full_shape),
                "dtype": dtypes[shard.name],
                "device": device,
                "dim": shard.dim,
                "start": shard.start,
                "length": shard.length,
                "full_start": shard.full_start,
            }
            for shard in shards
        },
        "param_names": sorted(shard.name for shard in shards),
        "ipc_handles": {},
        "shared_weights_enabled": True,
        "num_params": len(shards),
        "single_copy_enabled": False,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    with partial.open("w") as file:
        json.dump(config, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
