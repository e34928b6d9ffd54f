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


def test_that_of_an_environment_whose_name_begins_alike_is_another_s(tmp_path: Path) -> None:
    checkpoints.save(str(tmp_path), "math_hard_0", 2, {"level": 9})
    assert checkpoints.load(str(tmp_path), "math_0", "math", 2) is None
    for display_name in ("math[v2]", "math/v2", "math"):
        checkpoints.save(str(tmp_path), f"{display_name}_1", 2, {"of": display_name})
        found = checkpoints.load(str(tmp_path), f"{display_name}_0", display_name, 2)
        assert found is not None
        assert found[1] == {"of": display_name}


@pytest.mark.parametrize("name", ["math_0", "math_1", "math_2"])
def test_after_restarts_the_newest_step_is_taken_whatever_number_it_has(tmp_path: Path, name: str) -> None:
    for number, step in ((0, 8), (1, 12), (0, 2)):
        checkpoints.save(str(tmp_path), f"math_{number}", step, {"step": step})
    for step, newest in ((12, 12), (11, 8), (1, None)):
        found = checkpoints.load(str(tmp_path), name, "math", step)
        assert (found and found[1]) == (newest and {"step": newest})


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
