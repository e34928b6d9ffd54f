"""The contract of every WeightSource: names and shapes as on the wire, tied ones once, and the bytes of each bucket."""

import time
from collections.abc import Callable, Mapping
from contextlib import closing

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from atroposlib.wire.bridge import Manifest, compare, lay_out
from example_trainer.weights.flat import FlatWeights
from example_trainer.weights.gathered import GatheredWeights
from example_trainer.weights.shared import SharedWeights, shared_tensors
from example_trainer.weights.source import WeightSource, shapes_of
from tests.unit.trainer.arenas import ranks_of
from tests.unit.trainer.fakes import tiny_model

Make = Callable[[PreTrainedModel, Manifest], WeightSource]


def flat(model: PreTrainedModel, manifest: Manifest) -> WeightSource:
    return FlatWeights(manifest, dict(model.named_parameters()))


def shared(tp: int) -> Make:
    def make(model: PreTrainedModel, manifest: Manifest) -> WeightSource:
        return SharedWeights(shared_tensors(*ranks_of(model, tp), torch.nn.Parameter))

    return make


def gathered(model: PreTrainedModel, manifest: Manifest) -> WeightSource:
    """Of ranks that bring whole tensors."""

    def gather(places: Mapping[str, Tensor]) -> None:
        for name, place in places.items():
            place.copy_(values(model)[name].flatten())

    return GatheredWeights(shapes_of(model), gather, torch.device("cpu"))


SOURCES = pytest.mark.parametrize(
    "make",
    [flat, shared(1), shared(2), shared(4), gathered],
    ids=["flat", "tp1", "tp2", "tp4", "ranks"],
)


def served_as(model: PreTrainedModel, dtype: str) -> Manifest:
    """A manifest in another order than the model's own, every tensor a parameter of its own."""
    names = sorted(dict(model.named_parameters()), reverse=True)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    tensors = tuple(lay_out([(name, [(name, shapes[name], dtype)]) for name in names]))
    return Manifest("m", 1, tensors[-1].offset + tensors[-1].nbytes, tensors)


def values(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@SOURCES
def test_names_are_hugging_faces_tied_ones_once_with_whole_shapes(make: Make) -> None:
    model = tiny_model("qwen2", tie_word_embeddings=True)
    manifest = served_as(model, "float32")
    shapes = make(model, manifest).shapes()
    compare(manifest, shapes)
    assert "model.embed_tokens.weight" in shapes
    assert "lm_head.weight" not in shapes


@SOURCES
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bucket_bytes", [1, 5000, 1 << 30])
def test_buckets_in_wire_order_are_the_whole_image(make: Make, dtype: str, bucket_bytes: int) -> None:
    model = tiny_model("qwen2", tie_word_embeddings=True)
    manifest, before = served_as(model, dtype), values(model)
    source = make(model, manifest)
    image = torch.zeros(manifest.nbytes, dtype=torch.uint8)
    buckets = manifest.buckets(bucket_bytes)
    for bucket, sent in zip(buckets, source.stream(buckets), strict=True):
        assert (sent.dtype, sent.shape) == (torch.uint8, (bucket.end - bucket.start,))
        image[bucket.start : bucket.end] = sent
    for tensor in manifest.tensors:
        found = image[tensor.offset : tensor.offset + tensor.nbytes].view(getattr(torch, dtype)).view(tensor.shape)
        assert torch.equal(found, before[tensor.name].to(getattr(torch, dtype))), tensor.name


def test_a_transfer_that_fails_leaves_no_gather_under_way() -> None:
    model = tiny_model()
    manifest = served_as(model, "float32")
    begun, ended = [], []

    def gather(places: Mapping[str, Tensor]) -> None:
        begun.append(list(places))
        time.sleep(0.05)
        ended.append(list(places))

    buckets = manifest.buckets(1)
    with closing(GatheredWeights(shapes_of(model), gather, torch.device("cpu")).stream(buckets)) as stream:
        next(stream)
    assert begun == ended
    assert len(begun) < len(buckets)


def test_flat_float32_buckets_are_the_parameters_memory() -> None:
    model = tiny_model()
    manifest = served_as(model, "float32")
    source = flat(model, manifest)
    parameters = dict(model.named_parameters())
    for bucket in manifest.buckets(1 << 30):
        sent = source.bucket(bucket)
        for tensor in bucket.tensors:
            assert parameters[tensor.name].data_ptr() == sent.data_ptr() + tensor.offset - bucket.start
