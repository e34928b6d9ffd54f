"""run.json says by what a run was made, and keeps every start of a run that is resumed."""

import json
from pathlib import Path

import pytest

from example_trainer.launcher.run_record import commit, write_record

pytestmark = pytest.mark.services  # git is asked


def test_it_names_commit_packages_machine_seed_and_command(tmp_path: Path) -> None:
    write_record(tmp_path / "run.json", 7, "org/model", [])
    (start,) = json.loads((tmp_path / "run.json").read_text())["starts"]
    assert (start["seed"], start["model"]) == (7, "org/model")
    assert {"torch", "transformers", "pydantic"} <= start["packages"].keys()
    assert start["machine"]["cores"] > 0
    assert start["machine"]["processor"]
    assert start["command"]
    assert start["time"].startswith("20")
    assert commit().items() <= start.items()


def test_a_resumed_run_keeps_its_earlier_starts(tmp_path: Path) -> None:
    for seed in (1, 2):
        write_record(tmp_path / "run.json", seed, "m", [])
    assert [start["seed"] for start in json.loads((tmp_path / "run.json").read_text())["starts"]] == [1, 2]
