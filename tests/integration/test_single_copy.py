"""Single copy on a real vLLM: the trainer steps the live weights, and dies, freezes or fails wherever it hurts."""

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.client import http
from tests.integration.conftest import AUTHORIZED, Server, start_server, stop_server, workers_of
from tests.integration.test_bridge import (
    PARITY,
    PROMPT,
    check_two_hundred_syncs,
    finish,
    read_until,
    sync_and_probe,
    without_memory,
)
from tests.integration.test_bridge import start_child as start_broadcast

DEADLINE_S = 120
BF16_PARITY = 0.2  # nats; bfloat16's rounding, where other weights differ by more than 1


start_child = partial(start_broadcast, child="single_child")


def train_and_probe(server: Server) -> str:
    """A whole trainer's life of three updates; its output, after checking that vLLM agreed with it after each."""
    code, out, err = finish(start_child(server, "sync"), 240)
    assert code == 0, err[-2000:]
    differences = [float(value) for value in re.findall(r"PARITY (\S+)", out)]
    assert len(differences) == 3, differences
    assert max(differences) <= PARITY, differences
    return out


def generate(server: Server, max_tokens: int = 4) -> httpx.Response:
    body = {"prompt": {"prompt_token_ids": PROMPT}, "max_tokens": max_tokens, "ignore_eos": True}
    return http.post(f"{server.url}/generate", json=body, headers=AUTHORIZED, timeout=DEADLINE_S)


def wait_until_refused(server: Server) -> dict[str, Any]:
    deadline = time.monotonic() + DEADLINE_S
    while (status := server.status())["poisoned"] is None:
        assert time.monotonic() < deadline, status
        time.sleep(0.1)
    return status


def check_refusal(server: Server, fragment: str) -> None:
    """Generation is refused with the reason; everything else answers."""
    assert fragment in wait_until_refused(server)["poisoned"]
    for path in ("/generate", "/v1/completions", "/v1/chat/completions"):
        reply = http.post(server.url + path, json={"prompt": "x", "max_tokens": 1}, headers=AUTHORIZED, timeout=30)
        assert reply.status_code == 503, reply.text
        assert fragment in reply.text, reply.text
        assert reply.headers["retry-after"], reply.text
    assert http.get(f"{server.url}/health", timeout=30).status_code == 200


@pytest.fixture(params=["vllm_server", "vllm_server_tp2"])
def server(request: pytest.FixtureRequest) -> Server:
    found: Server = request.getfixturevalue(request.param)
    return found


def test_updates_in_place_are_served_without_moving_bytes(server: Server) -> None:
    out = train_and_probe(server)
    moved = [int(value) for value in re.findall(r"BYTES (\d+)", out)]
    if server.status()["tp_size"] == 1:
        assert moved == [0, 0, 0]
    else:  # five norms of 128 and the biases of two row-split layers' inputs that every rank holds alike, in float32
        assert moved == [5 * 128 * 4] * 3
    assert generate(server).json()["policy_versions"] == [[3, 3]]


def test_weights_are_in_memory_once(vllm_server: Server) -> None:
    child = start_child(vllm_server, "idle")
    read_until(child, "SYNCED 0")
    held, before = held_kb(vllm_server, child.pid), None
    while held != before:  # one process is read after the other, and what both have touched is shared between them
        time.sleep(0.5)
        held, before = held_kb(vllm_server, child.pid), held
    child.kill()
    child.wait()
    assert child.pid in held, held
    assert len(held) == 2, held
    parameters = 2 * 1000 * 128 + 2 * (2 * 128 * 128 + 2 * 64 * 128 + 3 * 128 * 256) + 5 * 128
    assert sum(held.values()) == pytest.approx(4 * parameters / 1024, rel=0.02)  # kB; two copies would be twice that


def held_kb(server: Server, child: int) -> dict[int, int]:
    """The kB of each process that holds some of the weights' memory file."""
    pids = map(int, filter(str.isdigit, os.listdir("/proc")))
    return {pid: pss for pid in pids if (pss := shared_kb(pid, server, child))}


def shared_kb(pid: int, server: Server, child: int) -> int:
    """Proportional share of the weights' memory file that process `pid` holds, in kB, if it is the server's or the
    child's.
    """
    try:
        if pid != child and os.getsid(pid) != server.process.pid:
            return 0
        smaps = Path(f"/proc/{pid}/smaps").read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0
    return sum(int(pss) for pss in re.findall(r"memfd:atropos-weights.*?\nPss: +(\d+) kB", smaps, re.DOTALL))


@pytest.mark.rotating
def test_trainer_killed_between_updates_leaves_its_last_version_served(plain_server: Server) -> None:
    child = start_child(plain_server, "idle")
    read_until(child, "SYNCED 0")
    child.kill()
    child.wait()
    assert generate(plain_server).json()["policy_versions"] == [[0, 0]]
    train_and_probe(plain_server)  # at once: no lease to wait for


@pytest.mark.rotating
@pytest.mark.parametrize("act", ["kill-mid-update", "kill-before-resume"])
def test_half_updated_weights_are_never_served(server: Server, act: str) -> None:
    child = start_child(server, act)
    read_until(child, "SYNCED 0")
    child.wait(DEADLINE_S)
    assert child.returncode == -signal.SIGKILL
    check_refusal(server, "died while it updated the weights to policy version 1")
    train_and_probe(server)
    assert server.status()["refusing"] is None
    assert generate(server).json()["policy_versions"] == [[3, 3]]


def running_requests(server: Server) -> float:
    metrics = server.request("GET", "/metrics").text
    return sum(float(found) for found in re.findall(r"^vllm:num_requests_running{.*} (\S+)$", metrics, re.MULTILINE))


