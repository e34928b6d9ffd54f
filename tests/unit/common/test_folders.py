"""Where the launcher finds what comes with Atropos, in a checkout and as pip installed it."""

from pathlib import Path

import pytest

from atropos_launcher import paths

ROOT = Path(__file__).parents[3]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Site-packages, with one environment."""
    (tmp_path / "atropos_environments").mkdir()
    (tmp_path / "atropos_environments/gsm8k_server.py").touch()
    monkeypatch.setattr(paths, "PACKAGES", tmp_path)
    return tmp_path


def test_a_checkout_has_them_at_its_top() -> None:
    assert paths.recipes() == ROOT / "recipes"
    assert paths.environments() == ROOT / "environments"


def test_installed_they_are_in_the_packages(installed: Path) -> None:
    assert paths.recipes() == installed / "example_trainer/recipes"
    assert paths.environments() == installed / "atropos_environments"


def test_a_recipe_s_environment_is_its_neighbour_or_ours(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, mine = installed / "atropos_environments/gsm8k_server.py", tmp_path / "mine/environments/gsm8k_server.py"
    monkeypatch.chdir(tmp_path)
    assert paths.environment_file("environments/gsm8k_server.py", tmp_path / "mine") == ours
    mine.parent.mkdir(parents=True)
    mine.touch()
    assert paths.environment_file("environments/gsm8k_server.py", tmp_path / "mine") == mine


def test_an_environment_that_is_nowhere_keeps_its_name(installed: Path) -> None:
    assert paths.environment_file("environments/none.py", installed) == Path("environments/none.py")
