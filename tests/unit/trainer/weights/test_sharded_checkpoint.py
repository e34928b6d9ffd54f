"""Checkpoints that several trainer ranks write together, beside training: what is in them, who can resume from them,
and what remains when a rank is killed or the disk is full.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from atropos_launcher.cli import main
from example_trainer.weights.checkpoint import find_checkpoint
from example_trainer.weights.export import export
from example_trainer.weights.export import main as export_main
from example_trainer.weights.shards import ShardFiles
from example_trainer.weights.written import CheckpointError, remove_leftovers
from tests.unit.trainer.checkpoint_child import MOMENTS
from tests.unit.trainer.fakes import model_folder

pytestmark = [pytest.mark.services, pytest.mark.slow]

REPOSITORY = Path(__file__).parents[4]
KILLS = [*((0, moment) for moment in MOMENTS), (1, "copy"), (1, "writing")]
LAST = {"pointed": "step_2"}  # what `latest` names after it; before, the checkpoint of step 1


def train(folder: Path, jobs: dict[str, Any]) -> dict[str, Any]:
    """The results of these jobs, done in order."""
    path = folder / "jobs.json"
    path.write_text(json.dumps(jobs))
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.trainer.checkpoint_child", str(path)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=600,  # a loaded machine
    )
    assert done.returncode == 0, done.stderr
    results: dict[str, Any] = json.loads(path.with_suffix(".results").read_text())
    return results | {"stderr": done.stderr}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    """All runs of this module. Those that save end after step 6, and keep the checkpoint of step 3."""
    model = model_folder(folder / "model", tie_word_embeddings=True)
    other = model_folder(folder / "other", vocab_size=101, tie_word_embeddings=True)

    def job(ranks: int, name: str, resume: str = "", **changes: Any) -> dict[str, Any]:
        config: dict[str, Any] = {
            "model_name": model,
            "micro_batch_tokens": 60,
            "save_path": str(folder / name),
            "keep_checkpoints": 0,
            **changes.pop("config", {}),
        }
        if resume:
            config["resume"] = str(folder / resume)
        return {"ranks": ranks, "steps": 6, "save": [], "config": config, **changes}

    hf = {"checkpoint_format": "hf"}
    lora = {"weight_bridge_mode": "lora_only", "lora_r": 4}
    dropout = lora | {"lora_dropout": 0.3}
    average = {"ema_decay": 0.75}
    jobs = {
        "two": job(2, "two", save=[3], out=str(folder / "two_end")),
        "one": job(1, "one", save=[3], config={"checkpoint_format": "sharded"}),
        "one hf": job(1, "one_hf", save=[3], config=hf),
        "two hf": job(2, "two_hf", save=[3], config=hf),
        "two from two": job(2, "x", "two/step_3", out=str(folder / "again")),
        "one from two": job(1, "x", "two/step_3"),
        "three from two": job(3, "x", "two/step_3"),
        "two from one": job(2, "x", "one/step_3"),
        "two from one hf": job(2, "x", "one_hf/step_3"),
        "one from two hf": job(1, "x", "two_hf/step_3"),
        "replicas": job(2, "replicas", save=[3], config={"fsdp_size": 1}),
        "two from replicas": job(2, "x", "replicas/step_3"),
        "lora": job(2, "lora", save=[3], config=lora),
        "two from lora": job(2, "x", "lora/adapter_step_3", config=lora),
        "one from lora": job(1, "x", "lora/adapter_step_3", config=lora),
        "dropout": job(2, "dropout", save=[3], config=dropout),
        "two from dropout": job(2, "x", "dropout/adapter_step_3", config=dropout),
        "average": job(2, "average", save=[3], config=average, out=str(folder / "average_end")),
        "two from average": job(2, "x", "average/step_3", config=average, out=str(folder / "average_again")),
        "one average": job(1, "x", config=average, out=str(folder / "average_alone")),
        "another model": job(2, "x", "two/step_3", config={"model_name": other}),
        "another optimizer": job(1, "x", "two/step_3", config={"optimizer": "adafactor"}),
        "full": job(2, "full", steps=3, save=[1, 2], hurt={"rank": 1, "limit": 60_000}),
    }
    jobs |= {
        f"kill {rank} {moment}": job(
            2, f"kill_{rank}_{moment}", steps=2, save=[1, 2], hurt={"rank": rank, "kill": moment}
        )
        for rank, moment in KILLS
    }
    return train(folder, jobs)


def test_ranks_save_together_and_go_on_while_files_are_written(folder: Path, results: dict[str, Any]) -> None:
    assert results["two"]["status"][0] == 0
    assert results["two"]["leases"] == [3]
    saved = folder / "two" / "step_3"
    assert find_checkpoint("latest", folder / "two") == saved
    files = {str(path.relative_to(saved)) for path in saved.rglob("*") if path.is_file()}
    assert {"shards/rank_0.safetensors", "shards/rank_1.safetensors", "trainer_state.pt", "config.json"} < files
    assert "model.safetensors" not in files
    assert set(json.loads((saved / "manifest.json").read_bytes())) == files - {"manifest.json"}


def test_each_rank_writes_its_rows_alone(folder: Path, results: dict[str, Any]) -> None:
    first, second = (load_file(folder / f"two/step_3/shards/rank_{rank}.safetensors") for rank in (0, 1))
    name = "model.model.embed_tokens.weight"
    assert (len(first[name]), len(second[name])) == (49, 48)
    moments = [key for key in first if key.startswith("optim.state.")]
    weights = [key for key in first if key.startswith("model.")]
    assert len(moments) == 2 * len(weights)


@pytest.mark.parametrize("resumed", ["two from two", "two from replicas"])
def test_as_many_ranks_resume_to_the_same_bits(results: dict[str, Any], resumed: str) -> None:
    begun = "replicas" if "replicas" in resumed else "two"
    if begun == "two":
        assert results[resumed]["losses"] == results[begun]["losses"][3:]
    else:
        assert results[resumed]["losses"] == pytest.approx(results[begun]["losses"][3:], abs=1e-6)


def test_the_resumed_run_ends_with_the_same_weights(folder: Path, results: dict[str, Any]) -> None:
    assert results["two from two"]["status"][0] == 0
    expected, found = (load_file(folder / name / "model.safetensors") for name in ("two_end", "again"))
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.parametrize(
    "resumed", ["one from two", "three from two", "two from one", "two from one hf", "one from two hf"]
)
def test_another_number_of_ranks_resumes(results: dict[str, Any], resumed: str) -> None:
    """float32 sums in another order: six digits agree."""
    assert results[resumed]["losses"] == pytest.approx(results["two"]["losses"][3:], abs=1e-6)


@pytest.mark.parametrize("resumed", ["two from lora", "one from lora"])
def test_an_adapter_of_several_ranks_resumes_with_its_moments(
    folder: Path, results: dict[str, Any], resumed: str
) -> None:
    assert not (folder / "lora/adapter_step_3/shards").exists()
    assert results[resumed]["losses"] == pytest.approx(results["lora"]["losses"][3:], abs=1e-6)


def test_ranks_keep_their_rows_of_the_average(folder: Path, results: dict[str, Any]) -> None:
    last, average, again, alone = (
        load_file(folder / name / "model.safetensors")
        for name in ("two_end", "average_end", "average_again", "average_alone")
    )
    assert any(not torch.equal(last[name], value) for name, value in average.items())
    assert all(torch.equal(again[name], value) for name, value in average.items())
    for name, value in average.items():
        torch.testing.assert_close(alone[name], value, rtol=1e-4, atol=1e-5)
    assert results["two from average"]["losses"] == results["average"]["losses"][3:]


def test_each_rank_resumes_with_its_own_dropout(results: dict[str, Any]) -> None:
    assert results["two from dropout"]["losses"] == results["dropout"]["losses"][3:]


def test_the_export_is_the_model_that_was_trained(folder: Path, results: dict[str, Any], tmp_path: Path) -> None:
    export(folder / "two/step_3", tmp_path / "model")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    expected = AutoModelForCausalLM.from_pretrained(folder / "two_hf/step_3")
    tokens = torch.arange(1, 40)[None]
    with torch.no_grad():
        assert torch.equal(found(tokens).logits, expected(tokens).logits)
    assert (tmp_path / "model/README.md").is_file()
    with pytest.raises(CheckpointError, match="model exists: give another directory"):
        export(folder / "two/step_3", tmp_path / "model")
    with pytest.raises(CheckpointError, match="is not a sharded checkpoint"):
        export(folder / "two_hf/step_3", tmp_path / "none")


def test_the_command_exports_or_says_why_not_in_one_line(
    folder: Path, results: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(folder / "two/step_3"), str(tmp_path / "model")]) == 0
    assert capfd.readouterr().out == f"Wrote {tmp_path / 'model'}\n"
    with pytest.raises(SystemExit, match=r"^2$"):
        export_main([str(folder / "two/step_3"), str(tmp_path / "model")])
    assert capfd.readouterr().err == (
        f"export: error: {tmp_path / 'model'} exists: give another directory, or remove it\n"
    )


def test_torch_s_own_distributed_checkpoint_reads_the_shards(folder: Path, results: dict[str, Any]) -> None:
    from torch.distributed.checkpoint import HuggingFaceStorageReader, load

    saved = folder / "two/step_3"
    files = ShardFiles(saved)
    state = {f"model.{name}": torch.zeros(shape) for name, shape in files.shapes.items()}
    load(state, storage_reader=HuggingFaceStorageReader(str(saved / "shards")), no_dist=True)
    assert len(state) == 20
    for name, shape in files.shapes.items():
        assert torch.equal(state[f"model.{name}"], files.part(name, 0, 0, shape[0]))


def test_a_checkpoint_of_another_model_or_optimizer_is_refused_in_one_line(results: dict[str, Any]) -> None:
    stderr = results["stderr"]
    assert "is a checkpoint of another model: it has [97, 32] for model.embed_tokens.weight" in stderr
    assert "contains the moments of AdamW, but this run uses Adafactor: give the same --optimizer" in stderr
    assert results["another model"]["status"][0] == 70


def test_a_full_disk_of_one_rank_is_one_line_and_leaves_what_was_there(folder: Path, results: dict[str, Any]) -> None:
    assert "cannot write" in results["full"]["error"]
    assert "step_2: File too large; earlier checkpoints are untouched" in results["full"]["error"]
    assert sorted(path.name for path in (folder / "full").iterdir()) == ["latest", "step_1"]
    assert find_checkpoint("latest", folder / "full") == folder / "full/step_1"


@pytest.mark.parametrize(("rank", "moment"), KILLS)
def test_a_rank_that_is_killed_while_saving_leaves_a_whole_checkpoint(
    folder: Path, results: dict[str, Any], tmp_path: Path, rank: int, moment: str
) -> None:
    result = results[f"kill {rank} {moment}"]
    assert result["status"][rank] == -9
    assert result["status"][1 - rank] in (0, 70)
    save_path = tmp_path / "checkpoints"
    shutil.copytree(folder / f"kill_{rank}_{moment}", save_path)
    found = find_checkpoint("latest", save_path)
    assert found is not None
    assert found.name == LAST.get(moment, "step_1")
    remove_leftovers(save_path)
    assert {path.name for path in save_path.iterdir()} <= {"latest", "step_1", "step_2"}