@pytest.mark.rotating
def test_requests_in_flight_end_when_the_trainer_dies_in_the_middle(vllm_server: Server) -> None:
    child = start_child(vllm_server, "freeze-when-told-mid-update")
    replies: list[httpx.Response] = []
    read_until(child, "SYNCED 0")
    waiting = threading.Thread(target=lambda: replies.append(generate(vllm_server, 500)))
    waiting.start()
    while not running_requests(vllm_server):
        assert waiting.is_alive(), "it was done before it was seen"
    assert child.stdin is not None
    child.stdin.write("go\n")
    child.stdin.flush()
    read_until(child, "MID-UPDATE")
    assert waiting.is_alive(), "it was done before the update began"
    child.kill()
    child.wait()
    waiting.join(DEADLINE_S)
    assert replies[0].status_code == 503
    assert "half updated" in replies[0].text
    train_and_probe(vllm_server)


@pytest.mark.rotating
def test_frozen_trainer_loses_the_weights_and_can_touch_them_no_more(plain_server: Server) -> None:
    child = start_child(plain_server, "freeze-mid-update")
    read_until(child, "MID-UPDATE")
    check_refusal(plain_server, "fell silent while it updated the weights to policy version 1")
    train_and_probe(plain_server)
    prompt = [5 + i % 50 for i in range(40)]
    before = plain_server.generate(prompt, max_tokens=1, temperature=0, prompt_logprobs=0)["prompt_logprobs"]
    child.send_signal(signal.SIGCONT)
    code, _, err = finish(child, 90)
    assert code != 0
    assert "example_trainer.bridges." in err  # BridgeError, or a kind of it
    after = plain_server.generate(prompt[:], max_tokens=1, temperature=0, prompt_logprobs=0)["prompt_logprobs"]
    assert before == after


@pytest.mark.rotating
def test_a_worker_that_fails_is_named_and_the_ranks_stay_in_step(vllm_server_tp2: Server) -> None:
    server = vllm_server_tp2
    child = start_child(server, "freeze-mid-update")
    read_until(child, "MID-UPDATE")
    check_refusal(server, "fell silent while it updated the weights to policy version 1")
    # the weights cannot be moved out of the frozen trainer's reach
    with without_memory(sorted(workers_of(server))[1:]):
        code, _, err = finish(start_child(server, "sync"))
        assert code != 0, err[-2000:]
        assert "bridge_renew failed on rank 1" in err, err[-2000:]
        assert "cannot allocate" in err, err[-2000:]
        assert [worker["rank"] for worker in server.status()["workers"]] == [0, 1]
        check_refusal(server, "fell silent while it updated the weights to policy version 1")
    train_and_probe(server)
    assert generate(server).json()["policy_versions"] == [[3, 3]]
    child.kill()
    child.wait()


@pytest.fixture(scope="module")
def bf16_server(llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = start_server(llama_folder, tmp_path_factory.mktemp("vllm_bf16"), "--dtype", "bfloat16")
    yield server
    stop_server(server)


@pytest.mark.rotating(together=True)
@pytest.mark.parametrize("bf16_update", ["master", "stochastic"])
def test_bfloat16_weights_are_trained_in_place(bf16_server: Server, bf16_update: str) -> None:
    prompt = list(range(5, 45))  # what the child trains on
    code, out, err = finish(start_child(bf16_server, f"train {bf16_update}"), 120)
    assert code == 0, err[-2000:]
    differences = [float(value) for value in re.findall(r"PARITY (\S+)", out)]
    assert len(differences) == 3, differences
    assert max(differences) <= BF16_PARITY, differences
    assert "BYTES 0" in out
    assert "BYTES" not in out.replace("BYTES 0", "")
    reply = bf16_server.generate(prompt, max_tokens=1, prompt_logprobs=0)
    learnt = [next(iter(position.values())) for position in reply["prompt_logprobs"][1:]]
    assert reply["policy_versions"] == [[3, 3]]
    assert sum(learnt) / len(learnt) > -5


@pytest.mark.rotating
def test_failed_update_is_reported_at_once(vllm_server: Server) -> None:
    code, _, err = finish(start_child(vllm_server, "fail-mid-update"))
    assert code != 0
    assert "the update failed half way" in err
    check_refusal(vllm_server, "left in the middle of policy version 1")
    train_and_probe(vllm_server)


@pytest.mark.rotating
def test_second_trainer_is_refused_while_one_lives(plain_server: Server) -> None:
    child = start_child(plain_server, "idle")
    read_until(child, "SYNCED 0")
    for second in (start_child(plain_server, "sync"), start_broadcast(plain_server, "sync")):
        code, _, err = finish(second)
        assert code != 0, err[-2000:]
        assert "holds session" in err, err[-2000:]
    child.kill()
    child.wait()


@pytest.mark.rotating
def test_broadcast_and_single_copy_take_turns(plain_server: Server) -> None:
    train_and_probe(plain_server)
    assert sync_and_probe(plain_server) <= PARITY
    train_and_probe(plain_server)
    assert sync_and_probe(plain_server) <= PARITY


@pytest.mark.rotating
def test_broadcast_heals_what_a_single_copy_left(vllm_server: Server) -> None:
    child = start_child(vllm_server, "kill-mid-update")
    child.communicate(timeout=DEADLINE_S)
    check_refusal(vllm_server, "died while it updated")
    assert sync_and_probe(vllm_server) <= PARITY
    assert vllm_server.status()["refusing"] is None


@pytest.mark.rotating
@pytest.mark.timeout(600)
def test_two_hundred_updates_under_load_fail_no_request_and_leak_nothing(vllm_server: Server) -> None:
    check_two_hundred_syncs(vllm_server, start_child(vllm_server, "many"))
