"""benchmarks/view_large_run.py runs, and what it measures is far below the limits."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.services
def test_the_benchmark_measures_a_small_run(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/view_large_run.py", "--gb", "0.02", "--folder", str(tmp_path)]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True).stdout
    found = dict(re.findall(r"^(.+?) {2,}(\S.*)$", shown, re.MULTILINE))
    assert {"page", "group", "index", "search", "memory"} <= set(found)
    assert float(found["memory"].removesuffix(" MB")) < 300
    assert list(tmp_path.iterdir()) == []
