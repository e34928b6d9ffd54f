"""Serves the window until it is interrupted. `atropos view` calls `run`; a launcher starts this file beside its run."""

import argparse
import errno
import os
import socket
import sys
import webbrowser
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from urllib.parse import quote

import uvicorn

from atroposlib.addresses import listening_socket, netloc
from atroposlib.api.http.connections import Connection, Connections, Limits, connections_allowed
from atroposlib.errors import WRONG_USE, AtroposError, one_line_errors
from atroposlib.http_guard import is_loopback, plain_name
from atroposlib.view.flags import PORT, add_flags
from atroposlib.view.run_data.runs import Runs
from atroposlib.view.server import create_app

PORTS_TRIED = 100
NICENESS = 10  # beside a run, whose processes come first
ANYWHERE = ("0.0.0.0", "::", "")


class CannotServe(AtroposError):
    """No socket can listen there."""

    exit_status = WRONG_USE


def run(options: argparse.Namespace, runs: Runs, page: str = "") -> None:
    """Serve as the flags say, until interrupted, and print the address. Raises CannotServe."""
    hosts = [_host_name(name) for name in options.allowed_host]
    port = PORT if options.port is None else options.port
    with listen(options.host, port, exact=options.port is not None) as listener:
        url = address(options.host, listener.getsockname()[1]) + page
        print(f"Open {url} in a browser; Ctrl-C ends it", flush=True)
        if not is_loopback(options.host):
            print("Everyone who can reach this address can read these runs: there is no password", file=sys.stderr)
        if options.open:
            webbrowser.open(url)
        app = create_app(runs, options.host, hosts)
        limited = partial(Connection, Connections(Limits(most=connections_allowed(Limits.most))))
        config = uvicorn.Config(
            app,
            http=limited,  # type: ignore[arg-type]
            log_level="warning",
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=1,
        )
        uvicorn.Server(config).run(sockets=[listener])


def listen(host: str, port: int, exact: bool) -> socket.socket:
    """A socket on this port or, unless it must be `exact`, on the next free one. Raises CannotServe."""
    candidates = [port] if exact or port == 0 else range(port, min(port + PORTS_TRIED, 65536))
    for candidate in candidates:
        try:
            return listening_socket(host, candidate, socket.AF_INET6 if ":" in host else socket.AF_INET)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or exact:
                raise CannotServe(_refusal(host, candidate, error.strerror or str(error))) from None
    raise CannotServe(f"no port from {port} to {port + PORTS_TRIED - 1} is free on {host}; choose another --port")


def address(host: str, port: int) -> str:
    """Return the address to type into a browser."""
    name = "127.0.0.1" if host in ANYWHERE else host
    return f"http://{netloc(name, port)}/"


def page_of(labels: Sequence[str]) -> str:
    """The page's own address of a run, or of several to compare; of the list of runs without any."""
    if len(labels) == 1:
        return f"#/run/{quote(labels[0], safe='')}"
    return "#/compare?" + "&".join(f"run={quote(label, safe='')}" for label in labels) if labels else ""


def main(argv: Sequence[str] | None = None) -> None:
    """The window as a process of its own: RUN [RUN ...], or --runs DIR for every run of a directory."""
    parser = argparse.ArgumentParser(prog="atroposlib.view.serve", allow_abbrev=False)
    parser.add_argument("run", nargs="*", type=Path, help="directory of a run")
    parser.add_argument("--runs", type=Path, metavar="DIR", help="show every run of this directory")
    parser.add_argument("--beside", action="store_true", help="leave the processor to others")
    add_flags(parser)
    options = parser.parse_args(argv)
    if options.beside:
        os.nice(NICENESS)
    with one_line_errors("view"):
        run(options, Runs(options.run, options.runs))


def _refusal(host: str, port: int, why: str) -> str:
    return f"cannot listen on {netloc(host, port)}: {why}; choose another --host or --port"


def _host_name(text: str) -> str:
    try:
        return plain_name(text)
    except ValueError as error:
        raise CannotServe(f"--allowed-host: {error}") from None


if __name__ == "__main__":
    main()
