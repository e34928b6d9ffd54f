"""The trainer's HTTP client of vLLM: what a server may do to an idle connection does not reach the caller."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from example_trainer.bridges.vllm_client import VllmClient


class DropsKeptConnections(BaseHTTPRequestHandler):
    """Answers the first request of a connection, keeps the connection, and closes it when the next one arrives."""

    protocol_version = "HTTP/1.1"
    answered = False

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.answered:
            self.close_connection = True
            return
        self.answered = True
        self.close_connection = False  # whatever the request asked for
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), DropsKeptConnections)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join(5)


def test_a_connection_that_the_server_closes_between_two_calls_fails_neither(server: ThreadingHTTPServer) -> None:
    client = VllmClient("127.0.0.1", server.server_port, None, timeout_s=5)
    for _ in range(3):
        client.heartbeat("session")
