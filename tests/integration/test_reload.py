"""Mode reload on a real vLLM: directories that a trainer writes, or that are named by hand, read by the server."""

import shutil
import signal
import subprocess
import time
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.client import http
from tests.integration.conftest import Server, kill_server, start_server, stop_server
from tests.integration.test_bridge import (
    PARITY,
    PROMPT,
    check_two_hundred_syncs,
    finish,
    read_until,
    server,
    sync_and_probe,
)
from tests.integration.test_bridge import start_child as start_any_child

__all__ = ["server"]  # the fixture: both servers, one of them with two ranks


def start_child(server: Server, save_path: Path, act: str) -> subprocess.Popen[str]:
    return start_any_child(server, f"{save_path} {act}", child="reload_child")


def parity_of(child: subprocess.Popen[str]) -> float:
    code, out, err = finish(child)
    assert code == 0, err[-2000:]
    return float(out.split("PARITY ")[1])


def by_hand(server: Server, path: Path, **body: int) -> httpx.Response:
    return server.request("POST", "/reload_weights", timeout_s=120, json={"path": str(path), **body})


def logprobs(server: Server) -> list[float]:
    scored = server.generate([5 + i % 50 for i in range(200)], max_tokens=1, prompt_logprobs=0)["prompt_logprobs"]
    return [next(iter(position.values())) for position in scored[1:]]


def same(one: list[float], other: list[float]) -> bool:
    """Up to the rounding between plain and packed weights, about 1e-6; other weights differ by more than 1e-2."""
    return max(abs(a - b) for a, b in zip(one, other, strict=True)) < 1e-4


def test_new_weights_are_served_without_a_restart_and_agree_with_the_trainer(server: Server, tmp_path: Path) -> None:
    before = server.process.pid
    assert parity_of(start_child(server, tmp_path, "sync")) <= PARITY
    status = server.status()
    assert (server.process.pid, server.process.poll()) == (before, None)
    assert (status["policy_version"], status["session"]) == (1, None)
    assert server.generate(PROMPT, max_tokens=4)["policy_versions"] == [[1, 1]]
    (kept,) = (tmp_path / "reload").iterdir()
    assert kept.name.startswith("policy-v1-")


@pytest.mark.rotating
def test_a_trainer_killed_while_it_writes_leaves_the_last_version_served(plain_server: Server, tmp_path: Path) -> None:
    child = start_child(plain_server, tmp_path, "kill-mid-write")
    read_until(child, "SYNCED 0")
    assert child.wait(90) == -signal.SIGKILL
    assert plain_server.generate(PROMPT, max_tokens=4)["policy_versions"] == [[0, 0]]
    (half,) = (tmp_path / "reload").glob(".policy-v1-*.partial-*")
    assert parity_of(start_child(plain_server, tmp_path, "sync")) <= PARITY  # joins at once: its death is seen
    assert not half.exists()


@pytest.mark.rotating
def test_a_trainer_killed_while_vllm_reads_leaves_a_whole_version_served(plain_server: Server, tmp_path: Path) -> None:
    child = start_child(plain_server, tmp_path, "kill-mid-read")
    read_until(child, "SYNCED 0")
    assert child.wait(90) == -signal.SIGKILL
    assert plain_server.generate(PROMPT, max_tokens=4)["policy_versions"][0] in ([0, 0], [0, 1], [1, 1])
    assert parity_of(start_child(plain_server, tmp_path, "sync")) <= PARITY


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("act", "why"),
    [("damage", "SHA-256 differs"), ("skip", "policy version 2 does not follow 0: it must rise by one")],
)
def test_what_is_refused_leaves_the_last_version_served(
    vllm_server: Server, tmp_path: Path, act: str, why: str
) -> None:
    child = start_child(vllm_server, tmp_path, act)
    read_until(child, "SYNCED 0")
    before = logprobs(vllm_server)
    code, _, err = finish(child)
    assert code != 0
    assert why in err
    assert same(logprobs(vllm_server), before)
    assert vllm_server.status()["refusing"] is None


@pytest.mark.rotating
def test_another_mode_s_trainer_follows(vllm_server: Server, tmp_path: Path) -> None:
    assert parity_of(start_child(vllm_server, tmp_path, "sync")) <= PARITY
    assert sync_and_probe(vllm_server) <= PARITY


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_two_hundred_reloads_under_load_fail_no_request_and_leak_nothing(vllm_server: Server, tmp_path: Path) -> None:
    check_two_hundred_syncs(vllm_server, start_child(vllm_server, tmp_path, "many"))


@pytest.mark.rotating
def test_a_directory_is_served_by_hand(vllm_server: Server, llama_folder: Path, tmp_path: Path) -> None:
    assert by_hand(vllm_server, llama_folder, policy_version=0).status_code == 200
    from_disk = logprobs(vllm_server)
    changed = Path(shutil.copytree(llama_folder, tmp_path / "changed"))
    tensors = load_file(changed / "model.safetensors")
    save_file({name: tensor + 0.02 for name, tensor in tensors.items()}, changed / "model.safetensors")
    reply = by_hand(vllm_server, changed)
    assert reply.json()["policy_version"] == 1, reply.text
    assert not same(logprobs(vllm_server), from_disk)
    assert vllm_server.generate(PROMPT, max_tokens=4)["policy_versions"] == [[1, 1]]
    for name, content, why in [
        ("shape", {**tensors, "lm_head.weight": torch.zeros(10, 128)}, "lm_head.weight: vLLM holds [1000, 128]"),
        ("missing", {key: value for key, value in tensors.items() if "norm" not in key}, "the directory does not"),
    ]:
        wrong = tmp_path / name
        wrong.mkdir()
        save_file(content, wrong / "model.safetensors")
        refused = by_hand(vllm_server, wrong)
        assert refused.status_code == 422
        assert why in refused.text
    assert http.post(f"{vllm_server.url}/reload_weights", json={"path": str(changed)}).status_code == 401
    assert by_hand(vllm_server, llama_folder, policy_version=7).status_code == 200
    assert same(logprobs(vllm_server), from_disk)


@pytest.mark.rotating
def test_a_killed_server_is_reported_by_the_trainer(llama_folder: Path, tmp_path: Path) -> None:
    server = start_server(llama_folder, tmp_path)
    child = start_child(server, tmp_path, "wait")
    try:
        read_until(child, "SYNCED 0")
        start = time.monotonic()
        kill_server(server)
        assert child.stdin is not None
        child.stdin.write("\n")
        child.stdin.close()
        code, _, err = finish(child)
        assert code != 0
        assert "did not answer POST /v1/bridge/reload" in err
        assert server.url.replace("127.0.0.1", "localhost") in err
        assert time.monotonic() - start < 90
    finally:
        child.kill()
        stop_server(server)
