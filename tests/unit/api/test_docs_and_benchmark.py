"""What docs/api.md, docs/operate.md and docs/security.md show and benchmarks/api_throughput.py measures works as
printed, but for the port.
"""

import importlib.metadata
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.client import http
from tests.serving import free_port
from tests.unit.api.support import DEADLINE_S, wait_until_healthy

pytestmark = pytest.mark.services

ROOT = Path(__file__).parents[3]


@pytest.fixture
def port() -> int:
    """One that was free a moment ago."""
    return free_port()


def bash_of(page: str, port: int) -> str:
    """The commands of a page, with another port than 8000."""
    (block,) = [part.split("```")[0] for part in (ROOT / "docs" / page).read_text().split("```bash\n")[1:]]
    return block.replace(":8000", f":{port}").replace("atroposlib.cli.run_api", f"atroposlib.cli.run_api --port {port}")


@contextmanager
def bash(commands: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """The commands as a shell runs them where `python` is this one; what they start ends with them."""
    surroundings = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    shell = subprocess.Popen(["bash", "-ec", commands], cwd=folder, env=surroundings, start_new_session=True, **pipes)
    try:
        yield shell
    finally:
        with suppress(ProcessLookupError):  # nothing of it is left
            os.killpg(shell.pid, signal.SIGKILL)
        shell.communicate()


def test_the_command_of_the_documentation_serves_with_a_journal_where_it_says(tmp_path: Path, port: int) -> None:
    with bash(bash_of("api.md", port), tmp_path) as shell:
        wait_until_healthy(f"http://127.0.0.1:{port}", shell)
        assert (tmp_path / f"atropos-api-{port}.db").exists()
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="run-api")
    assert script.value == "atroposlib.cli.run_api:main"


def test_the_commands_of_the_security_page_let_in_who_has_the_token(tmp_path: Path, port: int) -> None:
    commands = bash_of("security.md", port)
    assert "/status" in commands.splitlines()[-1]
    with bash(commands, tmp_path) as shell:
        shell.wait(timeout=DEADLINE_S + 30)
        assert shell.returncode == 0
        assert shell.stdout is not None
        assert json.loads(os.read(shell.stdout.fileno(), 4096)) == {"current_step": 0, "queue_size": 0}
        assert http.get(f"http://127.0.0.1:{port}/status", timeout=5).status_code == 401
    assert stat.S_IMODE((tmp_path / "api.token").stat().st_mode) == 0o600


def test_the_operators_commands_start_an_api_with_two_tokens(tmp_path: Path, port: int) -> None:
    page = (ROOT / "docs/operate.md").read_text()
    start, tokens = [part.split("```")[0] for part in page.split("```bash\n")[1:]]
    assert start.split("#")[0].split() == ["python", "-m", "atroposlib.cli.run_api"]
    with bash(tokens.replace("atroposlib.cli.run_api", f"atroposlib.cli.run_api --port {port}"), tmp_path) as shell:
        wait_until_healthy(f"http://127.0.0.1:{port}", shell)
        statuses = {}
        for name in ("api", "post"):
            token = (tmp_path / f"{name}.token").read_text().strip()
            for route in ("status", "activity"):
                headers = {"Authorization": f"Bearer {token}"}
                reply = http.get(f"http://127.0.0.1:{port}/{route}", headers=headers, timeout=5)
                statuses[name, route] = reply.status_code
    assert statuses == {
        ("api", "status"): 200,
        ("api", "activity"): 200,
        ("post", "status"): 200,
        ("post", "activity"): 403,
    }


def test_the_operators_page_names_every_flag_and_every_metric() -> None:
    from atroposlib.api.http.metrics import Metrics
    from atroposlib.api.service import RolloutService
    from atroposlib.api.settings import RunApiConfig

    page = (ROOT / "docs/operate.md").read_text()
    flags = {f"--{name.replace('_', '-')}" for name in RunApiConfig.model_fields}
    assert [flag for flag in sorted(flags) if flag not in page] == []
    text = Metrics(RolloutService(RunApiConfig())).text().decode()
    names = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")} - {
        "atropos_post_seconds_created"
    }
    assert [name for name in sorted(names) if f"`{name}" not in page] == []


def test_the_exchange_in_the_documentation_runs(process: tuple[subprocess.Popen[str], str]) -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    example = page.split("```python\n")[1].split("```")[0]
    assert "http://127.0.0.1:8000" in example
    exec(compile(example.replace("http://127.0.0.1:8000", process[1]), "docs/api.md", "exec"), {})


def test_the_documentation_names_every_route() -> None:
    from atroposlib.api import app

    page = (ROOT / "docs" / "api.md").read_text()
    undocumented = [path for path in app.openapi()["paths"] if f"`{path}`" not in page and f"`{path}?" not in page]
    assert undocumented == []


def test_the_benchmark_prints_its_table() -> None:
    small = ["--groups", "8", "--sequences", "2", "--tokens", "8", "--groups-per-batch", "4", "--repeats", "1"]
    small += ["--status-groups", "10", "--writers", "2", "--writer-posts", "1", "--writer-pace", "0.1"]
    command = [sys.executable, "benchmarks/api_throughput.py", *small, "--peer-python", sys.executable]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr
    assert "| posted and fetched |" in ended.stdout
    assert "2 x 8 tokens" in ended.stdout
    assert "| with journal |" in ended.stdout
    assert "| /status-env beside 10 groups |" in ended.stdout
