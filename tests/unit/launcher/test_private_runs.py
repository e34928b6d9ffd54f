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
from atropos_launcher.placement.ports import Ports
from atropos_launcher.plan.command_line import read_command_line
from atropos_launcher.service import Service
from atropos_launcher.services import ray_actor
from atropos_launcher.services.records import Records
from atropos_launcher.services.supervisor import CannotStart
from atroposlib.view.run_data.runs import Runs
from atroposlib.wire.folders import LATEST
from tests.unit.common.disk import broken_disk
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


@pytest.mark.usefixtures("no_processes")
def test_a_run_that_cannot_be_kept_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = plan("arithmetic")
    (tmp_path / "file").write_text("")
    under = replace(made, site=replace(made.site, run_dir=tmp_path / "file" / "mine"), services=SHORT)
    with pytest.raises(CannotStart, match=r"cannot write to .*mine: Not a directory; free space, or choose another"):
        train.start(under, PlainConsole(tmp_path, {}), [])
    folder = tmp_path / "mine"
    made = replace(made, site=replace(made.site, run_dir=folder), services=SHORT)
    with broken_disk(), pytest.raises(CannotStart, match=r"cannot write to .*mine: Input/output error; free space"):
        train.start(made, PlainConsole(folder, {}), [])
    assert not Records(folder).exist()


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize("status", [0, 1])
def test_a_run_that_ended_early_and_well_is_not_to_be_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: int
) -> None:
    """As by --stop-when-flat."""
    monkeypatch.setattr(train, "start", lambda *_: train.End(status, False, False))
    monkeypatch.setattr(train, "draw", lambda *_: 0)
    made = plan("arithmetic")
    made = replace(made, site=replace(made.site, run_dir=tmp_path))
    (tmp_path / "run.yaml").write_text("")
    with Ports() as ports:
        train.train(read_command_line(["arithmetic"]), made, False, None, ports)
    said = capsys.readouterr().out
    assert ("To continue (there is no checkpoint yet: from step 1)" in said) == (status != 0)
    assert "is lost" not in said
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / LATEST).write_text("step_20\n")
    made = replace(made, trainer=made.trainer.model_copy(update={"save_path": tmp_path / "checkpoints"}))
    with Ports() as ports:
        train.train(read_command_line(["arithmetic"]), made, False, None, ports)
    said = capsys.readouterr().out
    kept = "Nothing up to the last checkpoint is lost, nor any group that the batching API acknowledged"
    assert (kept in said, "To continue from the last checkpoint" in said) == (status != 0, status != 0)


def test_a_run_that_is_done_says_what_its_record_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.json").write_text("{}")
    with broken_disk(), pytest.raises(CannotStart, match=r"the run is done, and its record in .* is not whole: Input"):
        train.sum_up(tmp_path, 60, newcomer=False)
    assert "Mean sampled reward: not kept" in capsys.readouterr().out


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
