"""The drills of `atropos gpu-check`, on the GPUs that are visible or, as a rehearsal, on the CPU:

    python -m tests.integration.device_drills DRILL MODEL

    killed    the trainer dies in mid-transfer: serving continues, the weights are whole, a new trainer joins
    frozen    it stops there instead: it keeps the bridge for its lease, loses it, and fails cleanly when it continues
    fresh     greedy outputs after a commit are those of a server that loads the same weights

The trainer's process is bridge_child.py. With two GPUs or more it has the last one and NCCL carries the weights; with
one, both share it, over Gloo. Prints the result of each comparison of weights (`N of M tensors differ`), and at the end
a line `Drill: ...`, which the table shows.
"""

import os
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from example_trainer.bridges.vllm_client import VllmClient
from example_trainer.check_served_weights import finding
from example_trainer.settings.gpus import visible_gpus
from tests.integration.conftest import API_KEY, Server, start_server, stop_server
from tests.integration.test_bridge import PROMPT, finish, read_until, start_child

TRANSFER_S = 40  # the deadline of each transfer of a trainer that is stopped
LEASE_S = 20  # bridge_child.py
WAIT_S = 120.0
START_S = 600.0  # on a GPU it compiles and captures graphs first


class Stage:
    """Servers and trainers of one drill, and the GPUs of each."""

    def __init__(self, model: str, folder: Path, undo: ExitStack) -> None:
        gpus = visible_gpus(os.environ)
        self.model, self.folder, self._undo = model, folder, undo
        self._trained_on = "cuda nccl" if len(gpus) > 1 else "cuda gloo" if gpus else "cpu gloo"
        self._served = ",".join(gpus[:1]) or None
        shares = ["--gpu-memory-utilization", "0.4"] if len(gpus) == 1 else []
        self._flags = ["--dtype", "bfloat16", *shares] if gpus else []
        if gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = gpus[-1]  # of the trainers

    def server(self, model: str) -> Server:
        """A running one of `model`, which has answered once: its first answer takes seconds more."""
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        where = f"GPU {self._served}" if self._served else "the CPU"
        print(f"Starting a vLLM server of {model} on {where}, at most {START_S:.0f} s", flush=True)
        found = start_server(Path(model), folder, *self._flags, gpus=self._served, deadline_s=START_S)
        self._undo.callback(stop_server, found)
        found.generate(PROMPT, max_tokens=1)
        return found

    def trainer(self, server: Server, act: str, timeout_s: int = 120) -> Any:
        return start_child(server, f"{act} {timeout_s} {self._trained_on} {self.folder / 'saved'}")

    def sync(self, server: Server, act: str = "sync") -> float:
        """Seconds that a new trainer takes from its start to the proof that its version 1 is served."""
        start = time.monotonic()
        code, out, err = finish(self.trainer(server, act), 300)
        assert code == 0, err[-2000:]
        print(f"A new trainer has synced version 1, {out.splitlines()[-1]}", flush=True)
        return time.monotonic() - start


def expect_weights(server: Server, weights: str) -> None:
    """Every word that the server computes with is that of the files."""
    found = finding(VllmClient(server.host, server.port, API_KEY, WAIT_S), weights)
    print(found["found"], flush=True)
    assert found["level"] == "ok", found


def expect_serving(server: Server, version: int) -> float:
    """Seconds that the server takes to answer, from that version."""
    start = time.monotonic()
    reply = server.generate(PROMPT, max_tokens=4)
    assert reply["policy_versions"] == [[version, version]], reply
    return time.monotonic() - start


def killed(stage: Stage) -> str:
    server = stage.server(stage.model)
    child = stage.trainer(server, "kill-mid-transfer", TRANSFER_S)
    read_until(child, "MID-TRANSFER")
    assert child.wait(WAIT_S) == -signal.SIGKILL
    answered = expect_serving(server, 0)
    expect_weights(server, stage.model)
    return f"answered {answered:.1f} s after the kill, a new trainer synced within {stage.sync(server):.0f} s"


def frozen(stage: Stage) -> str:
    server = stage.server(stage.model)
    child = stage.trainer(server, "freeze-mid-transfer", TRANSFER_S)
    read_until(child, "MID-TRANSFER")
    stopped = time.monotonic()
    answered = expect_serving(server, 0)
    while (server.status()["lease_left_s"] or 0) > 0:
        assert time.monotonic() - stopped < LEASE_S + WAIT_S, server.status()
        time.sleep(0.5)
    expect_weights(server, stage.model)
    took = stage.sync(server)
    child.send_signal(signal.SIGCONT)
    code, _, err = finish(child, TRANSFER_S + WAIT_S)
    assert code != 0, "the trainer that was frozen synced to a server that had another one"
    assert "example_trainer.bridges." in err, err[-2000:]
    expect_serving(server, 1)
    return f"answered {answered:.1f} s after the freeze, a new trainer synced within {took:.0f} s"


def fresh(stage: Stage) -> str:
    def greedy(server: Server) -> list[list[int]]:
        """One request at a time, so that both servers run the same batches."""
        prompts = [[start + i for i in range(24)] for start in (5, 100, 300, 600)]
        return [
            server.generate(prompt, max_tokens=64, temperature=0, ignore_eos=True)["token_ids"][0] for prompt in prompts
        ]

    server, saved = stage.server(stage.model), str(stage.folder / "saved")
    before = greedy(server)
    stage.sync(server, "save")
    expect_weights(server, saved)
    after = greedy(server)
    stop_server(server)
    assert after != before, "the update changed no output"
    again = stage.server(saved)
    expect_weights(again, saved)
    loaded = greedy(again)
    different = sum(one != other for one, other in zip(after, loaded, strict=True))
    assert loaded == after, f"{different} of {len(after)} greedy outputs differ from those of a fresh server"
    return f"{len(after)} greedy outputs of 64 tokens are those of a fresh server"


DRILLS = {"killed": killed, "frozen": frozen, "fresh": fresh}


def main(drill: str, model: str) -> None:
    """A drill that fails prints the servers' logs, which are removed with the directory."""
    with tempfile.TemporaryDirectory(prefix="atropos-drill-") as folder, ExitStack() as undo:
        try:
            print(f"Drill: {DRILLS[drill](Stage(model, Path(folder), undo))}", flush=True)
        except Exception:
            for log in sorted(Path(folder).glob("*/vllm.log")):
                print(f"--- {log}", log.read_text(errors="replace"), sep="\n", flush=True)
            raise


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
