"""run.json says by what a run was made, and keeps every start of a run that is resumed."""

import json
from pathlib import Path

import pytest

from atropos_launcher.run_record import MOST_STARTS, commit, write_record
from atropos_launcher.service import Service

pytestmark = pytest.mark.services  # git is asked


def test_it_names_commit_packages_machine_seed_and_command(tmp_path: Path) -> None:
    vllm = Service(
        "vllm-2",
        ("true",),
        {"CUDA_VISIBLE_DEVICES": "2,3"},
        health="http://127.0.0.1:9002/health",
        cores=(4, 5),
    )
    write_record(tmp_path / "run.json", 7, "org/model", [], [Service("trainer", ("true",)), vllm])
    (start,) = json.loads((tmp_path / "run.json").read_text())["starts"]
    assert (start["seed"], start["model"]) == (7, "org/model")
    assert {"torch", "transformers", "pydantic"} <= start["packages"].keys()
    assert start["machine"]["cores"] > 0
    assert start["machine"]["processor"]
    assert start["command"]
    assert start["time"].startswith("20")
    assert commit().items() <= start.items()
    place = {"url": "http://127.0.0.1:9002", "gpus": ["2", "3"], "cores": [4, 5]}
    assert start["services"] == {"trainer": {}, "vllm-2": place}


def test_a_resumed_run_keeps_its_earlier_starts(tmp_path: Path) -> None:
    for seed in (1, 2):
        write_record(tmp_path / "run.json", seed, "m", [], [])
    assert [start["seed"] for start in json.loads((tmp_path / "run.json").read_text())["starts"]] == [1, 2]


def test_a_run_of_many_starts_keeps_the_first_and_the_newest(tmp_path: Path) -> None:
    starts = [{"seed": seed} for seed in range(MOST_STARTS + 50)]
    (tmp_path / "run.json").write_text(json.dumps({"starts": starts}))
    write_record(tmp_path / "run.json", 1000, "m", [], [])
    kept = [start["seed"] for start in json.loads((tmp_path / "run.json").read_text())["starts"]]
    assert (len(kept), kept[0], kept[1], kept[-2:]) == (MOST_STARTS, 0, 52, [MOST_STARTS + 49, 1000])


@pytest.mark.parametrize("content", ['{"data": {}}', "[]", '{"starts": 3}', "{"])
def test_a_record_without_starts_is_begun_again(tmp_path: Path, content: str) -> None:
    """As an environment makes it where somebody removed the file during the run."""
    (tmp_path / "run.json").write_text(content)
    write_record(tmp_path / "run.json", 1, "m", [], [])
    assert [start["seed"] for start in json.loads((tmp_path / "run.json").read_text())["starts"]] == [1]
