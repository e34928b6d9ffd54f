"""Single copy by ranks: trainer rank r computes on the device of vLLM's rank r, with that rank's own memory.

    vLLM rank 0's arena  ┌ q │ k │ v ┐ ...  ◀── views, DTensors with Shard along "tp" ──  trainer rank 0
    vLLM rank 1's arena  └ q │ k │ v ┘ ...  ◀── the other halves ──────────────────────  trainer rank 1

vLLM splits a layer as tp_plans.py does. What every rank of vLLM holds alike every trainer rank updates alike, so
nothing is copied. Where the two would split otherwise, such as a vocabulary that vLLM pads, the trainer refuses.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from atroposlib.errors import reading
from atroposlib.wire.bridge import Shard, SharedRank
from example_trainer.model.files import WeightFiles
from example_trainer.model.loading import ModelError, meta_model, prepare_for_training, rebuild_buffers
from example_trainer.model.policy import Policy
from example_trainer.ranks.partition import local, part
from example_trainer.settings.config import TrainerConfig
from example_trainer.weights.fsdp import shard
from example_trainer.weights.gathered import ShardedModel
from example_trainer.weights.shards import open_weights
from example_trainer.weights.shared import shared_views
from vllm_patching.memory import cuda_ipc
from vllm_patching.memory.shared_buffer import SharedBufferError, open_buffer

REMEDY = "train with one process (--tp-size 1), which takes any split, or by broadcast (--use-shared-memory)"


class SharedRanks:
    """Describes where the weights live: in the memory of vLLM's ranks, one for each of the trainer's."""

    def __init__(self, workers: list[SharedRank]) -> None:
        self.workers = workers


@dataclass(frozen=True, kw_only=True)
class LiveModel(ShardedModel):
    """A model that lies in vLLM's memory, on rank 0, which has all ranks write to it."""

    write_start: Callable[[], None]
    settle: Callable[[bool], list[int]]  # Learner.settle
    parted: Callable[[], bool]  # whether a call has begun that not every rank came out of


def open_rank(worker: SharedRank) -> Tensor:
    """The memory of vLLM's rank, flat uint8. Raises ModelError if it cannot be shared."""
    with reading(f"the weights of vLLM's rank {worker.rank} cannot be shared", ModelError, also=(SharedBufferError,)):
        if worker.ipc is not None:
            return cuda_ipc.open_handle(worker.ipc)
        assert worker.fd is not None
        return open_buffer(worker.process, worker.fd, worker.nbytes)


def expect_device(rank: int, vllm: torch.device, trainer: torch.device) -> None:
    """Raise ModelError unless a rank of the trainer is on the device of vLLM's."""
    if vllm != trainer:
        remedy = (
            "give both the same GPUs in CUDA_VISIBLE_DEVICES, in the same order"
            if vllm.type == trainer.type
            else f"give the trainer --device {vllm.type}"
        )
        raise ModelError(f"vLLM's rank {rank} is on {vllm}, and trainer rank {rank} on {trainer}: {remedy}")


class RankCopy:
    """This rank's part of the model of `source`, over the memory of vLLM's rank `worker`. Its values stay as they are
    until `write_start`. Raises ModelError.
    """

    def __init__(
        self, config: TrainerConfig, source: str, worker: SharedRank, device: torch.device, mesh: DeviceMesh
    ) -> None:
        self.buffer = open_rank(worker)
        expect_device(worker.rank, self.buffer.device, device)
        self._files: WeightFiles = open_weights(source)
        model = meta_model(source)
        prepare_for_training(model, gradient_checkpointing=config.gradient_checkpointing, longest=config.seq_len)
        self.policy = Policy(model)
        shard(self.policy, mesh, dtype=torch.float32, deadline_s=config.dist_timeout_s)
        views = {found.name: (found, view) for found, view in shared_views(worker, self.buffer)}
        over: dict[int, nn.Parameter] = {}  # tied ones once
        for name, parameter in list(model.named_parameters()):
            self._files.expect(name, tuple(parameter.shape))
            over[id(parameter)] = _over(parameter, *views[name])
        for module in model.modules():
            for leaf, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, leaf, over[id(parameter)])
        rebuild_buffers(model, self.buffer.device)

    @torch.no_grad()
    def write_start(self) -> None:
        """Write the weights of the source into vLLM's memory."""
        for name, parameter in self.policy.model.named_parameters():
            own = part(parameter)
            local(parameter).copy_(self._files.block(name, own.rows, own.columns))

    def inside(self) -> tuple[int, int]:
        """Count the parameters that lie in vLLM's memory, and all there are."""
        start, end = self.buffer.data_ptr(), self.buffer.data_ptr() + self.buffer.numel()
        places = [local(parameter.detach()).data_ptr() for parameter in self.policy.parameters()]
        return sum(start <= place < end for place in places), len(places)


def _over(parameter: nn.Parameter, found: Shard, view: Tensor) -> nn.Parameter:
    """A parameter like `parameter`, over vLLM's memory. Raises ModelError where vLLM holds another part, or dtype."""
    if view.dtype != torch.float32:
        name = str(view.dtype).removeprefix("torch.")
        raise ModelError(
            f"vLLM serves {name}, and single copy with --tp-size trains float32 weights: start vLLM with --dtype"
            f" float32, or {REMEDY}"
        )
    start = part(parameter).start[found.dim]
    if view.shape != local(parameter).shape or start != found.full_start:
        raise ModelError(
            f"vLLM's rank holds {list(view.shape)} of {found.name} {list(parameter.shape)}, from {found.full_start} on;"
            f" the trainer's rank would hold {list(local(parameter).shape)}, from {start} on. vLLM probably pads the"
            f" vocabulary: {REMEDY}"
        )
    if not isinstance(parameter, DTensor):
        return nn.Parameter(view)
    whole = DTensor.from_local(
        view,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return nn.Parameter(cast(Tensor, whole))
