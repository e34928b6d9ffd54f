"""The command that serves the API, as a process."""

import signal
import socket
import subprocess

import pytest
import requests

from atroposlib.cli.run_api import AddressError, listen
from tests.unit.api.support import DEADLINE_S, command, group, registration


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
