"""One trainer, several servers: real Gloo groups over loopback, servers without vLLM that fail on request."""

import logging
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from example_trainer.bridges import BridgeError, broadcast
from example_trainer.bridges.broadcast import BroadcastBridge
from example_trainer.model.loading import load_model
from example_trainer.settings.config import TrainerConfig
from example_trainer.weights.written import TrainedModel
from tests.unit.trainer.bridges.fake_broadcast_server import FakeVllmServer, serving
from tests.waiting import wait_until

CPU = torch.device("cpu")


@pytest.fixture
def servers(model: str) -> Iterator[list[FakeVllmServer]]:
    pair = [FakeVllmServer(model, tp_size=1), FakeVllmServer(model, tp_size=2)]
    with serving(*pair):
        yield pair


def config_to(model: str, *ports: int, **settings: Any) -> TrainerConfig:
    defaults: dict[str, Any] = {"bridge_timeout_s": 2, "bridge_lease_s": 0.3, "bridge_bucket_mb": 1}
    mode = {"model_name": model, "weight_bridge_mode": "shared_vllm", "use_shared_memory": True, "vllm_port": ports}
    return TrainerConfig.model_validate(mode | defaults | settings)


def bridge_to(model: str, *servers: FakeVllmServer, **settings: Any) -> BroadcastBridge:
    config = config_to(model, *(server.port for server in servers), **settings)
    connected = broadcast.prepare(config, model, CPU).connect(TrainedModel(load_model(model, CPU)))
    assert isinstance(connected, BroadcastBridge)
    return connected


def change(bridge: BroadcastBridge) -> None:
    with torch.no_grad():
        for parameter in bridge._trained.model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)


def synced(bridge: BroadcastBridge, version: int) -> int:
    return bridge.sync(version, lambda: change(bridge)).servers


def test_a_bridge_has_the_same_threads_from_its_first_sync_until_it_is_closed(
    model: str, servers: list[FakeVllmServer]
) -> None:
    def threads() -> set[int | None]:
        return {thread.ident for thread in threading.enumerate() if thread.name.startswith("BridgeLink")}

    bridge = bridge_to(model, *servers)
    assert threads() == set()
    synced(bridge, 0)
    of_first_sync = threads()
    assert 1 <= len(of_first_sync) <= len(servers)
    synced(bridge, 1)
    assert of_first_sync <= threads()
    assert len(threads()) <= len(servers)
    bridge.close()
    assert threads() == set()


def test_the_stall_of_a_sync_is_the_longest_of_its_servers(model: str, servers: list[FakeVllmServer]) -> None:
    servers[1].stall_s = 0.25
    bridge = bridge_to(model, *servers)
    assert bridge.sync(0, lambda: change(bridge)).stall_s == 0.25
    bridge.close()


def test_all_servers_serve_one_version_whatever_their_tensor_parallel_sizes(
    model: str, servers: list[FakeVllmServer]
) -> None:
    bridge = bridge_to(model, *servers)
    for version in range(3):
        report = bridge.sync(version, lambda: change(bridge))
        assert [server.version for server in servers] == [version, version]
    assert report.servers == 2
    assert report.bytes_moved == 3 * servers[0].manifest.nbytes
    assert bridge.parity_probe() < 1e-4
    bridge.close()
    assert [server.session for server in servers] == [None, None]


def test_before_there_is_a_model_no_server_is_asked_for_anything(model: str, servers: list[FakeVllmServer]) -> None:
    prepared = broadcast.prepare(config_to(model, *(server.port for server in servers)), model, CPU)
    assert not hasattr(prepared, "sync")
    assert prepared.storage is None
    assert [server.sessions for server in servers] == [0, 0]
    prepared.close()


