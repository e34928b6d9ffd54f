"""The broadcast bridge on a real vLLM, with real processes and real signals."""

import contextlib
import itertools
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from atroposlib.wire.bridge import Manifest
from tests.client import http
from tests.forked import Forked
from tests.integration.bridge_child import held_by
from tests.integration.conftest import API_KEY, AUTHORIZED, REPOSITORY, Server, session_members, workers_of
from tests.integration.test_hostile_requests import OFFER

PARITY = (
    2e-5  # fp32 on both sides; the same weights differ by about 1e-6 on these models, other weights by more than 1e-2
)
PROMPT = [5, 6, 7, 8]
SENT = r"SENT (\d+) (\S+) (\S+)"


def start_child(
    server: Server, act: str, model: str | None = None, *, child: str = "bridge_child"
) -> subprocess.Popen[str]:
    words = [model or server.model, str(server.port), *act.split()]
    return Forked(f"tests.integration.{child}", words, os.environ | {"VLLM_API_KEY": API_KEY})


def read_until(child: subprocess.Popen[str], word: str) -> str:
    assert child.stdout is not None
    assert child.stderr is not None
    for line in child.stdout:
        if line.startswith(word):
            return line
    raise AssertionError(f"{word} never came:\n{child.stderr.read()[-2000:]}")


def finish(child: subprocess.Popen[str], timeout_s: float = 180) -> tuple[int, str, str]:
    """Exit status, and what was printed since `read_until`. Not by communicate, which loses lines that were read
    ahead.
    """
    assert child.stdout is not None
    assert child.stderr is not None
    with ThreadPoolExecutor(2) as pool:
        out, err = pool.submit(child.stdout.read), pool.submit(child.stderr.read)
        try:
            return child.wait(timeout_s), out.result(), err.result()
        finally:
            child.kill()  # nothing where it has ended; else the readers would wait for it


def sync_and_probe(server: Server) -> float:
    code, out, err = finish(start_child(server, "sync 120"))  # seconds for an answer: the machine may be busy
    assert code == 0, err[-2000:]
    return float(out.split("PARITY ")[1])


@pytest.fixture(params=["vllm_server", "vllm_server_tp2"])
def server(request: pytest.FixtureRequest) -> Server:
    found: Server = request.getfixturevalue(request.param)
    return found


def test_guide_lines_and_complete_mapping_are_in_the_log(server: Server) -> None:
    log = server.log.read_text()
    tp_size = server.status()["tp_size"]
    for rank in range(tp_size):
        assert f"[vLLM Patch] ✓ Weight updater thread started (name: WeightUpdater_TP{rank})" in log
    assert "[vLLM Patch] ✓ Shared memory setup complete!" in log
    assert "[vLLM Patch] ✓ Exported" in log
    assert f"Uvicorn running on http://127.0.0.1:{server.port}" in log
    config = server.log.with_name("vllm_bridge_config.json")
    mapped = json.loads(config.read_text())["param_mappings"]
    manifest = http.get(f"{server.url}/v1/bridge/manifest", headers=AUTHORIZED, timeout=30).json()
    assert set(mapped) == {tensor["name"] for tensor in manifest["tensors"]}
    assert len(mapped) > 20


def test_new_weights_are_served_and_agree_with_the_trainer(server: Server) -> None:
    assert sync_and_probe(server) <= PARITY
    assert server.status()["policy_version"] == 1
    assert server.generate(PROMPT, max_tokens=4)["policy_versions"] == [[1, 1]]


