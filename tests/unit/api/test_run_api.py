"""The command that serves the API, as a process."""

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import requests

from atroposlib.cli.run_api import AddressError, listen
from tests.unit.api.support import group, registration

DEADLINE_S = 30.0


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "atroposlib.cli.run_api", *arguments]


def wait_until_healthy(url: str, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        assert process.poll() is None, process.communicate()
        try:
            requests.get(f"{url}/health", timeout=1)
            return
        except requests.ConnectionError:
            time.sleep(0.05)
    raise TimeoutError(url)


@pytest.fixture
def process() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A served API on a free port, and its URL from the first line of its log."""
    served = subprocess.Popen(command("--port", "0"), stderr=subprocess.PIPE, text=True)
    assert served.stderr is not None
    line = served.stderr.readline()
    url = line.split("listens on ")[1].strip()
    try:
        wait_until_healthy(url, served)
        yield served, url
    finally:
        served.kill()
        served.communicate()


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_on_the_port_that_its_log_names_and_ends_cleanly_on_a_signal(
    process: tuple[subprocess.Popen[str], str], ending: signal.Signals
) -> None:
    served, url = process
    assert url.startswith("http://127.0.0.1:")
    with requests.Session() as session:  # an idle connection does not delay the end
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
    assert f"127.0.0.1:{port}" in line and "in use" in line and "--port" in line


@pytest.mark.parametrize(("host", "reason"), [("no.such.host.invalid", "has no address"), ("192.0.2.1", "an address of this machine")])
def test_an_address_of_no_use_says_what_to_use_instead(host: str, reason: str) -> None:
    with pytest.raises(AddressError, match=reason):
        listen(host, 0)


def test_a_dry_run_shows_the_loopback_default_and_starts_nothing() -> None:
    ended = subprocess.run(command("--dry-run", "--reload"), capture_output=True, text=True, timeout=DEADLINE_S)
    assert ended.returncode == 0
    assert "host: 127.0.0.1\nport: 8000\nreload: true" in ended.stdout


def test_a_port_that_is_none_is_refused_with_its_limit() -> None:
    ended = subprocess.run(command("--port", "70000"), capture_output=True, text=True, timeout=DEADLINE_S)
    assert ended.returncode == 2 and "65535" in ended.stderr and "70000" in ended.stderr
