"""Programs of agents: whose fault it is that one cannot be watched."""

import errno
import os
from pathlib import Path

import pytest

from atroposlib.agents.program import ProgramLimits, Started, run_program

pytestmark = pytest.mark.services


async def test_a_machine_without_free_files_is_not_blamed_on_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def count(self: Started) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(Started, "count", count)
    (folder := tmp_path / "work").mkdir()
    with pytest.raises(OSError, match="Too many open files"):
        await run_program(["sleep", "60"], folder, {}, ProgramLimits(50.0, 1 << 30, 1 << 20, 8), around=[])
