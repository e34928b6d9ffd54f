import itertools
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from atroposlib.wire.bridge import Manifest, lay_out
from example_trainer.weights.flat import FlatWeights
from example_trainer.weights.written import TrainedModel
from tests.unit.trainer.fakes import tiny_model


def model_and_manifest(dtype: str) -> tuple[dict[str, nn.Parameter], Manifest]:
    torch.manual_seed(0)
    parameters = {"b": nn.Parameter(torch.randn(3, 5)), "a": nn.Parameter(torch.randn(7))}
    tensors = tuple(lay_out([("a", [("a", (7,), dtype)]), ("b", [("b", (3, 5), dtype)])]))
    return parameters, Manifest("m", 1, tensors[-1].offset + tensors[-1].nbytes, tensors)


def test_float32_buckets_are_the_parameters_themselves() -> None:
    parameters, manifest = model_and_manifest("float32")
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    flat = FlatWeights(manifest, parameters)
    (bucket,) = manifest.buckets(1 << 20)
    sent = flat.bucket(bucket)
    for tensor in manifest.tensors:
        start = tensor.offset - bucket.start
        assert torch.equal(
            sent[start : start + tensor.nbytes].view(torch.float32).view(tensor.shape), before[tensor.name]
        )
    with torch.no_grad():
        parameters["a"].add_(1)
    assert torch.equal(sent[:28].view(torch.float32), before["a"] + 1), (
        "an optimizer step must be in the buffer without packing"
    )


def test_bfloat16_buckets_are_the_parameters_cast() -> None:
    parameters, manifest = model_and_manifest("bfloat16")
    flat = FlatWeights(manifest, parameters)
    (bucket,) = manifest.buckets(1 << 20)
    sent = flat.bucket(bucket)
    for tensor in manifest.tensors:
        start = tensor.offset - bucket.start
        assert torch.equal(
            sent[start : start + tensor.nbytes].view(torch.bfloat16).view(tensor.shape),
            parameters[tensor.name].bfloat16(),
        )


def test_parameters_do_not_overlap() -> None:
    parameters, manifest = model_and_manifest("bfloat16")
    FlatWeights(manifest, parameters)
    spans = sorted((p.data_ptr(), p.data_ptr() + 4 * p.numel()) for p in parameters.values())
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def test_a_model_over_one_buffer_is_written_as_a_plain_one(tmp_path: Path) -> None:
    model = tiny_model("qwen2", tie_word_embeddings=True)
    parameters = dict(model.named_parameters())
    expected = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    shapes = [(name, [(name, tuple(parameter.shape), "float32")]) for name, parameter in parameters.items()]
    tensors = tuple(lay_out(shapes))
    FlatWeights(Manifest("m", 1, tensors[-1].offset + tensors[-1].nbytes, tensors), parameters)
    folder = TrainedModel(model).write(tmp_path / "final_model")
    assert (folder / "model.safetensors").stat().st_size < 1.2 * sum(value.nbytes for value in expected.values())
    written = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, parameter in written.named_parameters():
        assert torch.equal(parameter, expected[name]), name
