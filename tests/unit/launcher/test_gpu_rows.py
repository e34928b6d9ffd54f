"""The rows of gpu-check: which there are, how each is judged, and what is kept of them."""

import json
import re
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from example_trainer.launcher import gpu_check, peak_memory
from example_trainer.launcher.gpu_check import Place, Result, digest_of, keep, result, table
from example_trainer.launcher.gpu_record import RECORD, GpuRecord, read_gpu_record
from example_trainer.launcher.gpu_rows import DRILLS, Check, Models, checks
from example_trainer.launcher.peak_memory import PeakMemory
from example_trainer.launcher.run_file import find_run_file
from tests.integration.device_drills import DRILLS as DRILLED
from tests.unit.launcher.plans import no_processes, plan

__all__ = ["no_processes"]
MODELS = Models("SMALL", "LARGE")


@pytest.mark.parametrize("rehearse", [False, True])
def test_every_check_is_a_command_that_is_understood(no_processes: None, rehearse: bool) -> None:
    rows = checks("stamp", Path("/runs"), MODELS, rehearse)
    for check in rows:
        if check.command[0] == "train":
            assert find_run_file(check.command[1])
            made = plan(*check.command[1:])
            assert made.run.steps == (2 if rehearse else 3)
            assert made.run.name == check.run
            assert made.run.model == ("LARGE" if "large" in check.name and not rehearse else "SMALL")
        elif check.module == DRILLS:
            assert check.command[0] in DRILLED
    assert len({check.name for check in rows}) == len(rows)
    assert {check.command[0] for check in rows if check.module == DRILLS} == set(DRILLED)


def test_a_row_sees_the_first_of_the_visible_gpus() -> None:
    check = Check(2, "x", ("train",), most=2)
    assert check.visible(["4", "5", "6"]) == "4,5"
    assert check.shown(["4", "5", "6"]) == "CUDA_VISIBLE_DEVICES=4,5 atropos train"
    assert check.visible(["4", "5"]) is None
    assert check.shown([]) == "atropos train"


@pytest.mark.parametrize(
    ("said", "verdict"),
    [
        ("", ""),
        ("Digest: every word of vLLM's weights is the trainer's, policy version 1 (0.1 s)", "equal"),
        ("policy version 1, 0 of 21 tensors differ from /model (0.1 s)", "equal"),
        ("policy version 1, 10 of 21 tensors differ from /model: a", "differs"),
        ("0 of 21 tensors differ from a\n1 of 21 tensors differ from b: x", "differs"),
        ("Digest: every word of it\n3 of the tensors that vLLM computes with are not the trainer's", "differs"),
        ("Bitwise identical: True, 0 / 21 tokens differ", ""),
    ],
)
def test_what_a_log_says_of_the_weights(said: str, verdict: str) -> None:
    assert digest_of(said) == verdict


def test_the_trainer_says_what_is_looked_for() -> None:
    source = (Path(gpu_check.__file__).parents[1] / "grpo.py").read_text()
    assert "\"Digest: every word of vLLM's weights" in source
    assert "of the tensors that vLLM computes with are not the trainer's" in source


def test_what_needs_more_gpus_or_a_checkout_is_listed_and_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(("0",), tmp_path, tmp_path)
    rows = checks("x", tmp_path, MODELS)
    skipped = [result(check, place) for check in rows if check.gpus == 3]
    assert {row.came for row in skipped} == {"not run: needs 3 GPUs"}
    monkeypatch.setattr(gpu_check, "PACKAGES", tmp_path)
    outside = [result(check, place).came for check in rows if check.needs_checkout and check.gpus == 1]
    assert outside == ["not run: needs a checkout"] * 4
    assert not any(row.failed for row in skipped)


FAKE = """
import sys, time
held = bytearray(60_000_000)
print(sys.argv[1], flush=True)
time.sleep(float(sys.argv[2]))
sys.exit(int(sys.argv[3]))
"""


def run_fake(folder: Path, said: str, seconds: float = 0, status: int = 0, has_digest: bool = True) -> Result:
    (folder / "fake.py").write_text(FAKE)
    check = Check(1, "fake", (said, str(seconds), str(status)), "fake", has_digest=has_digest)
    return result(check, Place((), folder, folder))


