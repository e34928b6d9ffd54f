"""A run's directory is its owner's alone, and the runs of others are passed over."""

import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from atropos_launcher import runs
from atropos_launcher.commands import evaluate, train
from atropos_launcher.console.console import PlainConsole
from atropos_launcher.plan.command_line import read_command_line
from atropos_launcher.service import Service
from atropos_launcher.services import ray_actor
from atroposlib.view.run_data.runs import Runs
from tests.unit.launcher.plans import no_processes, plan

__all__ = ["no_processes"]

NOBODY = 65534
SHORT = [Service("trainer", (sys.executable, "-c", ""), may_end=True)]


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.services
@pytest.mark.usefixtures("no_processes", "open_umask")
def test_nobody_else_enters_the_directory_of_a_run_whatever_the_umask(tmp_path: Path) -> None:
    made = plan("two_environments", "--bridge", "broadcast")
    folder = tmp_path / "runs" / "mine"
    made = replace(made, site=replace(made.site, run_dir=folder), services=SHORT)
    assert train.start(made, PlainConsole(folder, {}), []).status == 0
    assert (folder / "run.json").exists()
    assert mode_of(folder) == 0o700


@pytest.mark.services
@pytest.mark.usefixtures("no_processes", "open_umask")
def test_a_directory_that_is_there_keeps_its_mode(tmp_path: Path) -> None:
    made = plan("arithmetic")
    tmp_path.chmod(0o750)
    made = replace(made, site=replace(made.site, run_dir=tmp_path), services=SHORT)
    train.start(made, PlainConsole(tmp_path, {}), [])
    assert mode_of(tmp_path) == 0o750


@pytest.mark.usefixtures("open_umask")
def test_the_directory_on_another_machine_is_as_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # which `prepare` leaves
    folder = tmp_path / "runs" / "mine"
    job = {"folder": str(folder), "sees": {}, "files": {str(folder / "a.yaml"): "a: 1"}, "directory": str(folder)}
    assert ray_actor.prepare(job) == ""
    assert mode_of(folder) == 0o700


@contextmanager
def as_somebody_else() -> Iterator[None]:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory of runs with one run of root's and one that everyone may read."""
    folder = Path(tempfile.mkdtemp(prefix="atropos-runs-"))  # pytest's own directories are closed to others
    folder.chmod(0o755)
    for name, mode in (("theirs", 0o700), ("ours", 0o755)):
        (folder / name).mkdir()
        (folder / name).chmod(mode)
        (folder / name / "trainer.log").touch()
    yield folder
    shutil.rmtree(folder)


CLOSED = r"theirs may be read by its owner alone, .*`chmod go\+rx "


def test_the_run_of_another_user_is_refused_by_name_and_hides_none_of_ours(shared: Path) -> None:
    with as_somebody_else():
        assert runs.ended_runs(shared) == [shared / "ours"]
        assert list(Runs([], shared).all()) == ["ours"]
        with pytest.raises(runs.NoSuchRun, match=CLOSED):
            runs.find_run(shared, "theirs")


def test_an_evaluation_in_the_directory_of_another_user_is_refused_by_name(shared: Path) -> None:
    asked = read_command_line(
        ["arithmetic", "gpt", "--run-name", "theirs", "--runs", str(shared)],
        prog="atropos evaluate",
        flags=evaluate.EvaluateFlags,
    )
    with as_somebody_else(), pytest.raises(runs.NoSuchRun, match=CLOSED):
        evaluate.evaluation_folder(asked, evaluate.EvaluateFlags())