@pytest.mark.rotating
def test_the_doctor_compares_a_running_server_with_files(plain_server: Server) -> None:
    def doctor() -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", "atropos_launcher", "doctor", "--live", plain_server.url],
            env={**os.environ, "VLLM_API_KEY": API_KEY, "PYTHONPATH": str(REPOSITORY)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return done.returncode, done.stdout

    sync_and_probe(plain_server)  # version 1, other weights than those that the server has loaded
    code, found = doctor()
    assert code == 1, found
    assert re.search(r"fail  live weights .* policy version 1, (\d+) of \1 tensors differ from ", found), found
    idle = start_child(plain_server, "idle")
    read_until(idle, "SYNCED 0")
    code, found = doctor()  # while a trainer has its session
    idle.kill()
    idle.wait()
    assert code == 0, found
    assert re.search(r"ok    live weights .* policy version 0, 0 of \d+ tensors differ from ", found), found


def cached_tokens(server: Server) -> float:
    """Prompt tokens that vLLM has taken from its prefix cache so far."""
    metrics = server.request("GET", "/metrics").text
    (found,) = re.findall(r"^vllm:prefix_cache_hits(?:_total)?{.*} (\S+)$", metrics, re.MULTILINE)
    return float(found)


@pytest.mark.rotating
def test_what_the_prefix_cache_holds_of_old_weights_is_not_used_after_a_sync(server: Server) -> None:
    """The last block of a prompt is always computed again, so another reply alone would not show it: the next token's
    log-probability must be that of the whole prompt under the new weights, which a request for `prompt_logprobs`
    computes without the cache.
    """
    long_prompt = [5 + i % 50 for i in range(200)]

    def next_token() -> tuple[int, float]:
        reply = server.generate(long_prompt, max_tokens=1, temperature=0, logprobs=0)
        ((entry,),) = reply["logprobs"][0]
        ((token, logprob),) = entry.items()
        return int(token), logprob

    def computed_anew(token: int) -> float:
        reply = server.generate([*long_prompt, token], max_tokens=1, prompt_logprobs=0)
        return float(reply["prompt_logprobs"][len(long_prompt)][str(token)])

    idle = start_child(server, "idle")  # version 0: the weights on disk
    read_until(idle, "SYNCED 0")
    before = next_token()
    hits = cached_tokens(server)
    assert next_token() == pytest.approx(before, abs=PARITY)
    assert cached_tokens(server) > hits  # so there is something to forget
    assert before[1] == pytest.approx(computed_anew(before[0]), abs=PARITY)
    idle.kill()
    idle.wait()
    sync_and_probe(server)
    token, logprob = next_token()
    assert logprob == pytest.approx(computed_anew(token), abs=PARITY)
    assert abs(logprob - before[1]) > 10 * PARITY or token != before[0]


@pytest.mark.rotating
def test_only_what_has_changed_is_sent_and_every_word_arrives(server: Server) -> None:
    child = start_child(server, "changes 120")
    code, out, err = finish(child)
    assert code == 0, err[-2000:]
    sent = {int(version): (float(share), float(changed)) for version, share, changed in re.findall(SENT, out)}
    norms, nothing, everything, norms_again = (sent[version] for version in (1, 2, 3, 4))
    assert nothing[1] == 0
    assert nothing[0] < norms[0] < 0.1
    assert 0 < norms[1] < 0.1
    assert 0.9 < everything[0] < 1.01
    assert norms_again[0] < 0.1
    assert float(out.split("PARITY ")[1]) <= PARITY
    assert server.status()["policy_version"] == 4
    assert sync_and_probe(server) <= PARITY  # of a trainer that sends everything


@pytest.mark.rotating
@pytest.mark.parametrize("act", ["idle", "kill-before-transfer", "kill-mid-transfer", "kill-after-ack"])
def test_killed_trainer_leaves_the_last_version_served_and_a_new_one_joins_at_once(
    plain_server: Server, act: str
) -> None:
    plain_server.generate(PROMPT, max_tokens=1)  # the first of a server takes seconds more
    child = start_child(plain_server, act)
    read_until(child, "SYNCED 0")
    if act == "idle":
        child.kill()
    child.wait(90)
    assert child.returncode == -signal.SIGKILL
    start = time.monotonic()
    assert plain_server.generate(PROMPT, max_tokens=4)["policy_versions"] == [[0, 0]]
    assert time.monotonic() - start < 5
    assert sync_and_probe(plain_server) <= PARITY


@pytest.mark.rotating
def test_trainer_killed_while_vllm_commits_leaves_a_whole_version_served(server: Server) -> None:
    child = start_child(server, "kill-during-commit")
    read_until(child, "SYNCED 0")
    child.wait(90)
    assert child.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 90
    while server.status()["policy_version"] != 1:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert server.generate(PROMPT, max_tokens=4)["policy_versions"] == [[1, 1]]
    assert server.status()["paused"] is False
    assert sync_and_probe(server) <= PARITY


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_two_hundred_syncs_under_load_fail_no_request_and_leak_nothing(vllm_server: Server) -> None:
    check_two_hundred_syncs(vllm_server, start_child(vllm_server, "many"))


def check_two_hundred_syncs(server: Server, child: subprocess.Popen[str]) -> None:
    """`child` syncs 200 times while clients generate; nothing fails, nothing grows."""
    read_until(child, "SYNCED 0")  # before, a request may begin under a higher version that an earlier trainer left
    with Load(server, clients=2) as load:
        held = {}
        for version in (20, 200):
            ours = json.loads(read_until(child, f"SYNCED {version} ").split(maxsplit=2)[2])
            held[version] = {"trainer": ours, "server": held_by(session_members(server.process.pid))}
    code, out, err = finish(child, 120)
    assert code == 0, err[-2000:]
    assert float(out.split("PARITY ")[1]) <= PARITY, err[-2000:]
    assert load.failures == []
    assert all(first <= last for (first, last), _ in load.answers)
    assert any(first < last for (first, last), _ in load.answers)  # some were under way while a version was committed
    for (first, last), spans in load.answers:  # each token of the 16 has a version, and versions only rise
        assert (spans[0][1], spans[-1][1]) == (first, last)
        assert spans[0][0] == 0
        assert all(a[0] < b[0] < 16 and a[1] < b[1] for a, b in itertools.pairwise(spans))
    # 180 leaked staging buffers would be 400 MB, 180 leaked threads or sockets 180 of them
    for side in ("trainer", "server"):
        grown = {what: held[200][side][what] - held[20][side][what] for what in held[20][side]}
        assert grown["memory"] < 150e6, (side, held)
        assert grown["files"] < 20, (side, held)
        assert grown["threads"] < 20, (side, held)


class Load:
    """Clients that generate without a pause; `answers` are the versions of what they got: first and last, and spans."""

    def __init__(self, server: Server, clients: int) -> None:
        self._server = server
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(clients)]
        self.failures: list[str] = []
        self.answers: list[tuple[list[int], list[list[int]]]] = []

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def _run(self) -> None:
        while not self._stop.is_set():
            body = {"prompt": {"prompt_token_ids": PROMPT}, "max_tokens": 16, "ignore_eos": True}
            try:
                reply = self._server.request("POST", "/generate", timeout_s=120, json=body)
                reply.raise_for_status()
            except httpx.HTTPError as error:
                self.failures.append(str(error))
            else:
                found = reply.json()
                # in one list: the clients' threads take turns between any two statements
                self.answers += zip(found["policy_versions"], found["version_spans"], strict=True)


