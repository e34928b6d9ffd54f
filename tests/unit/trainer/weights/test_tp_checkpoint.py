"""Checkpoints of ranks that split layers: any other ranks, splitting or not, resume from them, and the reverse."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from example_trainer.weights.export import export
from example_trainer.weights.shards import ShardFiles
from tests.unit.trainer.fakes import model_folder
from tests.unit.trainer.weights.test_sharded_checkpoint import train

pytestmark = [pytest.mark.services, pytest.mark.slow]

TP = {"tp_size": 2}
SHARDED, WHOLE = {"checkpoint_format": "sharded"}, {"checkpoint_format": "hf"}
RUNS = {"tp": (2, TP), "fsdp": (2, {}), "one": (1, SHARDED), "tp hf": (2, TP | WHOLE), "one hf": (1, WHOLE)}
RESUMED = {  # which checkpoint, by whom
    "tp from tp": ("tp", 2, TP),
    "fsdp from tp": ("tp", 2, {}),
    "one from tp": ("tp", 1, {}),
    "tp from fsdp": ("fsdp", 2, TP),
    "tp from one": ("one", 2, TP),
    "fsdp from tp hf": ("tp hf", 2, {}),
    "tp from one hf": ("one hf", 2, TP),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tp")


def jobs_of(folder: Path, runs: dict[str, Any], resumed: dict[str, Any]) -> dict[str, Any]:
    model = model_folder(folder / "model", family="qwen3", vocab_size=98, tie_word_embeddings=True)
    plain = {"model_name": model, "micro_batch_tokens": 60, "keep_checkpoints": 0, "share_prefixes": False}
    jobs = {
        name: {"ranks": ranks, "steps": 6, "save": [3], "config": plain | settings | {"save_path": str(folder / name)}}
        for name, (ranks, settings) in runs.items()
    }
    for name, (of, ranks, settings) in resumed.items():
        where = {"save_path": str(folder / "x"), "resume": str(folder / of / "step_3")}
        jobs[name] = {"ranks": ranks, "steps": 6, "save": [], "config": plain | settings | where}
    return jobs


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    return train(folder, jobs_of(folder, RUNS, RESUMED))


@pytest.mark.parametrize("resumed", RESUMED)
def test_any_ranks_resume(results: dict[str, Any], resumed: str) -> None:
    assert results[resumed]["status"][0] == 0, results["stderr"]
    assert results[resumed]["losses"] == pytest.approx(results["one"]["losses"][3:], abs=1e-6)


def test_the_same_ranks_resume_to_the_same_bits(results: dict[str, Any]) -> None:
    assert results["tp from tp"]["losses"] == results["tp"]["losses"][3:]


def test_each_rank_writes_its_part_and_what_all_have_is_written_once(folder: Path, results: dict[str, Any]) -> None:
    first, second = (load_file(folder / f"tp/step_3/shards/rank_{rank}.safetensors") for rank in (0, 1))
    down, norm = "model.model.layers.0.mlp.down_proj.weight", "model.model.layers.0.self_attn.q_norm.weight"
    assert first[down].shape == second[down].shape == (32, 24)
    assert norm in first
    assert norm not in second
    files = ShardFiles(folder / "tp/step_3")
    name = down.removeprefix("model.")
    assert torch.equal(files.part(name, 0, 0, 32), torch.cat([first[down], second[down]], 1))
    assert torch.equal(files.part(name, 1, 20, 8), torch.cat([first[down], second[down]], 1)[:, 20:28])
    assert torch.equal(files.block(name, range(3, 9), range(30, 40)), second[down][3:9, 6:16])


def test_the_export_is_what_one_process_writes(folder: Path, results: dict[str, Any], tmp_path: Path) -> None:
    export(folder / "tp/step_3", tmp_path / "model")
    found, expected = (
        load_file(tmp_path / "model/model.safetensors"),
        load_file(folder / "tp hf/step_3/model.safetensors"),
    )
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_torch_s_own_distributed_checkpoint_reads_the_parts(folder: Path, results: dict[str, Any]) -> None:
    from torch.distributed.checkpoint import HuggingFaceStorageReader, load

    saved = folder / "tp/step_3"
    files = ShardFiles(saved)
    state = {f"model.{name}": torch.zeros(shape) for name, shape in files.shapes.items()}
    load(state, storage_reader=HuggingFaceStorageReader(str(saved / "shards")))
    for name, shape in files.shapes.items():
        assert torch.equal(state[f"model.{name}"], files.part(name, 0, 0, shape[0])), name


def test_a_missing_file_is_named(folder: Path, results: dict[str, Any], tmp_path: Path) -> None:
    from example_trainer.model.loading import ModelError

    saved = tmp_path / "step_3"
    (saved / "shards").mkdir(parents=True)
    only = folder / "tp/step_3/shards/rank_0.safetensors"
    (saved / "shards" / only.name).write_bytes(only.read_bytes())
    files = ShardFiles(saved)
    with pytest.raises(ModelError, match=r"for model\.layers\.0\.mlp\.down_proj\.weight"):
        files.expect("model.layers.0.mlp.down_proj.weight", (32, 48))


def test_a_head_that_both_ranks_hold_is_written_once_and_goes_to_one_process_and_back(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "model", family="qwen2", num_key_value_heads=1)
    plain = {"model_name": model, "micro_batch_tokens": 60, "keep_checkpoints": 0, "share_prefixes": False}

    def job(name: str, settings: dict[str, Any], until: int, resume: str = "") -> dict[str, Any]:
        where = {"save_path": str(tmp_path / name)} | ({"resume": str(tmp_path / resume)} if resume else {})
        ranks = 2 if "tp_size" in settings else 1
        return {"ranks": ranks, "steps": until, "save": [until], "config": plain | settings | where}

    jobs = {
        "one": job("one", SHARDED, 6),
        "two": job("two", TP, 2),
        "then one": job("then one", SHARDED, 4, "two/step_2"),
        "then two": job("then two", TP, 6, "then one/step_4"),
        "two hf": job("two hf", TP | WHOLE, 2),
        "hf then two": job("hf then two", TP, 6, "two hf/step_2"),
    }
    found = train(tmp_path, jobs)
    assert all(found[name]["status"] == [0] * jobs[name]["ranks"] for name in jobs), found["stderr"]
    losses = found["one"]["losses"]
    parts = {"two": losses[:2], "then one": losses[2:4], "then two": losses[4:], "hf then two": losses[2:]}
    for name, expected in parts.items():
        assert found[name]["losses"] == pytest.approx(expected, abs=1e-6), name
    first, second = (load_file(tmp_path / f"two/step_2/shards/rank_{rank}.safetensors") for rank in (0, 1))
    copied = {name for name in first if "k_proj" in name or "v_proj" in name}
    assert len(copied) == 2 * 4 * 3  # of two layers; weights and biases; with two moments
    assert not copied & second.keys()
    export(tmp_path / "two/step_2", tmp_path / "exported")
    exported, whole = (load_file(tmp_path / path / "model.safetensors") for path in ("exported", "two hf/step_2"))
    assert exported.keys() == whole.keys()
    assert all(torch.equal(exported[name], whole[name]) for name in whole)


def test_any_ranks_take_the_weights_of_an_earlier_directory_back(folder: Path, tmp_path: Path) -> None:
    """As for the best policy of a run, which is served again."""
    adapter = {"weight_bridge_mode": "lora_only", "lora_r": 3, "lr": 1e-2}
    runs = {"one": (1, {}), "fsdp": (2, {}), "tp": (2, TP), "adapter": (1, adapter), "adapter fsdp": (2, adapter)}
    jobs = jobs_of(tmp_path, runs, {})
    for name, job in jobs.items():
        places = {key: str(tmp_path / f"{name} {key}") for key in ("out", "moved", "taken_back")}
        job |= places | {"steps": 2, "save": []}
    results = train(tmp_path, jobs)
    for name in runs:
        assert results[name]["status"][0] == 0, results["stderr"]
        file = "adapter_model.safetensors" if "adapter" in name else "model.safetensors"
        then, moved, now = (load_file(tmp_path / f"{name} {key}" / file) for key in ("out", "moved", "taken_back"))
        assert all(torch.equal(then[each], now[each]) for each in then), name
        assert not any(torch.equal(then[each], moved[each]) for each in then if "norm" not in each), name


@pytest.mark.nightly
def test_two_by_two_ranks_save_and_resume(folder: Path) -> None:
    runs = {"one": (1, SHARDED), "2x2": (4, TP), "2x2 hf": (4, TP | WHOLE)}
    resumed = {
        "2x2 from 2x2": ("2x2", 4, TP),
        "one from 2x2": ("2x2", 1, {}),
        "2x2 from one": ("one", 4, TP),
        "one from 2x2 hf": ("2x2 hf", 1, {}),
    }
    (folder / "four").mkdir()
    results = train(folder / "four", jobs_of(folder / "four", runs, resumed))
    for name in resumed:
        assert results[name]["status"][0] == 0, results["stderr"]
        assert results[name]["losses"] == pytest.approx(results["one"]["losses"][3:], abs=1e-6)
    assert json.loads((folder / "four/2x2/step_3/manifest.json").read_bytes())
