"""Limits on load: requests per second of one client, and bytes of bodies in memory, per client and in all.

A client is an address, together with the role of its token where the API has two. Bytes count from their arrival until
the reply, compressed and decompressed, whether the body is complete or not. connections.py limits how long a body may
take.

    429 with Retry-After    this client sends too many requests, or has too many bytes in progress
    503 with Retry-After    all clients together have too many bytes in progress
"""

import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atroposlib.api.http.auth import OPEN_PATHS, ROLE
from atroposlib.api.settings import RunApiConfig

HOLD = "atropos.hold"  # in a request's scope: the function that counts more bytes of its body, or raises Overloaded
BURST_S = 10.0  # a client may ask at once what it may ask in so many seconds
MAX_CLIENTS = 4096  # whose rates are remembered
RETRY_AFTER_S = 2

Client = tuple[str, str | None]


class Overloaded(HTTPException):
    """This client (429) or all clients together (503) have too many bytes in progress; the same request may succeed
    later.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(status, f"{message}; post again once they are answered", {"Retry-After": str(RETRY_AFTER_S)})


class Admission:
    """The limits as ASGI middleware."""

    def __init__(self, app: ASGIApp, settings: RunApiConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._app = app
        self._settings = settings
        self._clock = clock
        self._due: OrderedDict[Client, float] = OrderedDict()  # when what a client has asked would be due at its rate
        self._held: Counter[Client] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        client = (scope["client"][0] if scope.get("client") else "", scope.get(ROLE))
        late_s = self._late_s(client)
        if late_s > 0:
            reason = f"more than {self._settings.max_requests_per_second} requests per second from this client"
            await JSONResponse(
                {"detail": f"{reason} (--max-requests-per-second)"}, 429, {"Retry-After": str(math.ceil(late_s))}
            )(scope, receive, send)
            return
        held = 0

        def hold(count: int) -> None:
            nonlocal held
            self._hold(client, count)
            held += count

        async def counted() -> Message:
            message = await receive()
            if body := message.get("body"):
                hold(len(body))
            return message

        scope[HOLD] = hold
        try:
            await self._app(scope, counted, send)
        finally:
            self._held[client] -= held
            if not self._held[client]:
                del self._held[client]

    def _late_s(self, client: Client) -> float:
        """Count a request, unless it is one too many: the seconds until it would be none."""
        now = self._clock()
        due = max(now, self._due.get(client, now))
        late_s = due - now - BURST_S
        if late_s <= 0:
            self._due[client] = due + 1 / self._settings.max_requests_per_second
            self._due.move_to_end(client)
            if len(self._due) > MAX_CLIENTS:
                self._due.popitem(last=False)
        return late_s

    def _hold(self, client: Client, count: int) -> None:
        """Count bytes of a body. Raises Overloaded, and then counts nothing."""
        limits = self._settings
        if self._held[client] + count > limits.max_client_bytes:
            raise Overloaded(
                429,
                f"with this one, the bodies of this client in progress exceed {limits.max_client_bytes} bytes "
                "(--max-client-mb)",
            )
        if self._held.total() + count > limits.max_inflight_bytes:
            raise Overloaded(
                503,
                f"with this one, all bodies in progress exceed {limits.max_inflight_bytes} bytes (--max-inflight-mb)",
            )
        self._held[client] += count
