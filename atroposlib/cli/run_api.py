"""`run-api`: serve the batching API. Environments and the trainer find it at http://HOST:PORT.

`run-api journal` checks, copies and exports the journal (`journal.py`).

The address is bound before anything else starts, so that a port in use gives one line and a non-zero exit code. One
process only: it owns the queue, and the journal that brings the queue back after a restart.
"""

import errno
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import NoReturn

import uvicorn
from uvicorn.supervisors import ChangeReload

from atroposlib.addresses import listening_socket, netloc
from atroposlib.api.http.connections import Connection, Connections, Limits, connections_allowed
from atroposlib.api.server import create_app
from atroposlib.api.settings import RunApiConfig
from atroposlib.api.state.long_poll import LongPoll
from atroposlib.cli import journal as journal_commands
from atroposlib.config import load_config
from atroposlib.errors import AtroposError, one_line_errors, reaching
from atroposlib.http_guard import is_loopback
from atroposlib.logs import configure_logging, get_logger
from atroposlib.processes.utf8 import restart_in_utf8

log = get_logger(__name__)
COMMANDS_HELP = """\
Commands:
  journal    check, copy and export a journal; run-api journal --help lists how
"""


_REMEDIES: dict[int | None, str] = {
    errno.EADDRINUSE: "another process uses this port: end it, or choose another with --port (0 takes a free port)",
    errno.EACCES: "choose a port above 1023 with --port",
}


class AddressError(AtroposError):
    """The API cannot listen on the address; the message is one line with the remedy."""


def listen(host: str, port: int) -> list[socket.socket]:
    """Bound sockets, one for each address of `host`, all on one port. Raises AddressError."""
    remedy = "use --host 127.0.0.1 or an address of this machine"
    with reaching(f"host {host!r} has no address", AddressError, remedy=remedy):
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    bound: list[socket.socket] = []
    refusal: OSError | None = None
    for family, _, _, _, address in infos:
        try:
            bound.append(listening_socket(str(address[0]), port, family, backlog=socket.SOMAXCONN))
        except OSError as error:
            refusal = error
            if error.errno == errno.EADDRINUSE:
                break
        else:
            bound[-1].set_inheritable(True)
            port = bound[0].getsockname()[1]
    if refusal is not None and (not bound or refusal.errno == errno.EADDRINUSE):
        for listener in bound:
            listener.close()
        remedy = _REMEDIES.get(refusal.errno, remedy)
        raise AddressError(f"cannot listen on {netloc(host, port)}: {os.strerror(refusal.errno or 0)}; {remedy}")
    return bound


class Server(uvicorn.Server):
    """uvicorn's server; before it waits for open replies to end, it answers the requests that wait for a batch."""

    def __init__(self, settings: uvicorn.Config, long_poll: LongPoll) -> None:
        super().__init__(settings)
        self._long_poll = long_poll

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._long_poll.close()
        await super().shutdown(sockets)


def serve(config: RunApiConfig) -> None:
    """Serve until SIGINT or SIGTERM. Raises AddressError, JournalError."""
    sockets = listen(config.host, config.port)
    port = sockets[0].getsockname()[1]
    journal = None if config.reload else config.journal_at(port)
    app = None if config.reload else create_app(config, journal=journal, accept_loss=config.journal_accept_loss)
    where = netloc(config.host, port)
    log.info("Batching API listens on http://%s", where)
    log.info("Groups are kept in %s", "memory only" if journal is None else journal.absolute())
    if not is_loopback(config.host) and config.token is None:
        log.warning("Anyone who can reach %s can read and change everything: no token is set", where)
    limits = Limits(body_s=config.body_timeout, most=connections_allowed(config.max_connections))
    settings = uvicorn.Config(
        app or "atroposlib.api:app",
        http="auto" if config.reload else partial(Connection, Connections(limits)),  # type: ignore[arg-type]
        ws="none",
        reload=config.reload,
        log_config=None,  # our own format
        log_level="warning",
        access_log=False,  # environments poll several times a second
        timeout_keep_alive=75,  # s; longer than a client pauses between two requests
        timeout_graceful_shutdown=5,  # s
    )
    if app is None:
        ChangeReload(settings, target=uvicorn.Server(settings).run, sockets=sockets).run()
    else:
        Server(settings, app.state.service.long_poll).run(sockets=sockets)


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of `run-api` and `python -m atroposlib.cli.run_api`."""
    if argv is None:
        restart_in_utf8()
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["journal"]:
        journal_commands.main(argv[1:])
        return
    config = load_config(RunApiConfig, argv, prog="run-api", epilog=COMMANDS_HELP)
    configure_logging("api", config.json_logs)
    for ending in (signal.SIGTERM, signal.SIGINT):
        signal.signal(ending, _end)  # uvicorn finishes the open replies, then passes the signal on to this handler
    with one_line_errors("run-api"):
        serve(config)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    with suppress(OSError):  # past the log's lock and buffer, which the signal may have interrupted
        os.write(2, f"run-api: ended by {signal.Signals(number).name}\n".encode())
    raise SystemExit(0)


if __name__ == "__main__":
    main()
