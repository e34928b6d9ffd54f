"""The run's own rules: who may start a process, and which test may be left out in CI."""

from pathlib import Path

import pytest

from tests import marks

pytest_plugins = ["pytester"]
STARTING = """
import subprocess, threading
import pytest

@pytest.fixture
def service():
    subprocess.run(["true"], check=True)

{mark}
def test_starts():
    subprocess.run(["true"], check=True)

{mark}
def test_starts_by_a_fixture(service):
    pass

{mark}
def test_starts_and_hides_the_refusal():
    try:
        subprocess.run(["true"], check=True)
    except BaseException:
        pass

def test_starts_nothing():
    pass
"""


def run(pytester: pytest.Pytester, program: str, *plugins: object) -> pytest.RunResult:
    pytester.makepyfile(program)
    pytester.makeini(
        "[pytest]\nasyncio_default_fixture_loop_scope = function\nmarkers =\n    services: starts a process\n"
    )
    return pytester.runpytest_inprocess("-p", "no:xdist", "-p", "no:randomly", plugins=plugins)


@pytest.mark.services
def test_a_marked_test_may_start_processes(pytester: pytest.Pytester) -> None:
    run(pytester, STARTING.format(mark="@pytest.mark.services"), marks.NoProcess()).assert_outcomes(passed=4)


@pytest.mark.services  # the guard of this run would refuse first
def test_an_unmarked_test_that_starts_a_process_fails(pytester: pytest.Pytester) -> None:
    result = run(pytester, STARTING.format(mark=""), marks.NoProcess())
    result.assert_outcomes(passed=1, failed=2, errors=1)
    result.stdout.fnmatch_lines(
        ["*test_starts starts a process (subprocess.Popen): mark it with pytest.mark.services*"]
    )


SKIPPING = """
import pytest

@pytest.mark.skip(reason="{reason}")
def test_it():
    pass

@pytest.mark.xfail(strict=True)
def test_that_fails():
    assert False
"""


def test_a_skip_that_is_not_on_the_list_fails_the_run(pytester: pytest.Pytester) -> None:
    result = run(pytester, SKIPPING.format(reason="no time"), marks.NoUnseenSkip())
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["SKIPPED IN CI, * test_*.py::test_it: Skipped: no time"])


def test_a_skip_on_the_list_does_not(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(marks, "EXPECTED_SKIPS", (("test_a_skip_on_the_list", "no time"),))
    assert run(pytester, SKIPPING.format(reason="no time"), marks.NoUnseenSkip()).ret == pytest.ExitCode.OK


def test_a_module_that_skips_itself_is_seen(pytester: pytest.Pytester) -> None:
    program = "import pytest\npytest.skip('no such machine', allow_module_level=True)"
    result = run(pytester, program, marks.NoUnseenSkip())
    result.stdout.fnmatch_lines(["SKIPPED IN CI, *no such machine"])


def test_every_expected_skip_is_a_skip_that_a_test_may_make() -> None:
    """Where the fixture or the test of that name says it."""
    for name, reason in marks.EXPECTED_SKIPS:
        (test,) = Path(__file__).parents[2].rglob(name)
        assert any(reason in path.read_text() for path in (test, test.with_name("conftest.py")) if path.exists())


def items(pytester: pytest.Pytester, tests: int) -> list[pytest.Item]:
    return pytester.getitems("".join(f"def test_{number}(): pass\n" for number in range(tests)))


def test_each_rotating_test_is_in_one_third_and_the_thirds_are_equal(pytester: pytest.Pytester) -> None:
    made = items(pytester, 7)
    for found in (made[:1], made[:3], made):
        kept = [{item.name for item in {*found} - marks.of_other_thirds(found, third)} for third in "012"]
        assert sorted(name for names in kept for name in names) == sorted(item.name for item in found)
        assert max(map(len, kept)) - min(map(len, kept)) <= 1
        assert marks.of_other_thirds(found, "all") == set()


def test_those_that_share_a_start_run_together(pytester: pytest.Pytester) -> None:
    found = items(pytester, 4)
    for item in found[:3]:
        item.add_marker(pytest.mark.rotating(together=True))
    lefts = [marks.of_other_thirds(found, third) for third in "012"]
    assert sorted(len({*found[:3]} - left) for left in lefts) == [0, 0, 3]
    assert sorted(found[3] in left for left in lefts) == [False, True, True]


@pytest.mark.services
def test_the_commit_decides_on_the_third() -> None:
    assert marks.third_of_commit() in marks.THIRDS[:3]
    assert marks.third_of_commit() == marks.third_of_commit()
