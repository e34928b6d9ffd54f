"""Two trainer ranks and a real vLLM server: started by torchrun they train it by broadcast, and one of two that the
trainer started itself is killed, which does vLLM no harm.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from example_trainer.bridges.vllm_client import VllmClient
from example_trainer.check_served_weights import finding
from tests.integration.conftest import API_KEY, REPOSITORY, Server
from tests.integration.namespaces import tied
from tests.integration.test_bridge import PARITY, PROMPT, sync_and_probe
from tests.integration.trainer_process import parities
from tests.unit.trainer.fakes import FakeApi, item, serve
from tests.waiting import wait_until

DEADLINE_S = 300.0
DRILL_LIMIT_S = 30  # --dist-timeout-s: longer than ranks take to start, and than --bridge-timeout-s
DRILLED = ["-m", "tests.unit.trainer.drilled_trainer"]


def train(
    server: Server, folder: Path, program: list[str], drill: str = "", *flags: str, dist_timeout_s: int = 60
) -> tuple[int, str]:
    """Two steps by two ranks; exit status and output."""
    api = FakeApi(lambda number: [item([1.0, 0.0, 0.0, 1.0], seed=number)])
    with serve(api) as url:
        done = subprocess.run(
            tied(
                [
                    *(sys.executable, "-u", *program, "--trainer-ranks", "2", "--model-name", server.model),
                    *("--weight-bridge-mode", "shared_vllm", "--use-shared-memory", "--vllm-port", str(server.port)),
                    *("--atropos-url", url, "--training-steps", "2", "--checkpoint-interval", "0", "--threads", "1"),
                    *("--batch-size", "4", "--gradient-accumulation-steps", "1", "--eval-deadline", "0"),
                    *("--save-path", str(folder / "save"), "--log-dir", str(folder / "logs"), "--device", "cpu"),
                    *("--bridge-bucket-mb", "1", "--dist-timeout-s", str(dist_timeout_s), "--lr", "1e-3", *flags),
                ]
            ),
            cwd=REPOSITORY,
            env={
                **os.environ,
                "PYTHONPATH": str(REPOSITORY),
                "VLLM_API_KEY": API_KEY,
                "DRILL": drill,
                "DRILL_SERVER_PORT": str(server.port),
            },
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.rotating
@pytest.mark.timeout(900)
@pytest.mark.parametrize("which", ["vllm_server", pytest.param("vllm_server_tp2", marks=pytest.mark.nightly)])
def test_two_ranks_train_vllm_and_a_killed_one_leaves_it_serving(
    which: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    server: Server = request.getfixturevalue(which)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    status, said = train(server, tmp_path, [*torchrun, "example_trainer/grpo.py"])
    assert status == 0, said[-3000:]
    assert "2 trainer ranks send what they hold (direct)" in said
    found = parities(said)
    assert len(found) == 2  # at the start, and after an update
    assert max(found) <= PARITY, found
    assert server.status()["policy_version"] == 2
    assert (tmp_path / "save" / "final_model" / "model.safetensors").is_file()

    status, said = train(server, tmp_path, DRILLED, "1 bring_rows KILL")
    assert status == 1, said[-3000:]
    assert "grpo: error: trainer rank 1 of 2 was ended by SIGKILL" in said
    expect_serving(server)
    assert server.status()["lease_left_s"] is None  # rank 0 has closed the session
    assert sync_and_probe(server) <= PARITY


@pytest.mark.rotating
@pytest.mark.timeout(900)
@pytest.mark.parametrize("which", ["vllm_server", pytest.param("vllm_server_tp2", marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    ("drill", "ended"),
    [
        ("1 sending KILL", "trainer rank 1 of 2 was ended by SIGKILL"),
        ("1 sending STOP", "trainer rank 1 of 2 is stopped (SIGSTOP)"),
        pytest.param("0 sending KILL", "trainer rank 0 of 2 was ended by SIGKILL", marks=pytest.mark.nightly),
        pytest.param("0 sending STOP", "trainer rank 0 of 2 is stopped (SIGSTOP)", marks=pytest.mark.nightly),
    ],
)
def test_a_rank_that_is_lost_while_it_sends_its_rows_leaves_the_last_version_served_whole(
    which: str, drill: str, ended: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """The transfer of version 1, of many buckets. The next trainer joins at once."""
    server: Server = request.getfixturevalue(which)
    status, said = train(server, tmp_path, DRILLED, drill, "--bridge-timeout-s", "10", dist_timeout_s=DRILL_LIMIT_S)
    assert status == 1, said[-3000:]
    assert f"grpo: error: {ended}" in said
    assert "2 trainer ranks send what they hold (direct)" in said

    def of_session() -> str:
        return server.log.read_text().rpartition("Joined session")[2]

    wait_until(lambda: f"failed (trainer rank {drill[0]} of 2: " in of_session())  # the server sees it when it can
    assert "; receiving policy version 1)" in of_session()  # lines that repeat themselves may be left out
    expect_serving(server)
    assert server.status()["policy_version"] == 0
    client = VllmClient(server.host, server.port, API_KEY, 120.0)
    found = finding(client, server.model)  # the start weights, which version 0 is
    assert found["level"] == "ok", found
    assert sync_and_probe(server) <= PARITY


@pytest.mark.timeout(900)
@pytest.mark.nightly
def test_ranks_with_copies_of_key_value_heads_gather_and_vllm_agrees(vllm_server: Server, tmp_path: Path) -> None:
    """Four ranks split two key-value heads."""
    flags, copies = ("--trainer-ranks", "4", "--tp-size", "4"), "several trainer ranks hold each key-value head"
    status, said = train(vllm_server, tmp_path, ["example_trainer/grpo.py"], "", *flags)
    assert status == 0, said[-3000:]
    assert f"Trainer rank 0 sends the weights of all ranks: {copies}" in said
    found = parities(said)
    assert len(found) == 2  # at the start, and after an update
    assert max(found) <= PARITY, found

    status, said = train(vllm_server, tmp_path, ["example_trainer/grpo.py"], "", *flags, "--bridge-sends", "direct")
    assert status == 1, said[-3000:]
    assert f"grpo: error: --bridge-sends direct: {copies}" in said
    expect_serving(vllm_server)


def expect_serving(server: Server) -> None:
    """It answers in time."""
    start = time.monotonic()
    assert server.generate(PROMPT, max_tokens=4)["token_ids"]
    assert time.monotonic() - start < 30