@pytest.mark.rotating
def test_frozen_trainer_keeps_its_lease_then_loses_the_bridge(plain_server: Server) -> None:
    child = start_child(plain_server, "freeze-mid-transfer 20")
    read_until(child, "MID-TRANSFER")
    frozen = time.monotonic()
    assert plain_server.generate(PROMPT, max_tokens=4)["policy_versions"] == [[0, 0]]
    # the offer alone: a whole trainer may take longer to start than the lease lasts
    digest = msgspec.convert(plain_server.request("GET", "/v1/bridge/manifest").json(), Manifest).digest()
    offer = OFFER | {"world_size": 1 + plain_server.status()["tp_size"], "manifest_digest": digest}
    newcomer = plain_server.request("POST", "/v1/bridge/session", json=offer)
    assert newcomer.status_code == 409
    assert "holds session" in newcomer.text
    assert "wait for its lease to end" in newcomer.text
    while plain_server.status()["lease_left_s"] > 0:
        assert time.monotonic() - frozen < 60
        time.sleep(0.5)
    assert sync_and_probe(plain_server) <= PARITY
    child.send_signal(signal.SIGCONT)  # the late trainer must fail with a clear error and touch nothing
    code, _, err = finish(child, 90)
    assert code != 0
    assert "example_trainer.bridges." in err  # BridgeError, or a kind of it
    assert plain_server.status()["policy_version"] == 1


