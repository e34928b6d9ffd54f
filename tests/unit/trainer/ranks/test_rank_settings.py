"""What several ranks, bfloat16 and offloading cannot do is one line, before anything is loaded."""

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen2VLConfig,
)

from atroposlib.config import resolve_config
from atroposlib.flags import ConfigError
from example_trainer.errors import TrainerError
from example_trainer.grpo import prepare_torch
from example_trainer.model.loading import ModelError
from example_trainer.ranks.place import CHOSEN, INTERFACE, Place, ranks_to_start
from example_trainer.ranks.ranks import Ranks, _store, compute_dtype, join
from example_trainer.settings.config import TrainerConfig
from example_trainer.weights.load import sharded_model
from tests.unit.trainer.fakes import SHAPE, VOCAB, model_folder, tiny_model

CPU = torch.device("cpu")


def config(model: str = "m", **settings: Any) -> TrainerConfig:
    return TrainerConfig(**{"model_name": model, "weight_bridge_mode": "none", "device": "cpu"} | settings)


@pytest.fixture
def alone() -> Iterator[Ranks]:
    """One rank that shards."""
    ranks = join(config(compute_dtype="bfloat16"), CPU)
    yield ranks
    ranks.leave()


def load(folder: Path | str, ranks: Ranks) -> None:
    assert ranks.mesh is not None
    sharded_model(config(str(folder), compute_dtype="bfloat16"), str(folder), CPU, ranks.mesh)


def without_safetensors(folder: Path) -> None:
    model = tiny_model()
    model.config.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")


def that_changes_its_logits(folder: Path) -> None:
    torch.manual_seed(0)
    GraniteForCausalLM(GraniteConfig(**SHAPE, logits_scaling=4.0, initializer_range=0.3)).save_pretrained(folder)


@pytest.mark.parametrize(
    ("save", "says"),
    [
        (
            lambda folder: OlmoeForCausalLM(OlmoeConfig(**SHAPE, num_experts=4, num_experts_per_tok=2)).save_pretrained(
                folder
            ),
            r"OlmoeForCausalLM is a model with experts \(model.layers.0.mlp is a OlmoeSparseMoeBlock\)",
        ),
        (
            lambda folder: GPT2LMHeadModel(
                GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4)
            ).save_pretrained(folder),
            "GPT2LMHeadModel has no list of decoder layers.* --trainer-ranks 1 --compute-dtype float32 --offload none",
        ),
        (Qwen2VLConfig(text_config=SHAPE).save_pretrained, "cannot load --model-name .*Qwen2VLConfig"),
        (without_safetensors, "contains no safetensors, only pytorch_model.bin: .*save the model again"),
        (that_changes_its_logits, "GraniteForCausalLM cannot be trained with packed sequences: its logits"),
    ],
    ids=["olmoe", "gpt2", "images", "no safetensors", "changed logits"],
)
def test_what_is_not_sharded_is_refused_by_name(
    alone: Ranks, tmp_path: Path, save: Callable[[Path], Any], says: str
) -> None:
    save(tmp_path)
    with pytest.raises(ModelError, match=says) as refused:
        load(tmp_path, alone)
    assert "\n" not in str(refused.value)


