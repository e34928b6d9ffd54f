"""Two trainer ranks, real torch and real Gloo, a vLLM server without a model: whatever meets a rank, all end in time,
with the right exit status and one line, and vLLM's session is closed, so that the next trainer joins at once.

What the parent of the ranks does in each case is in test_rank_parent.py, without torch.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from atroposlib.processes.shared_memory import mapped_shared_memory
from atroposlib.wire.bridge import PROTOCOL
from tests.serving import free_port
from tests.unit.trainer.bridges.fake_broadcast_server import FakeVllmServer, serving
from tests.unit.trainer.fakes import FakeApi, item, model_folder, serve

pytestmark = [pytest.mark.services, pytest.mark.slow]

REPOSITORY = Path(__file__).parents[4]
START_S = 240.0  # of two ranks on a machine with other things to do
LISTENING = "0A"  # state in /proc/net/tcp
LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
PLAIN = ["--trainer-ranks", "2"]


@dataclass
class Drills:
    """A batching API and a vLLM server, which outlive the trainers."""

    folder: Path
    model: str
    server: FakeVllmServer
    api: FakeApi
    url: str
    batches: int = 0  # that the API gives to a trainer

    def flags(self, *more: str) -> list[str]:
        return [
            *("--model-name", self.model, "--device", "cpu", "--threads", "1"),
            *("--weight-bridge-mode", "shared_vllm", "--use-shared-memory", "--vllm-port", str(self.server.port)),
            *("--atropos-url", self.url, "--training-steps", "2", "--checkpoint-interval", "0"),
            *("--batch-size", "4", "--gradient-accumulation-steps", "1", "--eval-deadline", "0"),
            *("--save-path", str(self.folder / "save"), "--log-dir", str(self.folder / "logs")),
            *more,
        ]


@pytest.fixture(scope="module")
def drills(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drills]:
    folder = tmp_path_factory.mktemp("drills")
    model = model_folder(folder / "model")
    server = FakeVllmServer(model)
    api = FakeApi(lambda number: [item([1.0, 0.0, 0.0, 1.0], seed=number)] if number < found.batches else None)
    with serving(server), serve(api) as url:
        found = Drills(folder, model, server, api, url)
        yield found


class Trainer:
    """A running trainer, from its command. It is killed at the end of the `with` if it still runs."""

    def __init__(self, drills: Drills, command: list[str], *flags: str, batches: int = 9, drill: str = "") -> None:
        self._drills = drills
        drills.batches, drills.api.delivered = batches, 0
        drills.api.registrations.clear()
        self._log = drills.folder / f"{time.monotonic_ns()}.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, *drills.flags(*flags)],
                cwd=REPOSITORY,
                env={**os.environ, "PYTHONPATH": str(REPOSITORY), "DRILL": drill},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._parts: dict[int, psutil.Process] = {}

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, *_: object) -> None:
        for part in [*self.parts().values(), self.process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                part.kill()
        self.process.wait()

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def errors(self) -> list[str]:
        """Its last words."""
        return [line for line in self.log.splitlines() if line.startswith("grpo")]

    def parts(self) -> dict[int, psutil.Process]:
        """All processes that this trainer has had."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._parts |= {each.pid: each for each in psutil.Process(self.process.pid).children(recursive=True)}
        return self._parts

    def wait_for(self, sign: str) -> float:
        """When `sign` came into the log."""
        give_up = time.monotonic() + START_S
        while sign not in self.log:
            runs = self.process.poll() is None and time.monotonic() < give_up
            assert runs, f"{sign} never came:\n{self.log[-3000:]}"
            self.parts()
            time.sleep(0.05)
        return time.monotonic()

    def ends(self, status: int, within_s: float = START_S) -> None:
        """It does, in time, and leaves no process, and no session of vLLM."""
        try:
            assert self.process.wait(within_s) == status, self.log[-3000:]
        except subprocess.TimeoutExpired:
            pytest.fail(f"it still runs after {within_s} s:\n{self.log[-3000:]}")
        _, left = psutil.wait_procs(list(self.parts().values()), timeout=15)
        assert not left
        assert self._drills.server.session is None, self.log[-3000:]


