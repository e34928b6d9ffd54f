"""The quickstart's model directory: names, rotary order, tokenizer and template, and how a damaged one is handled."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader

from example_trainer import quickstart_model as model


@pytest.fixture(scope="module")
def fields() -> dict[str, Any]:
    """Every field of the packaged weight file."""
    return {name: entry.contents() for name, entry in GGUFReader(model.packaged_gguf()).fields.items()}


def test_tensor_names_are_hugging_faces() -> None:
    assert model.hugging_face_name("token_embd.weight") == "model.embed_tokens.weight"
    assert model.hugging_face_name("blk.29.attn_output.weight") == "model.layers.29.self_attn.o_proj.weight"
    assert model.hugging_face_name("blk.0.ffn_norm.weight") == "model.layers.0.post_attention_layernorm.weight"


def test_rotary_pairs_are_put_back_into_halves() -> None:
    heads, half = 2, 3
    # [head, x or y, pair, column]
    halves = np.arange(heads * 2 * half * 4, dtype=np.float32).reshape(heads, 2, half, 4)
    interleaved = halves.swapaxes(1, 2).reshape(heads * 2 * half, 4)
    assert np.array_equal(model.unpermute_rotary(interleaved, heads), halves.reshape(-1, 4))


def test_config_says_what_the_weights_need(fields: dict[str, Any]) -> None:
    config = model.model_config(fields)
    assert config["rms_norm_eps"] == 1e-5
    assert config["rope_parameters"] == {"rope_theta": 100000.0, "rope_type": "default"}
    assert config["tie_word_embeddings"] is True
    assert config["eos_token_id"] == 2
    assert "quantization_config" not in config


def test_prompt_is_the_user_turn_alone_in_17_tokens(fields: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    model.build_tokenizer(fields).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}'
    )
    (tmp_path / "chat_template.jinja").write_text(model.CHAT_TEMPLATE)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "What is 2 + 3?"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == "<|im_start|>user\nWhat is 2 + 3?<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.encode(text)
    assert ids == [1, 4093, 198, 1780, 314, 216, 34, 1232, 216, 35, 47, 2, 198, 1, 520, 9531, 198]
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_id == 2


def write_small_model(gguf_path: Path, folder: Path, advance: model.Advance) -> None:
    """Stands in for write_model: two small files and the record."""
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"w" * 100)
    model.write_json(folder / model.RECORD_NAME, {"config.json": 2, "model.safetensors": 100})


def test_complete_folder_is_reused_and_a_damaged_one_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "write_model", write_small_model)
    folder = model.ensure_model(tmp_path / "m")
    untouched = (folder / "model.safetensors").stat().st_mtime_ns
    model.ensure_model(folder)
    assert (folder / "model.safetensors").stat().st_mtime_ns == untouched
    (folder / "model.safetensors").write_bytes(b"w" * 50)
    model.ensure_model(folder)
    assert (folder / "model.safetensors").stat().st_size == 100


def test_what_a_killed_call_left_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "write_model", write_small_model)
    partial = tmp_path / ".m.partial"
    partial.mkdir()
    (partial / "stale").touch()
    folder = model.ensure_model(tmp_path / "m")
    assert not partial.exists()
    assert not (folder / "stale").exists()


def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(gguf_path: Path, folder: Path, advance: model.Advance) -> None:
        (folder / "model.safetensors").write_bytes(b"w")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(model, "write_model", full_disk)
    with pytest.raises(model.QuickstartModelError, match=r"No space left on device.*--out"):
        model.ensure_model(tmp_path / "m")
    assert not list(tmp_path.iterdir())


def test_another_folder_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(model.QuickstartModelError, match="contains something other"):
        model.ensure_model(tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "mine"


@pytest.mark.services
def test_command_prints_the_folder_alone(tmp_path: Path) -> None:
    folder = tmp_path / "atropos" / model.MODEL_NAME
    folder.mkdir(parents=True)
    write_small_model(Path(), folder, lambda done, total: None)
    done = subprocess.run(
        [sys.executable, "-m", "example_trainer.quickstart_model"],
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == f"{folder}\n"
    assert json.loads((folder / "config.json").read_text()) == {}
