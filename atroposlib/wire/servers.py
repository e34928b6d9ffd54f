"""Inference servers that join or leave a run while it goes on, as the batching API knows them.

    joining ──(the trainer has given it the policy)──▶ serving ──▶ leaving ──(no request runs)──▶ left

Whoever starts a server announces it as joining, and whoever ends one announces that it is leaving. A server that the
configuration names is not listed until it leaves. Environments send requests to those that serve, and no new ones to
those that leave.
"""

from typing import Literal

from msgspec import Struct

State = Literal["joining", "serving", "leaving", "left"]
MOST = 256  # servers that are listed
LISTED_EVERY_S = 2.0  # how often whoever calls the servers asks for the list


class ServerChange(Struct):
    """One server's new state: the body of POST /servers."""

    url: str  # http://HOST:PORT
    state: State


class Servers(Struct):
    """All servers that have joined or left since the trainer registered: the reply of GET /servers."""

    servers: dict[str, State] = {}
