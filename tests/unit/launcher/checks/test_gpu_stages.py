"""benchmarks/gpu/stages.py: every stage's command is understood, and what is kept of stages that fail or do not fit."""

import ast
import json
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atropos_launcher.commands import doctor
from benchmarks.gpu import kernels, stages, trainer_speed
from benchmarks.gpu.random_model import SHAPES, TOKENIZER_FILES, tokenizer_files, work_folder
from benchmarks.gpu.running import Command, Failed, Found, Generation, Program, Site, Together, Training, Work
from benchmarks.gpu.stages import BEFORE, CHANGES, STAGES, Stage, main, one_by_one
from example_trainer import quickstart_model
from example_trainer.settings.config import TrainerConfig
from tests.integration.device_drills import DRILLS
from tests.unit.launcher.plans import ROOT, no_processes, plan

__all__ = ["no_processes"]
SITE = Site(Path("/gpu"))


def stage(name: str) -> Stage:
    (found,) = [each for each in STAGES if each.name == name]
    return found


def works(of: type) -> list[Any]:
    """Every work of one kind."""
    found: list[Any] = []
    for each in STAGES:
        parts = each.work.parts if isinstance(each.work, Together) else (each.work,)
        found += [part for part in parts if isinstance(part, of)]
    return found


def test_every_stage_is_listed_with_its_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[-1] for line in lines] == [each.name for each in STAGES]
    assert all(each.expected_s < each.limit_s for each in STAGES)
    assert len({each.name for each in STAGES}) == len(STAGES)
    assert main(["--list", "trl"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


@pytest.mark.parametrize("rehearse", [False, True])
def test_every_training_is_a_command_that_is_understood(no_processes: None, rehearse: bool) -> None:
    trainings = works(Training)
    for work in trainings:
        (command,) = work.commands(Site(Path("/gpu"), rehearse))
        assert command[1:4] == ["-m", "atropos_launcher", "train"]
        made = plan(*command[4:])
        assert made.run.steps == work.steps
        assert made.run.name == work.label
        assert command[command.index("--runs") + 1] == "/gpu/runs"
        size = "tiny" if rehearse else work.size
        assert work.recipe == "quickstart" or made.run.model == f"/gpu/models/{size}"
        served = " ".join(next(each for each in made.services if each.name == "vllm").command)
        assert ("--batch-invariant" in served) is work.exact
    assert {work.recipe for work in trainings} == {
        *("gsm8k_broadcast", "gsm8k_single_copy", "gsm8k_reload", "gsm8k_lora", "quickstart")
    }


@pytest.mark.parametrize("rehearse", [False, True])
def test_every_program_understands_its_words(rehearse: bool) -> None:
    for work in works(Program):
        (command,) = work.commands(Site(Path("/gpu"), rehearse))
        words = command[3:]
        assert ("--rehearse" in words) is rehearse
        if work.module == "kernels":
            assert set(kernels.parser().parse_args(words).experiments) <= set(kernels.EXPERIMENTS)
        elif work.module == "trainer_speed":
            asked = trainer_speed.parser().parse_args(words)
            assert asked.model in SHAPES
            for variant in asked.variant or []:
                assert set(variant) <= {*trainer_speed.SWITCHES, *TrainerConfig.model_fields}
        else:
            assert (ROOT / f"benchmarks/gpu/{work.module}.py").is_file()


def test_every_other_command_names_what_exists() -> None:
    for work in works(Command):
        (command,) = work.commands(SITE)
        assert "MODEL" not in command
        if work.name == "doctor":
            assert doctor.parser().parse_known_args(command[4:])[1] == []
        elif "pytest" in command:
            source = (ROOT / next(word for word in command if word.endswith(".py"))).read_text()
            tests = [each.name for each in ast.parse(source).body if isinstance(each, ast.FunctionDef)]
            for word in command[-1].split(" or "):
                assert any(word in test for test in tests), word
        else:
            assert command[2] == "tests.integration.device_drills"
            assert command[3] in DRILLS
            assert command[4] == "/gpu/models/0.6B"


def test_a_server_is_started_by_the_products_launcher() -> None:
    for work in works(Generation):
        (command,) = work.commands(SITE)
        assert (ROOT / command[2]).is_file()
        assert command[-1] == ("--batch-invariant" if work.flags else "0.4")


def test_the_trainers_changes_are_added_one_by_one() -> None:
    first, *middle, last = one_by_one(BEFORE, CHANGES)
    assert first == {"tf32": False, "varlen": False, "norms": False, "micro_batch_tokens": 2048, "logits_chunk_mb": 128}
    changed = [
        next(name for name in now if now[name] != old[name]) for old, now in zip([first, *middle], middle, strict=False)
    ]
    assert changed == ["tf32", "logits_chunk_mb", "micro_batch_tokens", "varlen", "norms"]
    assert middle[-1] == CHANGES
    assert last == {}
    (command,) = stage("trainer 1.7B").work.commands(SITE)
    assert [json.loads(word) for word in command if word.startswith("{")] == [first, *middle, last]
    (command,) = stage("trainer 0.6B").work.commands(SITE)
    assert [json.loads(word) for word in command if word.startswith("{")] == [
        *({"micro_batch_tokens": 2048, "logits_chunk_mb": 128}, {}, {"share_prefixes": False})
    ]


def test_norms_are_fused_and_get_their_own_forward_back() -> None:
    import torch
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    from example_trainer.model.fused_norms import fuse_norms

    model = torch.nn.Sequential(LlamaRMSNorm(16), torch.nn.Linear(16, 2))
    own = model[0].forward
    assert fuse_norms(model) == 1
    assert model[0].forward != own
    trainer_speed.unfuse_norms(model)
    assert model[0].forward == own
    trainer_speed.unfuse_norms(model)  # also where they are not fused


@pytest.mark.parametrize(
    ("rows", "digests", "why"),
    [
        (2, ["Digest: every word arrived"], "2 of 3 steps"),
        (3, ["Digest: 3 words differ"], "no digest says that every word arrived"),
        (3, [], "no digest says that every word arrived"),
        (3, ["Digest: every word arrived"], ""),
    ],
)
def test_a_training_passes_with_all_steps_and_whole_weights_alone(rows: int, digests: list[str], why: str) -> None:
    work = Training("gsm8k_broadcast", "0.6B", digest=True)
    assert work.wrong([{}] * rows, digests) == why


@pytest.mark.parametrize(("row", "why"), [({}, "tokens differ"), ({"bit_exact/differing_tokens": 0}, "")])
def test_an_exact_training_fails_unless_it_counts_no_differing_token(row: Found, why: str) -> None:
    assert Training("gsm8k_broadcast", "0.6B", exact=True, steps=1).wrong([row], []) == why


def test_without_a_packed_tokenizer_it_is_the_quickstart_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quickstart_model, "ensure_model", lambda folder: Path("/quickstart"))
    assert tokenizer_files(tmp_path) == [Path("/quickstart") / name for name in TOKENIZER_FILES]
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").touch()
    assert tokenizer_files(tmp_path) == [tmp_path / "tokenizer" / "tokenizer.json"]


def test_work_has_a_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORK", raising=False)
    assert work_folder().name == "atropos-gpu"
    monkeypatch.setenv("WORK", "/elsewhere")
    assert work_folder() == Path("/elsewhere")


class Fake:
    """A work that returns or raises, and counts its calls."""

    def __init__(self, outcome: Found | Exception) -> None:
        self.outcome, self.limits = outcome, list[float]()

    def commands(self, site: Site) -> list[list[str]]:
        return []

    def run(self, site: Site, limit_s: float) -> Found:
        (site.logs / "fake.log").write_text("said\n")
        self.limits.append(limit_s)
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


Call = Callable[..., int]


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    """Run stages of these works by name, in order, with these words on the command line."""
    monkeypatch.setenv("WORK", str(tmp_path / "work"))
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    monkeypatch.setattr("signal.signal", lambda *_: None)

    def run(given: dict[str, Work], *words: str, expected_s: int = 10, package: str | None = None) -> int:
        made = [Stage(name, expected_s, 100, work, package) for name, work in given.items()]
        monkeypatch.setattr(stages, "STAGES", made)
        return main(["--rehearse", *words])

    return run


def rows(tmp_path: Path) -> list[Found]:
    return [json.loads(line) for line in (tmp_path / "out/results.jsonl").read_text().splitlines()]


def test_a_failed_stage_gives_status_1_and_keeps_the_rest(call: Call, tmp_path: Path) -> None:
    broken = Fake(KeyError("a fault of the stage's own"))
    given = {"a": Fake({"x": 1}), "b": Fake(Failed("too | slow", {"y": 2})), "c": broken, "d": Fake({"z": 3})}
    assert call(given) == 1
    found = rows(tmp_path)
    assert [(row["stage"], row["passed"], row["result"]) for row in found] == [
        *(("a", True, {"x": 1}), ("b", False, {"y": 2}), ("c", False, {}), ("d", True, {"z": 3}))
    ]
    table = (tmp_path / "out/table.md").read_text().splitlines()
    assert len(table) == 6
    assert table[3].startswith("| b | FAILED: too / slow | ")
    assert table[4].startswith("| c | FAILED: KeyError: ")
    with tarfile.open(tmp_path / "out/logs.tar.gz") as archive:
        assert archive.getnames() == ["fake.log"]


def test_a_call_that_is_cut_leaves_what_it_did(call: Call, tmp_path: Path) -> None:
    class Cut(Fake):
        def run(self, site: Site, limit_s: float) -> Found:
            raise SystemExit(143)

    with pytest.raises(SystemExit):
        call({"a": Fake({}), "b": Cut({})})
    assert [row["stage"] for row in rows(tmp_path)] == ["a"]
    assert "| a | passed | " in (tmp_path / "out/table.md").read_text()


def test_a_stage_that_does_not_fit_the_budget_is_not_begun(
    call: Call, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work = Fake({})
    assert call({"a": work}, "--budget", "60", "--spent", "30") == 0  # 25 of the rest are for packing
    assert work.limits == []
    assert "a: not begun, 5 s are left of the budget and it takes about 10" in capsys.readouterr().out
    assert not (tmp_path / "out/results.jsonl").exists()
    assert call({"a": work}, "--budget", "60") == 0
    assert work.limits == [pytest.approx(35, abs=2)]  # less than its own limit: the budget ends first


def test_what_has_passed_runs_again_only_if_asked_for_and_what_failed_if_named(call: Call) -> None:
    good, bad = Fake({}), Fake(Failed("why", {}))
    given = {"good": good, "bad": bad}
    assert [call(given), call(given), len(good.limits), len(bad.limits)] == [1, 1, 1, 1]
    bad.outcome = {}
    assert [call(given, "good", "bad"), len(good.limits), len(bad.limits)] == [0, 1, 2]
    assert [call(given, "--again"), len(good.limits), len(bad.limits)] == [0, 2, 3]


def test_a_stage_without_its_package_is_not_begun(call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    work = Fake({})
    assert call({"learn": work}, package="no_such_package") == 0
    assert work.limits == []
    assert "learn: not begun, the package no_such_package is not installed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "why"), [(("nonsense",), "no stage is named 'nonsense'"), (("reload",), "no GPU on this machine")]
)
def test_a_wrong_command_line_has_status_2(
    words: tuple[str, ...], why: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "first_gpu", lambda: None)
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert why in capsys.readouterr().err


def test_two_at_once_keep_the_results_of_both() -> None:
    class Part(Fake):
        def run(self, site: Site, limit_s: float) -> Found:
            if isinstance(self.outcome, Exception):
                raise self.outcome
            return self.outcome

    with pytest.raises(Failed, match=r"^why$") as failed:
        Together((Part({"x": 1}), Part(Failed("why", {"y": 2})))).run(SITE, 1)
    assert failed.value.found == {"found": [{"x": 1}, {"y": 2}]}


@pytest.mark.services
def test_a_command_that_takes_too_long_ends_at_its_limit_with_what_it_started(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.logs.mkdir()
    script = "import subprocess; print(subprocess.Popen(['sleep', '60']).pid, flush=True); import time; time.sleep(60)"
    with pytest.raises(Failed, match=r"^status 124: .* / \d+$") as failed:
        Command("slow", ("-c", script)).run(site, 1.0)
    child = int(failed.value.found["last"][-1])
    deadline = time.monotonic() + 10
    while (stat := Path(f"/proc/{child}/stat")).exists() and stat.read_text().split()[2] != "Z":
        assert time.monotonic() < deadline, "the child lives on"
        time.sleep(0.01)
