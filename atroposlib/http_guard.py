"""Limits our HTTP servers to requests for their own names, and to no web page but their own.

The batching API, vLLM's server, the managed-server proxy, the agent endpoint and view-run mount `HostGuard` in front of
all their routes.
A browser sends requests on behalf of any page, and a page whose name was rebound to 127.0.0.1 may read the replies. But
no page controls the headers that name the page behind a request:

    Host            one of the server's own names, with any port: a tunnel has another one
    Origin          none, or that very Host
    Sec-Fetch-Site  none or same-origin, where the browser sends it (to loopback and over TLS)
    Sec-Fetch-Mode  a navigation may only GET

A request with the server's token and none of the last three does not come from a page: it is answered under any Host.
"""

import ipaddress
import re
import socket
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import AfterValidator
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocketClose

POLICY_VIOLATION = 1008  # WebSocket close code; before the handshake servers make a 403 of it
SHOWN_CHARACTERS = 80

_LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
_LABEL = "[a-z0-9_-]{1,63}"
_HOST = re.compile(rf"(?:\[([0-9a-f:.]{{2,45}})\]|({_LABEL}(?:\.{_LABEL})*)\.?)(?::([0-9]{{0,5}}))?", re.ASCII)
_MAX_NAME = 253
_DEFAULT_PORT = {"http": 80, "https": 443}

Headers = Iterable[tuple[bytes, bytes]]


def split_host(text: str) -> tuple[str, int | None] | None:
    """(name, port) of a Host header: lower case, an address in its shortest form. None if it is malformed."""
    match = _HOST.fullmatch(text.lower()) if text.isascii() else None
    if match is None or len(text) > _MAX_NAME + len(".:65535"):
        return None
    bracketed, name, digits = match.groups()
    port = int(digits) if digits else None
    if port is not None and port > 65535:
        return None
    if bracketed is None:
        return name, port
    with suppress(ValueError):
        return _shortest(ipaddress.IPv6Address(bracketed)), port
    return None


def plain_name(text: str) -> str:
    """A name or address that a server is told to answer to, as `split_host` gives it. Raises ValueError."""
    bracketed = f"[{text}]" if ":" in text and not text.startswith("[") else text
    parts = split_host(bracketed)
    if parts is None or (bracketed.count(":") and not bracketed.endswith("]")):
        raise ValueError(f"{_shown(text)} is not a host name or address; give it without scheme and port")
    return parts[0]


HostName = Annotated[str, AfterValidator(plain_name)]


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches the host."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


@dataclass(frozen=True)
class OwnHosts:
    """The Host names that are a server's own: `names`, and the addresses of this machine where others can reach it."""

    names: frozenset[str] = _LOOPBACK
    addresses: bool = False

    @classmethod
    def of(cls, host: str, allowed: Sequence[str] = ()) -> "OwnHosts":
        """For a server that listens on `host`; `allowed` are further names, as `plain_name` gives them."""
        names = _LOOPBACK | {_as_address(host.lower().partition("%")[0])} | {*allowed}
        if is_loopback(host):
            return cls(names)
        return cls(names | _names_of_this_machine(), addresses=True)

    def has(self, name: str, connected_to: str) -> bool:
        """Return whether `name` is one of this server's names, on a connection that was made to the address
        `connected_to`.

        That address is known from the socket. No resolver can make a page of it, unlike a name.
        """
        return name in self.names or name == connected_to or (self.addresses and _is_address_of_this_machine(name))

    def __str__(self) -> str:
        return ", ".join([*sorted(self.names), *(["this machine's addresses"] if self.addresses else [])])


@dataclass
class HostGuard:
    """ASGI middleware: 400 for a malformed Host, 403 with the reason for a foreign one and for foreign pages."""

    app: ASGIApp
    hosts: OwnHosts
    bears_token: Callable[[Scope], object] = field(default=lambda scope: False)  # a truth value

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] in ("http", "websocket") else None
        if refusal is None:
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await WebSocketClose(POLICY_VIOLATION)(scope, receive, send)
        else:
            status, reason = refusal
            await JSONResponse({"detail": reason}, status)(scope, receive, send)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        given = _values(headers, b"host")
        if len(given) > 1:
            return 400, f"the request has {len(given)} Host headers: send one"
        if not _is_of_page(headers) and self.bears_token(scope):
            return None
        host = split_host(given[0]) if given else None
        if host is None:
            return 400, (
                f"the request needs a Host header, NAME or NAME:PORT (got {_shown(given[0]) if given else 'none'})"
            )
        server = scope.get("server")  # the address of this end of the connection
        if not self.hosts.has(host[0], _as_address(server[0].partition("%")[0]) if server else ""):
            return 403, (
                f"Host {_shown(given[0])} is not a name of this server ({self.hosts}): use one of those, or start "
                f"the server with --allowed-host {host[0]}"
            )
        if any(not _is_origin_of(origin, host) for origin in _values(headers, b"origin")) or any(
            site not in ("none", "same-origin") for site in _values(headers, b"sec-fetch-site")
        ):
            return 403, "web pages of other origins may not use this server"
        if "navigate" in _values(headers, b"sec-fetch-mode") and scope.get("method", "GET") not in ("GET", "HEAD"):
            return 403, "a browser may only GET a page of this server"
        return None


def is_from_browser(headers: Headers) -> bool:
    """Return whether a browser sent this, for whatever page or person; all of them call themselves Mozilla."""
    return _is_of_page(headers) or any(
        agent.lower().startswith("mozilla/") for agent in _values(headers, b"user-agent")
    )


def _is_of_page(headers: Headers) -> bool:
    return any(name == b"origin" or name.startswith(b"sec-fetch-") for name, _ in headers)


def _values(headers: Headers, wanted: bytes) -> list[str]:
    return [value.decode("latin-1") for name, value in headers if name == wanted]


def _is_origin_of(origin: str, host: tuple[str, int | None]) -> bool:
    """Return whether the page came from `host` itself; `null`, and what is not an origin at all, did not."""
    scheme, _, authority = origin.partition("://")
    parts = split_host(authority)
    if parts is None or scheme not in _DEFAULT_PORT:
        return False
    usual = _DEFAULT_PORT[scheme]
    return (parts[0], parts[1] or usual) == (host[0], host[1] or usual)


def _shortest(address: ipaddress.IPv6Address) -> str:
    return str(address.ipv4_mapped or address)


def _as_address(text: str) -> str:
    """The shortest form of an address; what is none, as it is."""
    with suppress(ValueError):
        return _shortest(ipaddress.IPv6Address(text))
    return text


def _names_of_this_machine() -> frozenset[str]:
    """Return this machine's host name, in short and in full; the resolver is never asked what an address is called."""
    name = socket.gethostname()
    candidates = {name, name.partition(".")[0]}
    with suppress(socket.gaierror):
        candidates.add(socket.getaddrinfo(name, None, flags=socket.AI_CANONNAME)[0][3])
    return frozenset(parts[0] for candidate in candidates if (parts := split_host(candidate)) is not None)


def _is_address_of_this_machine(text: str) -> bool:
    """Return whether a socket can be bound to `text`: the kernel allows that for this machine's own addresses only."""
    with suppress(ValueError, OSError):
        address = ipaddress.ip_address(text)
        family = socket.AF_INET if address.version == 4 else socket.AF_INET6
        if not address.is_unspecified and not address.is_multicast:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.bind((text, 0))
            return True
    return False


def _shown(text: str) -> str:
    return ascii(text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}...")
