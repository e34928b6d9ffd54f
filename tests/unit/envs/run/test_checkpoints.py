"""Checkpoints of an environment: whole, few, and passed over when they are damaged."""

import logging
from pathlib import Path

import pytest

from atroposlib.envs.run import checkpoints

DAMAGES = {
    "cut": b'{"taken": 3',
    "garbage": b"\x00\xff\x01",
    "list": b"[]",
    "empty": b"",
    "number": b"7",
    "null": b"null",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_for_the_newest_whole_one(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (2, 4, 6):
        checkpoints.save(str(tmp_path), "echo_0", step, {"taken": step})
    newest = tmp_path / "env_checkpoints/echo_0/step-6.json"
    newest.write_bytes(DAMAGES[damage])
    with caplog.at_level(logging.WARNING):
        found = checkpoints.load(str(tmp_path), "echo_0", "echo", 7)
    assert found is not None
    assert found[1] == {"taken": 4}
    assert len(caplog.messages) == 1
    assert f"Skipping the checkpoint {newest}, which is damaged" in caplog.messages[0]


def test_where_all_are_damaged_the_environment_starts_afresh(tmp_path: Path) -> None:
    checkpoints.save(str(tmp_path), "echo_0", 2, {"taken": 2})
    (tmp_path / "env_checkpoints/echo_0/step-2.json").write_bytes(b"")
    (tmp_path / "env_checkpoints/echo_0/step-x.json").write_bytes(b"{}")
    (tmp_path / "env_checkpoints/echo_0/step-1.json").mkdir()
    assert checkpoints.load(str(tmp_path), "echo_0", "echo", 9) is None


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for step in range(1, checkpoints.KEPT + 10):
        checkpoints.save(str(tmp_path), "echo_0", step, {"taken": step})
    kept = sorted(int(path.stem.removeprefix("step-")) for path in tmp_path.glob("env_checkpoints/echo_0/*"))
    assert kept == list(range(10, checkpoints.KEPT + 10))
    assert checkpoints.load(str(tmp_path), "echo_0", "echo", 12) == (
        tmp_path / "env_checkpoints/echo_0/step-12.json",
        {"taken": 12},
    )


def test_one_beside_later_ones_of_an_earlier_run_stays(tmp_path: Path) -> None:
    for step in range(100, 100 + checkpoints.KEPT):
        checkpoints.save(str(tmp_path), "echo_0", step, {"taken": "by another run"})
    for step in range(1, checkpoints.KEPT + 2):
        checkpoints.save(str(tmp_path), "echo_0", step, {"taken": step})
    for step in (2, checkpoints.KEPT + 1):
        found = checkpoints.load(str(tmp_path), "echo_0", "echo", step)
        assert found is not None
        assert found[1] == {"taken": step}
    assert checkpoints.load(str(tmp_path), "echo_0", "echo", 1) is None
