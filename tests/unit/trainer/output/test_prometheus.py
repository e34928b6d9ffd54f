"""What Prometheus is told of a trainer, and by which names."""

import re
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from example_trainer.errors import TrainerError
from example_trainer.output.prometheus import MOST_CONNECTIONS, PrometheusSink
from tests.client import http

PAGE = Path(__file__).parents[4] / "docs/run_directory.md"
ROW: dict[str, Any] = {
    "step": 7,
    "policy_version": 7,
    "served_version": 7,
    "reward_mean": 0.5,
    "accuracy": 0.75,
    "loss": -0.25,
    "kl": 0.01,
    "entropy": 1.5,
    "grad_norm": 2.0,
    "staleness_mean": 0.5,
    "logprob_diff_mean": 1e-6,
    "servers": 1,
    "completion_tokens": 100,
    "trained_tokens": 80,
    "step_s": 10.0,
    "generate_s": 6.0,
    "train_s": 3.0,
    "eval_wait_s": 2.0,
    "sync_stall_s": 0.25,
    "sync_transfer_s": 0.5,
    "sync_apply_s": 0.125,
    "rejected_groups": 1,
}


def samples(url: str) -> dict[str, float]:
    """By name and labels."""
    reply = http.get(url, timeout=5)
    assert reply.status_code == 200
    return {
        " ".join([sample.name, *sample.labels.values()]).removeprefix("atropos_trainer_"): sample.value
        for family in text_string_to_metric_families(reply.text)
        for sample in family.samples
    }


def test_the_last_step_and_sums_are_served_to_this_machine_s_own_names_alone() -> None:
    with ExitStack() as resources:
        sink = PrometheusSink(0, resources)
        before = samples(sink.url)
        assert before["seconds_total waiting"] == 0
        assert "loss" not in before
        sink.write(ROW)
        sink.write(ROW | {"step": 8, "loss": None, "kl": None, "accuracy": None})
        found = samples(sink.url)
        assert http.get(sink.url, headers={"Host": "evil.example"}, timeout=5).status_code == 403
        assert http.get(sink.url, headers={"Origin": "http://evil.example"}, timeout=5).status_code == 403
        documented = {
            name.removeprefix("atropos_trainer_") for name in re.findall(r"`(atropos_trainer_\w+)`", PAGE.read_text())
        }
        sink.write(ROW)
        assert {name.partition(" ")[0] for name in samples(sink.url)} == documented
    assert (found["step"], found["reward_mean"]) == (8, 0.5)
    assert not {"loss", "kl", "accuracy"} & found.keys()
    assert (found["tokens_total sampled"], found["tokens_total trained"]) == (200, 160)
    phases = {name: found[f"seconds_total {name}"] for name in ("waiting", "training", "syncing", "evaluating")}
    assert phases == {"waiting": 12, "training": 6, "syncing": 2, "evaluating": 4}
    assert (found["sync_seconds_total stall"], found["rejected_groups_total"]) == (0.5, 2)
    with pytest.raises(httpx.TransportError):
        http.get(sink.url, timeout=5)


def test_a_taken_port_is_one_line_that_names_the_flag() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, ExitStack() as resources:
        port = taken.getsockname()[1]
        with pytest.raises(TrainerError, match=f"--metrics-port {port} cannot be listened on.*give another, or 0"):
            PrometheusSink(port, resources)


def test_idle_connections_take_few_of_the_trainers_files() -> None:
    with ExitStack() as resources:
        url = PrometheusSink(0, resources).url
        port = int(url.split(":")[2].partition("/")[0])
        idle = [resources.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5)) for _ in range(100)]
        samples(url)  # all before it have been accepted
        assert sum(map(_is_open, idle)) <= MOST_CONNECTIONS


def _is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return bool(connection.recv(1))
    except BlockingIOError:
        return True
    except ConnectionResetError:
        return False
