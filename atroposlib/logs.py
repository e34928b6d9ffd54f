"""Logging for every process of the product, in one format.

Names, replies of servers and model output reach the log and may contain anything. `escape_records` is the only place
that makes them harmless, for every logger, handler and formatter of a process, vLLM's too:

    message     on one line, a line break as the characters \\n
    traceback   its lines, each behind "    | "

A log that nobody takes ends no process: what cannot be written is lost.

Of similar lines only the first few are written at once (`Repeats`). What libraries write to stderr without
`logging` becomes records too (stderr_lines.py).
"""

import atexit
import codecs
import copy
import json
import logging
import os
import re
import sys
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TextIO

from atroposlib.stderr_lines import plain_stderr, take_stderr

# Terminals obey C0, DEL and C1. Unicode adds line breaks, marks that reorder what is read, and invisible characters.
_CONTROL = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff"
    "\U000e0000-\U000e0fff]"
)
_plain_message = logging.LogRecord.getMessage
_plain_exception = logging.Formatter.formatException
_plain_stack = logging.Formatter.formatStack

DATE = "%Y-%m-%d %H:%M:%S"
RUN = "ATROPOS_RUN"  # the variable in which a launcher names the run
FIRST_EQUAL = 5  # equal lines that are written at once
FIRST_ALIKE = 50  # lines that only differ in their values
THEN_EVERY_S = 10.0  # one, with the number of those between
LONGEST, HEAD = 1000, 500  # characters of an error's line that are printed, and those of them at its beginning
_exit_status_is_kept = threading.Event()
KEPT = 1000  # kinds of lines, and tracebacks, that are remembered


class Lines(logging.Formatter):
    """`2026-11-22 12:30:00 INFO    [trainer] text`; of vLLM's processes beside its server, their name too."""

    def __init__(self, process: str) -> None:
        super().__init__(datefmt=DATE)
        self._process = process

    def formatMessage(self, record: logging.LogRecord) -> str:  # the name is logging's
        part = getattr(record, "vllm_process_name", None)
        process = self._process if part in (None, "APIServer", "MainProcess") else f"{self._process} {part}"
        return f"{self.formatTime(record, DATE)} {record.levelname:<7} [{process}] {record.message}"

    def usesTime(self) -> bool:
        return False


