"""Whom a server answers, decided by the headers that no web page can choose."""

import http.client
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route, WebSocketRoute
from starlette.testclient import TestClient
from starlette.types import Scope
from starlette.websockets import WebSocket, WebSocketDisconnect

from atroposlib.http_guard import HostGuard, OwnHosts, is_from_browser, plain_name, split_host
from tests.serving import threaded_app

LOOPBACK = OwnHosts.of("127.0.0.1", ["trainer.example"])


def bears_token(scope: Scope) -> bool:
    return (b"authorization", b"Bearer secret") in scope["headers"]


async def status_of(
    *headers: tuple[str, str], hosts: OwnHosts = LOOPBACK, server: Any = ("127.0.0.1", 8000), method: str = "GET"
) -> tuple[int, str]:
    """Status and reason of the reply to a request with exactly these headers, on a connection to `server`."""
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        sent.append({"status": 200})

    async def receive() -> Any:
        return {"type": "http.request"}

    async def send(message: Any) -> None:
        sent.append(message)

    raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers]
    scope = {"type": "http", "method": method, "path": "/", "headers": raw, "server": server}
    await HostGuard(app, hosts, bears_token)(scope, receive, send)
    return sent[0]["status"], json.loads(sent[1]["body"])["detail"] if len(sent) > 1 else ""


OWN = """127.0.0.1 127.0.0.1:8000 LocalHost:9 localhost. localhost.:8000 [::1] [::1]:8000 127.0.0.1: 127.0.0.1.:80
    [0:0:0:0:0:0:0:1] [::ffff:127.0.0.1]:8000 TRAINER.example:1 trainer.example.""".split()


@pytest.mark.parametrize("host", OWN)
async def test_own_names_are_answered_with_any_port_and_spelling(host: str) -> None:
    assert await status_of(("Host", host)) == (200, "")


FOREIGN = """evil.test evil.test:8000 127.0.0.1.evil.test localhost.evil.test a.localhost evil-127.0.0.1 1.evil.test
    trainer.example.evil 0.0.0.0:8000 0 127.1 2130706433 0x7f000001 0177.0.0.1 127.0.0.01 127.0.0.2 10.0.0.1 [::] [::2]
    [::127.0.0.1] [fe80::1] xn--localhost-0.test""".split()


@pytest.mark.parametrize("host", FOREIGN)
async def test_names_and_addresses_of_others_are_refused_with_the_remedy(host: str) -> None:
    status, reason = await status_of(("Host", host))
    assert status == 403
    assert host in reason
    assert "127.0.0.1, ::1, localhost, trainer.example" in reason
    assert "--allowed-host" in reason


MALFORMED = """. .. :8000 localhost:x localhost:99999 localhost:-1 localhost:8000:8000 user@localhost localhost@evil
    localhost/ localhost,evil.test http://localhost [::1 ::1 [::1]x [] [1] [::g] localhöst localhost.. [::1%lo]
    [fe80::1%25lo] * localhost# localhost? [127.0.0.1] 127.0.0.1\\""".split()
MALFORMED += ["", " ", "localhost evil.test", "local\thost", "localhost\x00", "localhost\x85"]
MALFORMED += ["a" * 64, ".".join(["a" * 60] * 5), "x" * 100_000, "a." * 50_000, "[" + ":" * 50_000]


@pytest.mark.parametrize("host", MALFORMED, ids=lambda host: ascii(host[:20]))
async def test_a_malformed_host_is_refused_shortened_and_in_ascii(host: str) -> None:
    start = time.process_time()
    status, reason = await status_of(("Host", host))
    assert status == 400
    assert reason.isascii()
    assert reason.isprintable()
    assert len(reason) < 500
    assert time.process_time() - start < 0.5


async def test_one_host_header_is_wanted() -> None:
    assert (await status_of())[0] == 400
    assert (await status_of(("Host", "localhost"), ("Host", "localhost")))[0] == 400
    assert (await status_of(("Host", "localhost"), ("Host", "evil.test"), ("Authorization", "Bearer secret")))[0] == 400


@pytest.mark.parametrize("server", [("10.1.2.3", 8000), ("::ffff:10.1.2.3", 8000)])
async def test_the_address_of_the_connection_itself_is_own(server: Any) -> None:
    assert (await status_of(("Host", "10.1.2.3:9000"), server=server))[0] == 200
    assert (await status_of(("Host", "10.1.2.4:9000"), server=server))[0] == 403
    assert (await status_of(("Host", "evil.test"), server=server))[0] == 403


