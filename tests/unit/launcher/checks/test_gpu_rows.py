"""The rows of gpu-check: which there are, how each is judged, and what is kept of them."""

import json
import re
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import torch
import yaml

from atropos_launcher.checks import gpu_table, peak_memory
from atropos_launcher.checks.gpu_record import RECORD, GpuRecord, read_gpu_record
from atropos_launcher.checks.gpu_rows import DRILLS, LARGE, ONE_RANK, Check, Models, checks
from atropos_launcher.checks.gpu_table import Result, Table
from atropos_launcher.checks.peak_memory import PeakMemory
from atropos_launcher.commands import gpu_check
from atropos_launcher.commands.gpu_check import Place, check_all, digest_of, find_large, keep, result, rows_named
from atropos_launcher.run_file.run_file import find_run_file
from atroposlib.flags import ConfigError
from example_trainer import grpo_run
from example_trainer.ranks.ranks import shards_alone
from example_trainer.settings.config import TrainerConfig
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
    source = Path(grpo_run.__file__).with_name("loop").joinpath("served.py").read_text()
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


def shown(results: Sequence[Result], folder: Path, rehearses: bool) -> list[str]:
    table = Table(folder / "table.md", "atropos gpu-check", rehearses)
    table.write(results)
    return table.path.read_text().splitlines()


def test_the_table_has_a_row_for_each_check_and_names_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_table, "gpu_names", lambda: ["NVIDIA H200, 580.65.06"])
    rows = [Result("a", "passed", "3 s", "1.0 GB", "equal", "Step 3/3"), Result("b", "not run: needs 2 GPUs")]
    lines = shown(rows, tmp_path / "gpu", rehearses=False)
    assert lines[0] == "NVIDIA H200, 580.65.06"
    assert lines[-2:] == [
        "| a | passed | 3 s | 1.0 GB | equal | Step 3/3 |",
        "| b | not run: needs 2 GPUs |  |  |  |  |",
    ]
    assert "peak of the fullest GPU" in lines[-4]
    rehearsal = shown(rows, tmp_path / "cpu", rehearses=True)
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


def test_the_row_of_fsdp2_on_one_rank_is_that(no_processes: None) -> None:
    (row,) = [check for check in checks("stamp", Path("/runs"), MODELS, rehearse=True) if check.name == ONE_RANK]
    assert "FSDP2 on one rank" in row.name
    (text,) = [text for path, text in plan(*row.command[1:]).files.items() if path.endswith("trainer.yaml")]
    config = TrainerConfig.model_validate(yaml.safe_load(text))
    assert config.trainer_ranks in ("auto", 1)
    assert shards_alone(config, torch.device("cpu"))
    assert row.has_digest


def test_without_a_large_model_its_row_alone_is_not_run(tmp_path: Path) -> None:
    place = Place(("0", "1", "2"), tmp_path, tmp_path)
    lacking = [check for check in checks("x", tmp_path, Models("SMALL", None)) if check.needs_model]
    assert [result(check, place).came for check in lacking] == ["not run: needs a model: --large-model"]
    assert result(lacking[0], Place(("0",), tmp_path, tmp_path)).came == (
        "not run: needs 3 GPUs and a model: --large-model"
    )
    assert not any(check.needs_model for check in checks("x", tmp_path, MODELS))
    assert not any(check.needs_model for check in checks("x", tmp_path, Models("SMALL", None), rehearse=True))


def test_the_large_model_is_the_named_one_or_one_that_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert find_large(str(tmp_path)) == str(tmp_path)
    monkeypatch.setattr(gpu_check, "read_model", lambda name: None)
    assert find_large(None) is None
    monkeypatch.setattr(gpu_check, "read_model", lambda name: name)
    assert find_large(None) == LARGE


NAMES = [check.name for check in checks("x", Path("/runs"), MODELS)]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("reload", {"reload"}),
        ("restart", {"restart"}),  # a whole name: not also "LoRA adapters, restart"
        ("LoRA adapters, restart,doctor", {"LoRA adapters, restart", "doctor"}),
        ("doctor , LoRA adapters", {"doctor", "LoRA adapters"}),
        ("killed", {"trainer killed in mid-transfer, Gloo", "trainer killed in mid-transfer, NCCL"}),
        (ONE_RANK, {ONE_RANK}),
        (",".join(NAMES), set(NAMES)),
        (", ".join(NAMES), set(NAMES)),
    ],
)
def test_rows_are_named_whole_or_in_part(words: str, found: set[str]) -> None:
    assert rows_named(words, NAMES) == found


