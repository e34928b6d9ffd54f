"""CPU cores of a run's services: who gets which, what each program is told, and what is refused."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from atropos_launcher.commands import train
from atropos_launcher.placement.cores import CorePlacement, place_cores
from atropos_launcher.run_file.core_settings import CoreLayout
from atropos_launcher.run_file.run_file import validated
from atropos_launcher.service import Service
from atroposlib.flags import ConfigError
from atroposlib.processes import exec_child
from tests.unit.launcher.plans import ask_for, no_processes, on_gpus, plan

__all__ = ["no_processes"]

EIGHT = range(8)
BINDING = "VLLM_CPU_OMP_THREADS_BIND"


def placed(servers: int = 1, **cores: object) -> CorePlacement:
    return place_cores(CoreLayout.model_validate(cores), servers, EIGHT)


# --- who gets which ---------------------------------------------------------------------------------


def test_without_a_layout_nobody_is_pinned() -> None:
    assert placed() == CorePlacement(((),))
    assert placed(servers=2) == CorePlacement(((), ()))


def test_numbers_take_what_no_set_names() -> None:
    found = placed(vllm=3, trainer="0-1", environments=1, api="auto")
    assert found == CorePlacement(((2, 3, 4),), (0, 1), (5,), ())


def test_a_set_is_a_list_a_range_or_both() -> None:
    assert placed(vllm=[1, "4-5"], trainer="7,0", environments=[6]) == CorePlacement(((1, 4, 5),), (0, 7), (6,))


def test_servers_share_evenly_or_as_they_are_named() -> None:
    assert placed(servers=2, vllm=4).vllm == ((0, 1), (2, 3))
    assert placed(servers=2, vllm="2-5").vllm == ((2, 3), (4, 5))
    assert placed(servers=2, vllm=[[0, 1, 2], ["7"]]).vllm == ((0, 1, 2), (7,))


def test_sets_may_overlap_where_services_take_turns() -> None:
    found = placed(vllm="0-7", trainer="0-7", environments=[0])
    assert (found.vllm, found.trainer) == ((tuple(EIGHT),), tuple(EIGHT))


@pytest.mark.parametrize(
    ("servers", "cores", "message"),
    [
        (1, {"trainer": "6-8"}, "layout.cores.trainer: CPU core 8 cannot be used here; available cores are 0-7"),
        (2, {"vllm": 3}, "layout.cores.vllm: 3 CPU cores (0-2) for 2 vLLM servers: give 2 or 4"),
        (
            2,
            {"vllm": [[0, 1], [1]]},
            "layout.cores.vllm: the servers 1 and 2 both have core 1, but they compute at the",
        ),
        (2, {"vllm": [[0], [1], [2]]}, "layout.cores.vllm: 3 sets, but this run has 2 vLLM server(s)"),
        (
            1,
            {"vllm": 6, "trainer": 2, "api": [0]},
            "layout.cores asks for 8 cores (vllm 6 and trainer 2), but only 7 of 0-7 are left: lower the numbers, or",
        ),
    ],
)
def test_cores_that_do_not_go_round_are_refused(servers: int, cores: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        placed(servers, **cores)
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    ("cores", "message"),
    [
        ({"trainer": 0}, "layout.cores.trainer: expected auto, a number of cores from 1 on, or a set such as 0-3,8"),
        ({"trainer": True}, "layout.cores.trainer: expected auto, a number of cores from 1 on"),
        ({"trainer": []}, "layout.cores.trainer: expected auto, a number of cores from 1 on"),
        ({"vllm": [[0], []]}, "layout.cores.vllm: expected auto, a number of cores from 1 on"),
        ({"vllm": "two"}, "layout.cores.vllm: 'two' names no CPU cores; write e.g. 0-3,8"),
        ({"vllm": [0, "0-1"]}, "layout.cores.vllm: core 0 is named twice"),
        ({"vlm": 2}, "unknown key 'layout.cores.vlm'"),
    ],
)
def test_what_are_no_cores_is_refused(cores: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        validated({"layout": {"cores": cores}, "environments": {"a": {"file": "a.py"}}}, "run.yaml")
    assert str(raised.value).startswith(f"run.yaml: {message}")
    assert "\n" not in str(raised.value)


# --- what the programs are told ---------------------------------------------------------------------------------


@pytest.fixture
def eight_cores(no_processes: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {*EIGHT})


def services(*words: str) -> dict[str, Service]:
    return {service.name: service for service in plan("arithmetic", *words).services}


@pytest.mark.usefixtures("eight_cores")
def test_every_service_runs_on_its_cores_with_as_many_threads() -> None:
    words = "--vllm.count 2 --layout.cores.vllm 4 --layout.cores.trainer 2 --trainer-ranks 2"
    found = services(*words.split(), "--layout.cores.environments", "[7]", "--layout.cores.api=[7]")
    assert {name: service.cores for name, service in found.items()} == {
        "api": (7,),
        "vllm-1": (0, 1),
        "vllm-2": (2, 3),
        "trainer": (4, 5),
        "env": (7,),
    }
    assert (found["vllm-1"].environment[BINDING], found["vllm-2"].environment[BINDING]) == ("0-1", "2-3")
    assert found["env"].environment["OMP_NUM_THREADS"] == "1"


@pytest.mark.usefixtures("eight_cores")
def test_the_trainer_gets_its_cores_as_a_flag_and_shares_them_out_among_its_ranks() -> None:
    made = plan("arithmetic", "--layout.cores.trainer", "4-7", "--trainer-ranks", "2")
    assert (made.trainer.cores, made.trainer.trainer_ranks) == ("4-7", 2)
    assert "cores: 4-7" in made.files["trainer.yaml"]
    with pytest.raises(
        ConfigError, match=r"layout.cores.trainer: 3 CPU cores \(0-2\) for 2 trainer ranks: give 2 or 4"
    ):
        plan("arithmetic", "--layout.cores.trainer", "3", "--trainer-ranks", "2")
    with pytest.raises(ConfigError, match=r"trainer.cores: `layout.cores.trainer` at the top of the run decides it"):
        plan("arithmetic", "--layout.cores.trainer", "4", "--trainer.cores", "0")


@pytest.mark.usefixtures("eight_cores")
@pytest.mark.parametrize(
    ("words", "overlap"),
    [
        ("", False),
        ("--layout.cores.trainer 2", False),
        ("--layout.cores.vllm 4 --layout.cores.trainer 2", True),
        ("--layout.cores.vllm 0-3 --layout.cores.trainer 3-4", False),
        ("--layout.cores.vllm 4 --layout.cores.trainer 2 --trainer.no-overlap", False),
    ],
)
def test_sampler_and_trainer_overlap_where_they_have_cores_of_their_own(words: str, overlap: bool) -> None:
    assert plan("arithmetic", *words.split()).trainer.overlap is overlap


@pytest.mark.usefixtures("eight_cores")
def test_tensor_parallel_ranks_are_bound_to_shares() -> None:
    words = ["--vllm.tensor_parallel_size", "2", "--layout.cores.vllm"]
    assert services(*words, "2-5")["vllm"].environment[BINDING] == "2-3|4-5"
    with pytest.raises(ConfigError, match=r"3 CPU cores \(0-2\) for 2 tensor-parallel ranks of vllm: give 2 or 4"):
        services(*words, "3")


@pytest.mark.usefixtures("eight_cores")
def test_without_a_layout_every_command_and_variable_is_as_it_was() -> None:
    for service in services().values():
        assert service.cores == ()
        assert not {BINDING, "OMP_NUM_THREADS"} & service.environment.keys()
    assert plan("arithmetic").trainer.cores is None
    assert "layout" not in plan("arithmetic").files["run.yaml"]


@pytest.mark.usefixtures("eight_cores")
def test_on_gpus_vllm_is_kept_to_its_cores_and_chooses_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpus(monkeypatch, ["0", "1"])
    vllm = services("--layout.cores.vllm", "2")["vllm"]
    assert (vllm.cores, BINDING in vllm.environment) == ((0, 1), False)


@pytest.mark.usefixtures("eight_cores")
def test_a_trainer_that_starts_vllm_gives_it_its_own_cores() -> None:
    with pytest.raises(ConfigError, match=r"layout.cores.vllm: with bridge restart .* the trainer starts vLLM"):
        plan("arithmetic", "--bridge", "restart", "--layout.cores.vllm", "2")
    assert plan("arithmetic", "--bridge", "restart", "--layout.cores.trainer", "2").trainer.cores == "0-1"


@pytest.mark.usefixtures("eight_cores")
def test_a_dry_run_shows_them_and_the_kept_run_repeats_them(tmp_path: Path) -> None:
    words = ["arithmetic", "--vllm.count", "2", "--layout.cores.vllm", "[[0, 1], [4-5]]", "--layout.cores.trainer", "2"]
    made = plan(*words)
    shown = train.described(made, ask_for(*words))
    assert "#   on the CPU cores 4-5\n" in shown
    assert "#   on the CPU cores 2-3\n" in shown
    (tmp_path / "run.yaml").write_text(made.files["run.yaml"])
    assert plan(str(tmp_path / "run.yaml")).files == made.files


# --- in the process ---------------------------------------------------------------------------------


@pytest.mark.services
def test_a_service_and_its_children_run_there_and_nowhere_else() -> None:
    core = max(os.sched_getaffinity(0))
    ask = "import os, subprocess, sys; print(*os.sched_getaffinity(0), flush=True); subprocess.run(sys.argv[1:])"
    command = [sys.executable, "-c", ask, sys.executable, "-c", "import os; print(*os.sched_getaffinity(0))"]
    done = subprocess.run(
        [sys.executable, "-I", "-S", exec_child.__file__, str(os.getpid()), "15", str(core), *command],
        input=b"\n",
        capture_output=True,
        timeout=30,
        check=True,
    )
    assert done.stdout.decode().split() == [str(core), str(core)]


@pytest.mark.services
def test_a_core_that_has_gone_is_one_line() -> None:
    command = [sys.executable, "-I", "-S", exec_child.__file__, str(os.getpid()), "15", "1000", "true"]
    done = subprocess.run(command, input=b"\n", capture_output=True, timeout=30, check=False)
    assert done.returncode == exec_child.NOT_STARTED
    assert done.stderr.decode() == "cannot run on the CPU cores [1000]: Invalid argument\n"