@pytest.mark.parametrize("server", [None, ("/run/api.sock", None), ("fe80::1%eth0", 8000)])
async def test_a_connection_without_an_address_has_the_servers_names_only(server: Any) -> None:
    assert (await status_of(("Host", "localhost"), server=server))[0] == 200
    assert (await status_of(("Host", "evil.test"), server=server))[0] == 403


async def test_beyond_loopback_the_machines_own_names_and_addresses_are_answered() -> None:
    beyond = OwnHosts.of("0.0.0.0")
    (address,) = {info[4][0] for info in socket.getaddrinfo("localhost", None, socket.AF_INET)}
    for own in (socket.gethostname(), socket.gethostname().upper(), str(address), "127.0.0.77", "0.0.0.0"):
        assert (await status_of(("Host", own), hosts=beyond, server=("10.9.9.9", 1)))[0] == 200, own
    for foreign in ("evil.test", "192.0.2.1", "255.255.255.evil", "224.0.0.1", "[ff02::1]", "[2001:db8::1]", "[::]"):
        assert (await status_of(("Host", foreign), hosts=beyond, server=("10.9.9.9", 1)))[0] == 403, foreign
    assert (await status_of(("Host", socket.gethostname())))[0] == 403  # a loopback service has no such name


@pytest.mark.parametrize("host", ["some.name", "SOME.name", "10.3.2.1", "fe80::1%eth0", "::", "", "127.0.0.9"])
async def test_the_host_that_a_server_listens_on_is_its_own(host: str) -> None:
    plain = host.partition("%")[0]
    if plain:
        header = f"[{plain}]:1" if ":" in plain else f"{plain}:1"
        assert (await status_of(("Host", header), hosts=OwnHosts.of(host), server=None))[0] == 200
    assert (await status_of(("Host", "evil.test"), hosts=OwnHosts.of(host), server=None))[0] == 403


OWN_HOST = ("Host", "127.0.0.1:8000")
FOREIGN_ORIGINS = """http://evil.test http://evil.test:8000 null http:// http://[::1 http://[ //127.0.0.1:8000
    http://127.0.0.1 http://127.0.0.1:8001 http://localhost:8000 https://127.0.0.1 127.0.0.1:8000 http://a:b:c
    file://127.0.0.1:8000 http://x@127.0.0.1:8000 http://127.0.0.1:8000/ http://127.0.0.1:99999999 http://[v1.x]:8000
    chrome-extension://abc""".split()
FOREIGN_ORIGINS += ["", "http://\xff\x00", "http://127.0.0.1:8000 http://evil.test"]
FOREIGN_ORIGINS += ["http://127.0.0.1:٨٠٠٠".encode().decode("latin-1")]  # digits that int() reads


@pytest.mark.parametrize("origin", FOREIGN_ORIGINS, ids=ascii)
async def test_a_page_of_another_origin_is_refused_whatever_it_calls_itself(origin: str) -> None:
    assert (await status_of(OWN_HOST, ("Origin", origin)))[0] == 403
    assert (await status_of(OWN_HOST, ("Origin", origin), ("Authorization", "Bearer secret")))[0] == 403
    assert (await status_of(OWN_HOST, ("Origin", "http://127.0.0.1:8000"), ("Origin", origin)))[0] == 403


async def test_its_own_page_may_use_a_server() -> None:
    for origin in ("http://127.0.0.1:8000", "https://127.0.0.1:8000"):
        own = (OWN_HOST, ("Origin", origin), ("Sec-Fetch-Site", "same-origin"))
        assert (await status_of(*own, method="POST"))[0] == 200
    assert (await status_of(("Host", "localhost"), ("Origin", "http://localhost:80")))[0] == 200
    assert (await status_of(("Host", "localhost:443"), ("Origin", "https://localhost")))[0] == 200
    assert (await status_of(("Host", "[::1]:8000"), ("Origin", "http://[::1]:8000")))[0] == 200

    rebound = ("Host", "evil.test:8000"), ("Origin", "http://evil.test:8000")
    assert (await status_of(*rebound))[0] == 403


@pytest.mark.parametrize("site", ["cross-site", "same-site", "", "NONE", "none, cross-site", "x"])
async def test_what_a_browser_sends_for_another_site_is_refused(site: str) -> None:
    assert (await status_of(OWN_HOST, ("Sec-Fetch-Site", site)))[0] == 403
    assert (await status_of(OWN_HOST, ("Sec-Fetch-Site", "none"), ("Sec-Fetch-Site", site)))[0] == 403


async def test_a_navigation_may_only_get() -> None:
    navigation = (OWN_HOST, ("Sec-Fetch-Site", "none"), ("Sec-Fetch-Mode", "navigate"))
    for method, status in {"GET": 200, "HEAD": 200, "POST": 403, "DELETE": 403}.items():
        assert (await status_of(*navigation, method=method))[0] == status


