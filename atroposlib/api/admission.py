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

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atroposlib.api.auth import OPEN_PATHS, ROLE
from atroposlib.api.settings import ApiSettings

HELD = "atropos.held"  # in a request's scope: the `Held` of its body
BURST_S = 10.0  # a client may ask at once what it may ask in so many seconds
MAX_CLIENTS = 4096  # whose rates are remembered
RETRY_AFTER_S = 2.0

Client = tuple[str, str | None]


class Overloaded(Exception):
    """This client (429) or all clients together (503) are above a limit; the same request may succeed later."""

    def __init__(self, status: int, message: str, retry_after_s: float = RETRY_AFTER_S) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = math.ceil(retry_after_s)

    def reply(self) -> JSONResponse:
        """The message for the client."""
        return JSONResponse({"detail": str(self)}, self.status, {"Retry-After": str(self.retry_after_s)})


class Held:
    """The bytes of one request's body that are in memory."""

    def __init__(self, admission: "Admission", client: Client) -> None:
        self._admission = admission
        self._client = client
        self._bytes = 0

    def add(self, count: int) -> None:
        """Count more bytes. Raises Overloaded, and then counts nothing."""
        self._admission.hold(self._client, count)
        self._bytes += count

    def release(self) -> None:
        """Stop counting: the request has its reply."""
        self._admission.let_go(self._client, self._bytes)


class Admission:
    """The limits as ASGI middleware."""

    def __init__(self, app: ASGIApp, settings: ApiSettings, clock: Callable[[], float] = time.monotonic) -> None:
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
        try:
            self._count(client)
        except Overloaded as refusal:
            await refusal.reply()(scope, receive, send)
            return
        scope[HELD] = held = Held(self, client)

        async def counted() -> Message:
            message = await receive()
            if body := message.get("body"):
                held.add(len(body))
            return message

        try:
            await self._app(scope, counted, send)
        finally:
            held.release()

    def _count(self, client: Client) -> None:
        """Count a request. Raises Overloaded (429)."""
        rate, now = self._settings.max_requests_per_second, self._clock()
        due = max(now, self._due.get(client, now))
        if due - now > BURST_S:
            message = f"more than {rate} requests a second of this client (--max-requests-per-second)"
            raise Overloaded(429, message, due - now - BURST_S)
        self._due[client] = due + 1 / rate
        self._due.move_to_end(client)
        if len(self._due) > MAX_CLIENTS:
            self._due.popitem(last=False)

    def hold(self, client: Client, count: int) -> None:
        """Count bytes of a body that is being read. Raises Overloaded (429 or 503)."""
        limits, total = self._settings, self._held.total() + count
        if self._held[client] + count > limits.max_client_bytes:
            message = f"this client has bodies of {limits.max_client_bytes} bytes under way (--max-client-mb)"
            raise Overloaded(429, f"{message}; post again when they are answered")
        if total > limits.max_inflight_bytes:
            message = f"bodies of {limits.max_inflight_bytes} bytes are under way (--max-inflight-mb)"
            raise Overloaded(503, f"{message}; post again when they are answered")
        self._held[client] += count

    def let_go(self, client: Client, count: int) -> None:
        """Stop counting the bytes of a request that has its reply."""
        self._held[client] -= count
        if not self._held[client]:
            del self._held[client]
