"""Deadlines and a limit for connections to the API, so that none waits forever and none keeps others out.

uvicorn closes a connection that is idle after its first reply. This module handles the other cases:

    nothing sent, or half a head     closed after `head_s`
    a head that does not end         400 after `MAX_HEAD_BYTES`
    an upgrade to another protocol   left unheeded, so that the body is read; 400 where it came in pieces
    half a body                      408 after `body_s`, or after `stall_s` without a byte
    a reply that nobody reads        cut after `stall_s` without progress, once the connection would be closed
    more than `most` connections     those that wait for a request are closed, of the busiest address and oldest first

So the API still answers `/health` when one client opens more connections than the process has file descriptors.
"""

import asyncio
import re
import resource
from collections import Counter
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from atroposlib.logs import get_logger

RESERVED_FILES = 64  # descriptors for the journal, the log, the event loop
LOG_EVERY_S = 10.0
MAX_HEAD_BYTES = 65_536  # of a head, or of what follows a body; uvicorn keeps it all
END_OF_HEAD = b"\r\n\r\n"
UPGRADE = re.compile(rb"\r\nupgrade:[^\r\n]*", re.IGNORECASE)  # the JDK's client asks for h2c with each first request

log = get_logger(__name__)


@dataclass(frozen=True)
class Limits:
    """Deadlines in seconds, and the largest number of connections."""

    head_s: float = 15.0
    body_s: float = 120.0
    stall_s: float = 30.0
    most: int = 4096


def connections_allowed(wanted: int) -> int:
    """`wanted`, or fewer if the limit on open files, raised as far as allowed, leaves fewer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + RESERVED_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return wanted if soft == resource.RLIM_INFINITY else max(1, min(wanted, soft - RESERVED_FILES))


class Connections:
    """All open connections of one server."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.open: dict[Connection, None] = {}  # oldest first
        self._unlogged: Counter[str] = Counter()
        self._logged_at = -LOG_EVERY_S

    def opened(self, connection: "Connection") -> None:
        """Keep the connection and close one that waits; refuse it if all others are being answered."""
        self.open[connection] = None
        if len(self.open) <= self.limits.most:
            return
        of_address = Counter(each.address for each in self.open)
        waiting = [each for each in self.open if each is not connection and each.patience is not None]
        waiting.sort(key=lambda each: (each.patience, -of_address[each.address]))
        for each in waiting[: 1 + self.limits.most // 20] or [connection]:  # several, as finding them takes a while
            self.open.pop(each, None)
            each.transport.abort()
            self.note(f"closed, because more than {self.limits.most} were open")

    def note(self, what: str) -> None:
        """Count what happened to a connection; a log line every few seconds reports the counts."""
        self._unlogged[what] += 1
        now = asyncio.get_running_loop().time()
        if now - self._logged_at >= LOG_EVERY_S:
            for reason, count in self._unlogged.items():
                log.warning("%d connection(s) %s", count, reason)
            self._unlogged.clear()
            self._logged_at = now


class Connection(HttpToolsProtocol):
    """uvicorn's connection, with deadlines; a server makes one by `partial(Connection, Connections(limits))`."""

    def __init__(self, connections: Connections, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._connections = connections
        self._receiving: str | None = "head"  # or "body"; None: a request is being answered, or none has begun
        self._since = self._heard = 0.0
        self._unframed = 0  # bytes since a message or a piece of its body came
        self._timer: asyncio.TimerHandle | None = None

    @property
    def address(self) -> str:
        """The client's address."""
        return self.client[0] if self.client else ""

    @property
    def patience(self) -> int | None:
        """Rank how long the connection may still wait for a request; None while one is being answered."""
        if self._receiving is not None:
            return 0 if self._receiving == "head" else 2
        return 1 if self.cycle is None or self.cycle.response_complete else None

    # --- uvicorn's events ------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._since = self._heard = self.loop.time()
        self._watch()
        self._connections.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.open.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._heard = self.loop.time()
        self._unframed += len(data)
        super().data_received(data if self._receiving == "body" else _without_upgrade(data))
        if self._unframed > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._connections.note(f"closed, because a request head had more than {MAX_HEAD_BYTES} bytes")
            self.send_400_response(f"The head of a request has at most {MAX_HEAD_BYTES} bytes.")
        self._watch()

    def _unsupported_upgrade_warning(self) -> None:
        """The parser has skipped the body: what follows is not the next request."""
        self.send_400_response("This server speaks HTTP/1.1 alone: send no Upgrade header.")

    def on_message_begin(self) -> None:
        self._receiving, self._since, self._unframed = "head", self._heard, 0
        super().on_message_begin()

    def on_body(self, body: bytes) -> None:
        self._unframed = 0
        super().on_body(body)

    def on_headers_complete(self) -> None:
        self._receiving = "body"
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._receiving = None
        super().on_message_complete()

    def timeout_keep_alive_handler(self) -> None:
        unsent = self.transport.get_write_buffer_size()
        super().timeout_keep_alive_handler()
        if unsent:
            self.loop.call_later(self._connections.limits.stall_s, self._cut_unless_read, unsent)

    # --- deadlines -----------------------------------------------------------------------------------------

    def _watch(self) -> None:
        if self._timer is None and self._receiving is not None and not self.transport.is_closing():
            self._timer = self.loop.call_later(max(0.0, self._deadline() - self.loop.time()), self._look)

    def _deadline(self) -> float:
        limits = self._connections.limits
        if self._receiving == "head":
            return self._since + limits.head_s
        heard = self.loop.time() if self.flow.read_paused else self._heard  # we do not read, so nothing is heard
        return min(self._since + limits.body_s, heard + limits.stall_s)

    def _look(self) -> None:
        self._timer = None
        if self._receiving is None or self.loop.time() < self._deadline():
            self._watch()
            return
        self._connections.note(f"closed before a complete {self._receiving} came")
        cycle = self.cycle if self._receiving == "body" else None
        if cycle is not None and not cycle.response_started:
            cycle.disconnected = True
            cycle.message_event.set()
            self.transport.write(_too_slow(self._connections.limits))
            self.transport.close()
        else:
            self.transport.abort()

    def _cut_unless_read(self, unsent_before: int) -> None:
        unsent = self.transport.get_write_buffer_size()
        if unsent and unsent < unsent_before:
            self.loop.call_later(self._connections.limits.stall_s, self._cut_unless_read, unsent)
        elif unsent:
            self._connections.note("cut, because the reply was not read")
            self.transport.abort()


def _without_upgrade(data: bytes) -> bytes:
    if data.startswith((b"\r", b"\n")):  # perhaps the end of a head, before its body
        return data
    end = data.find(END_OF_HEAD)
    head = data if end < 0 else data[: end + 2]
    return UPGRADE.sub(b"", head) + data[len(head) :] if UPGRADE.search(head) else data


def _too_slow(limits: Limits) -> bytes:
    said = (
        f'{{"detail":"the body was not complete within {limits.body_s:g} s (--body-timeout), '
        f'or no part of it arrived for {limits.stall_s:g} s"}}'
    ).encode()
    head = "HTTP/1.1 408 Request Timeout\r\ncontent-type: application/json\r\nconnection: close\r\nretry-after: 2\r\n"
    return head.encode() + b"content-length: %d\r\n\r\n" % len(said) + said
