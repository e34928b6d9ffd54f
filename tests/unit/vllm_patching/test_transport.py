"""Gloo groups between two threads over loopback; real sockets, no vLLM."""

import socket
import threading
import time
import uuid

import pytest
import torch

from vllm_patching import transport


def worker_groups(port: int, session: str, timeout_s: float) -> transport.Groups:
    store = transport.join_store("127.0.0.1", port, timeout_s)
    control = transport.make_control_group(store, session, 1, 2, timeout_s)
    return transport.Groups(
        control, transport.make_data_group(control, store, session, 1, 2, timeout_s, "gloo"), "gloo"
    )


def trainer_groups(store: object, session: str, timeout_s: float) -> transport.Groups:
    control = transport.make_control_group(store, session, 0, 2, timeout_s)  # type: ignore[arg-type]
    return transport.Groups(control, control, "gloo")


def test_bytes_arrive_unchanged_across_chunks() -> None:
    store, port = transport.host_store("127.0.0.1", 0, 20)
    session = uuid.uuid4().hex
    sent = torch.randint(0, 256, (transport.CHUNK_BYTES + 12345,), dtype=torch.uint8)
    received = torch.zeros_like(sent)
    thread = threading.Thread(target=lambda: worker_groups(port, session, 20).broadcast(received))
    thread.start()
    trainer_groups(store, session, 20).broadcast(sent)
    thread.join(20)
    assert torch.equal(sent, received)


def test_silent_peer_ends_at_the_deadline_with_one_clear_line() -> None:
    store, port = transport.host_store("127.0.0.1", 0, 20)
    session = uuid.uuid4().hex
    joined: list[transport.Groups] = []
    # joins, then stays silent
    thread = threading.Thread(target=lambda: joined.append(trainer_groups(store, session, 1)))
    thread.start()
    groups = worker_groups(port, session, 1)
    thread.join(20)
    start = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        groups.broadcast(torch.zeros(8, dtype=torch.uint8))
    assert time.monotonic() - start < 5
    assert transport.describe(caught.value) == "peer silent for 1 s, its deadline"


def test_taken_port_is_refused_with_the_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(transport.TransportError, match=f"cannot listen on 127.0.0.1:{port}.*--master-port"):
            transport.host_store("127.0.0.1", port, 5)


def test_store_listens_on_the_given_address_only() -> None:
    store, port = transport.host_store("127.0.0.1", 0, 5)
    with socket.socket() as other:
        other.settimeout(2)
        assert other.connect_ex(("127.0.0.2", port)) != 0
    assert store.num_keys() >= 0
