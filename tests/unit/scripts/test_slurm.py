"""scripts/slurm/train.sbatch, with the variables that SLURM sets, and commands in place of SLURM's and of `atropos`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from atropos_launcher.placement.ray_cluster import Nodes, planned

pytestmark = pytest.mark.services

SCRIPT = Path(__file__).parents[3] / "scripts/slurm/train.sbatch"


# Starts the command once for each node, as SLURM does, with what a test asks for in place of the job.
SRUN = """
while [ "${1#--}" != "$1" ]; do
  case $1 in --ntasks=*) tasks=${1#*=} ;; esac
  echo "$1" >> steps
  shift
done
for node in $(seq "$tasks"); do echo "n$node $RAY_AUTH_MODE ${#RAY_AUTH_TOKEN} $*"; done
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    """The directory in which sbatch was called; the commands on PATH say how they were started."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, program in {"scontrol": 'echo "n1\nn2\nn3"', "atropos": 'echo "$(pwd) atropos $*"', "srun": SRUN}.items():
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
RAY = "ray symmetric-run --address n1:6379 --min-nodes 3 --num-cpus 16 --disable-usage-stats --"


def test_a_job_of_several_nodes_is_a_ray_cluster_whose_head_trains(cluster: Path) -> None:
    done = start(cluster, "gsm8k_broadcast", "--steps", "5", **SEVERAL)
    assert (done.returncode, done.stderr) == (0, "")
    words = f"{RAY} atropos train gsm8k_broadcast --steps 5 --run-name atropos-17 --ray auto --ray-nodes 3"
    assert done.stdout.splitlines() == [f"n{node} token 64 {words}" for node in (1, 2, 3)]
    asked = (cluster / "steps").read_text().split()
    assert asked == ["--nodes=3", "--ntasks=3", "--ntasks-per-node=1", "--cpus-per-task=16", "--mem=0"]
    (cluster / "runs/atropos-17").mkdir(parents=True)
    (cluster / "runs/atropos-17/run.yaml").touch()
    again = start(cluster, "gsm8k_broadcast", **SEVERAL)
    assert f"n3 token 64 {RAY} atropos train --resume runs/atropos-17 --ray auto --ray-nodes 3\n" in again.stdout


def test_no_secret_of_the_cluster_is_in_a_command_line(cluster: Path) -> None:
    token = "do" * 32
    done = start(cluster, "gsm8k_broadcast", **SEVERAL, RAY_AUTH_TOKEN=token, ATROPOS_API_TOKEN="an-api-token")
    assert done.stdout
    assert token not in done.stdout
    assert "an-api-token" not in done.stdout


def test_some_nodes_train_and_the_others_serve(cluster: Path) -> None:
    done = start(cluster, "gsm8k_broadcast", **SEVERAL, TRAINER_NODES="2")
    assert done.returncode == 0
    (asked,) = {line.rpartition(" ")[2] for line in done.stdout.splitlines()}
    machines = planned(Nodes.of(asked), 30)
    assert (machines.training, machines.serving) == (["node-1", "node-2"], ["node-3"])


@pytest.mark.slow
def test_ray_has_the_commands_and_flags_that_the_script_uses() -> None:
    """`ray symmetric-run` takes the first two, and passes the others on to `ray start`."""
    own, passed_on = (help_of(command) for command in ("symmetric-run", "start"))
    flags = [word for word in RAY.split() if word.startswith("--") and word != "--"]
    assert flags == ["--address", "--min-nodes", "--num-cpus", "--disable-usage-stats"]
    assert all(flag in own for flag in flags[:2])
    assert all(flag in passed_on for flag in flags[2:])


def help_of(command: str) -> str:
    words = [str(Path(sys.executable).with_name("ray")), command, "--help"]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=True).stdout
