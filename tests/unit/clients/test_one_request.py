"""One blocking request to a server of the run: no proxy, no redirect, a bounded reply, a name for each failure."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from atroposlib.clients import one_request
from atroposlib.clients.bearer import UnusableToken
from atroposlib.clients.one_request import NoReply, request

HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: "


@contextmanager
def answering(*pieces: bytes, hold: bool = False) -> Iterator[tuple[str, list[bytes]]]:
    """A server that sends `pieces` to the first connection, and keeps it open if it is to `hold`; and what it got."""
    got: list[bytes] = []
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                got.append(connection.recv(65536))
                while got[0].startswith(b"POST") and not got[0].endswith(b"}"):  # the body may come behind the head
                    got[0] += connection.recv(65536)
                for piece in pieces:
                    connection.sendall(piece)
                ended.wait(20 if hold else 0)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/path", got
        ended.set()
        thread.join(20)


def get(url: str, read_s: float = 10) -> one_request.Reply:
    return request("GET", url, connect_s=5, read_s=read_s)


def test_a_request_has_its_body_its_key_and_a_connection_of_its_own() -> None:
    with answering(HEAD + b"2\r\n\r\n{}") as (url, got):
        reply = request("POST", url, connect_s=5, read_s=10, key="k", body={"a": [1, None]})
    assert (reply.status, reply.content) == (200, b"{}")
    head, _, body = got[0].partition(b"\r\n\r\n")
    lines = head.lower().split(b"\r\n")
    assert lines[0] == b"post /path http/1.1"
    assert {b"connection: close", b"authorization: bearer k", b"content-type: application/json"} <= set(lines)
    assert body == b'{"a":[1,null]}'


def test_a_redirect_is_an_answer_and_no_proxy_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    one_request._client.cache_clear()
    with answering(b"HTTP/1.1 302 Found\r\nLocation: http://other/\r\nContent-Length: 0\r\n\r\n") as (url, _):
        reply = get(url)
    assert (reply.status, reply.headers["location"]) == (302, "http://other/")


def test_a_key_that_no_header_carries_is_refused_and_not_shown() -> None:
    with pytest.raises(UnusableToken, match=r"^the key of http://127\.0\.0\.1/: a token has printable ASCII") as raised:
        request("GET", "http://127.0.0.1/", connect_s=1, read_s=1, key="geheimnisvöll")
    assert "geheim" not in str(raised.value)


def unused() -> str:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}/"


@pytest.mark.parametrize("url", [unused, lambda: "http:///x", lambda: "ftp://127.0.0.1/"])
def test_where_nothing_listens_there_is_no_connection(url: Callable[[], str]) -> None:
    with pytest.raises(NoReply, match=r"^ConnectionError$") as raised:
        get(url())
    assert not raised.value.timed_out


@pytest.mark.parametrize("pieces", [(), (b"nonsense\r\n\r\n",), (HEAD + b"5\r\n\r\n{",)])
def test_a_connection_that_breaks_is_no_reply(pieces: tuple[bytes, ...]) -> None:
    with answering(*pieces) as (url, _), pytest.raises(NoReply, match=r"^ConnectionError$") as raised:
        get(url)
    assert not raised.value.timed_out


@pytest.mark.parametrize("pieces", [(), (HEAD + b"5\r\n\r\n{",)])
def test_a_server_that_is_silent_is_known_as_such(pieces: tuple[bytes, ...]) -> None:
    with answering(*pieces, hold=True) as (url, _), pytest.raises(NoReply, match=r"^ReadTimeout$") as raised:
        get(url, read_s=0.2)
    assert raised.value.timed_out


def test_a_reply_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_request, "MOST_BYTES", 100)
    with answering(HEAD + b"101\r\n\r\n" + b"x" * 101) as (url, _), pytest.raises(NoReply, match="more than 100 bytes"):
        get(url)