def test_files_of_another_model_are_refused_before_there_is_storage(
    alone: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_folder(tmp_path, tie_word_embeddings=True)
    tiny_model(intermediate_size=64).config.save_pretrained(tmp_path)
    monkeypatch.setattr(torch.nn.Module, "to_empty", lambda *anything, **more: pytest.fail("there is storage"))
    with pytest.raises(ModelError, match=r"has \[48, 32\] for model.layers.0.mlp.gate_proj.weight \[64, 32\]"):
        load(tmp_path, alone)


def test_one_rank_takes_every_optimizer_unless_it_shards() -> None:
    assert join(config(optimizer="adafactor"), CPU).mesh is None
    assert compute_dtype(config(optimizer="adafactor"), torch.device("cuda")) is torch.float32
    assert compute_dtype(config(), torch.device("cuda")) is torch.bfloat16
    with pytest.raises(TrainerError, match="--optimizer adafactor updates whole tensors, and --compute-dtype bfloat16"):
        join(config(optimizer="adafactor", compute_dtype="bfloat16"), CPU)


@pytest.mark.parametrize(
    ("ways", "name"),
    [
        (["--weight-bridge-mode", "shared_vllm", "--single-copy"], "a single copy"),
        (["--weight-bridge-mode", "none", "--batch-invariant"], "--batch-invariant"),
    ],
    ids=["single_copy", "batch_invariant"],
)
@pytest.mark.parametrize("flags", [["--compute-dtype", "bfloat16"], ["--offload", "all"], ["--offload", "moments"]])
def test_what_computes_as_vllm_does_takes_no_other_dtype_and_is_not_offloaded(
    ways: list[str], name: str, flags: list[str]
) -> None:
    with pytest.raises(ConfigError, match=f"{' '.join(flags)}: {name}"):
        resolve_config(TrainerConfig, ["--model-name", "m", *ways, *flags], prog="grpo", env={})


@pytest.mark.parametrize(
    ("ranks", "settings", "says"),
    [
        (1, {"tp_size": 2}, "--tp-size 2 does not divide the 1 trainer rank: give --trainer-ranks 2"),
        (2, {"tp_size": 4}, "--tp-size 4 does not divide the 2 trainer ranks: give --trainer-ranks 4, or a multiple"),
        (
            2,
            {"tp_size": 2, "fsdp_size": 2},
            "--fsdp-size 2 does not divide the 2 trainer ranks / --tp-size 2: give one",
        ),
        (6, {"fsdp_size": 4}, "--fsdp-size 4 does not divide the 6 trainer ranks: give one of 1, 2, 3, 6"),
        (
            2,
            {"tp_size": 2, "weight_bridge_mode": "lora_only", "lora_dropout": 0.1},
            "--lora-dropout 0.1: ranks that split a layer .*: give --lora-dropout 0, or --tp-size 1",
        ),
        *[
            (2, changes | {"optimizer": optimizer}, f"--optimizer {optimizer} updates whole tensors, and this trainer")
            for optimizer in ("adafactor", "adamw_8bit")
            for changes in ({}, {"tp_size": 2})
        ],
        (
            2,
            {"tp_size": 2, "batch_invariant": True},
            "--batch-invariant trains on one device, but this trainer has 2 ranks",
        ),
        (
            2,
            {"weight_bridge_mode": "shared_vllm", "single_copy": True},
            "with one trainer rank or one per vLLM rank, but this trainer has 2 ranks: give .* --tp-size and",
        ),
    ],
)
def test_what_cannot_be_split_over_ranks_is_refused(
    monkeypatch: pytest.MonkeyPatch, ranks: int, settings: dict[str, Any], says: str
) -> None:
    if ranks > 1:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
    optimizer = settings.pop("optimizer", "adamw")
    with pytest.raises(TrainerError, match=says):
        join(config(**settings).model_copy(update={"optimizer": optimizer}), CPU)  # without bitsandbytes, too


def test_a_trainer_on_a_cpu_starts_as_many_ranks_as_its_sizes_need() -> None:
    assert ranks_to_start(config()) == 0
    assert ranks_to_start(config(tp_size=2)) == 2
    assert ranks_to_start(config(tp_size=2, fsdp_size=2)) == 4
    with pytest.raises(TrainerError, match="--tp-size 2 does not divide the 3 trainer ranks"):
        ranks_to_start(config(tp_size=2, trainer_ranks=3))


def test_one_process_needs_no_group_no_thread_and_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    held = psutil.Process().num_fds(), threading.active_count()
    ranks = join(config(), CPU)
    assert not torch.distributed.is_initialized()
    assert (psutil.Process().num_fds(), threading.active_count()) == held
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    ranks.leave()


@pytest.mark.parametrize(("chosen", "interface"), [({CHOSEN: "1"}, "lo"), ({}, "eth9")])
def test_an_interface_that_another_trainer_chose_is_chosen_again(
    chosen: dict[str, str], interface: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {INTERFACE: "eth9", **chosen})
    _store(Place(), "this process", 0, 1.0)
    assert os.environ[INTERFACE] == interface


@pytest.mark.parametrize(("asked", "index"), [("auto", 0), ("cuda", 0), ("cuda:1", 1)])
def test_the_one_ranks_gpu_has_an_index(asked: str, index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's groups refuse a device without one."""
    current: list[int] = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert prepare_torch(config(device=asked)) == torch.device("cuda", index)
    assert current == [index]


@pytest.mark.parametrize(
    ("settings", "precision"),
    [({}, ["high"]), ({"compute_dtype": "float32"}, []), ({"batch_invariant": True}, []), ({"single_copy": True}, [])],
)
def test_the_head_alone_multiplies_in_tensorfloat_32(
    settings: dict[str, Any], precision: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the layers compute in bfloat16, and nowhere else: no other product is then in float32."""
    asked: list[str] = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", asked.append)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    mode = {"weight_bridge_mode": "shared_vllm"} if "single_copy" in settings else {}
    prepare_torch(config(device="auto", **mode, **settings))
    assert asked == precision
