"""Logging as every process of the product does it, in one format.

Names, replies of servers and model output reach the log, with whatever their author put there. `escape_records` is the
one place where that is made harmless, for every logger, handler and formatter of a process, vLLM's too:

    message     on one line, a line break as the characters \\n
    traceback   its lines, each behind "    | "
"""

import json
import logging
import re
import sys
import traceback
from types import TracebackType
from typing import Any

# Terminals obey C0, DEL and C1. Unicode adds line breaks, marks that reorder what is read, and invisible characters.
_CONTROL = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff"
    "\U000e0000-\U000e0fff]"
)
_plain_message = logging.LogRecord.getMessage
_plain_exception = logging.Formatter.formatException
_plain_stack = logging.Formatter.formatStack

_FORMAT = "%(asctime)s %(levelname)-7s [{process}] %(message)s"


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
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def configure_logging(process: str, json_lines: bool = False, level: int = logging.INFO) -> None:
    """Send this process's log to stderr, one line per record, named by `process`. Call once, at start."""
    escape_records()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        _JsonLines(process) if json_lines else logging.Formatter(_FORMAT.format(process=process), datefmt="%H:%M:%S")
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for chatty in ("httpx", "httpx2", "httpcore", "urllib3", "filelock", "fsspec", "asyncio", "aiohttp.access"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


def escape(text: str) -> str:
    """`text` on one line, control characters as Python writes them (\\n, \\x1b); letters of all scripts stay."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


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
    print("\n".join([f"{prog}: error: {escape(first)}", *map(_behind_bar, rest)]), file=sys.stderr, flush=True)


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
    print(_behind_bars("".join(traceback.format_exception(kind, error, trace)).rstrip()), file=sys.stderr)


def _behind_bars(text: str) -> str:
    return "\n".join(map(_behind_bar, text.split("\n")))


def _behind_bar(line: str) -> str:
    return f"    | {escape(line)}"


def get_logger(name: str) -> logging.Logger:
    """The logger of a module."""
    return logging.getLogger(name)
