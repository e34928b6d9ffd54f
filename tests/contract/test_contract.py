"""The oldest and the newest release of vLLM that is proven, again: CI downloads 200 MB, unless cached.

`--nightly` and scripts/vllm_contract.sh try more. Without an index these tests fail in CI, and are skipped elsewhere.
"""

import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from tests.contract import __main__ as command
from tests.contract import releases
from tests.contract.uses import ROOT
from tests.contract.wheels import NoWheel
from vllm_patching.version import BEYOND, OLDEST

PROVEN = list(command.recorded())
ENDS = [PROVEN[0], PROVEN[-1]]
pytestmark = [pytest.mark.services, pytest.mark.slow]


def only_each_night(cases: Iterable[Any], often: Any) -> list[Any]:
    """All cases, each but one marked for --nightly."""
    return [case if case == often else pytest.param(case, marks=pytest.mark.nightly) for case in cases]


@contextmanager
def wheels_needed() -> Iterator[None]:
    """A developer may be offline; CI may not."""
    try:
        yield
    except NoWheel as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))


def test_the_supported_range_is_what_was_proven() -> None:
    assert Version(PROVEN[0]).release[:2] == OLDEST.release
    assert Version(PROVEN[-1]).minor + 1 == BEYOND.minor, "run scripts/vllm_contract.sh with the newest release"
    assert {Version(each).minor for each in PROVEN} == set(range(OLDEST.minor, BEYOND.minor))


def test_every_page_names_the_supported_range() -> None:
    """So a new release is one number, BEYOND, and what else names it is listed here."""
    newest = f"{BEYOND.major}.{BEYOND.minor - 1}"
    wrong = [
        f"{page.relative_to(ROOT)}:{number}: {line.strip()[:80]}"
        for page in [*ROOT.glob("[!C]*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("vllm_patching/*.py")]
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
        for first, last in re.findall(r"\b(0\.\d+) to (0\.\d+)\b(?!\.)", line)
        if "vLLM" in line and first == str(OLDEST) and last != newest
    ]
    assert wrong == []


def test_the_page_has_the_record() -> None:
    page = command.PAGE.read_text(encoding="utf-8")
    assert page == command.with_table(page, command.recorded())


@pytest.mark.parametrize("version", ENDS)
def test_every_use_of_vllm_is_served(version: str) -> None:
    with wheels_needed():
        assert releases.check_symbols(version) > 400


@pytest.mark.rotating
@pytest.mark.parametrize("version", ENDS)
@pytest.mark.parametrize("mode", only_each_night(releases.MODES, often="exact"))
def test_the_launcher_ends_in_the_engine_configuration_it_asks_for(version: str, mode: str) -> None:
    with wheels_needed():
        releases.check_configuration(version, mode)


@pytest.mark.rotating
@pytest.mark.parametrize("model", only_each_night(releases.MODELS, often=("qwen3", "bfloat16")))
def test_the_exact_trainer_has_the_bits_of_vllms_cuda_classes_and_a_planted_rounding_is_found(
    model: tuple[str, str],
) -> None:
    with wheels_needed():
        releases.check_bits(PROVEN[-1], *model)


@pytest.mark.rotating
def test_a_use_that_no_release_serves_is_named(tmp_path: Path) -> None:
    for package in ("vllm_patching", "example_trainer", "atroposlib"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    compat = tmp_path / "vllm_patching/compat/vllm_engine.py"
    source = compat.read_text(encoding="utf-8")
    assert "pause_scheduler_async(mode=" in source
    compat.write_text(source.replace("pause_scheduler_async(mode=", "pause_scheduler_async(modes="), encoding="utf-8")
    use = r"vllm_engine\.py:\d+ uses pause_scheduler_async\(modes=, clear_cache=\)"
    expected = rf"{use}, but vllm/v1/engine/core_client\.py:\d+: it takes no modes"
    with wheels_needed(), pytest.raises(releases.NotProven, match=expected):
        releases.check_symbols(PROVEN[-1], tmp_path)
