"""Two trainers that would write the same checkpoints, or the same metrics."""

import errno
import os
import threading
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from atroposlib.processes import lock_files
from example_trainer.errors import TrainerError
from example_trainer.loop import opening
from tests.unit.trainer.whole_runs import rows, train

pytestmark = pytest.mark.usefixtures("one_thread")


def alone_in(path: Path) -> AbstractContextManager[None]:
    return lock_files.alone_in(path, RuntimeError, str)


@pytest.mark.parametrize(
    ("held", "named", "changes", "flag"),
    [
        ("checkpoints/checkpoints", "checkpoints", {}, "--save-path"),
        ("logs/metrics.jsonl", "logs/metrics.jsonl", {}, "--log-dir"),
        ("mine.jsonl", "mine.jsonl", {"metrics_path": "mine.jsonl"}, "--metrics-path"),
    ],
)
def test_the_second_one_is_refused_before_it_touches_anything(
    model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    held: str,
    named: str,
    changes: dict[str, Any],
    flag: str,
) -> None:
    monkeypatch.setattr(opening, "HELD_S", 0.2)
    monkeypatch.chdir(tmp_path)
    with alone_in(tmp_path / held):
        with pytest.raises(TrainerError) as refused:
            train(model, tmp_path, training_steps=1, **changes)
        assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [f".{Path(held).name}.lock"]
    assert f"{named} is being written by process" in str(refused.value)
    assert f"another trainer: end that one, or choose another {flag}" in str(refused.value)
    train(model, tmp_path, training_steps=1, **changes)
    assert not list(tmp_path.rglob("*.lock"))


def test_one_that_is_about_to_end_is_waited_for(model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    run = threading.Thread(target=train, args=(model, tmp_path), kwargs={"training_steps": 1})
    with alone_in(tmp_path / "checkpoints/checkpoints"):
        run.start()
        while "Waiting at most 20 s until" not in caplog.text:
            assert run.is_alive()
            run.join(0.05)
    run.join(60)
    assert len(rows(tmp_path)) == 1


def test_offline_training_is_kept_apart_too(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "HELD_S", 0.2)
    (tmp_path / "answers.jsonl").write_text('{"prefix": "a", "completion": "b"}\n')
    with (
        alone_in(tmp_path / "checkpoints/checkpoints"),
        pytest.raises(TrainerError, match="is being written by process"),
    ):
        train(model, tmp_path, offline_data=str(tmp_path / "answers.jsonl"), offline_share=1.0)


def test_the_directory_of_checkpoints_alone_must_be_writable(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a cluster, where /scratch/me is mine and /scratch is not."""
    opened = os.open

    def mine_alone(path: Any, flags: int, *arguments: Any, **named: Any) -> int:
        if flags & os.O_CREAT and Path(path).parent == tmp_path:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, flags, *arguments, **named)

    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "logs").mkdir()
    monkeypatch.setattr(os, "open", mine_alone)
    train(model, tmp_path, training_steps=1)
    assert len(rows(tmp_path)) == 1