@contextlib.contextmanager
def without_memory(workers: list[int]) -> Iterator[None]:
    """These workers can make no memory file as large as their weights, as where memory is full; their logs stay below
    the limit.
    """
    limits = {worker: resource.prlimit(worker, resource.RLIMIT_FSIZE) for worker in workers}
    for worker, (_, hard) in limits.items():
        resource.prlimit(worker, resource.RLIMIT_FSIZE, (500_000, hard))
    try:
        yield
    finally:
        for worker, limit in limits.items():
            resource.prlimit(worker, resource.RLIMIT_FSIZE, limit)


@pytest.mark.rotating
def test_a_trainer_is_refused_for_want_of_memory_and_the_last_version_served(vllm_server: Server) -> None:
    assert sync_and_probe(vllm_server) <= PARITY
    with without_memory(workers_of(vllm_server)):
        code, _, err = finish(start_child(vllm_server, "sync 8"))
        assert code != 0, err[-2000:]
        assert re.search(r"TP0 failed \(.*cannot allocate .* MB of shared memory: File too large", err), err[-2000:]
        assert vllm_server.generate(PROMPT, max_tokens=4)["policy_versions"] == [[1, 1]]
    assert sync_and_probe(vllm_server) <= PARITY


@pytest.mark.rotating
def test_another_model_is_refused_by_name(server: Server, llama_folder: Path, qwen_folder: Path) -> None:
    other = qwen_folder if server.model == str(llama_folder) else llama_folder
    code, _, err = finish(start_child(server, "sync", str(other)))
    assert code != 0
    assert "do not have the same model" in err
    assert "tensors agree" in err


def test_strangers_are_kept_out(server: Server) -> None:
    for method, path in [
        ("GET", "/v1/bridge/status"),
        ("POST", "/v1/bridge/commit"),
        ("POST", "/generate"),
        ("POST", "/v1/generate"),
    ]:
        reply = http.request(
            method, server.url + path, json={"prompt": "x", "session": "s", "policy_version": 1}, timeout=30
        )
        assert reply.status_code == 401, (method, path)


def test_commit_of_a_stranger_session_is_refused(server: Server) -> None:
    reply = http.post(
        f"{server.url}/v1/bridge/commit",
        json={"session": "nobody", "policy_version": 9},
        headers=AUTHORIZED,
        timeout=30,
    )
    assert reply.status_code == 404
    assert "is not the current one" in reply.text


@pytest.mark.parametrize(
    ("body", "status", "fragment"),
    [
        ({"prompt": {"prompt_token_ids": [1]}, "max_tokenss": 3}, 422, "did you mean 'max_tokens'"),
        ({"prompt": {"prompt_token_ids": []}}, 422, "prompt must be"),
        ({"prompt": {"prompt_token_ids": [1]}, "temperature": -1}, 400, "got -1"),
        ({"prompt": {"prompt_token_ids": [1] * 600}, "max_tokens": 1}, 400, "512"),
        ({"prompt": {"prompt_token_ids": [999999]}, "max_tokens": 1}, 400, "999999"),
    ],
)
def test_bad_generate_requests_are_4xx_with_the_value(
    vllm_server: Server, body: dict[str, Any], status: int, fragment: str
) -> None:
    reply = http.post(f"{vllm_server.url}/generate", json=body, headers=AUTHORIZED, timeout=30)
    assert reply.status_code == status, reply.text
    assert fragment in reply.text, reply.text