class _JsonLines(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": record.created,
            "level": record.levelname,
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if run := os.environ.get(RUN):
            entry["run"] = run
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


@dataclass
class _Repeated:
    since: float
    shown: int = 0
    held: int = 0


class Repeats:
    """Chooses the lines to write when many are alike: the first few of each ten seconds, then one with the number of
    the others. A traceback is written once. `now` is the clock, in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._kinds: OrderedDict[tuple[object, ...], _Repeated] = OrderedDict()
        self._tracebacks: OrderedDict[str, None] = OrderedDict()

    def thinned(self, record: logging.LogRecord) -> logging.LogRecord | None:
        """The record as it is to be written; None: not now."""
        message = record.getMessage()
        equal = self._admit((record.name, record.levelno, message), FIRST_EQUAL)
        template = record.msg if record.args and isinstance(record.msg, str) and len(record.msg) > 4 else message
        alike = 0 if equal is None else self._admit((record.name, record.levelno, template, "alike"), FIRST_ALIKE)
        if equal is None or alike is None:
            return None
        notes = [f"({equal or alike} more like this before)"] if equal or alike else []
        known = record.exc_info and self._is_known(record)
        notes += ["(its traceback is above)"] if known else []
        if not notes:
            return record
        written = copy.copy(record)
        written.msg, written.args = " ".join([message, *notes]), ()
        if known:
            written.exc_info = written.exc_text = None
        return written

    def _admit(self, kind: tuple[object, ...], first: int) -> int | None:
        """Return how many of this kind were held back before this one; None: it is held back, too."""
        now = self._now()
        seen = self._kinds.setdefault(kind, _Repeated(now))
        self._kinds.move_to_end(kind)
        if len(self._kinds) > KEPT:
            self._kinds.popitem(last=False)
        if now - seen.since >= THEN_EVERY_S:
            held = seen.held
            self._kinds[kind] = _Repeated(now, shown=first if held else 1)
            return held
        seen.shown += 1
        if seen.shown > first:
            seen.held += 1
            return None
        return 0

    def _is_known(self, record: logging.LogRecord) -> bool:
        assert record.exc_info
        text = "".join(traceback.format_exception(*record.exc_info))
        known = text in self._tracebacks
        self._tracebacks[text] = None
        if len(self._tracebacks) > KEPT:
            self._tracebacks.popitem(last=False)
        return known


class LineHandler(logging.StreamHandler[TextIO]):
    """Writes to stderr, and of many lines that are alike only some."""

    def __init__(self) -> None:
        super().__init__(plain_stderr())
        self._repeats = Repeats()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            written = self._repeats.thinned(record)
        except Exception:  # arguments that do not fit the message: logging must not fail the caller
            self.handleError(record)
        else:
            if written is not None:
                super().emit(written)


def make_line_handler() -> LineHandler:
    """For `logging.config.dictConfig`, which can do no more than make handlers: also does what else `configure_logging`
    does to the process.
    """
    escape_records()
    take_stderr()
    return LineHandler()


def configure_logging(process: str, json_lines: bool = False, level: int = logging.INFO) -> None:
    """Send this process's log to stderr, one line per record, named by `process`. Call once, at start."""
    handler = make_line_handler()
    keep_exit_status()
    handler.setFormatter(_JsonLines(process) if json_lines else Lines(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for chatty in ("httpx", "httpx2", "httpcore", "urllib3", "filelock", "fsspec", "asyncio", "aiohttp.access"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    if run := os.environ.get(RUN):
        get_logger(__name__).info("Run %s: %s is pid %d", run, process, os.getpid())


def say(line: str) -> None:
    """A line on stdout: as it is on a terminal, in the log's format in a file or a pipe."""
    handler = next((each for each in logging.getLogger().handlers if isinstance(each, LineHandler)), None)
    if handler is not None and not sys.stdout.isatty():
        line = handler.format(logging.makeLogRecord({"levelname": "INFO", "name": __name__, "msg": line}))
    put(line)


def put(text: str, file: TextIO | None = None) -> None:
    """Print `text`, to stdout if no `file` is given. Where nobody takes it (a full disk, a pipe without a reader) it is
    lost, and the process continues.
    """
    with suppress(OSError):
        print(text, file=file, flush=True)


def keep_exit_status() -> None:
    """Have this process end as it would if its last lines cannot be written: Python would exit with 120 instead."""
    _exit_status_is_kept.set()
    atexit.register(_end_streams)


def flush_output() -> None:
    """Write what was printed. Raises OSError where it is what the process is for, and not a log."""
    if sys.stdout is not None and not _exit_status_is_kept.is_set():
        sys.stdout.flush()


def drop_output() -> None:
    """Drop what stdout does not take, or Python complains of it at the end."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        _drop(sys.stdout)


def _end_streams() -> None:
    for stream in (sys.stdout, plain_stderr()):
        try:
            stream.flush()
        except OSError:  # the rest is lost
            _drop(stream)


def _drop(stream: TextIO) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


class QuietAccess(logging.Filter):
    """Leaves out of a web server's access log what is asked all the time, unless it fails: addresses under `paths`."""

    def __init__(self, paths: Sequence[str]) -> None:
        super().__init__()
        self._paths = tuple(paths)

    def filter(self, record: logging.LogRecord) -> bool:
        match record.args:
            case (_, _, str(path), _, int(status)):  # uvicorn.access: client, method, path, HTTP version, status
                return status >= 400 or not path.startswith(self._paths)
        return True


def escape(text: str) -> str:
    """`text` on one line, control characters as Python writes them (\\n, \\x1b); letters of all scripts stay."""
    # by the codec itself: looking it up opens a file, of which a process in trouble may have too many open
    return _CONTROL.sub(lambda match: codecs.unicode_escape_encode(match[0])[0].decode(), text)


def escape_records() -> None:
    """From now on no record of this process holds a control character, and no text in one looks like another record.

    It changes the classes that all formatters use, as libraries bring their own. Uncaught exceptions, and what
    `print_error` prints, are written the same way.
    """
    logging.LogRecord.getMessage = _message  # type: ignore[method-assign, assignment]
    logging.Formatter.formatException = _exception  # type: ignore[method-assign, assignment]
    logging.Formatter.formatStack = _stack  # type: ignore[method-assign, assignment]
    sys.excepthook = _write_uncaught


def print_error(prog: str, error: object) -> None:
    """One line on stderr for what ended `prog`; more lines, such as the last ones of a log, behind bars."""
    first, *rest = str(error).split("\n")
    put("\n".join([f"{prog}: error: {_cut(escape(first))}", *map(_behind_bar, rest)]), plain_stderr())


def _cut(line: str) -> str:
    """Leave out the middle of a line that nobody could read: what it repeats of a value, and not what to do."""
    left_out = len(line) - LONGEST
    return line if left_out <= 0 else f"{line[:HEAD]} [{left_out} characters] {line[HEAD + left_out :]}"


def _message(record: logging.LogRecord) -> str:
    """Some formatters, such as that of uvicorn's access log, read the arguments too."""
    if isinstance(record.args, tuple):
        record.args = tuple(escape(value) if isinstance(value, str) else value for value in record.args)
    return escape(_plain_message(record))


def _exception(formatter: logging.Formatter, info: Any) -> str:
    return _behind_bars(_plain_exception(formatter, info))


def _stack(formatter: logging.Formatter, stack: str) -> str:
    return _behind_bars(_plain_stack(formatter, stack))


def _write_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    put(_behind_bars("".join(traceback.format_exception(kind, error, trace)).rstrip()), plain_stderr())


def _behind_bars(text: str) -> str:
    return "\n".join(map(_behind_bar, text.split("\n")))


def _behind_bar(line: str) -> str:
    return f"    | {escape(line)}"


def get_logger(name: str) -> logging.Logger:
    """The logger of a module."""
    return logging.getLogger(name)
