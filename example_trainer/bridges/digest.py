"""The digest probe: whether every word that vLLM computes with is the trainer's, exact in any dtype and on any device.

    vLLM, rank by rank ──checksums of live parameters──┐
    trainer ──weights as they are sent, cut as vLLM's shards──checksums──┴─▶ names of the tensors that differ

The parity probe sees what the weights do, within a tolerance; this one sees each of them.
"""

import torch

from atroposlib.wire.bridge import Bucket, LiveShard, LiveWeights, Manifest, WireTensor
from example_trainer.bridges.base import BridgeError
from example_trainer.bridges.vllm_client import VllmClient
from example_trainer.weights.source import WeightSource
from vllm_patching.memory.digest import digest

BUCKET_BYTES = 64 << 20  # of the weights, gathered and compared at once: to ask the ranks takes milliseconds


def differing(source: WeightSource, manifest: Manifest, vllm: VllmClient, policy_version: int) -> list[str]:
    """Names of the tensors of which a rank of `vllm` holds other words than `source`. Raises BridgeError if it serves
    another version.
    """
    live = vllm.ask(LiveWeights, "GET", "/v1/bridge/digest")
    if live.policy_version != policy_version:
        raise BridgeError(f"{vllm.url} serves policy version {live.policy_version}, not {policy_version}")
    shards: dict[str, set[LiveShard]] = {}
    for shard in (shard for rank in live.ranks for shard in rank):
        shards.setdefault(shard.name, set()).add(shard)
    names: list[str] = []
    for bucket in manifest.buckets(BUCKET_BYTES):
        packed = source.bucket(bucket)
        for tensor in bucket.tensors:
            whole, parts = _whole(bucket, tensor, packed), shards.get(tensor.name, ())
            if not parts or any(digest(_part(whole, shard)) != shard.digest for shard in parts):
                names.append(tensor.name)
    return names


def _whole(bucket: Bucket, tensor: WireTensor, packed: torch.Tensor) -> torch.Tensor:
    start = tensor.offset - bucket.start
    return packed[start : start + tensor.nbytes].view(getattr(torch, tensor.dtype)).view(tensor.shape)


def _part(whole: torch.Tensor, shard: LiveShard) -> torch.Tensor:
    return whole.narrow(shard.dim, shard.start, shard.length) if whole.dim() else whole