def test_generate_returns_one_logprob_a_token_at_the_sampled_temperature(vllm_server: Server) -> None:
    reply = vllm_server.generate(PROMPT, n=3, max_tokens=8, temperature=0.5, logprobs=0, ignore_eos=True, seed=1)
    assert [len(ids) for ids in reply["token_ids"]] == [8, 8, 8]
    assert [[int(next(iter(entry))) for (entry,) in positions] for positions in reply["logprobs"]] == reply["token_ids"]
    assert reply["prompt_token_ids"] == PROMPT
    assert reply["finish_reasons"] == ["length"] * 3


def test_no_route_of_the_server_answers_a_foreign_host_or_page(vllm_server: Server) -> None:
    """vLLM's own routes too, and before its CORS middleware, which allows every origin."""
    paths = http.get(f"{vllm_server.url}/openapi.json", headers=AUTHORIZED, timeout=30).json()["paths"]
    assert {"/health", "/v1/models", "/tokenize", "/generate", "/v1/bridge/status"} <= set(paths)
    preflight = {"Origin": "http://evil.test", "Access-Control-Request-Method": "POST"}
    for headers in ({"Host": "evil.test"}, {"Sec-Fetch-Site": "cross-site"}, preflight, preflight | AUTHORIZED):
        for path, methods in [*paths.items(), ("/metrics", ["get"]), ("/docs", ["get"]), ("/nowhere", ["post"])]:
            for method in {*methods, "options"}:
                reply = http.request(method, vllm_server.url + path, headers=headers, timeout=30)
                assert reply.status_code == 403, (headers, method, path, reply.text)
                assert "access-control-allow-origin" not in reply.headers
    named = {"Host": "vllm.cluster.local:80"}
    assert http.get(f"{vllm_server.url}/health", headers=named | AUTHORIZED, timeout=30).status_code == 200


def test_no_route_of_the_server_but_health_answers_without_the_key(vllm_server: Server) -> None:
    """The running engine too: /invocations samples, and vLLM itself does not guard it."""
    paths = http.get(f"{vllm_server.url}/openapi.json", headers=AUTHORIZED, timeout=30).json()["paths"]
    assert {"/invocations", "/tokenize", "/scale_elastic_ep"} <= set(paths)
    chat = {"model": vllm_server.model, "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    for given in ({}, {"Authorization": "Bearer wrong"}):
        for path, methods in [*paths.items(), ("/metrics", ["get"]), ("/docs", ["get"]), ("/nowhere", ["post"])]:
            for method in {*methods, "options", "head"} if path != "/health" else ():
                reply = http.request(method, vllm_server.url + path, json=chat, headers=given, timeout=30)
                assert reply.status_code == 401, (given, method, path, reply.text)
    assert http.get(f"{vllm_server.url}/health", timeout=30).status_code == 200
    reply = http.post(f"{vllm_server.url}/invocations", json=chat, headers=AUTHORIZED, timeout=30)
    assert reply.status_code == 200, reply.text


def test_what_a_request_brings_is_escaped_in_the_log(vllm_server: Server) -> None:
    """uvicorn takes the client's address from a header, and for a terminal the byte 0x9b starts a command."""
    headers = httpx.Headers(AUTHORIZED | {"X-Forwarded-For": "1.2.3.4\x9b31m"}, encoding="latin-1")
    deadline = time.monotonic() + 30
    while r"1.2.3.4\x9b31m" not in (text := vllm_server.log.read_text()):
        assert time.monotonic() < deadline, text[-2000:]
        # again, as of many refused requests only one per 10 s is logged
        http.post(f"{vllm_server.url}/v1/bridge/session/none/heartbeat", headers=headers, timeout=30)
        time.sleep(0.5)
    assert "\x9b" not in text
