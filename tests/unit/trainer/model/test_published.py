"""Experts are apart in published files and stacked in memory: names and shapes of both are transformers' own."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from atropos_launcher.checks.model_files import read_model
from atroposlib.wire.published import in_files, in_memory
from example_trainer.model.files import WeightFiles
from example_trainer.model.loading import ModelError, prepare_for_training
from example_trainer.weights.gathered import write_safetensors
from example_trainer.weights.source import shapes_of
from tests.unit.trainer.fakes import model_folder, tiny_model

FAMILIES = pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "qwen3"])


def shapes_in(path: Path) -> dict[str, tuple[int, ...]]:
    with safe_open(path, "pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118  not a mapping


@FAMILIES
def test_names_are_those_of_transformers_both_ways(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    model.save_pretrained(tmp_path)
    published, held = shapes_in(tmp_path / "model.safetensors"), shapes_of(model)
    assert {name: content.shape for name, content in in_memory(published).items()} == held
    parts = [part for name, shape in held.items() for part in in_files(name, shape, family)]
    assert {part.name: part.shape for part in parts} == published
    found = read_model(str(tmp_path))
    assert found is not None
    assert found.shapes == held


@FAMILIES
def test_rows_of_files_are_those_of_the_model(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    model.save_pretrained(tmp_path)
    files = WeightFiles(str(tmp_path))
    for name, parameter in model.named_parameters():
        files.expect(name, tuple(parameter.shape))
        assert torch.equal(files.part(name, 0, 0, len(parameter)), parameter)
        assert torch.equal(files.part(name, 0, 1, 2), parameter[1:3])
        assert torch.equal(files.part(name, 0, len(parameter), 0), parameter[:0])


@FAMILIES
def test_a_model_written_tensor_by_tensor_is_what_transformers_writes(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    model.save_pretrained(tmp_path)
    tensors = ((name, parameter.detach()) for name, parameter in model.named_parameters())
    write_safetensors(tmp_path / "ours", shapes_of(model), tensors, family)
    ours, theirs = load_file(tmp_path / "ours"), load_file(tmp_path / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("missing", ["0.up_proj", "3.down_proj"])
def test_a_part_of_an_expert_that_is_missing_is_named(missing: str, tmp_path: Path) -> None:
    model_folder(tmp_path, family="qwen3_moe")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors[f"model.layers.1.mlp.experts.{missing}.weight"]
    save_file(tensors, path)
    if missing == "3.down_proj":  # the last one: no gap shows it, the shape does
        with pytest.raises(
            ModelError, match=r"has \[3, 32, 16\] for model.layers.1.mlp.experts.down_proj \[4, 32, 16\]"
        ):
            WeightFiles(str(tmp_path)).expect("model.layers.1.mlp.experts.down_proj", (4, 32, 16))
    else:
        with pytest.raises(
            ModelError, match=r"gate_up_proj has 4 experts in the files, of which expert 0 is not whole"
        ):
            WeightFiles(str(tmp_path))


def test_the_router_is_trained_without_the_loss_that_balances_it() -> None:
    model = tiny_model("qwen3_moe", output_router_logits=True, router_aux_loss_coef=1000.0)
    prepare_for_training(model, gradient_checkpointing=False)
    tokens = torch.arange(1, 13)[None]
    output = model(input_ids=tokens, labels=tokens)
    assert output.aux_loss is None
    plain = torch.nn.functional.cross_entropy(output.logits[0, :-1], tokens[0, 1:])
    assert output.loss.item() == pytest.approx(plain.item(), rel=1e-6)