def test_a_trainer_on_a_gpu_loads_once_its_servers_have_measured_what_is_free_there(model: str) -> None:
    """A server that starts on the same GPU would count the trainer's weights as its own."""
    nobody = config_to(model, 1, vllm_start_timeout=1)
    with pytest.raises(BridgeError, match=r"no vLLM server at .* after 1 s"):
        broadcast.prepare(nobody, model, torch.device("cuda"))


def test_parity_is_that_of_the_worst_server(model: str, servers: list[FakeVllmServer]) -> None:
    bridge = bridge_to(model, *servers)
    synced(bridge, 0)
    with torch.no_grad():
        servers[1]._model.get_parameter("model.embed_tokens.weight").mul_(1.5)
    assert bridge.parity_probe() > 1e-2
    bridge.close()


@pytest.mark.parametrize("delta", [False, True], ids=["whole", "delta"])
@pytest.mark.parametrize("fail", ["transfer", "commit", "heartbeat"])
def test_a_laggard_is_fenced_off_and_let_in_again(
    model: str,
    servers: list[FakeVllmServer],
    fail: str,
    delta: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    healthy, laggard = servers
    bridge = bridge_to(model, *servers, bridge_delta=delta)
    assert synced(bridge, 4) == 2
    laggard.fail = fail
    if fail == "heartbeat":
        wait_until(lambda: bridge._links[1].session.heart.lost is not None)
    with caplog.at_level(logging.WARNING):
        assert synced(bridge, 5) == 1
    assert (healthy.version, laggard.version) == (5, 4)
    assert healthy.fenced is None
    assert laggard.fenced is not None
    assert "left out of the weight sync" in laggard.fenced
    assert (
        f"127.0.0.1:{laggard.port} is fenced off, training continues with 1 of 2 servers".replace(
            "127.0.0.1", "localhost"
        )
        in caplog.text
    )
    laggard.fail = None
    assert synced(bridge, 6) == 1, "looked too early"
    monkeypatch.setattr(broadcast, "READMIT_S", 0.0)
    bridge._next_look = 0.0
    assert synced(bridge, 7) == 2
    assert (healthy.version, laggard.version) == (7, 7)
    assert not laggard.fenced
    assert bridge.parity_probe() < 1e-4
    assert synced(bridge, 8) == 2
    assert bridge.differing_tensors(8) == []
    if delta:
        assert healthy.bases == [None, 4, 5, 6, 7]
        assert laggard.bases[-4:] == [None, None, 7, 7], "by each of its two ranks: whole once it is back"
    bridge.close()


def test_a_server_is_sent_what_has_changed_since_the_sync_before(model: str, servers: list[FakeVllmServer]) -> None:
    bridge = bridge_to(model, *servers, bridge_delta=True)
    whole = 3 * servers[0].manifest.nbytes
    first = bridge.sync(0, lambda: change(bridge))
    assert (first.bytes_whole, first.words_changed) == (whole, None)
    assert whole <= first.bytes_moved < 1.01 * whole
    nothing = bridge.sync(1, lambda: None)
    assert nothing.words_changed == 0
    assert nothing.bytes_moved < 0.01 * whole
    norm = bridge._trained.model.get_parameter("model.norm.weight")

    @torch.no_grad()
    def change_norm() -> None:
        norm.add_(1.0)

    little = bridge.sync(2, change_norm)
    assert nothing.bytes_moved < little.bytes_moved < nothing.bytes_moved + 9 * norm.nbytes
    assert little.words_changed is not None
    assert 0 < little.words_changed < 0.01
    assert bridge.differing_tensors(2) == []
    everything = bridge.sync(3, lambda: change(bridge))
    assert everything.bytes_moved < 1.01 * whole
    assert bridge.differing_tensors(3) == []
    bridge.close()


def test_no_server_commits_before_all_have_acked(model: str, servers: list[FakeVllmServer]) -> None:
    bridge = bridge_to(model, *servers)
    synced(bridge, 0)
    acked: list[str] = []
    for link in bridge._links:
        transfer, commit = link.transfer, link.vllm.commit

        def slow(*arguments: Any, transfer: Any = transfer) -> None:
            transfer(*arguments)
            time.sleep(0.2 * len(acked))
            acked.append("ack")

        def checked(session: str, version: int, commit: Any = commit) -> Any:
            assert acked == ["ack", "ack"]
            return commit(session, version)

        link.transfer, link.vllm.commit = slow, checked  # type: ignore[method-assign,assignment]
    synced(bridge, 1)
    bridge.close()


def test_training_ends_when_the_last_server_is_gone(model: str, servers: list[FakeVllmServer]) -> None:
    bridge = bridge_to(model, *servers)
    synced(bridge, 0)
    servers[0].fail = "commit"
    assert synced(bridge, 1) == 1
    servers[1].fail = "commit"
    with pytest.raises(BridgeError, match=r"all 2 vLLM servers are lost: .*commit broken for the test"):
        synced(bridge, 2)
    assert servers[1].fenced is None, "the last one continues serving what it last committed"
    bridge.close()


def test_one_server_alone_fails_as_it_is(model: str) -> None:
    server = FakeVllmServer(model)
    with serving(server):
        bridge = bridge_to(model, server)
        synced(bridge, 0)
        server.fail = "transfer"
        with pytest.raises(
            BridgeError,
            match=r"^policy version 1 did not reach every worker of .* within 2 s: peer silent .*TP0 joined",
        ):
            synced(bridge, 1)
        assert server.fenced is None
        bridge.close()


def test_a_stopped_server_stays_out_until_it_answers_with_the_same_model(
    model: str, servers: list[FakeVllmServer], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bridge = bridge_to(model, *servers)
    synced(bridge, 0)
    servers[1].stop()
    assert synced(bridge, 1) == 1
    monkeypatch.setattr(broadcast, "READMIT_S", 0.0)
    bridge._next_look = 0.0
    with caplog.at_level(logging.WARNING):
        assert synced(bridge, 2) == 1
    assert "could not be fenced off" in caplog.text
    assert "stays out" in caplog.text
    assert servers[0].sessions == 1, "the healthy server's session is never disturbed"
    bridge.close()


def test_servers_that_hold_their_weights_differently_are_refused(model: str) -> None:
    pair = [FakeVllmServer(model), FakeVllmServer(model, dtype="bfloat16")]
    with serving(*pair):
        with pytest.raises(
            BridgeError,
            match=r"stores its weights differently \(bfloat16\) than .* \(float32\).*same --model and --dtype",
        ):
            bridge_to(model, *pair)
        assert [server.sessions for server in pair] == [0, 0]


def test_a_long_run_fills_neither_the_store_nor_threads_nor_descriptors(
    model: str, servers: list[FakeVllmServer]
) -> None:
    bridge = bridge_to(model, *servers)
    for version in range(3):
        synced(bridge, version)
    store = bridge._links[0]._store
    before = store.num_keys(), threading.active_count(), len(os.listdir("/proc/self/fd"))
    for version in range(3, 23):
        synced(bridge, version)
    after = store.num_keys(), threading.active_count(), len(os.listdir("/proc/self/fd"))
    assert after[0] == before[0], (before, after)
    assert after[1] <= before[1] + 2, (before, after)
    assert after[2] <= before[2] + 2, (before, after)
    bridge.close()


def test_a_loopback_rendezvous_is_refused_for_a_server_elsewhere(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_patching.transport.address_towards", lambda host: "192.0.2.1")
    config = config_to(model, 9001, vllm_host="192.0.2.7")
    with pytest.raises(
        BridgeError, match=r"192.0.2.7 runs on another machine.*MASTER_ADDR=localhost.*--master-addr.*192.0.2.1"
    ):
        broadcast.prepare(config, model, CPU)


# --- servers that join and leave --------------------------------------------------------------------------------------


def test_a_server_that_joins_gets_the_next_version_and_one_that_leaves_none(
    model: str, servers: list[FakeVllmServer]
) -> None:
    first, second = servers
    bridge = bridge_to(model, first)
    assert synced(bridge, 1) == 1
    bridge.admit(f"http://localhost:{second.port}")
    bridge.admit(f"http://127.0.0.1:{second.port}")  # it is known
    assert [client.url for client in bridge.joined()] == []
    assert synced(bridge, 2) == 2
    assert (first.version, second.version) == (2, 2)
    assert [client.url for client in bridge.joined()] == [f"http://localhost:{second.port}"]
    assert bridge.differing_tensors(2) == []
    bridge.release(f"http://127.0.0.1:{first.port}")
    assert first.session is None
    assert first.fenced is None
    assert synced(bridge, 3) == 1
    assert (first.version, second.version) == (2, 3)
    with pytest.raises(BridgeError, match="is the only vLLM server"):
        bridge.release(f"http://localhost:{second.port}")
    bridge.admit(f"http://127.0.0.1:{first.port}")
    assert synced(bridge, 4) == 2
    bridge.close()


def test_a_server_that_has_left_is_not_told_that_its_session_ends(
    model: str, servers: list[FakeVllmServer], caplog: pytest.LogCaptureFixture
) -> None:
    bridge = bridge_to(model, *servers)
    assert synced(bridge, 1) == 2
    servers[1].stop()
    bridge.release(f"http://localhost:{servers[1].port}", gone=True)
    assert synced(bridge, 2) == 1
    bridge.close()
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == []


def test_a_server_that_joins_with_other_words_does_not_count(
    model: str, servers: list[FakeVllmServer], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = servers
    bridge = bridge_to(model, first)
    bridge.admit(f"http://127.0.0.1:{second.port}")

    def others(reply: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{**reply[0], "digest": reply[0]["digest"] ^ 1}, *reply[1:]]

    right = second._digests
    monkeypatch.setattr(second, "_digests", lambda: others(right()))
    assert synced(bridge, 1) == 1
    assert bridge.joined() == ()
    assert second.fenced is not None
    assert "1 of its tensors are not the trainer's" in caplog.text
    bridge.close()


def test_a_server_that_does_not_answer_joins_once_it_does(model: str, servers: list[FakeVllmServer]) -> None:
    bridge = bridge_to(model, servers[0])
    bridge.admit("http://127.0.0.1:9")
    assert synced(bridge, 1) == 1
    assert bridge.joined() == ()
    bridge.close()


def test_the_last_server_that_is_connected_does_not_leave(model: str, servers: list[FakeVllmServer]) -> None:
    first, second = servers
    bridge = bridge_to(model, *servers)
    synced(bridge, 0)
    first.fail = "commit"
    assert synced(bridge, 1) == 1
    first.stop()
    with pytest.raises(BridgeError, match=rf"{second.port} is the only vLLM server that is connected"):
        bridge.release(f"http://localhost:{second.port}")
    assert synced(bridge, 2) == 1
    assert second.version == 2
    bridge.close()


def test_a_server_that_leaves_is_replaced_by_one_that_was_left_out_and_answers_again(
    model: str, servers: list[FakeVllmServer]
) -> None:
    first, second = servers
    bridge = bridge_to(model, *servers)
    synced(bridge, 0)
    first.fail = "commit"
    assert synced(bridge, 1) == 1
    first.fail = None
    bridge.release(f"http://localhost:{second.port}")
    assert synced(bridge, 2) == 1
    assert (first.version, second.version) == (2, 1)
    bridge.close()


def test_a_sync_without_any_server_is_an_error_of_the_bridge(model: str) -> None:
    server = FakeVllmServer(model)
    with serving(server):
        bridge = bridge_to(model, server)
        server.stop()
        with pytest.raises(BridgeError, match="no vLLM server could be joined again"):
            bridge.reconnect()
        with pytest.raises(BridgeError, match="no vLLM server is connected"):
            synced(bridge, 0)
        bridge.close()
