"""A file of JSON lines, each of them about one training step: metrics.jsonl and trained.jsonl.

A fresh run moves an earlier run's file aside. A resumed run drops the lines of the steps that it does again. A disk
without room ends no run for their sake (atroposlib/row_files/record_file.py).
"""

import os
from collections.abc import Mapping
from pathlib import Path

from atroposlib.errors import reading
from atroposlib.files import dated, expect_regular, open_regular
from atroposlib.logs import get_logger
from atroposlib.row_files.kept_rows import Keep, Parts, step_of
from atroposlib.row_files.record_file import RecordFile
from example_trainer.errors import TrainerError

log = get_logger(__name__)


class StepFile:
    """The file at `path`, which `flag` names, from `first_step` on. `what` its lines hold, for errors. Raises
    TrainerError if something else is in it. Of it and its earlier parts, `keep` says how much stays.
    """

    def __init__(self, path: Path, first_step: int, what: str, flag: str, keep: Keep = Keep()) -> None:  # noqa: B008
        self._what, self._flag = what, flag
        path.parent.mkdir(parents=True, exist_ok=True)
        parts = Parts(path, keep)
        if expect_regular(path).exists() and first_step == 1:
            earlier = path.rename(dated(path))
            parts.set_aside(earlier.stem)
            log.info("Moved the %s of an earlier run to %s", what, earlier)
        elif path.exists():
            self._cut(path, first_step)
        if first_step > 1:
            with reading(
                f"cannot drop the rows of step {first_step} and later from the parts of {path}",
                TrainerError,
                remedy=f"free space, or move {path.stem}_s* away",
            ):
                parts.cut(first_step)
        open_regular(path, "ab").close()
        self._file = RecordFile(path, None if keep.is_all else parts)

    def append(self, step: int, *records: Mapping[str, object]) -> None:
        """A line for each record, all or none. While the disk takes no more, they wait in memory (record_file.py)."""
        self._file.append(*records, step=step)

    def close(self) -> None:
        """Write what waits."""
        self._file.close()

    def _cut(self, path: Path, first_step: int) -> None:
        """Drop everything from the first line of `first_step` on, and a last line that was cut. The file may be larger
        than memory.
        """
        kept, is_open = 0, True
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.endswith((b"\n", b"}")):
                    break  # the last one, half written
                with reading(
                    f"{path}:{number} is not a row of {self._what} (an object with a step)",
                    TrainerError,
                    remedy=f"move the file away, or give another {self._flag}",
                ):
                    is_open = is_open and (not line.strip() or step_of(line) < first_step)
                kept += len(line) if is_open else 0
            lines.seek(max(0, kept - 1))
            needs_end = kept > 0 and lines.read(1) != b"\n"
        with open_regular(path, "r+b") as file:
            file.truncate(kept)
            if needs_end:
                file.seek(kept)
                file.write(b"\n")
            file.flush()
            os.fsync(file.fileno())
