"""benchmarks/planted_errors.py: an error is found by its text alone, tried out, and undone; results are kept."""

import subprocess
from pathlib import Path

import pytest

from benchmarks import planted_errors
from benchmarks.planted_errors import CannotPlant, Planted, Report, Result

pytestmark = pytest.mark.services

MEAN = "def mean(values):\n    return sum(values) / len(values)\n"
TEST = "from product.mean import mean\n\n\ndef test_mean():\n    assert mean([{}]) == 3\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A product of one function with two tests, of which one notices what the other does not."""
    files = {
        "product/mean.py": MEAN,
        "product/other.py": "TWICE = 1\nTWICE = 1\n",
        "tests/deep/test_mean.py": TEST.format("1, 5"),
        "tests/test_one.py": TEST.format("3"),
        "tests/conftest.py": "def pytest_addoption(parser):\n"
        "    parser.addoption('--fast', action='store_true')\n    parser.addoption('--third')\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for words in (["init", "--quiet"], ["add", "."]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    return tmp_path


def divisor_lost(*tests: str) -> Planted:
    return Planted("divisor lost", "data", "sum(values) / len(values)", "sum(values)", tests)


def test_an_error_is_caught_by_the_test_that_notices_and_undone(checkout: Path) -> None:
    found = planted_errors.try_out(divisor_lost("test_one", "test_mean"), checkout)
    assert (found.outcome, found.by) == ("caught", "tests/deep/test_mean.py::test_mean")
    assert (checkout / "product/mean.py").read_text() == MEAN


def test_an_error_that_no_test_notices_is_missed(checkout: Path) -> None:
    assert planted_errors.try_out(divisor_lost("test_one"), checkout).outcome == "missed"


@pytest.mark.parametrize(
    ("old", "tests", "why"),
    [
        ("return nothing", ["test_mean"], "stands in no file"),
        ("TWICE = 1", ["test_mean"], r"stands in product/other.py \(2\)"),
        ("values", ["test_mean"], r"stands in product/mean.py \(3\)"),
        ("def mean", ["test_gone"], "no test file is called test_gone.py"),
        ("def mean", ["test_mean::test_gone"], "pytest ended with exit status 4"),
    ],
)
def test_what_cannot_be_planted_is_told_and_never_counted(checkout: Path, old: str, tests: list[str], why: str) -> None:
    with pytest.raises(CannotPlant, match=why):
        planted_errors.try_out(Planted("odd", "data", old, "pass", tuple(tests)), checkout)


def test_results_of_the_same_commit_are_kept_and_of_another_are_not(tmp_path: Path) -> None:
    report = Report("abc", passes_without=True, results=[Result("x", "data", "missed", 1.0)])
    report.write(tmp_path / "out.json")
    assert planted_errors._earlier(tmp_path / "out.json", "abc") == report
    assert planted_errors._earlier(tmp_path / "out.json", "def") == Report("def")
    assert planted_errors.table(report).splitlines()[1:] == [f"{'in all':<12}   0 of 1", "missed: x (data)"]


def test_every_error_has_a_name_of_its_own_and_changes_something() -> None:
    errors = planted_errors.read_errors()
    assert len({error.name for error in errors}) == len(errors) >= 60
    assert all(error.old != error.new and error.tests for error in errors)


def test_every_error_of_the_list_can_be_planted_in_this_tree() -> None:
    for error in planted_errors.read_errors():
        planted_errors.find(error, planted_errors.ROOT)
        assert planted_errors.test_ids(error, planted_errors.ROOT)