async def test_a_request_with_the_token_that_no_page_made_is_answered_under_any_host() -> None:
    token = ("Authorization", "Bearer secret")
    for host in ("trainer.cluster.local:8000", "203.0.113.7", "b@d host"):
        assert (await status_of(("Host", host), token))[0] == 200
    assert (await status_of(token))[0] == 200  # HTTP/1.0
    for page in (("Origin", "http://trainer.cluster.local"), ("Sec-Fetch-Site", "none"), ("Sec-Fetch-Dest", "image")):
        assert (await status_of(("Host", "trainer.cluster.local"), token, page))[0] == 403
    assert (await status_of(("Host", "evil.test"), ("Authorization", "Bearer wrong")))[0] == 403


def test_browsers_are_told_by_what_they_send() -> None:
    for header in ((b"origin", b"x"), (b"sec-fetch-dest", b"image"), (b"user-agent", b"Mozilla/5.0 (iPhone)")):
        assert is_from_browser([header])
    assert not is_from_browser([(b"user-agent", b"python-requests/2.32"), (b"accept", b"text/html")])


@pytest.mark.parametrize(
    ("text", "plain"),
    [("A.Example.", "a.example"), ("::1", "::1"), ("[FE80::1]", "fe80::1"), ("::ffff:10.0.0.1", "10.0.0.1")],
)
def test_a_name_to_allow_is_kept_as_hosts_are_compared(text: str, plain: str) -> None:
    assert plain_name(text) == plain


@pytest.mark.parametrize(
    "text", ["", "*", "*.example", "name:80", "[::1]:80", "http://name", "a b", "\u212a.example", "a,b", "fe80::1%eth0"]
)
def test_a_name_that_could_not_be_a_host_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a host name"):
        plain_name(text)


def test_a_host_is_split_into_name_and_port() -> None:
    assert split_host("A:1") == ("a", 1)
    assert split_host("a:") == ("a", None)
    assert split_host("[::0:1]:65535") == ("::1", 65535)
    assert [split_host(f"a:{port}") for port in (65535, 65536, 99999)] == [("a", 65535), None, None]


# --- served ---------------------------------------------------------------------------------------------------------


async def _hello(request: Any) -> PlainTextResponse:
    return PlainTextResponse("hello")


async def _socket(websocket: WebSocket) -> None:
    await websocket.accept()
    await websocket.send_text("hello")
    await websocket.close()


def _app() -> Starlette:
    app = Starlette(routes=[Route("/", _hello), WebSocketRoute("/ws", _socket)])
    app.add_middleware(HostGuard, hosts=OwnHosts())
    return app


def test_a_websocket_is_guarded_too() -> None:
    client = TestClient(_app(), base_url="http://127.0.0.1:8000")
    with client.websocket_connect("/ws") as opened:
        assert opened.receive_text() == "hello"
    for headers in ({"Host": "evil.test"}, {"Origin": "http://evil.test"}, {"Origin": "null"}, {"Host": "["}):
        with pytest.raises(WebSocketDisconnect) as refused, client.websocket_connect("/ws", headers=headers):
            pass
        assert refused.value.code == 1008  # "policy violation"


@pytest.fixture
def port() -> Iterator[int]:
    with threaded_app(_app(), lifespan="off") as found:
        yield found


@pytest.mark.parametrize(
    ("request_line", "headers", "status"),
    [
        ("GET / HTTP/1.1", "Host: 127.0.0.1", 200),
        ("GET / HTTP/1.1", "HOST: LOCALHOST:7", 200),
        ("GET / HTTP/1.1", "Host: evil.test", 403),
        ("GET / HTTP/1.1", "Host: 127.0.0.1\r\nHost: evil.test", 400),
        ("GET / HTTP/1.1", "Accept: */*", 400),
        ("GET / HTTP/1.0", "Accept: */*", 400),
        ("GET / HTTP/1.1", "Host:", 400),
        ("GET http://127.0.0.1/ HTTP/1.1", "Host: evil.test", 403),  # a proxy's form of the target: the header decides
        ("OPTIONS / HTTP/1.1", "Host: evil.test\r\nOrigin: http://evil.test", 403),
        ("GET / HTTP/1.1", "Host: 127.0.0.1\r\nOrigin: http://[::1", 403),
    ],
)
def test_raw_requests_are_decided_as_they_come(port: int, request_line: str, headers: str, status: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(f"{request_line}\r\n{headers}\r\nConnection: close\r\n\r\n".encode())
        reply = http.client.HTTPResponse(connection)
        reply.begin()
        assert reply.status == status
