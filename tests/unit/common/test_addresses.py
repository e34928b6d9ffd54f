"""Proxies of the environment: never for addresses of this machine, and named in an error where one was asked. Sockets
that listen, of every server.
"""

import json
import socket
from collections.abc import Callable

import pytest

from atropos_launcher.commands.doctor import ask
from atroposlib.addresses import (
    is_loopback_url,
    listening_socket,
    netloc,
    proxy_variable,
    resolved,
    through_proxy,
    without_loopback_proxies,
)
from atroposlib.agents import serve as agents
from atroposlib.cli import run_api
from atroposlib.envs.authors.author_errors import CORRECT, NOT_THEIRS, ErrorBudget, TooManyFailures
from atroposlib.envs.server_handling.errors import PermanentServerError, ServerUnreachableError
from atroposlib.envs.server_handling.openai_server import OpenAIServer
from atroposlib.envs.server_handling.server_config import APIServerConfig
from atroposlib.testing.fake_inference_server import FakeInferenceServer
from atroposlib.view import serve as view
from example_trainer import vllm_api_server
from example_trainer.bridges.vllm_client import VllmClient
from example_trainer.settings.config import TrainerConfig
from tests.unit.trainer.fakes import FakeApi, serve

DEAD = "http://127.0.0.1:1"
VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("ALL_PROXY", "socks5://127.0.0.1:1"),
        ("all_proxy", "socks5h://127.0.0.1:1"),
        ("HTTP_PROXY", DEAD),
        ("http_proxy", DEAD),
        ("HTTP_PROXY", "nonsense://x"),
    ],
)
async def test_clients_of_this_machine_use_no_proxy(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    monkeypatch.setenv(variable, value)
    async with FakeInferenceServer(lambda prompt: "yes") as fake:
        server = OpenAIServer(APIServerConfig(server_type="openai", base_url=fake.base_url, model_name="fake"))
        assert await server.probe() is None
        reply = await server.request_chat({"messages": [{"role": "user", "content": "?"}]})
        await server.close()
    assert reply.choices[0].message.content == "yes"


@pytest.mark.parametrize("variable", ["HTTP_PROXY", "ALL_PROXY"])
def test_the_trainer_and_the_doctor_ask_servers_directly(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "socks5://127.0.0.1:1" if variable == "ALL_PROXY" else DEAD)
    with serve(FakeApi(lambda step: None)) as url:
        port = int(url.rpartition(":")[2])
        assert ask(f"{url}/health", None).status != 0
        VllmClient("127.0.0.1", port, None, 5.0).status()


@pytest.mark.parametrize(
    ("variable", "value", "error"),
    [
        ("HTTPS_PROXY", DEAD, ServerUnreachableError),
        ("ALL_PROXY", "socks5://127.0.0.1:1", PermanentServerError),
    ],
)
async def test_an_error_through_a_proxy_names_the_variable(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, error: type[Exception]
) -> None:
    monkeypatch.setenv(variable, value)
    server = OpenAIServer(APIServerConfig(server_type="openai", base_url="https://models.example/v1", model_name="m"))
    with pytest.raises(error, match=rf"models.example.*through the proxy of {variable}: correct it"):
        await server.request_chat({"messages": [{"role": "user", "content": "?"}]})
    await server.close()


def test_what_is_of_this_machine() -> None:
    for url in ("http://localhost:1/v1", "http://127.0.0.9", "http://[::1]:9001/v1", "http://api.localhost./"):
        assert is_loopback_url(url)
    for url in ("http://gpu01:9001", "https://127.0.0.1.example", "http://10.0.0.1", "nothing"):
        assert not is_loopback_url(url)


def test_the_variable_of_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    assert through_proxy("https://models.example") == ""
    monkeypatch.setenv("ALL_PROXY", "socks5://user:secret@proxy:1")
    assert proxy_variable("https://models.example") == "ALL_PROXY"
    assert "secret" not in through_proxy("https://models.example")
    monkeypatch.setenv("https_proxy", DEAD)
    assert proxy_variable("https://models.example/v1") == "https_proxy"
    monkeypatch.setenv("NO_PROXY", ".example")
    assert proxy_variable("https://models.example/v1") is None
    assert proxy_variable("http://127.0.0.1:9001") is None


def test_children_get_no_proxy_for_this_machine() -> None:
    assert without_loopback_proxies({"A": "1"}) == {"A": "1"}
    found = without_loopback_proxies({"HTTP_PROXY": DEAD, "no_proxy": "a.b"})
    assert found["NO_PROXY"] == found["no_proxy"] == "a.b,localhost,127.0.0.1,::1"


def test_a_line_of_a_library_is_not_called_the_authors() -> None:
    def of_library() -> Exception:
        try:
            json.loads("{")
        except ValueError as error:
            error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next  # without this test's own line
            return error
        raise AssertionError

    with pytest.raises(TooManyFailures) as raised:
        ErrorBudget(0).note_failure(of_library(), "1")
    assert NOT_THEIRS in str(raised.value)
    assert CORRECT not in str(raised.value)
    assert "own code" not in str(raised.value)


def test_a_line_of_the_authors_is_named_to_be_corrected() -> None:
    def own() -> Exception:
        try:
            raise ZeroDivisionError
        except ZeroDivisionError as error:
            return error

    with pytest.raises(TooManyFailures, match=rf"environment's own code .*test_addresses.py.* {CORRECT}"):
        ErrorBudget(0).note_failure(own(), "1")


async def test_servers_of_ipv6_hosts_listen_and_write_their_address_in_brackets() -> None:
    async with FakeInferenceServer(lambda prompt: "yes", host="::1") as fake:
        assert fake.base_url == f"http://[::1]:{fake.port}/v1"
        server = OpenAIServer(APIServerConfig(server_type="openai", base_url=fake.base_url, model_name="fake"))
        assert await server.probe() is None
        await server.close()
    with run_api.listen("::1", 0)[0] as api, view.listen("::1", 0, exact=True) as window:
        assert api.family == window.family == socket.AF_INET6
    assert view.address("::1", 9200) == "http://[::1]:9200/"
    with socket.socket(socket.AF_INET6) as taken:
        taken.bind(("::1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(run_api.AddressError, match=rf"cannot listen on \[::1\]:{port}: "):
            run_api.listen("::1", port)
        with pytest.raises(vllm_api_server.LaunchError, match=rf"--port {port} on ::1: .*in use"):
            vllm_api_server._check_port("::1", port)
    vllm_api_server._check_port("::1", 0)


def test_the_trainer_names_servers_of_ipv6_hosts() -> None:
    assert VllmClient("::1", 9001, None, 5.0).url == "http://[::1]:9001"
    config = {"model_name": "m", "vllm_host": "::1", "vllm_port": "9001"}
    assert TrainerConfig.model_validate(config).vllm_servers == [("::1", 9001)]
    several = TrainerConfig.model_validate(config | {"vllm_host": "[fd00::7]:9005,fd00::8,gpu01:9002"}).vllm_servers
    assert several == [("fd00::7", 9005), ("fd00::8", 9001), ("gpu01", 9002)]
    assert (netloc("::1", 1), netloc("gpu01", 1), resolved("::1"), resolved("127.0.0.1")) == (
        "[::1]:1",
        "gpu01:1",
        "::1",
        "127.0.0.1",
    )


@pytest.mark.parametrize(
    "listen",
    [
        lambda: listening_socket("127.0.0.1", 0),
        lambda: listening_socket("::1", 0, socket.AF_INET6),
        lambda: run_api.listen("127.0.0.1", 0)[0],
        lambda: agents._listener("127.0.0.1", 0),
        lambda: view.listen("127.0.0.1", 0, exact=True),
    ],
)
def test_a_connection_sends_at_once_what_is_written_to_it(listen: Callable[[], socket.socket]) -> None:
    """A reply whose head and body were written apart took 44 ms, of which its client waited 40 to acknowledge the
    head.
    """
    with listen() as listener, socket.create_connection(listener.getsockname()[:2], timeout=10):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_an_address_that_is_taken_is_told_in_the_systems_words() -> None:
    with (
        listening_socket("127.0.0.1", 0) as taken,
        pytest.raises(OSError, match=r"^\[Errno 98\] Address already in use$"),
    ):
        listening_socket("127.0.0.1", taken.getsockname()[1])
