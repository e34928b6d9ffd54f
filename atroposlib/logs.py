"""Logging as every process of the product does it: one format, and a line before and after each wait."""

import contextlib
import json
import logging
import sys
import time
from collections.abc import Iterator

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
    """Send this process's log to stderr, one line a record, named by `process`. Call once, at start."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines(process) if json_lines else logging.Formatter(_FORMAT.format(process=process), datefmt="%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for chatty in ("httpx", "httpx2", "httpcore", "urllib3", "filelock", "fsspec", "asyncio", "aiohttp.access"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


def get_logger(name: str) -> logging.Logger:
    """The logger of a module."""
    return logging.getLogger(name)


@contextlib.contextmanager
def waiting(log: logging.Logger, what: str, *, peer: str, deadline_s: float) -> Iterator[None]:
    """Log whom this process waits for before it blocks, and how long it took after; `deadline_s` in seconds."""
    log.info("Waiting for %s from %s, at most %.0f s", what, peer, deadline_s)
    start = time.monotonic()
    try:
        yield
    except BaseException:
        log.warning("Gave up on %s from %s after %.1f s", what, peer, time.monotonic() - start)
        raise
    log.info("Got %s from %s after %.1f s", what, peer, time.monotonic() - start)
