"""What the trainer's weights are on the wire, whatever their layout: names and shapes, tied ones once, and the bytes of
each bucket.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from atroposlib.wire.bridge import Manifest, compare, lay_out
from example_trainer.weights.flat import FlatWeights
from example_trainer.weights.sharded import whole_parameters
from example_trainer.weights.shared import bind, shared_tensors
from tests.unit.trainer.arenas import ranks_of
from tests.unit.trainer.fakes import tiny_model

Parameters = dict[str, nn.Parameter]
Layout = Callable[[PreTrainedModel], Parameters]


def flat(model: PreTrainedModel) -> Parameters:
    return dict(model.named_parameters())


def shared(tp: int) -> Layout:
    def whole(model: PreTrainedModel) -> Parameters:
        """Of a model over the memory of `tp` ranks, whole."""
        with torch.device("meta"):
            bound = AutoModelForCausalLM.from_config(model.config)
        bind(bound, shared_tensors(*ranks_of(model, tp), nn.Parameter), gradient_checkpointing=False)
        return {name: nn.Parameter(value) for name, value in whole_parameters(bound)}

    return whole


LAYOUTS = pytest.mark.parametrize("layout", [flat, shared(1), shared(2), shared(4)], ids=["flat", "tp1", "tp2", "tp4"])


def served_as(model: PreTrainedModel, dtype: str) -> Manifest:
    """A manifest in another order than the model's own, every tensor a parameter of its own."""
    names = sorted(dict(model.named_parameters()), reverse=True)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    tensors = tuple(lay_out([(name, [(name, shapes[name], dtype)]) for name in names]))
    return Manifest("m", 1, tensors[-1].offset + tensors[-1].nbytes, tensors)


def values(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@LAYOUTS
def test_names_are_hugging_faces_tied_ones_once_with_whole_shapes(layout: Layout) -> None:
    model = tiny_model("qwen2", tie_word_embeddings=True)
    manifest = served_as(model, "float32")
    shapes = {name: tuple(parameter.shape) for name, parameter in layout(model).items()}
    compare(manifest, shapes)
    assert "model.embed_tokens.weight" in shapes
    assert "lm_head.weight" not in shapes


@LAYOUTS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bucket_bytes", [1, 5000, 1 << 30])
def test_buckets_in_wire_order_are_the_whole_image(layout: Layout, dtype: str, bucket_bytes: int) -> None:
    model = tiny_model("qwen2", tie_word_embeddings=True)
    manifest, before = served_as(model, dtype), values(model)
    source = FlatWeights(manifest, layout(model))
    image = torch.zeros(manifest.nbytes, dtype=torch.uint8)
    for bucket in manifest.buckets(bucket_bytes):
        sent = source.bucket(bucket)
        assert (sent.dtype, sent.shape) == (torch.uint8, (bucket.end - bucket.start,))
        image[bucket.start : bucket.end] = sent
    for tensor in manifest.tensors:
        found = image[tensor.offset : tensor.offset + tensor.nbytes].view(getattr(torch, dtype)).view(tensor.shape)
        assert torch.equal(found, before[tensor.name].to(getattr(torch, dtype))), tensor.name


def test_flat_float32_buckets_are_the_parameters_memory() -> None:
    model = tiny_model()
    manifest = served_as(model, "float32")
    source = FlatWeights(manifest, flat(model))
    parameters = dict(model.named_parameters())
    for bucket in manifest.buckets(1 << 30):
        sent = source.bucket(bucket)
        for tensor in bucket.tensors:
            assert parameters[tensor.name].data_ptr() == sent.data_ptr() + tensor.offset - bucket.start
