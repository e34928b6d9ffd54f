"""Ports are chosen so that neither a listener, nor a vLLM that loads, nor another launcher has them."""

import os
import socket
from collections.abc import Iterator

import pytest

from atropos_launcher.placement.ports import Ports, PortTaken, holder
from tests.serving import free_port


@pytest.fixture
def ports() -> Iterator[Ports]:
    with Ports() as held:
        yield held


def test_a_free_port_is_taken_as_it_is(ports: Ports) -> None:
    port = free_port()
    assert ports.require("--api-port", port) == port


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_a_taken_port_is_refused_with_its_holder_and_passed_over_otherwise(ports: Ports, address: str) -> None:
    with socket.socket() as held:
        held.bind((address, 0))
        held.listen()
        port = held.getsockname()[1]
        with pytest.raises(PortTaken, match=rf"^--api-port {port} is taken by .*\(pid {os.getpid()}\); end that"):
            ports.require("--api-port", port)
        assert ports.first_free(port) > port
    assert ports.first_free(port) == port


def test_a_port_that_a_starting_vllm_claims_is_taken_before_anything_listens_on_it(ports: Ports) -> None:
    port = free_port()
    with socket.socket(socket.AF_UNIX) as claim:
        claim.bind(f"\0atropos-vllm-127.0.0.1:{port}")
        with pytest.raises(PortTaken, match=rf"\(pid {os.getpid()}\)"):
            ports.require("--vllm-port", port)
        assert ports.first_free(port) > port
    assert ports.require("--vllm-port", port) == port


def test_two_launchers_that_start_at_once_choose_different_ports(ports: Ports) -> None:
    port = free_port()
    with Ports() as others:
        assert others.require("--api-port", port) == port
        assert str(os.getpid()) in holder(port)
        assert ports.first_free(port) > port
    with Ports() as free:
        assert free.require("--api-port", port) == port


def test_one_run_gives_no_port_twice(ports: Ports) -> None:
    port = free_port()
    assert ports.first_free(port) == port
    assert ports.first_free(port) > port


def test_the_last_port_is_the_end(ports: Ports) -> None:
    with pytest.raises(PortTaken, match="no port from 65536 to 65535 is free"):
        ports.first_free(65536)