@pytest.mark.parametrize("words", ["", "doctor,", "doctor,nonsense", "Doctor"])
def test_a_row_that_does_not_exist_is_refused(words: str) -> None:
    with pytest.raises(ConfigError, match=f"--rows {words}: no check is named"):
        rows_named(words, NAMES)


class Machine:
    """Checks a, b and c whose results are given, on a GPU; the record is kept in a list."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.place = Place(("0",), folder, folder)
        self.ran: list[str] = []
        self.kept: list[list[str]] = []
        self.results = {"a": "passed", "b": "FAILED, status 1", "c": "passed"}
        self.gpus = ["NVIDIA H200, 580.65.06"]
        monkeypatch.setattr(gpu_table, "gpu_names", lambda: self.gpus)
        monkeypatch.setattr(gpu_check, "result", self._result)
        monkeypatch.setattr(gpu_check, "keep", lambda rows, place: self.kept.append([row.name for row in rows]))

    def _result(self, check: Check, place: Place) -> Result:
        if self.results[check.name] == "cut":
            raise KeyboardInterrupt
        self.ran.append(check.name)
        return Result(check.name, self.results[check.name], "3 s", "1.0 GB", "equal", "Step 3/3 | reward 0")

    def call(self, names: str, skip_passed: bool = False) -> int:
        self.ran.clear()
        every = [Check(1, name, ("train",)) for name in "abc"]
        table = Table(self.place.folder / "table.md", f"atropos gpu-check --rows {names}", rehearses=False)
        chosen = [check for check in every if check.name in names]
        return check_all(every, chosen, table, self.place, skip_passed=skip_passed)

    def rows(self) -> dict[str, str]:
        lines = (self.place.folder / "table.md").read_text().splitlines()
        cells = [line.split(" | ") for line in lines[lines.index(gpu_table.RULE) + 1 :]]
        return {name.removeprefix("| "): came for name, came, *_ in cells}


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_a_call_that_is_cut_leaves_the_rows_that_it_ran(machine: Machine) -> None:
    machine.results["c"] = "cut"
    with pytest.raises(KeyboardInterrupt):
        machine.call("abc")
    assert machine.rows() == {"a": "passed", "b": "FAILED, status 1"}
    assert machine.kept == []


def test_the_table_exists_before_the_first_row_runs(machine: Machine) -> None:
    machine.results["a"] = "cut"
    with pytest.raises(KeyboardInterrupt):
        machine.call("abc")
    assert machine.rows() == {}


def test_a_later_call_adds_to_the_table_and_skips_what_passed(machine: Machine) -> None:
    assert machine.call("b") == 1
    assert machine.call("a") == 0  # b failed before, and is not part of this call
    assert machine.rows() == {"a": "passed", "b": "FAILED, status 1"}
    machine.results["b"] = "passed"
    assert machine.call("ab", skip_passed=True) == 0
    assert machine.ran == ["b"]
    assert machine.kept == []
    assert machine.call("abc", skip_passed=True) == 0
    assert machine.ran == ["c"]
    assert machine.rows() == dict.fromkeys("abc", "passed")
    assert machine.kept == [["a", "b", "c"]]  # the table is whole: the doctor may read it
    text = (machine.place.folder / "table.md").read_text()
    assert [line for line in text.splitlines() if line.startswith("Command: ")] == [
        f"Command: `atropos gpu-check --rows {names}`" for names in ("b", "a", "ab", "abc")
    ]


def test_without_skip_passed_a_row_runs_again(machine: Machine) -> None:
    machine.call("a")
    machine.results["a"] = "FAILED, status 3"
    assert machine.call("a") == 1
    assert machine.rows() == {"a": "FAILED, status 3"}


def test_rows_of_another_version_stay_in_the_table(machine: Machine) -> None:
    machine.call("a")
    path = machine.place.folder / "table.md"
    path.write_text(path.read_text() + "| an older row | passed | 1 s |  |  |  |\n")
    machine.call("b")
    assert machine.rows() == {"a": "passed", "b": "FAILED, status 1", "an older row": "passed"}


@pytest.mark.parametrize("change", ["gpu", "versions", "file"])
def test_the_table_of_another_machine_is_refused_and_stays(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    path = machine.place.folder / "table.md"
    machine.call("a")
    if change == "gpu":
        machine.gpus = ["NVIDIA H100 80GB HBM3, 580.65.06"]
    elif change == "versions":
        monkeypatch.setattr(gpu_table, "installed_version", lambda name: "9.9")
    else:
        path.write_text("# My notes\n")
    before = path.read_text()
    with pytest.raises(ConfigError, match="name another directory with --out"):
        machine.call("b", skip_passed=True)
    assert machine.ran == []
    assert path.read_text() == before
