"""What each rank holds of each parameter: the parts of those that send or write cover it exactly once."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from example_trainer.model.policy import Policy
from example_trainer.ranks.partition import holders, is_first_holder, local, part
from example_trainer.weights.fsdp import shard
from tests.unit.trainer.fakes import tiny_model

MESHES = {  # names and sizes
    "fsdp": {"shard": 4},
    "replicas": {"replicate": 2, "shard": 2},
    "tp": {"shard": 1, "tp": 2},
    "fsdp, tp": {"shard": 3, "tp": 2},
    "tp of four": {"shard": 2, "tp": 4},
    "all three": {"replicate": 2, "shard": 2, "tp": 2},
}


@pytest.fixture(params=MESHES)
def mesh(request: pytest.FixtureRequest) -> Iterator[DeviceMesh]:
    """Of ranks that exist in name only, seen by the last of them."""
    sizes = MESHES[request.param]
    count = torch.Size(sizes.values()).numel()
    dist.init_process_group("fake", rank=count - 1, world_size=count, store=FakeStore())
    yield init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    dist.destroy_process_group()


@pytest.mark.parametrize(("vocabulary", "kv_heads"), [(97, 2), (98, 2), (98, 1)])
def test_the_parts_of_the_first_holders_cover_a_parameter_once(
    mesh: DeviceMesh, vocabulary: int, kv_heads: int
) -> None:
    """Where more ranks split a layer than it has key-value heads, too."""
    model = tiny_model("qwen3", vocab_size=vocabulary, num_key_value_heads=kv_heads)
    shard(Policy(model), mesh, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        assert part(parameter).of(torch.empty(parameter.shape)).shape == local(parameter).shape, name
        counted = torch.zeros(parameter.shape)
        found = dict(holders(parameter, mesh))
        for held in found.values():
            held.of(counted).add_(1)
        assert bool((counted == 1).all()), name
        assert (dist.get_rank() in found) == is_first_holder(parameter, mesh), name
        if dist.get_rank() in found:
            assert found[dist.get_rank()] == part(parameter)
