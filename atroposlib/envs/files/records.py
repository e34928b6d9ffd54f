"""Files that an environment writes: groups as JSONL, and evaluations. Lines and files are written completely or not at
all.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import IO

import msgspec

from atroposlib.envs.errors import EnvError, RecordError
from atroposlib.errors import reading
from atroposlib.files import NotRegularFile, expect_regular, open_regular, write_whole
from atroposlib.logs import get_logger
from atroposlib.processes.lock_files import alone_in
from atroposlib.row_files.json_text import encode
from atroposlib.row_files.kept_rows import Keep, Parts, packed_path
from atroposlib.row_files.record_file import RecordFile, as_lines, write_lines

log = get_logger(__name__)

WRITE_ELSEWHERE = "free space, or write elsewhere"


class JsonlWriter:
    """Appends JSON lines to a new file; if `path` exists, to the first free one of `<stem>_1`, `_2`, ... Raises
    NotRegularFile for a device or a link.
    """

    def __init__(self, path: Path) -> None:
        number, self.path = 0, expect_regular(path)
        with reading(f"cannot write groups to {path}", RecordError, remedy="choose another file"):
            path.parent.mkdir(parents=True, exist_ok=True)
            while not self._take():
                number += 1
                self.path = path.with_name(f"{path.stem}_{number}{path.suffix}")
        self._base = path
        self._file = RecordFile(self.path)
        log.info("Writing groups to %s%s", self.path, f", as there is a {path} already" if number else "")

    def _take(self) -> bool:
        """Make the file, unless it is there: as it was, compressed, or that of an environment that starts now."""
        if self.path.exists() or packed_path(self.path).exists():
            return False
        with suppress(FileExistsError):
            open_regular(self.path, "xb").close()
            return True
        return False

    def keep(self, keep: Keep) -> None:
        """Keep no more than this from now on: full parts are moved aside, compressed, and at last removed."""
        self._file.parts = None if keep.is_all else Parts(self.path, keep, self._base)

    def write(self, record: Mapping[str, object], step: int | None = None) -> None:
        """Append `record`. One of a `step` only records what was done, so it waits in memory while the disk takes no
        more (record_file.py). Any other is data: raises RecordError, with the file as it was.
        """
        if step is None:
            append_jsonl(self.path, record)
        else:
            self._file.append(record, step=step)

    def close(self) -> None:
        """Write what waits, and remove a file without a line."""
        self._file.close()
        with suppress(OSError):
            if not self.path.stat().st_size:
                self.path.unlink()


def append_jsonl(path: Path, *records: Mapping[str, object]) -> None:
    """Append a line for each record to `path`, which is made if need be: all of them or none. Raises RecordError, and
    NotRegularFile for a device or a link.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        opened = open_regular(path, "a+b", buffering=0)
    except NotRegularFile:
        raise
    except OSError as error:
        raise RecordError(f"cannot write to {path}: {error.strerror}; {WRITE_ELSEWHERE}") from error
    with opened as file:
        append_line(file, *records)


def append_line(file: IO[bytes], *records: Mapping[str, object]) -> None:
    """Append a line for each record to an unbuffered `file` that can be read, too, all of them or none. Raises
    RecordError.
    """
    lines = as_lines(*records)
    try:
        write_lines(file, lines)
    except OSError as error:
        raise RecordError(
            f"cannot write {len(lines)} bytes to {file.name}: {error.strerror}; {WRITE_ELSEWHERE}"
        ) from error


def write_result(path: Path, content: bytes) -> None:
    """Write `path` whole, which holds what was asked for. Raises RecordError."""
    with reading(f"cannot write {path}", RecordError, remedy=WRITE_ELSEWHERE):
        write_whole(path, content)


def tell_result(text: str) -> None:
    """Print what was asked for. Raises RecordError where nobody takes it."""
    try:
        print(text, flush=True)
    except OSError as error:
        raise RecordError(f"cannot write the output: {error.strerror}; {WRITE_ELSEWHERE}") from error


def the_only_evaluation(path: Path, remedy: str, within: str = "") -> AbstractContextManager[None]:
    """While this lasts, no other evaluation writes `path`, a file, or a directory by its file `within`: who may write
    there may not write beside it. Raises EnvError that names the process which does.
    """

    def taken(holder: str) -> str:
        return f"{path} is being written by {holder}, another evaluation: wait for its end, or {remedy}"

    return alone_in(path / within, EnvError, taken)


def crossed(old: int, new: int, interval: int) -> int | None:
    """The largest multiple of `interval` in (old, new], or None."""
    if interval <= 0:
        return None
    multiple = new // interval * interval
    return multiple if multiple > old else None


def markdown_table(metrics: Mapping[str, object]) -> str:
    """`metrics` as a table to print."""
    return "\n".join(
        [
            "| Metric | Value |",
            "|---|---|",
            *(
                f"| {name} | {value:.4f} |" if isinstance(value, float) else f"| {name} | {value} |"
                for name, value in metrics.items()
            ),
        ]
    )


def write_eval_results(
    folder: Path,
    task: str,
    results: Mapping[str, object],
    samples: Sequence[object] | None,
    *,
    model_name: str | None,
    start_time: float | None,
    end_time: float | None,
    generation_parameters: Mapping[str, object] | None,
) -> None:
    """`metrics.json` (lighteval's layout) and, given samples, `samples.jsonl` in `folder`, each replaced whole. Times
    are seconds, now if they are not given. Raises RecordError.
    """
    now = time.time()
    begun, ended = start_time if start_time is not None else now, end_time if end_time is not None else now
    content = {
        "config_general": {
            "model_name": model_name,
            "start_time": begun,
            "end_time": ended,
            "total_evaluation_time_seconds": ended - begun,
            "generation_parameters": generation_parameters or {},
        },
        "results": {f"atropos|{task}|0": results, "all": results},
    }
    write_result(folder / "metrics.json", msgspec.json.format(encode(content), indent=2))
    if samples is not None:
        write_result(
            folder / "samples.jsonl",
            b"".join(encode(sample, default=str) + b"\n" for sample in samples),
        )
