"""One trainer feeds vLLM servers on two hosts, which are network namespaces joined by a cable; real processes, real
failures.
"""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.integration.conftest import Server, await_server, start_server, stop_server, workers_of
from tests.integration.namespaces import Host
from tests.integration.trainer_process import DEADLINE_S, TrainerProcess, trainer_process

PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def servers(
    hosts: tuple[Host, Host], llama_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Server]]:
    started = [start_on(host, llama_folder, tmp_path_factory.mktemp("vllm")) for host in hosts]
    try:
        for server in started:
            await_server(server)
        yield started
    finally:
        for server in started:
            stop_server(server)


@pytest.fixture
def trainer(
    hosts: tuple[Host, Host], servers: list[Server], llama_folder: Path, tmp_path: Path
) -> Iterator[TrainerProcess]:
    """On the first host."""
    hosts_file = tmp_path / "hosts"
    hosts_file.write_text("".join(f"{host.address}  # vLLM\n" for host in hosts))
    with trainer_process(
        str(llama_folder),
        tmp_path,
        "--vllm-port",
        "9001",
        "--hosts-file",
        str(hosts_file),
        namespace=hosts[0].namespace,
        NUM_INFERENCE_NODES="2",
        MASTER_ADDR=hosts[0].address,
    ) as process:
        yield process


def start_on(host: Host, model: Path, folder: Path) -> Server:
    return start_server(model, folder, port=9001, host=host.address, namespace=host.namespace, wait=False)


def versions(servers: list[Server]) -> list[int]:
    return [server.status()["policy_version"] for server in servers]


@pytest.mark.rotating(together=True)
def test_servers_on_two_hosts_serve_one_version(trainer: TrainerProcess, servers: list[Server]) -> None:
    for version in (1, 2):
        assert trainer.sync_with(2) == version
        assert versions(servers) == [version, version]
    samples = [server.generate(PROMPT, max_tokens=8, temperature=0)["token_ids"] for server in servers]
    assert samples[0] == samples[1]
    assert "served by 2 of 2 servers" in trainer.log.read_text()


@pytest.mark.nightly
def test_a_host_behind_a_cut_cable_is_left_out_and_let_in_again(
    trainer: TrainerProcess, servers: list[Server], hosts: tuple[Host, Host]
) -> None:
    near, far = servers
    trainer.sync_with(2)
    hosts[1].set_cable("down")
    try:
        cut = time.monotonic()
        row = trainer.sync()
        assert row["servers"] == 1
        assert time.monotonic() - cut < DEADLINE_S
        assert near.status()["policy_version"] == row["version"]
        assert near.generate(PROMPT, max_tokens=4)["policy_versions"] == [[row["version"]] * 2]
        said = trainer.log.read_text()
        assert f"{far.url} is fenced off, training continues with 1 of 2 servers" in said
        assert "could not be fenced off" in said
    finally:
        hosts[1].set_cable("up")
    version = trainer.sync_with(2)
    assert versions(servers) == [version, version]


@pytest.mark.rotating(together=True)
def test_a_server_whose_worker_freezes_refuses_to_generate_until_it_has_caught_up(
    trainer: TrainerProcess, servers: list[Server]
) -> None:
    near, far = servers
    trainer.sync_with(2)
    frozen = workers_of(far)[0]
    os.kill(frozen, signal.SIGSTOP)
    try:
        start = time.monotonic()
        row = trainer.sync()
        assert row["servers"] == 1
        assert time.monotonic() - start < DEADLINE_S
        for path in ("/generate", "/v1/completions"):
            reply = far.request("POST", path, json={"model": far.model, "prompt": "x", "max_tokens": 1})
            assert reply.status_code == 503, reply.text
            assert "left out of the weight sync" in reply.text, reply.text
        assert near.generate(PROMPT, max_tokens=4)["policy_versions"] == [[row["version"]] * 2]
    finally:
        os.kill(frozen, signal.SIGCONT)
    version = trainer.sync_with(2)
    assert versions(servers) == [version, version]
    assert far.generate(PROMPT, max_tokens=4)["policy_versions"] == [[version, version]]


@pytest.mark.nightly
def test_a_server_that_died_is_left_out_and_let_in_again_once_restarted(
    trainer: TrainerProcess, servers: list[Server], hosts: tuple[Host, Host], llama_folder: Path, tmp_path: Path
) -> None:
    near, far = servers
    trainer.sync_with(2)
    os.kill(workers_of(far)[0], signal.SIGKILL)
    start = time.monotonic()
    row = trainer.sync()
    assert row["servers"] == 1
    assert time.monotonic() - start < DEADLINE_S
    assert near.generate(PROMPT, max_tokens=4)["policy_versions"] == [[row["version"]] * 2]
    far.process.wait(60)
    with pytest.raises(httpx.TransportError):
        far.status()
    servers[1] = start_on(hosts[1], llama_folder, tmp_path)
    await_server(servers[1])
    assert servers[1].status()["policy_version"] == 0
    version = trainer.sync_with(2)
    assert versions(servers) == [version, version]
