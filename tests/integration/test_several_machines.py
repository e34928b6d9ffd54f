"""One run on two machines, which are network namespaces joined by a cable: its launcher starts a vLLM server and a
trainer rank on each, and continues after the cable was cut. They share their files, or have a `runs` of their own.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from atropos_launcher.service import trainer_name
from atroposlib.logs import RUN
from example_trainer.ranks.place import LOST
from tests.integration.conftest import REPOSITORY
from tests.integration.namespaces import Host, entering, tied

REMOTE_SHELL = str(Path(__file__).with_name("remote_shell.py"))
PORT = 2222
SILENCE_S = 6
STEPS = 6
START_S = 600.0
# as short as a step of the quickstart's task can be
SHORT = [
    *("--trainer.batch_size", "2", "--trainer.gradient_accumulation_steps", "2", "--env.group_size", "2"),
    *("--env.max_new_tokens", "16", "--env.steps_per_eval", "0", "--env.eval_at_start", "false"),
    *("--trainer.checkpoint_interval", "1", "--trainer.threads", "1"),
]


@dataclass
class Machines:
    """Two machines, and how the first one reaches the other."""

    hosts: tuple[Host, Host]
    folder: Path
    name: str
    shell: int  # the process on the other one that starts what runs there

    @property
    def run(self) -> Path:
        return self.folder / "runs" / self.name

    def there(self, path: Path) -> Path:
        """The same path as the other machine sees it."""
        return Path(f"/proc/{self.shell}/root{path}")

    @property
    def remote_command(self) -> str:
        return f"{sys.executable} {REMOTE_SHELL} run {{host}} {PORT}"

    @property
    def flags(self) -> list[str]:
        return [
            *("--hosts", str(self.folder / "hosts.txt"), "--remote-command", self.remote_command),
            *("--host-timeout", str(SILENCE_S), "--runs", str(self.folder / "runs"), "--view", "false"),
        ]

    def launch(self, *words: str) -> "Launched":
        output = self.folder / f"output-{time.monotonic_ns()}.txt"
        with output.open("wb") as log:
            process = subprocess.Popen(
                entering(
                    self.hosts[0].namespace,
                    tied([sys.executable, "-m", "atropos_launcher", "train", *words, *self.flags], "TERM"),
                ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
                cwd=self.folder,
                start_new_session=True,
            )
        return Launched(process, output)

    def processes(self) -> dict[int, psutil.Process]:
        """Of the run, on both machines."""
        found = {}
        for each in psutil.process_iter():
            try:
                if each.environ().get(RUN) == self.name and each.status() != psutil.STATUS_ZOMBIE:
                    found[each.pid] = each
            except psutil.Error:
                continue
        return found

    def expect_all_gone(self, within_s: float) -> None:
        deadline = time.monotonic() + within_s
        while left := self.processes():
            assert time.monotonic() < deadline, [each.cmdline() for each in left.values()]
            time.sleep(0.2)


@dataclass
class Launched:
    """A launcher that runs."""

    process: subprocess.Popen[bytes]
    output: Path

    @property
    def said(self) -> str:
        return self.output.read_text(errors="replace")

    def says(self, text: str) -> None:
        deadline = time.monotonic() + START_S
        while text not in self.said:
            assert self.process.poll() is None, self.said[-6000:]
            assert time.monotonic() < deadline, self.said[-6000:]
            time.sleep(0.1)

    def ends(self, status: int, within_s: float = START_S) -> None:
        try:
            assert self.process.wait(within_s) == status, self.said[-6000:]
        except subprocess.TimeoutExpired:
            pytest.fail(f"it still runs after {within_s} s:\n{self.said[-6000:]}")


@contextmanager
def two_machines(hosts: tuple[Host, Host], folder: Path, first: tuple[str, ...] = ()) -> Iterator[Machines]:
    """With a remote shell on the second one, which `first` may start."""
    (folder / "hosts.txt").write_text("".join(f"{host.address}\n" for host in hosts))
    command = [*first, *tied([sys.executable, REMOTE_SHELL, "serve", hosts[1].address, str(PORT)])]
    with subprocess.Popen(entering(hosts[1].namespace, command), stdout=subprocess.PIPE, cwd=folder) as shell:
        found = Machines(hosts, folder, f"machines-{uuid.uuid4().hex[:8]}", shell.pid)
        try:
            assert shell.stdout is not None
            assert shell.stdout.readline() == b"ready\n"
            yield found
        finally:
            for process in found.processes().values():
                process.kill()
            hosts[1].set_cable("up")
            shell.kill()


@pytest.fixture
def machines(hosts: tuple[Host, Host], tmp_path: Path) -> Iterator[Machines]:
    with two_machines(hosts, tmp_path) as found:
        yield found


@pytest.fixture
def machines_with_own_files(hosts: tuple[Host, Host], tmp_path: Path) -> Iterator[Machines]:
    """`runs` of the second machine is a file system of its own: `ip netns exec` makes a mount namespace, too."""
    (tmp_path / "runs").mkdir()
    mounting = ("sh", "-c", 'mount -t tmpfs -o size=256m none "$0" && exec "$@"', str(tmp_path / "runs"))
    with two_machines(hosts, tmp_path, mounting) as found:
        yield found


def agents(machines: Machines, drill: str) -> list[dict[str, object]]:
    """An agent of torchrun on each machine, as `atropos train --hosts` has them, with ranks that only add."""
    near, far = machines.hosts
    command = [sys.executable, "-u", "-m", "example_trainer.ranks.agent", "--nnodes", "2", "--nproc-per-node", "1"]
    command += ["--master-addr", near.address, "--master-port", "29500", "--rdzv-conf", "timeout=60"]
    found: list[dict[str, object]] = []
    for number, host in enumerate(machines.hosts):
        own = [*command, "--node-rank", str(number), "--local-addr", host.address]
        words = [*own, "--module", "tests.integration.machine_child"]
        if host is far:
            remote = ["--host", far.address, "--remote-command", machines.remote_command, "--name", "trainer-2"]
            remote += ["--silence-s", str(SILENCE_S), "--folder", str(machines.run), "--variables", "DRILL"]
            words = [sys.executable, "-u", "-m", "atropos_launcher.services.remote_client", *remote, "--", *words]
        found.append(
            {
                "name": trainer_name(number),
                "command": words,
                "environment": {"DRILL": drill, "OMP_NUM_THREADS": "1"},
                "may_end": True,
                "missing_another": LOST,
                "host": far.address if host is far else "",
            }
        )
    return found


def supervised(machines: Machines, drill: str) -> tuple[int, str]:
    """The supervisor's exit status and output, on the first machine."""
    plan = json.dumps({"services": agents(machines, drill), "limits": {}})
    words = [sys.executable, str(REPOSITORY / "tests/unit/launcher/launch.py"), str(machines.run), plan]
    done = subprocess.run(
        entering(machines.hosts[0].namespace, tied(words, "TERM")),
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        cwd=REPOSITORY,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.rotating
def test_agents_on_two_machines_meet_and_their_ranks_add(machines: Machines) -> None:
    status, said = supervised(machines, "")
    assert status == 0, said
    for number in range(2):
        assert f"rank {number} of 2: sum 3" in (machines.run / f"{trainer_name(number)}.log").read_text()
    machines.expect_all_gone(5)


@pytest.mark.rotating
def test_the_machine_whose_rank_was_killed_is_named_and_not_the_one_that_misses_it(machines: Machines) -> None:
    status, said = supervised(machines, "kill")
    far = machines.hosts[1].address
    assert status == 1, said
    assert f"trainer-2 on {far} (pid" in said
    assert f"grpo: error: trainer rank 1 on {far} was ended by SIGKILL" in said
    assert said.count("died:") == 1, said
    machines.expect_all_gone(10)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_run_on_two_machines_continues_after_the_cable_was_cut(machines: Machines, llama_folder: Path) -> None:
    near, far = machines.hosts
    first = machines.launch("arithmetic", str(llama_folder), "--steps", str(STEPS), "--run-name", machines.name, *SHORT)
    first.says("Step 2/6")
    assert f"Machine {far.address}: vllm-2 on port 9001, trainer rank 1 of 2" in first.said
    assert f"Trainer ranks meet at {near.address}:29500" in first.said
    said = (machines.run / "trainer.log").read_text()
    assert "served by 2 of 2 servers" in said
    assert "2 trainer ranks send what they hold (direct)" in said  # each to the servers of both machines
    far.set_cable("down")
    cut = time.monotonic()
    first.ends(1, within_s=SILENCE_S + 30)
    assert re.search(rf"(trainer|vllm)-2 on {far.address} \(pid \d+\) died", first.said), first.said[-3000:]
    assert f"no sign of life for {SILENCE_S} s from {far.address}" in first.said
    remedy = f"atropos train --resume runs/{machines.name} --hosts {machines.folder}/hosts.txt"
    assert remedy in first.said
    machines.expect_all_gone(cut + SILENCE_S + 40 - time.monotonic())

    far.set_cable("up")
    again = machines.launch(*remedy.split("atropos train ")[1].split(" --hosts")[0].split())
    again.ends(0)
    rows = [json.loads(line) for line in (machines.run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert list(machines.run.glob("checkpoints/final_model/*.safetensors"))
    machines.expect_all_gone(10)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_rank_that_is_killed_on_one_machine_ends_the_run_with_its_name(
    machines: Machines, llama_folder: Path
) -> None:
    far = machines.hosts[1]
    run = machines.launch("arithmetic", str(llama_folder), "--steps", "100", "--run-name", machines.name, *SHORT)
    run.says("Step 1/100")
    (rank,) = (each for each in machines.processes().values() if each.environ().get("RANK") == "1")
    rank.send_signal(signal.SIGKILL)
    run.ends(1, within_s=60)
    assert f"trainer-2 on {far.address} (pid" in run.said
    assert f"grpo: error: trainer rank 1 on {far.address} was ended by SIGKILL" in run.said
    assert "trainer (pid" not in run.said.partition("died")[2].partition("died")[0]
    machines.expect_all_gone(20)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_machines_without_a_shared_file_system_train_and_resume_from_a_copied_checkpoint(
    machines_with_own_files: Machines, llama_folder: Path
) -> None:
    """As docs/devices.md describes; what it says to do is asked for where it was not done."""
    machines = machines_with_own_files
    saved, run = machines.run / "checkpoints", ("arithmetic", str(llama_folder), "--run-name", machines.name, *SHORT)
    refused = machines.launch(*run, "--steps", "2")
    refused.ends(1)
    assert f"the launcher's {machines.run}/run.json is not on " in refused.said, refused.said[-3000:]
    assert "give --trainer.checkpoint-format hf" in refused.said
    machines.expect_all_gone(20)
    shutil.rmtree(machines.run)

    first = machines.launch(*run, "--steps", "2", "--trainer.checkpoint-format", "hf")
    first.ends(0)
    assert (saved / "latest").is_file()
    assert machines.there(machines.run).is_dir()
    assert not machines.there(saved).exists()

    resume = ("--resume", f"runs/{machines.name}", "--steps", "4")
    refused = machines.launch(*resume)
    refused.ends(1)
    assert f"every rank reads the checkpoint: copy {saved} " in refused.said, refused.said[-3000:]
    machines.expect_all_gone(20)

    shutil.copytree(saved, machines.there(saved))
    machines.launch(*resume).ends(0)
    rows = [json.loads(line) for line in (machines.run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert list(saved.glob("final_model/*.safetensors"))
    machines.expect_all_gone(10)
