"""`run-api`: serve the batching API. Environments and the trainer find it at http://HOST:PORT.

The address is bound before anything else starts, so that a taken port is one line and a non-zero exit. One process only: the queue
lives in its memory.
"""

import errno
import signal
import socket
import sys
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

import uvicorn
from pydantic import Field
from uvicorn.supervisors import ChangeReload

from atroposlib.config import Config, load_config
from atroposlib.logs import configure_logging, get_logger

log = get_logger(__name__)


class RunApiConfig(Config):
    """Where and how the batching API is served."""

    host: str = Field(
        "127.0.0.1", description="Address to listen on. Other machines can reach it only if it is theirs to reach, e.g. 0.0.0.0."
    )
    port: int = Field(8000, ge=0, le=65535, description="TCP port; 0 takes a free one, which the log names.")
    reload: bool = Field(False, description="Restart when the code changes (development; the queue is lost each time).")
    json_logs: bool = Field(False, description="Log one JSON object a line.")


class AddressError(Exception):
    """The address cannot be listened on; the message is one line for the person who chose it."""


def listen(host: str, port: int) -> list[socket.socket]:
    """Bound sockets, one for each address of `host`, all on one port. Raises AddressError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise AddressError(f"host {host!r} has no address ({error.strerror}); use --host 127.0.0.1 or an address of this machine") from None
    bound: list[socket.socket] = []
    refusal: OSError | None = None
    for family, _, _, _, address in found:
        try:
            bound.append(_bind(family, (address[0], port)))
        except OSError as error:
            refusal = error
            if error.errno == errno.EADDRINUSE:
                break
        else:
            port = bound[0].getsockname()[1]
    if refusal is not None and (not bound or refusal.errno == errno.EADDRINUSE):
        for listener in bound:
            listener.close()
        raise AddressError(_cannot_listen(host, port, refusal))
    return bound


def _bind(family: int, address: tuple[str | int, int]) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
        listener.listen(socket.SOMAXCONN)
    except OSError:
        listener.close()
        raise
    listener.set_inheritable(True)
    return listener


def _cannot_listen(host: str, port: int, error: OSError) -> str:
    reason = f"cannot listen on {host}:{port}: {error.strerror}"
    if error.errno == errno.EADDRINUSE:
        return f"{reason}; another process has this port: end it, or choose another with --port (0 takes a free one)"
    if error.errno == errno.EACCES:
        return f"{reason}; choose a port above 1023 with --port"
    return f"{reason}; use --host 127.0.0.1 or an address of this machine"


def serve(config: RunApiConfig) -> None:
    """Serve until SIGINT or SIGTERM. Raises AddressError."""
    sockets = listen(config.host, config.port)
    log.info("Batching API listens on http://%s:%d", config.host, sockets[0].getsockname()[1])
    settings = uvicorn.Config(
        "atroposlib.api:app",
        reload=config.reload,
        log_config=None,  # our own format
        log_level="warning",
        access_log=False,  # environments poll several times a second
        timeout_keep_alive=75,  # s; longer than a client pauses between two requests
        timeout_graceful_shutdown=5,  # s
    )
    server = uvicorn.Server(settings)
    if config.reload:
        ChangeReload(settings, target=server.run, sockets=sockets).run()
    else:
        server.run(sockets=sockets)


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of `run-api` and `python -m atroposlib.cli.run_api`."""
    config = load_config(RunApiConfig, argv, prog="run-api")
    configure_logging("api", config.json_logs)
    for ending in (signal.SIGTERM, signal.SIGINT):
        signal.signal(ending, _end)  # uvicorn finishes the open replies, then passes the signal on to this handler
    try:
        serve(config)
    except AddressError as error:
        print(f"run-api: error: {error}", file=sys.stderr)
        raise SystemExit(1) from None


def _end(number: int, frame: FrameType | None) -> NoReturn:
    log.info("Batching API ended by %s", signal.Signals(number).name)
    raise SystemExit(0)


if __name__ == "__main__":
    main()
