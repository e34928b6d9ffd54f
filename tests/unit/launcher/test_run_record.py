"""run.json says by what a run was made, and keeps every start of a run that is resumed."""

import json
from pathlib import Path

import pytest

from atropos_launcher.run_record import commit, write_record
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