@pytest.mark.services
@pytest.mark.parametrize(
    ("said", "status", "came", "digest"),
    [
        ("0 of 2 tensors differ", 0, "passed", "equal"),
        ("nothing", 0, "FAILED, no digest was compared", ""),
        ("1 of 2 tensors differ", 0, "FAILED, weights differ", "differs"),
        ("0 of 2 tensors differ", 3, "FAILED, status 3", "equal"),
        (
            "0 of 2 tensors differ\nStep 2/2 | no update |",
            0,
            "FAILED, no update: the same weights were sent again",
            "equal",
        ),
    ],
)
def test_a_row_passes_with_status_0_and_equal_weights_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, status: int, came: str, digest: str
) -> None:
    monkeypatch.setattr(gpu_check, "PACKAGES", tmp_path)
    (tmp_path / "tests").mkdir()
    found = run_fake(tmp_path, said, status=status)
    assert (found.came, found.digest, found.failed) == (came, digest, came != "passed")
    assert re.fullmatch(r"\d+ s", found.took)


@pytest.mark.services
def test_a_row_shows_its_memory_and_last_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "PACKAGES", tmp_path)
    monkeypatch.setattr(peak_memory, "INTERVAL_S", 0.05)
    (tmp_path / "tests").mkdir()
    found = run_fake(tmp_path, "Step 1/2, reward | 0", seconds=0.5, has_digest=False)
    assert (found.came, found.peak, found.last) == ("passed", "0.1 GB", "Step 1/2, reward | 0")
    assert str(found).endswith("| Step 1/2, reward , 0 |")


@pytest.mark.services
def test_a_row_that_hangs_fails_at_its_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "PACKAGES", tmp_path)
    monkeypatch.setattr(gpu_check, "LIMIT_S", 0.1)
    (tmp_path / "tests").mkdir()
    assert run_fake(tmp_path, "nothing", seconds=30).came == "FAILED, not done in time"


def test_the_peak_is_the_largest_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peak_memory, "INTERVAL_S", 0.001)
    samples, taken = [3, 9, 4], threading.Event()

    def sample() -> int:
        if len(samples) == 1:
            taken.set()
        return samples.pop(0) if len(samples) > 1 else samples[0]

    with PeakMemory(sample) as peak:
        assert taken.wait(5)
    assert peak.nbytes == 9


def test_the_fullest_gpu_counts_among_those_that_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = "0, GPU-aa, 1000\n1, GPU-bb, 3000\n2, GPU-cc, [N/A]\n3, GPU-dd, 9000"
    monkeypatch.setattr(peak_memory, "printed_by", lambda *command: printed)
    assert peak_memory.of_gpus(["0", "GPU-bb", "2"]) == 3000 << 20
    assert peak_memory.of_gpus(["2"]) == 0
    monkeypatch.setattr(peak_memory, "printed_by", lambda *command: None)
    assert peak_memory.of_gpus(["0"]) == 0


def shown(results: Sequence[Result], place: Place) -> list[str]:
    return table(results, "atropos gpu-check", place).splitlines()


def test_the_table_has_a_row_for_each_check_and_names_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "gpu_names", lambda: ["NVIDIA H200, 580.65.06"])
    rows = [Result("a", "passed", "3 s", "1.0 GB", "equal", "Step 3/3"), Result("b", "not run: needs 2 GPUs")]
    lines = shown(rows, Place(("0",), tmp_path, tmp_path))
    assert lines[0] == "NVIDIA H200, 580.65.06"
    assert lines[-2:] == [
        "| a | passed | 3 s | 1.0 GB | equal | Step 3/3 |",
        "| b | not run: needs 2 GPUs |  |  |  |  |",
    ]
    assert "peak of the fullest GPU" in lines[-4]
    rehearsal = shown(rows, Place((), tmp_path, tmp_path))
    assert rehearsal[0].startswith("Rehearsal on a CPU: ")
    assert "peak of all processes" in rehearsal[-4]


def test_a_whole_run_is_recorded_for_the_doctor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(gpu_check, "gpu_names", lambda: ["NVIDIA H200, 580.65.06"])
    rows = [Result("a", "passed"), Result("b", "FAILED, status 1"), Result("c", "not run: needs 2 GPUs")]
    keep(rows, Place(("0",), tmp_path, tmp_path))
    found = read_gpu_record(tmp_path / RECORD)
    assert isinstance(found, GpuRecord)
    assert (found.gpus, found.passed, found.failed, found.skipped) == (["NVIDIA H200, 580.65.06"], 1, ["b"], 1)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", found.date)
    assert json.loads(msgspec.json.encode(found))["table"] == str(tmp_path / "table.md")