GRPO = [sys.executable, "-u", "example_trainer/grpo.py"]
CONSOLE_SCRIPT = [sys.executable, "-c", "from example_trainer.commands import grpo; raise SystemExit(grpo())"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
DRILLED = ["-m", "tests.unit.trainer.drilled_trainer"]


def drilled(drills: Drills, drill: str, *flags: str) -> Trainer:
    return Trainer(drills, [sys.executable, "-u", *DRILLED], *PLAIN, *flags, drill=drill)


def listeners(pid: int) -> set[str]:
    """Addresses, in hexadecimal, at which a process listens."""
    inodes = set()
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            inodes.add(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == LISTENING and f"socket:[{inode}]" in inodes:
                found.add(local.partition(":")[0])
    return found


def test_two_ranks_train_listen_on_loopback_alone_and_end_on_ctrl_c(drills: Drills) -> None:
    """Ctrl-C comes while they wait for a batch, to all of them, as in a terminal."""
    with Trainer(drills, GRPO, *PLAIN, batches=1) as trainer:
        trainer.wait_for("Step 1/2")
        time.sleep(2.5)  # in which rank 1 looks for the next call many times
        ranks = sorted(pid for pid, part in trainer.parts().items() if part.is_running())
        assert len(ranks) == 2
        assert all(listeners(pid) <= LOOPBACK for pid in ranks)
        assert listeners(ranks[0])
        assert not listeners(trainer.process.pid)
        assert not mapped_shared_memory(ranks)
        assert "[c10d]" not in trainer.log  # its warnings
        os.killpg(trainer.process.pid, signal.SIGINT)
        trainer.ends(130, within_s=15)
    assert trainer.errors == ["grpo: interrupted"], trainer.log[-3000:]
    assert "Parity: vLLM's and the trainer's log-probabilities" in trainer.log
    assert "2 trainer ranks send what they hold (direct)" in trainer.log
    assert drills.server.senders == 2


@pytest.mark.rotating
def test_a_server_that_knows_one_sender_alone_gets_gathered_weights(drills: Drills) -> None:
    drills.server.protocol = 1
    with Trainer(drills, GRPO, *PLAIN) as trainer:
        trainer.ends(0)
    drills.server.protocol = PROTOCOL
    assert "Trainer rank 0 sends the weights of all ranks: the vLLM server at" in trainer.log
    assert (drills.server.senders, drills.server.version) == (1, 2)


@pytest.mark.parametrize(
    ("where", "flags"),
    [
        ("bring_rows", []),
        pytest.param("gradients", [], marks=pytest.mark.nightly),
        pytest.param("bring_rows", ["--tp-size", "2"], marks=pytest.mark.nightly),
        pytest.param("gradients", ["--tp-size", "2"], marks=pytest.mark.nightly),
    ],
)
def test_a_rank_that_is_killed_in_a_forward_pass_or_a_sync_ends_all(
    drills: Drills, where: str, flags: list[str]
) -> None:
    with drilled(drills, f"1 {where} KILL", *flags) as trainer:
        since = trainer.wait_for("DRILL")
        trainer.ends(1)
    assert time.monotonic() - since < 15
    (error,) = trainer.errors
    assert error.startswith("grpo: error: trainer rank 1 of 2 was ended by SIGKILL")
    assert f"in `{where}`: connection closed by the peer" in trainer.log


@pytest.mark.rotating
def test_a_rank_that_is_stopped_in_a_forward_pass_ends_all_after_the_deadline(drills: Drills) -> None:
    with drilled(drills, "1 gradients STOP", "--dist-timeout-s", "8") as trainer:
        since = trainer.wait_for("DRILL")
        trainer.ends(1)
    assert 7 < time.monotonic() - since < 8 + 10
    (error,) = trainer.errors
    assert error.startswith("grpo: error: trainer rank 1 of 2 is stopped (SIGSTOP), and did not answer for 8 s")


@pytest.mark.rotating
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_ranks_of_tensor_parallelism_send_what_they_hold(drills: Drills, ranks: int) -> None:
    """By the digest, which ends the run if it differs, vLLM has every word. Four ranks are a mesh of 2 x 2."""
    with Trainer(drills, GRPO, "--trainer-ranks", str(ranks), "--tp-size", "2") as trainer:
        trainer.ends(0)
    assert f"{ranks} trainer ranks send what they hold (direct)" in trainer.log
    assert (drills.server.senders, drills.server.version) == (ranks, 2)


@pytest.mark.nightly
@pytest.mark.parametrize("sends", ["direct", "gathered"])
def test_a_sync_takes_no_ranks_memory_beyond_two_buckets(tmp_path: Path, sends: str) -> None:
    """The first sync, in which memory is touched that later ones use again. The model has 364 MB, its largest tensor,
    and so its largest bucket, 66 MB.
    """
    shape = {"intermediate_size": 2816, "num_hidden_layers": 6, "head_dim": 256}
    model = model_folder(tmp_path / "model", vocab_size=16_000, hidden_size=1024, **shape)
    server, api = FakeVllmServer(model), FakeApi(lambda number: None)
    with serving(server), serve(api) as url:
        drills = Drills(tmp_path, model, server, api, url)
        steps = ["--seq-len", "128", "--micro-batch-tokens", "128", "--logits-chunk-mb", "16"]  # take little memory
        with drilled(drills, "all transfers MEMORY", "--bridge-sends", sends, *steps) as trainer:
            trainer.wait_for("Parity:")
            rose = [json.loads(line) for line in re.findall(r"ROSE (.+)", trainer.log)]
    assert {each["rank"] for each in rose} == {0, 1}
    assert {each["call"] for each in rose} >= {"send_rows" if sends == "direct" else "bring_rows"}
    largest = max(tensor.nbytes for tensor in server.manifest.tensors)
    most = {rank: max(each["bytes"] for each in rose if each["rank"] == rank) for rank in (0, 1)}
    assert max(most.values()) <= 2 * largest + 50e6 < server.manifest.nbytes / 2, most


@pytest.mark.rotating
@pytest.mark.parametrize("act", ["KILL", "STOP"])
def test_a_rank_that_is_lost_while_it_sends_its_rows_ends_all_and_nothing_of_the_version_is_served(
    drills: Drills, act: str
) -> None:
    drill = f"1 sending {act}"
    with drilled(drills, drill, "--dist-timeout-s", "8", "--bridge-timeout-s", "4") as trainer:
        since = trainer.wait_for("DRILL")
        trainer.ends(1)
    took = time.monotonic() - since
    assert took < 15 if act == "KILL" else 7 < took < 8 + 10
    (error,) = trainer.errors
    assert error.startswith(
        "grpo: error: trainer rank 1 of 2 "
        + ("was ended by SIGKILL" if act == "KILL" else "is stopped (SIGSTOP), and did not answer for 8 s")
    )
    assert (drills.server.senders, drills.server.version) == (2, 0)


@pytest.mark.rotating
def test_a_rank_that_sends_for_longer_than_the_ranks_deadline_is_waited_for(drills: Drills) -> None:
    with drilled(drills, "1 sending SLOW", "--dist-timeout-s", "5") as trainer:
        trainer.ends(0)
    assert (drills.server.senders, drills.server.version) == (2, 2)


@pytest.mark.rotating
def test_an_error_of_one_rank_is_everyones_and_printed_once(drills: Drills) -> None:
    """Also where the others wait for that rank in a forward pass."""
    with drilled(drills, "1 gradients TrainerError") as trainer:
        trainer.ends(1)
    assert trainer.errors == ["grpo: error: trainer rank 1 of 2: drilled"]
    assert "Traceback" not in trainer.log


@pytest.mark.nightly
def test_a_bug_in_one_rank_is_its_traceback(drills: Drills) -> None:
    with drilled(drills, "1 gradients ValueError") as trainer:
        trainer.ends(1)
    assert trainer.errors == []
    assert trainer.log.count("ValueError: drilled") == 1
    assert trainer.log.count("Traceback") == 1


@pytest.mark.nightly
def test_ranks_of_other_code_are_refused(drills: Drills) -> None:
    with drilled(drills, "1 code x") as trainer:
        trainer.ends(1)
    (error,) = trainer.errors
    assert error.startswith("grpo: error: trainer rank 1 of 2: it runs another version of the code as rank 0 does")
    assert "Loading" not in trainer.log


@pytest.mark.nightly
def test_a_rank_that_never_comes_is_missed_by_name(drills: Drills) -> None:
    with drilled(drills, "1 join FREEZE", "--dist-timeout-s", "12") as trainer:
        trainer.ends(1)
    (error,) = trainer.errors
    assert error.endswith("within 12 s (--dist-timeout-s): rank 1 of 2 has not connected")


@pytest.mark.rotating
def test_a_killed_parent_takes_all_ranks_along_and_vllms_session_is_closed(drills: Drills) -> None:
    """Started by the console script."""
    with Trainer(drills, CONSOLE_SCRIPT, *PLAIN, batches=1) as trainer:
        trainer.wait_for("Step 1/2")
        assert len(trainer.parts()) == 2
        trainer.process.kill()
        trainer.ends(-signal.SIGKILL)


@pytest.mark.rotating
def test_torchrun_starts_the_same_program_and_ends_it_when_a_rank_is_killed(drills: Drills) -> None:
    """Its MASTER_PORT is where ranks meet, and not where vLLM's workers do."""
    with Trainer(drills, [*TORCHRUN, "--nproc-per-node", "2", "example_trainer/grpo.py"], batches=1) as trainer:
        trainer.wait_for("Step 1/2")
        ranks = [part for part in trainer.parts().values() if part.environ().get("RANK")]
        assert all(listeners(each.pid) <= LOOPBACK for each in ranks)
        (other,) = (each for each in ranks if each.environ()["RANK"] == "1")
        other.kill()
        trainer.ends(1)
    assert trainer.errors == []  # torchrun's report names the rank and the signal
    assert "SIGKILL" in trainer.log


@pytest.mark.rotating
def test_two_agents_of_torchrun_train_together(drills: Drills) -> None:
    port = str(free_port())
    agent = [*TORCHRUN, "--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", port]
    with (
        Trainer(drills, [*agent, "--node-rank", "0", "example_trainer/grpo.py"]) as first,
        Trainer(drills, [*agent, "--node-rank", "1", "example_trainer/grpo.py"]) as second,
    ):
        first.ends(0)
        second.ends(0)
    assert "Step 2/2" in first.log
    assert "Step" not in second.log
