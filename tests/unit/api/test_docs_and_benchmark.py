"""What docs/api.md shows and benchmarks/api_throughput.py measures works as printed."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


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
    assert "| posted and fetched |" in ended.stdout and "2 x 8 tokens" in ended.stdout
    assert "| with journal |" in ended.stdout and "| /status-env beside 10 groups |" in ended.stdout
