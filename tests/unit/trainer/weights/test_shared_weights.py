"""Models whose parameters are views into vLLM's memory compute, learn and are saved like plain ones."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from example_trainer.loop.learner import Learner
from example_trainer.model.loading import ModelError, check_packed_forward, meta_model, prepare_for_training
from example_trainer.model.policy import Policy
from example_trainer.optim.bf16_masters import MasteredParameter
from example_trainer.optim.optimizer import make_optimizer
from example_trainer.ranks.ranks import ALONE
from example_trainer.settings.config import TrainerConfig
from example_trainer.weights.checkpoint import Checkpoints, Progress, restore
from example_trainer.weights.load import read_into
from example_trainer.weights.sharded import whole_parameters
from example_trainer.weights.shared import (
    SharedTensor,
    SharedWeights,
    StartWeights,
    bind,
    copy_replicas,
    shared_tensors,
)
from example_trainer.weights.written import CheckpointError, TrainedModel
from tests.unit.trainer.arenas import ranks_of
from tests.unit.trainer.fakes import VOCAB, model_folder, random_model, tiny_model
from tests.unit.trainer.rank_child import sequences

MODELS = [
    ("llama", {"pad_token_id": 3}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen3", {"tie_word_embeddings": True}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
]
IDS = torch.arange(3, 60)[None] % VOCAB


def shared(
    model: PreTrainedModel,
    folder: Path,
    tp: int,
    dtype: torch.dtype = torch.float32,
    as_parameter: Callable[[Tensor], nn.Parameter] = nn.Parameter,
) -> tuple[PreTrainedModel, dict[str, SharedTensor], list[Tensor]]:
    """`model` over the arenas of `tp` ranks that serve it, its tensors, and the arenas."""
    model.save_pretrained(folder)
    workers, arenas = ranks_of(model, tp, dtype)
    tensors = shared_tensors(workers, arenas, as_parameter)
    bound = meta_model(str(folder))
    bind(bound, tensors, gradient_checkpointing=False)
    return bound, tensors, arenas


@pytest.mark.parametrize(("family", "changes"), MODELS)
@pytest.mark.parametrize("tp", [1, 2, 4])  # with two key/value heads, four ranks hold each twice
def test_logits_and_gradients_are_the_plain_models(
    family: str, changes: dict[str, Any], tp: int, tmp_path: Path
) -> None:
    plain = tiny_model(family, **changes)
    bound, _, _ = shared(plain, tmp_path, tp)
    check_packed_forward(Policy(bound), torch.device("cpu"))
    prepare_for_training(plain, gradient_checkpointing=False)  # the padding token's row has a gradient, too
    for model in (plain, bound):
        model.train()
        logits = model(input_ids=IDS, use_cache=False).logits
        logits.log_softmax(-1)[0, :-1].gather(-1, IDS[0, 1:, None]).mean().backward()
    expected = plain(input_ids=IDS, use_cache=False).logits
    torch.testing.assert_close(
        bound(input_ids=IDS, use_cache=False).logits, expected, rtol=0, atol=1e-4 if tp > 1 else 0
    )

    gradients = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for parameter in bound.parameters():
        assert parameter.grad is not None
        parameter.data = parameter.grad  # so that whole_parameters puts the gradients together
    for name, gradient in whole_parameters(bound):
        torch.testing.assert_close(gradient, gradients.pop(name), rtol=0, atol=1e-5 if tp > 1 else 0)
    assert gradients == {}


@pytest.mark.parametrize("tp", [1, 2])
def test_nothing_is_allocated_and_padding_rows_stay(tp: int, tmp_path: Path) -> None:
    plain = tiny_model("qwen2", tie_word_embeddings=True)
    bound, tensors, arenas = shared(plain, tmp_path, tp)
    spans = [(arena.data_ptr(), arena.data_ptr() + arena.nbytes) for arena in arenas]
    for parameter in bound.parameters():
        assert any(start <= parameter.data_ptr() < end for start, end in spans)
    with torch.no_grad():
        for parameter in bound.parameters():
            parameter.fill_(1.0)
    copy_replicas(tensors.values())
    workers, _ = ranks_of(plain, tp)
    offset, shape, _ = workers[-1].layout["model.embed_tokens.weight"]
    embedding = arenas[-1][offset : offset + 4 * shape[0] * shape[1]].view(torch.float32).view(shape)
    assert embedding[-1].tolist() == [7.0] * shape[1]
    assert embedding[0].tolist() == [1.0] * shape[1]


def test_every_rank_gets_what_all_hold_alike(tmp_path: Path) -> None:
    plain = tiny_model("qwen3")
    bound, tensors, arenas = shared(plain, tmp_path, 4)
    with torch.no_grad():
        for parameter in bound.parameters():
            parameter.mul_(2)
    copied = copy_replicas(tensors.values())
    norms = sum(p.numel() for name, p in plain.named_parameters() if "norm" in name)
    key_values = sum(p.numel() for name, p in plain.named_parameters() if "k_proj" in name or "v_proj" in name)
    assert copied == 4 * (3 * norms + key_values)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(2)
    for arena, expected in zip(arenas, ranks_of(plain, 4)[1], strict=True):
        found, wanted = arena.view(torch.float32), expected.view(torch.float32)
        assert torch.equal(found[wanted != 7], wanted[wanted != 7])


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_start_weights_reach_every_rank_exactly(tp: int, tmp_path: Path) -> None:
    other = tiny_model("qwen2", seed=1, tie_word_embeddings=True)
    other.save_pretrained(tmp_path / "other", max_shard_size="20KB")  # several files
    _bound, tensors, arenas = shared(tiny_model("qwen2", tie_word_embeddings=True), tmp_path / "served", tp)
    StartWeights(str(tmp_path / "other"), tensors.values()).write()
    copy_replicas(tensors.values())
    for arena, expected in zip(arenas, ranks_of(other, tp)[1], strict=True):
        assert torch.equal(arena, expected)


def test_start_weights_of_another_shape_or_without_safetensors_are_refused(tmp_path: Path) -> None:
    _, tensors, _ = shared(tiny_model(), tmp_path / "served", 1)
    tiny_model(intermediate_size=64).save_pretrained(tmp_path / "other")
    with pytest.raises(ModelError, match=r"has \[64, 32\] for model.layers.0.mlp.gate_proj.weight \[48, 32\]"):
        StartWeights(str(tmp_path / "other"), tensors.values())
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="empty contains no safetensors"):
        StartWeights(str(tmp_path / "empty"), tensors.values())


@pytest.mark.parametrize(("family", "changes"), MODELS)
@pytest.mark.parametrize("tp", [1, 2])
def test_saved_model_is_a_plain_folder(family: str, changes: dict[str, Any], tp: int, tmp_path: Path) -> None:
    plain = tiny_model(family, **changes)
    bound, _, _ = shared(plain, tmp_path / "served", tp)
    folder = TrainedModel(bound).write(tmp_path / "final_model")
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for (name, found), (_, expected) in zip(loaded.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(found, expected), name


@pytest.mark.parametrize(("family", "changes"), MODELS)
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_folder_of_the_run_is_read_into_every_piece(
    family: str, changes: dict[str, Any], tp: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    best = tiny_model(family, seed=1, **changes)
    TrainedModel(best).write(tmp_path / "best_model")
    bound, tensors, arenas = shared(
        tiny_model(family, **changes), tmp_path / "served", tp, dtype, MasteredParameter.over
    )
    read_into(bound, tmp_path / "best_model")
    copy_replicas(tensors.values())
    for arena, expected in zip(arenas, ranks_of(best, tp, dtype)[1], strict=True):
        assert torch.equal(arena, expected)
    for (name, found), (_, wanted) in zip(whole_parameters(bound), best.named_parameters(), strict=True):
        assert torch.equal(found, wanted), name


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_stacked_experts_are_shared_whole(family: str, tmp_path: Path) -> None:
    plain, other = tiny_model(family), tiny_model(family, seed=1)
    bound, tensors, _ = shared(plain, tmp_path / "plain", 1)
    assert torch.equal(bound(input_ids=IDS).logits, plain(input_ids=IDS).logits)
    other.save_pretrained(tmp_path / "other")
    StartWeights(str(tmp_path / "other"), tensors.values()).write()
    assert torch.equal(bound(input_ids=IDS).logits, other(input_ids=IDS).logits)
    TrainedModel(bound).write(tmp_path / "written")
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "written", dtype=torch.float32)
    assert torch.equal(written(input_ids=IDS).logits, other(input_ids=IDS).logits)


def test_experts_in_pieces_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"Qwen3MoeExperts, which single copy .* with --tensor-parallel-size 1"):
        shared(tiny_model("qwen3_moe"), tmp_path, 2)


def test_an_embedding_that_scales_is_shared_whole_and_refused_in_pieces(tmp_path: Path) -> None:
    plain = random_model("gemma3_text", tie_word_embeddings=True)
    bound, _, _ = shared(plain, tmp_path / "whole", 1)
    assert torch.equal(bound(input_ids=IDS).logits, plain(input_ids=IDS).logits)
    with pytest.raises(ModelError, match=r"Gemma3TextScaledWordEmbedding, which single copy .* in pieces"):
        shared(plain, tmp_path / "pieces", 2)


def test_moments_resume_with_the_same_tp_only(tmp_path: Path) -> None:
    config = TrainerConfig.model_validate({"model_name": "m", "lr": 1e-3})

    def stepped(tp: int) -> tuple[PreTrainedModel, torch.optim.Optimizer]:
        bound, _, _ = shared(tiny_model(), tmp_path / f"served{tp}", tp)
        return bound, make_optimizer(bound.parameters(), config)

    bound, optimizer = stepped(2)
    bound(input_ids=IDS, use_cache=False).logits.sum().backward()
    optimizer.step()
    folder = Checkpoints(tmp_path, 0).save(Progress(1, 1, 1), TrainedModel(bound), optimizer)
    _again, same = stepped(2)
    assert restore(folder, same) == Progress(1, 1, 1)
    for before, after in zip(optimizer.state.values(), same.state.values(), strict=True):
        assert torch.equal(before["exp_avg"], after["exp_avg"])
    _, other = stepped(1)
    with pytest.raises(CheckpointError, match="the same --tensor-parallel-size"):
        restore(folder, other)


def test_bfloat16_checkpoints_hold_the_masters(tmp_path: Path) -> None:
    plain = tiny_model()
    bound, tensors, _ = shared(plain, tmp_path / "served", 2, torch.bfloat16, MasteredParameter.over)
    StartWeights(str(tmp_path / "served"), tensors.values()).write()
    assert all(parameter.dtype == torch.bfloat16 for parameter in bound.parameters())
    folder = TrainedModel(bound).write(tmp_path / "final_model")
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for (name, found), (_, expected) in zip(loaded.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(found, expected), name  # float32, not rounded


def test_the_start_model_computes_as_the_copy_of_a_bfloat16_server(tmp_path: Path) -> None:
    """So that the KL term is 0 before the first update; a resumed preference run asks such a start model, too."""
    folder, cpu = model_folder(tmp_path, family="qwen3"), torch.device("cpu")
    workers, arenas = ranks_of(tiny_model("qwen3"), 1, torch.bfloat16)
    settings = {"model_name": folder, "bridge": {"kind": "single_copy"}, "kl_coef": 0.1, "kernels": "torch"}
    learner = Learner(TrainerConfig.model_validate(settings), cpu, ALONE)
    learner.load_into(SharedWeights(shared_tensors(workers, arenas, MasteredParameter.over)), folder)
    learner.begin("", "bfloat16")
    batch, _ = sequences(1)
    (by_start,), by_policy = learner.with_start_logprobs([batch]), learner.with_old_logprobs(batch)
    for start, policy in zip(by_start, by_policy, strict=True):
        np.testing.assert_array_equal(start.old_logprobs, policy.old_logprobs)  # NaN where nothing is trained
