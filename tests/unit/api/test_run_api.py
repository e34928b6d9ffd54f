"""The command that serves the API, as a process."""

import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from atroposlib.cli.run_api import AddressError, listen
from tests.client import http
from tests.serving import free_port
from tests.unit.api.support import DEADLINE_S, command, group, registration, wait_until_healthy

pytestmark = pytest.mark.services


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_on_the_port_that_its_log_names_and_ends_cleanly_on_a_signal(
    process: tuple[subprocess.Popen[str], str], ending: signal.Signals
) -> None:
    served, url = process
    assert url.startswith("http://127.0.0.1:")
    with httpx.Client(trust_env=False) as session:  # an idle connection does not delay the end
        session.post(f"{url}/register", json=registration(4), timeout=5)
        session.post(f"{url}/scored_data", json=group(4), timeout=5)
        assert len(session.get(f"{url}/batch", timeout=5).json()["batch"]) == 1
        served.send_signal(ending)
        _, log = served.communicate(timeout=10)
    assert served.returncode == 0
    assert f"ended by {ending.name}" in log


def test_a_taken_port_is_one_line_and_a_failure() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = subprocess.run(command("--port", str(port)), capture_output=True, text=True, timeout=DEADLINE_S)
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert f"127.0.0.1:{port}" in line
    assert "in use" in line
    assert "--port" in line


@pytest.mark.parametrize(
    ("host", "reason"), [("no.such.host.invalid", "has no address"), ("192.0.2.1", "an address of this machine")]
)
def test_an_address_of_no_use_says_what_to_use_instead(host: str, reason: str) -> None:
    with pytest.raises(AddressError, match=reason):
        listen(host, 0)


def test_a_dry_run_shows_the_loopback_default_and_starts_nothing() -> None:
    ended = subprocess.run(command("--dry-run", "--reload"), capture_output=True, text=True, timeout=DEADLINE_S)
    assert ended.returncode == 0
    assert "host: 127.0.0.1\nport: 8000\nreload: true" in ended.stdout


def test_a_port_that_is_none_is_refused_with_its_limit() -> None:
    ended = subprocess.run(command("--port", "70000"), capture_output=True, text=True, timeout=DEADLINE_S)
    assert ended.returncode == 2
    assert "65535" in ended.stderr
    assert "70000" in ended.stderr


# --- journal --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def served(folder: Path, port: int, *more: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = subprocess.Popen(command("--port", str(port), *more), cwd=folder, stderr=subprocess.PIPE, text=True)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_healthy(url, process)
        yield process, url
    finally:
        process.kill()
        process.communicate()


def test_a_killed_api_goes_on_where_it_was_from_the_journal_in_its_folder(tmp_path: Path) -> None:
    port = free_port()
    with served(tmp_path, port) as (process, url):
        http.post(f"{url}/register", json=registration(4), timeout=5)
        http.post(f"{url}/scored_data", json=group(4, 7), timeout=5)
        process.kill()
        process.wait()
    assert (tmp_path / f"atropos-api-{port}.db").exists()
    with served(tmp_path, port) as (_, url):
        assert http.get(f"{url}/batch", timeout=5).json()["batch"][0]["tokens"][0][0] == 7


def test_in_memory_and_a_random_port_leave_no_file(tmp_path: Path) -> None:
    with served(tmp_path, free_port(), "--in-memory"):
        assert list(tmp_path.iterdir()) == []


def test_a_journal_in_use_is_one_line_and_a_failure(tmp_path: Path) -> None:
    """A second API waits for one that is just ending; here not for the usual five seconds."""
    hasty = "from atroposlib.api.journal import journal_file; journal_file.LOCK_TIMEOUT_S = 0.05; "
    main = "import sys; from atroposlib.cli import run_api; run_api.main(sys.argv[1:])"
    with served(tmp_path, free_port(), "--journal", "groups.db"):
        second = [sys.executable, "-c", hasty + main, "--port", str(free_port()), "--journal", "groups.db"]
        ended = subprocess.run(second, capture_output=True, text=True, timeout=DEADLINE_S, cwd=tmp_path)
    assert ended.returncode == 1
    assert "groups.db is in use by another process" in ended.stderr.splitlines()[-1]


def test_a_request_that_never_completes_does_not_delay_the_end(process: tuple[subprocess.Popen[str], str]) -> None:
    served_process, url = process
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=10) as half:
        half.sendall(b"POST /scored_data HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\n{")
        assert http.get(f"{url}/health", timeout=10).is_success  # sent later, so the half request is being read
        served_process.send_signal(signal.SIGTERM)
        served_process.communicate(timeout=15)
    assert served_process.returncode == 0


def test_a_request_that_waits_for_a_batch_does_not_delay_the_end(process: tuple[subprocess.Popen[str], str]) -> None:
    served_process, url = process
    trainer = http.post(f"{url}/register", json=registration(4), timeout=10).json()["uuid"]
    body = json.dumps({"trainer": trainer, "wait_s": 30}).encode()
    head = f"POST /batch/lease HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=10) as waiting:
        waiting.sendall(head + body)
        assert http.get(f"{url}/health", timeout=10).is_success  # sent later, so the request waits
        start = time.monotonic()
        served_process.send_signal(signal.SIGTERM)
        _, log = served_process.communicate(timeout=15)
        assert time.monotonic() - start < 4
        assert waiting.recv(10_000).endswith(b'{"batch":null,"lease":null}')
    assert served_process.returncode == 0
    assert "timeout" not in log


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--in-memory", "--journal", "x.db"], "cannot be combined"),
        (["--reload", "--journal", "x.db"], "serves in memory"),
        (["--reload", "--json-logs", "--max-staleness", "3", "--vocab-size", "10"], "--max-staleness, --vocab-size"),
        (["--host", "0.0.0.0"], "--allow-unauthenticated"),
        (["--api-token", "short"], "8"),
        (["--stale-groups", "keep"], "down-weight"),
    ],
)
def test_flags_that_do_not_go_together_are_one_line(flags: list[str], said: str) -> None:
    ended = subprocess.run(command(*flags), capture_output=True, text=True, timeout=DEADLINE_S)
    assert ended.returncode == 2
    assert said in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
