"""Addresses as every client and server here writes and reads them: IPv6 hosts in brackets, and which proxy of the
environment a request would take. Clients of this machine take none, whatever the environment says; those of other
people's servers do, and an error then names the variable. No client follows a redirect, which could send prompts and
keys to another server.
"""

import ipaddress
import os
import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from urllib.parse import urlsplit
from urllib.request import getproxies_environment, proxy_bypass

LOOPBACK = "localhost,127.0.0.1,::1"
LABEL = "[A-Za-z0-9_-]{1,63}"
SERVER = re.compile(
    rf"http://(?P<host>{LABEL}(\.{LABEL})*\.?|\[(?P<ipv6>[0-9A-Fa-f:.]{{2,45}})\]):(?P<port>\d{{1,5}})(/v1)?/?",
    re.ASCII,
)
LONGEST_NAME = 253
SHOWN_CHARACTERS = 200  # of where a redirect leads


def netloc(host: str, port: int) -> str:
    """`host:port` for a URL or a log; an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def server_address(url: str) -> str:
    """Return a server's address as it is listed, `http://HOST:PORT`: without a path, and with 127.0.0.1 for localhost.
    Raises ValueError for what is no such address.
    """
    match = SERVER.fullmatch(url)
    if match is None or not 0 < int(match["port"]) < 1 << 16 or not _is_host(match["host"], match["ipv6"]):
        raise ValueError(f"expected the address of a server, http://HOST:PORT, not {url[:SHOWN_CHARACTERS]!a}")
    return f"http://{'127.0.0.1' if match['host'] == 'localhost' else match['host'].lower()}:{int(match['port'])}"


def _is_host(host: str, ipv6: str | None) -> bool:
    if ipv6 is None:
        return len(host) <= LONGEST_NAME
    with suppress(ValueError):
        ipaddress.IPv6Address(ipv6)
        return True
    return False


def listening_socket(host: str, port: int, family: int = socket.AF_INET, backlog: int = 128) -> socket.socket:
    """Return a socket that listens for TCP connections. Raises OSError.

    Its connections send at once what is written to them. Otherwise the body of a reply waits until the client has
    acknowledged its head, which Linux does after 40 ms; asyncio asks for that only of sockets that it has made.
    """
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # its connections inherit it
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind((host, port))
        listener.listen(backlog)
    except BaseException:
        listener.close()
        raise
    return listener


def resolved(host: str) -> str:
    """The first address of a host, of IPv4 if it has one. Raises OSError for a name that has none."""
    infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    *_, address = min(infos, key=lambda each: each[0] != socket.AF_INET)
    return str(address[0])


def is_loopback_url(url: str) -> bool:
    """Return whether an address is of this machine alone."""
    host = (urlsplit(url).hostname or "").rstrip(".")
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def proxy_variable(url: str) -> str | None:
    """The variable whose proxy a request to `url` would take, as it is written in this environment; None if none is
    taken.
    """
    parts = urlsplit(url)
    proxies = getproxies_environment()
    if is_loopback_url(url) or (proxies.get("no") and proxy_bypass(parts.netloc)):
        return None
    for scheme in (parts.scheme, "all"):
        if scheme in proxies:
            name = f"{scheme}_proxy"
            return name if os.environ.get(name) else name.upper()
    return None


def through_proxy(url: str) -> str:
    """For the end of an error: which variable's proxy was asked; empty if none was."""
    variable = proxy_variable(url)
    return f" (through the proxy of {variable}: correct it, or name this host in NO_PROXY)" if variable else ""


def without_loopback_proxies(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` for a child whose own clients read it: no proxy for addresses of this machine."""
    kept = dict(environment)
    if any(name.lower().endswith("_proxy") and name.lower() != "no_proxy" for name in environment):
        for name in ("NO_PROXY", "no_proxy"):
            kept[name] = ",".join(filter(None, [environment.get("no_proxy") or environment.get("NO_PROXY"), LOOPBACK]))
    return kept


def refused_redirect(url: str, status: int, target: str | None) -> str | None:
    """Say what is wrong with the reply of `url` if it is a redirect: its target (Location header) and the remedy."""
    if not 300 <= status < 400:
        return None
    shown = ascii(target)[:SHOWN_CHARACTERS] if target else "nowhere"
    return (
        f"{url} replied {status}, a redirect to {shown}, which is not followed because it would send the request "
        "and its key there; if that is the intended server, configure its address"
    )
