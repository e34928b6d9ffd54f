"""`atropos view`, and the window that a launcher serves beside its run."""

import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from atropos_launcher.commands.existing_runs import view
from atropos_launcher.placement.ports import Ports
from atropos_launcher.runs import NoSuchRun
from atroposlib.view.flags import PORT
from atroposlib.view.serve import CannotServe, address, listen, page_of
from tests.client import http
from tests.unit.launcher.plans import plan

IDLE_S = 1.0


@contextmanager
def served(*words: str, within: Sequence[str] = ()) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`atropos view` as a process, and the address that it prints."""
    command = [*within, sys.executable, "-m", "atropos_launcher", "view", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"http://\S+", line)
        assert found, line
        yield process, found[0]
    finally:
        process.kill()
        process.communicate()


@pytest.mark.services
def test_it_serves_a_run_at_the_address_that_it_prints_and_idles(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "other").mkdir()
    with served("mine", "--runs", str(tmp_path), "--port", "0") as (process, url):
        assert url.endswith("/#/run/mine")
        base = url.partition("#")[0]
        found = http.get(f"{base}api/runs", timeout=20).json()["runs"]
        assert [run["path"] for run in found] == [str(tmp_path / "mine")]
        assert "<!doctype html>" in http.get(base, timeout=20).text.lower()
        before = psutil.Process(process.pid).cpu_times()
        time.sleep(IDLE_S)
        after = psutil.Process(process.pid).cpu_times()
        assert after.user + after.system - before.user - before.system < 0.05 * IDLE_S
        process.send_signal(signal.SIGINT)
        process.wait(20)


@pytest.mark.services
def test_idle_connections_keep_nobody_out(tmp_path: Path) -> None:
    few_files = ["sh", "-c", 'ulimit -n 128 && exec "$@"', "sh"]
    with served("--runs", str(tmp_path), "--port", "0", within=few_files) as (_, url), ExitStack() as stack:
        port = int(url.split(":")[2].partition("/")[0])
        for _ in range(200):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
        assert http.get(f"http://127.0.0.1:{port}/api/runs", timeout=20).json()["runs"] == []


@pytest.mark.services
def test_help_loads_no_server() -> None:
    program = (
        "import sys; from atropos_launcher.commands.existing_runs import view\n"
        "try: view.main(['--help'])\n"
        "except SystemExit: print([name for name in ('uvicorn', 'numpy', 'starlette', 'yaml') if name in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "--open" in shown
    assert shown.splitlines()[-1] == "[]"


def test_a_run_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(NoSuchRun, match="nobody"):
        view.main(["nobody", "--runs", str(tmp_path)])
    with pytest.raises(NoSuchRun, match="there is no directory"):
        view.main(["--runs", str(tmp_path / "nowhere")])


def test_a_port_that_is_taken_leads_to_the_next_one_unless_it_was_asked_for() -> None:
    with listen("127.0.0.1", 0, exact=False) as first:
        port = first.getsockname()[1]
        with listen("127.0.0.1", port, exact=False) as second:
            assert second.getsockname()[1] > port
        with pytest.raises(CannotServe, match=f"127.0.0.1:{port}: Address already in use; choose another"):
            listen("127.0.0.1", port, exact=True)


def test_addresses_are_what_a_browser_takes() -> None:
    assert address("0.0.0.0", 8400) == "http://127.0.0.1:8400/"
    assert address("::1", 1) == "http://[::1]:1/"
    assert page_of(["a b/c"]) == "#/run/a%20b%2Fc"
    assert page_of(["a", "b&c"]) == "#/compare?run=a&run=b%26c"
    assert page_of([]) == ""


@pytest.mark.parametrize("words", [["--port", "x"], ["--port", "65536"], ["--port", "-1"], ["--prot", "1"]])
def test_a_wrong_flag_is_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        view.main(words)
    assert ended.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.services
def test_a_launcher_serves_it_beside_its_run_as_a_service_that_nothing_depends_on() -> None:
    site = plan("arithmetic").site
    with Ports() as ports:
        window = view.beside(site, ports)
    assert window.optional
    assert not window.may_end
    assert str(site.run_dir) in window.command
    assert "--beside" in window.command
    port = int(window.command[window.command.index("--port") + 1])
    assert port >= PORT
    assert window.health == f"http://127.0.0.1:{port}/health"
    assert view.page(window, Path("runs/a b")) == f"http://127.0.0.1:{port}/#/run/a%20b"
