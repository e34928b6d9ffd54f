"""scripts/slurm/train.sbatch, with the variables that SLURM sets, and commands in place of SLURM's and of `atropos`."""

import os
import subprocess
from pathlib import Path

import pytest

from atropos_launcher.placement.machines import read_machines, remote_words

pytestmark = pytest.mark.services

SCRIPT = Path(__file__).parents[3] / "scripts/slurm/train.sbatch"


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    """The directory in which sbatch was called; the commands on PATH say how they were started."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, program in {"scontrol": 'echo "n1\nn2\nn3"', "atropos": 'echo "$(pwd) atropos $*"'}.items():
        (tools / name).write_text(f"#!/bin/sh\n{program}\n")
        (tools / name).chmod(0o755)
    return tmp_path


def start(cluster: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """As slurmd does: a copy of the script, elsewhere."""
    copy = cluster / "slurm_script"
    copy.write_text(SCRIPT.read_text())
    environment = {
        "PATH": f"{cluster / 'bin'}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(cluster),
        "SLURM_JOB_NAME": "atropos",
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NUM_NODES": "1",
        **variables,
    }
    return subprocess.run(
        ["bash", copy, *arguments], env=environment, cwd="/", capture_output=True, text=True, timeout=20
    )


def test_a_job_trains_its_recipe_under_the_job_s_name(cluster: Path) -> None:
    done = start(cluster, "gsm8k_broadcast", "--steps", "5")
    assert done.stdout == f"{cluster} atropos train gsm8k_broadcast --steps 5 --run-name atropos-17\n"
    assert (done.returncode, done.stderr) == (0, "")


def test_a_job_that_slurm_starts_again_continues_its_run(cluster: Path) -> None:
    (cluster / "runs/atropos-17").mkdir(parents=True)
    (cluster / "runs/atropos-17/run.yaml").touch()
    assert start(cluster, "gsm8k_broadcast").stdout == f"{cluster} atropos train --resume runs/atropos-17\n"


def test_the_checkout_s_own_command_is_preferred(cluster: Path) -> None:
    own = cluster / ".venv/bin/atropos"
    own.parent.mkdir(parents=True)
    own.write_text("#!/bin/sh\necho own\n")
    own.chmod(0o755)
    assert start(cluster, "gsm8k").stdout == "own\n"


def test_without_a_recipe_it_says_so(cluster: Path) -> None:
    done = start(cluster)
    assert done.returncode == 2
    assert done.stderr == ("train.sbatch: error: name a recipe: sbatch scripts/slurm/train.sbatch gsm8k_broadcast\n")


SEVERAL = {"SLURM_JOB_NUM_NODES": "3", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_CPUS_PER_TASK": "16"}
STEP = "srun --overlap --nodes=1 --ntasks=1 --cpus-per-task=16 --mem=0 --nodelist={host}"


def test_a_job_of_several_nodes_names_them_and_starts_what_runs_there_by_srun(cluster: Path) -> None:
    done = start(cluster, "gsm8k_broadcast", "--steps", "5", **SEVERAL)
    machines = f"--hosts runs/atropos-17.hosts --remote-command {STEP}"
    assert done.stdout == f"{cluster} atropos train gsm8k_broadcast --steps 5 --run-name atropos-17 {machines}\n"
    assert (cluster / "runs/atropos-17.hosts").read_text() == "n1\nn2\nn3\n"
    (cluster / "runs/atropos-17").mkdir()
    (cluster / "runs/atropos-17/run.yaml").touch()
    again = start(cluster, "gsm8k_broadcast", **SEVERAL)
    assert again.stdout == f"{cluster} atropos train --resume runs/atropos-17 {machines}\n"


def test_some_nodes_train_and_the_others_serve(cluster: Path) -> None:
    assert start(cluster, "gsm8k_broadcast", **SEVERAL, TRAINER_NODES="2").returncode == 0
    file = cluster / "runs/atropos-17.hosts"
    assert file.read_text() == "n1 trainer\nn2 trainer\nn3 vllm\n"
    machines = read_machines(file, STEP, 30, check_here=False)
    assert (machines.training, machines.serving) == (["n1", "n2"], ["n3"])
    assert remote_words(machines.remote, "n3")[-2:] == ["--mem=0", "--nodelist=n3"]
