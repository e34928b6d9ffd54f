"""What an adapter directory must hold to be served: read without vLLM, before vLLM reads it."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from atroposlib.processes.identity import this_process
from atroposlib.wire.bridge import AdapterOffer
from vllm_patching.engines.adapter_files import CONFIG, WEIGHTS, read_config, read_pairs
from vllm_patching.engines.adapters import AdapterEngine
from vllm_patching.engines.base import FileFault, Refused

LAYER = "base_model.model.model.layers.0.self_attn"
Q, OUT = f"{LAYER}.q_proj", f"{LAYER}.o_proj"
SETTINGS: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "o_proj"], "peft_type": "LORA"}


def pair(name: str, rank: int = 4, inputs: int = 6, outputs: int = 5) -> dict[str, torch.Tensor]:
    return {f"{name}.lora_A.weight": torch.ones(rank, inputs), f"{name}.lora_B.weight": torch.ones(outputs, rank)}


def adapter(folder: Path, tensors: dict[str, torch.Tensor] | None = None, **settings: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(SETTINGS | settings))
    save_file(pair(Q) | pair(OUT) if tensors is None else tensors, folder / WEIGHTS)
    return folder


def read(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, list[int]]:
    return read_pairs(folder, read_config(folder), dtype)


def test_a_whole_adapter_is_read_as_rank_and_sizes_of_its_layers(tmp_path: Path) -> None:
    assert read(adapter(tmp_path)) == {Q: [4, 6, 5], OUT: [4, 6, 5]}
    assert set(read(adapter(tmp_path, target_modules="all-linear"))) == {Q, OUT}
    assert read(adapter(tmp_path, pair(Q, 4) | pair(OUT, 2), rank_pattern={"o_proj": 2}))[OUT] == [2, 6, 5]
    half = {name: tensor.bfloat16() for name, tensor in pair(Q).items()}
    assert read(adapter(tmp_path, half, target_modules=["self_attn.q_proj"])) == {Q: [4, 6, 5]}


@pytest.mark.parametrize(
    "settings",
    [
        {"r": None},
        {"r": "4"},
        {"r": 4.5},
        {"r": 0},
        {"r": -1},
        {"r": True},
        {"r": 10**30},
        {"r": [4]},
        {"lora_alpha": None},
        {"lora_alpha": "8"},
        {"lora_alpha": 1e300},
        {"lora_alpha": -1},
        {"target_modules": None},
        {"target_modules": [1]},
        {"target_modules": {}},
        {"base_model_name_or_path": 5},
        {"use_rslora": "yes"},
        {"rank_pattern": {"q_proj": "4"}},
        {"rank_pattern": [4]},
        {"alpha_pattern": {"q_proj": 1e300}},
    ],
)
def test_a_setting_of_another_type_is_refused_by_name(tmp_path: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(FileFault, match=f"Expected .*{next(iter(settings))}"):
        read(adapter(tmp_path, **settings))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"5",
        b"{",
        b"\xff",
        b'{"r": Infinity}',
        b"[" * 200_000,
        b'{"a":' * 200_000 + b"1" + b"}" * 200_000,
        b" " * (1 << 21),
    ],
)
def test_a_configuration_that_is_none_is_refused(tmp_path: Path, content: bytes) -> None:
    (adapter(tmp_path) / CONFIG).write_bytes(content)
    with pytest.raises(FileFault) as refused:
        read(tmp_path)
    assert len(str(refused.value)) < 600
    assert str(refused.value).isprintable()


def test_what_is_no_regular_file_is_not_opened(tmp_path: Path) -> None:
    for name in (CONFIG, WEIGHTS):
        (adapter(tmp_path) / name).unlink()
        os.mkfifo(tmp_path / name)  # to read it would wait forever
        with pytest.raises(FileFault, match="is not a regular file"):
            read(tmp_path)
        (tmp_path / name).unlink()


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({}, "contains no tensors"),
        (pair(Q), "has no tensors for 'o_proj'|has no tensors for \\['o_proj'\\]"),
        (pair(Q) | pair(OUT) | pair(OUT.replace("o_proj", "k_proj")), "which adapter_config.json does not name"),
        (pair(Q) | {f"{OUT}.lora_A.weight": torch.ones(4, 6)}, "has no lora_B"),
        (pair(Q) | {f"{OUT}.lora_B.weight": torch.ones(5, 4)}, "has no lora_A"),
        (pair(Q) | pair(OUT, rank=3), "expected .* of rank 4"),
        (
            pair(Q) | {f"{OUT}.lora_A.weight": torch.ones(4, 6), f"{OUT}.lora_B.weight": torch.ones(5, 3)},
            "expected .* of rank 4",
        ),
        (
            pair(Q) | {f"{OUT}.lora_A.weight": torch.ones(4), f"{OUT}.lora_B.weight": torch.ones(5, 4)},
            "expected a matrix of floats",
        ),
        (
            pair(Q) | {f"{OUT}.lora_A.weight": torch.ones(4, 6).int(), f"{OUT}.lora_B.weight": torch.ones(5, 4)},
            "expected a matrix",
        ),
        (pair(Q) | pair(OUT) | {"base_model.model.lm_head.weight": torch.ones(1)}, "is not a tensor of a LoRA adapter"),
        (pair(Q) | pair(OUT) | {"\x1b[2J.lora_A.weight": torch.ones(4, 6)}, "is not a tensor of a LoRA adapter"),
    ],
)
def test_tensors_that_are_not_what_the_configuration_says_are_refused(
    tmp_path: Path, tensors: dict[str, torch.Tensor], reason: str
) -> None:
    with pytest.raises(FileFault, match=reason) as refused:
        read(adapter(tmp_path, tensors))
    assert str(refused.value).isprintable()


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (torch.nan, torch.float32),
        (torch.inf, torch.float32),
        (-torch.inf, torch.bfloat16),
        (3e38, torch.float32),
        (1e5, torch.float16),
    ],
)
def test_numbers_that_are_not_finite_as_they_are_served_are_refused(
    tmp_path: Path, value: float, dtype: torch.dtype
) -> None:
    tensors = pair(Q) | pair(OUT)
    tensors[f"{OUT}.lora_B.weight"][-1, -1] = value
    with pytest.raises(FileFault, match=r"o_proj.lora_B.weight contains NaN or infinity"):
        read(adapter(tmp_path, tensors), dtype)


def test_every_cut_of_the_weights_is_refused(tmp_path: Path) -> None:
    whole = (adapter(tmp_path) / WEIGHTS).read_bytes()
    for size in range(0, len(whole), 37):
        (tmp_path / WEIGHTS).write_bytes(whole[:size])
        with pytest.raises(FileFault):
            read(tmp_path)
    (tmp_path / WEIGHTS).write_bytes((2**64 - 1).to_bytes(8, "little") + whole[8:])
    with pytest.raises(FileFault):
        read(tmp_path)


async def test_a_base_model_whose_name_cannot_be_a_path_is_another_model(tmp_path: Path) -> None:
    """It was a 500: the operating system refuses to look for a name that is longer than 255 bytes."""
    engine = object.__new__(AdapterEngine)
    engine.serving = cast(Any, SimpleNamespace(model=str(tmp_path), max_lora_rank=8))
    offer = AdapterOffer(
        session="a", trainer="h:1", lease_s=60.0, model=f"{tmp_path}/.", rank=8, process=this_process()
    )
    await engine.fits(offer)
    for model in ("x" * 300, "\0", f"{tmp_path}/none"):
        with pytest.raises(Refused, match=r"is for the model .*, this server serves") as refused:
            await engine.fits(msgspec.structs.replace(offer, model=model))
        assert refused.value.status == 422
