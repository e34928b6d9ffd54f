"""The flags of `atropos view`, apart from what serves: `--help` loads no web server."""

import argparse

HOST, PORT = "127.0.0.1", 8400


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say where to serve."""
    parser.add_argument("--host", default=HOST, metavar="ADDRESS", help="listen on this address (default: %(default)s)")
    parser.add_argument(
        "--port", type=_port, metavar="N", help=f"listen on this port (default: {PORT}, or the next free one)"
    )
    parser.add_argument(
        "--allowed-host", action="append", default=[], metavar="NAME", help="answer to this host name too; repeatable"
    )
    parser.add_argument("--open", action="store_true", help="open the page in a browser")


def _port(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) <= 65535):
        raise argparse.ArgumentTypeError(f"expects a port from 0 to 65535, got {text!r}")
    return int(text)
