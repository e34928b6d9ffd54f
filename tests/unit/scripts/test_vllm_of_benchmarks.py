"""benchmarks/shared/vllm_server.py: the server that a benchmark starts for itself."""

from pathlib import Path

import pytest

from benchmarks.shared import vllm_server as own

pytestmark = pytest.mark.services


def test_a_server_that_ends_while_it_starts_shows_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "server.py"
    script.write_text('raise SystemExit("no such model")')
    monkeypatch.setattr(own, "SERVER", script)
    with pytest.raises(RuntimeError, match="no such model"), own.vllm_server("m", own.free_port(), []):
        pytest.fail("nothing serves")
