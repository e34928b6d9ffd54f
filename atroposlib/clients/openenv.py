"""The client of an OpenEnv server: episodes over its WebSocket, one session each.

    server = OpenEnvClient(url, limits)
    session, first = await server.begin({"seed": 7})     waits for a free session; resets
    reply = await session.step({"number": 3})            Reply(observation, reward, done)
    await server.end(session)                            the server may give the session to the next one

A server takes as many sessions at once as it was started with, by default one, and refuses others. A refused caller
waits for its turn here, first come, first served; the server's refusals report how many it takes. A session reads all
the time, so that the server's pings are answered while the model generates.

What goes wrong is one of these:

    ActionRefused       the action is not one of the environment's; with `is_over` the server also ended the session
    StepFailed          the environment's own code raised
    SessionLost         no connection, no session or no answer in time, or an answer that is not the protocol's

Nothing that the server sends is trusted: sizes are limited, redirects are not followed, cookies are not kept.
"""

import asyncio
import contextlib
import json
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import aiohttp

from atroposlib.addresses import refused_redirect
from atroposlib.clients.bearer import bearer
from atroposlib.clients.replies import BoundedResponse, ReplyTooLong, at_most
from atroposlib.clients.waiting import NotYet
from atroposlib.logs import get_logger

log = get_logger(__name__)

FIRST_PAUSE_S = 0.05
LAST_PAUSE_S = 5.0
GROWTH = 1.5
LOOK_EVERY_S = 1.0
REPORT_EVERY_S = 60.0
CLOSE_LIMIT_S = 2.0
HTTP_LIMIT_S = 10.0
PAGE_BYTES = 4 * 2**20
REPLIES_KEPT = 4  # a server that sends what nobody asked for is not read any more
SHOWN_CHARACTERS = 300
ERRORS_SHOWN = 5
OLDEST = "of openenv-core 0.2 or newer"
# What OpenEnv says before it ends the session, where a validator of the action's class raised: it cannot send that.
UNWRITABLE_ERROR = "Unable to serialize unknown type"


class OpenEnvError(Exception):
    """An episode cannot continue."""


class SessionLost(OpenEnvError):
    """See the head of the module."""


class StepFailed(OpenEnvError):
    """See the head of the module."""


class ActionRefused(OpenEnvError):
    """See the head of the module. The message is for the model."""

    def __init__(self, reason: str, is_over: bool = False) -> None:
        super().__init__(reason)
        self.is_over = is_over


class NoSession(OpenEnvError):
    """The server has none free: `limit` is how many it reports that it takes."""

    def __init__(self, reason: str, limit: int | None = None) -> None:
        super().__init__(reason)
        self.limit = limit


class NotOpenEnv(Exception):
    """The address is not an OpenEnv server's, or the server wants another token."""


@dataclass(frozen=True, slots=True)
class Limits:
    """`sessions` at once (0: as many as the server takes); seconds for a session to become free, and for an answer;
    bytes of an answer.
    """

    sessions: int = 0
    session_wait_s: float = 300.0
    reply_s: float = 60.0
    message_bytes: int = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Reply:
    """Holds what the environment shows after a reset or a step. `reward` is None where it gave none."""

    observation: Mapping[str, object]
    reward: float | None
    done: bool


class OpenEnvClient:
    """One server, by the address of its HTTP routes. `token` is sent as a bearer token."""

    def __init__(self, url: str, limits: Limits, token: str | None = None) -> None:
        self.url = url.rstrip("/")
        self.limits = limits
        self._headers = bearer(token, f"the token of {url}")
        self._http: aiohttp.ClientSession | None = None
        self.observation_schema: Mapping[str, object] = {}
        self._places = Places(limits.sessions)
        self._last_begun = -math.inf
        self._told = -math.inf

    async def schema(self) -> Mapping[str, object]:
        """The JSON schema of an action; that of an observation is kept. Raises NotYet while the server is not up,
        NotOpenEnv where there is none.
        """
        page = await self._page("schema")
        action = page.get("action")
        if not isinstance(action, dict):
            raise NotOpenEnv(f"{self.url}/schema has no schema of an action; is that an OpenEnv server, {OLDEST}?")
        observation = page.get("observation")
        self.observation_schema = observation if isinstance(observation, dict) else {}
        return action

    async def description(self) -> tuple[str, str]:
        """The environment's name and description, its address where it has none. Raises NotYet."""
        try:
            page = await self._page("metadata")
        except NotOpenEnv:
            page = {}
        return str(page.get("name") or self.url), str(page.get("description") or "")

    async def begin(self, arguments: Mapping[str, object]) -> tuple["Session", Reply]:
        """A session and its first observation. Raises SessionLost when no session became free in time, for this caller
        or another, and StepFailed when the environment's reset raised.
        """
        started, pause = time.monotonic(), FIRST_PAUSE_S
        why = "all sessions are in use"
        while True:
            await self._places.take(partial(self._expire, started, why))
            try:
                session = await self._connect()
                try:
                    first = await session.reset(arguments)
                except BaseException:
                    await session.close()
                    raise
            except NoSession as error:
                self._places.learn(error.limit)
                self._places.release()
                why = str(error)
            except BaseException:
                self._places.release()
                raise
            else:
                self._last_begun = time.monotonic()
                return session, first
            self._expire(started, why)
            await asyncio.sleep(pause)
            pause = min(LAST_PAUSE_S, pause * GROWTH)

    async def end(self, session: "Session") -> None:
        """Give the session back."""
        try:
            await session.close()
        finally:
            self._places.release()

    async def close(self) -> None:
        """Close every connection."""
        if self._http is not None:
            await self._http.close()
            self._http = None

    def _expire(self, started: float, why: str) -> None:
        """Tell the log now and then who waits. Raises SessionLost once nobody has got a session for too long."""
        now, limit_s = time.monotonic(), self.limits.session_wait_s
        if now - max(started, self._last_begun) >= limit_s:
            raise SessionLost(
                f"no session of {self.url} became free for {limit_s:g} s ({why}); look at that server, let it take more"
                " sessions (max_concurrent_envs), or raise --env.session_wait"
            )
        if now - self._told >= REPORT_EVERY_S:
            self._told = now
            log.info(
                "Waiting for a session of %s, at most %.0f s: %d in use, %d waiting (%s)",
                self.url,
                limit_s,
                self._places.taken,
                self._places.waiting,
                why,
            )

    async def _connect(self) -> "Session":
        try:
            async with asyncio.timeout(self.limits.reply_s):
                socket = await self._client().ws_connect(
                    f"{self.url}/ws",
                    headers=self._headers,
                    max_msg_size=self.limits.message_bytes,
                    timeout=aiohttp.ClientWSTimeout(ws_close=CLOSE_LIMIT_S),
                )
        except NotOpenEnv as error:  # a redirect
            raise SessionLost(str(error)) from None
        except aiohttp.WSServerHandshakeError as error:
            raise NoSession(f"{self.url}/ws replied {error.status}") from None
        except (aiohttp.ClientError, OSError) as error:
            raise NoSession(str(error) or f"no connection within {self.limits.reply_s:g} s") from None
        return Session(socket, self.url, self.limits.reply_s)

    async def _page(self, name: str) -> Mapping[str, object]:
        url = f"{self.url}/{name}"
        try:
            async with asyncio.timeout(HTTP_LIMIT_S), self._client().get(url, headers=self._headers) as reply:
                if reply.status >= 500:
                    raise NotYet(f"it replied {reply.status}")
                if reply.status in (401, 403):
                    raise NotOpenEnv(f"{url} replied {reply.status}: give its token as OPENENV_TOKEN (--env.token)")
                if reply.status != 200:
                    raise NotOpenEnv(f"{url} replied {reply.status}; is that an OpenEnv server, {OLDEST}?")
                with at_most(PAGE_BYTES):
                    page = _object(await reply.read())
        except ReplyTooLong:
            raise NotOpenEnv(f"{url} sends more than {PAGE_BYTES:,} bytes; is that an OpenEnv server?") from None
        except (aiohttp.ClientError, OSError) as error:
            raise NotYet(str(error) or f"no reply within {HTTP_LIMIT_S:.0f} s") from None
        if page is None:
            raise NotOpenEnv(f"{url} is not a JSON object; is that an OpenEnv server?")
        return page

    def _client(self) -> aiohttp.ClientSession:
        if self._http is None:
            trace = aiohttp.TraceConfig()
            trace.on_request_redirect.append(_refuse_redirect)
            self._http = aiohttp.ClientSession(
                response_class=BoundedResponse,
                trust_env=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                trace_configs=[trace],
                connector=aiohttp.TCPConnector(limit=0),  # `Places` limits the sessions
            )
        return self._http


class Session:
    """An open WebSocket; requests are answered in their order, one at a time."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, url: str, reply_s: float) -> None:
        self._socket = socket
        self._url = url
        self._reply_s = reply_s
        self._received: asyncio.Queue[str | SessionLost] = asyncio.Queue(REPLIES_KEPT)
        self._is_lost = False
        self._reader = asyncio.create_task(self._read())

    async def reset(self, arguments: Mapping[str, object]) -> Reply:
        """Begin an episode. Raises NoSession where the server refuses the session, or breaks it off before it answers;
        SessionLost, StepFailed.
        """
        try:
            return self._observed(await self._ask("reset", arguments))
        except ActionRefused as error:
            raise StepFailed(f"reset: {error}") from None

    async def step(self, action: Mapping[str, object]) -> Reply:
        """Act. Raises ActionRefused, StepFailed, SessionLost."""
        try:
            return self._observed(await self._ask("step", action))
        except NoSession as error:
            raise self._lost(str(error)) from None

    async def state(self) -> Mapping[str, Any]:
        """The environment's state. Raises SessionLost, StepFailed."""
        try:
            return await self._ask("state", None)
        except (NoSession, ActionRefused) as error:
            raise self._lost(str(error)) from None

    async def close(self) -> None:
        """Leave, and wait a moment until the server has ended the session: it then takes the next one."""
        try:
            if not self._is_lost and not self._socket.closed:
                with contextlib.suppress(aiohttp.ClientError, OSError):  # TimeoutError is one
                    await self._socket.send_str('{"type": "close"}')
                    async with asyncio.timeout(CLOSE_LIMIT_S):
                        await asyncio.wait({self._reader})
        finally:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
            await self._socket.close()

    async def _read(self) -> None:
        """Keep the connection alive, and keep what arrives until it is asked for."""
        while True:
            message = await self._socket.receive()
            if message.type == aiohttp.WSMsgType.TEXT:
                await self._received.put(message.data)
                continue
            if message.type == aiohttp.WSMsgType.ERROR:
                why = str(self._socket.exception() or message.data)
            elif message.type == aiohttp.WSMsgType.BINARY:
                why = "it sent bytes"
            else:
                why = f"it closed the connection (code {self._socket.close_code})"
            await self._received.put(SessionLost(f"the session of {self._url} is lost: {why}"))
            return

    async def _ask(self, kind: str, data: Mapping[str, object] | None) -> Mapping[str, object]:
        """The data of the reply. Raises what the server reports."""
        request = {"type": kind} if data is None else {"type": kind, "data": data}
        try:
            async with asyncio.timeout(self._reply_s):
                # A refusal may be there before anything is sent, and then nothing can be.
                with contextlib.suppress(aiohttp.ClientError, ConnectionError):
                    await self._socket.send_str(json.dumps(request))
                received = await self._received.get()
        except TimeoutError:
            raise self._lost(f"{kind} was not answered within {self._reply_s:g} s (--env.reply_timeout)") from None
        if isinstance(received, SessionLost):
            self._is_lost = True
            if kind == "reset":  # nothing is lost yet: another session will do
                raise NoSession(str(received))
            raise received
        reply = _object(received)
        answer = None if reply is None else reply.get("data")
        if reply is None or not isinstance(answer, dict):
            raise self._lost(f"the answer to {kind} is not OpenEnv's: {shown(received)}")
        if reply.get("type") == "error":
            raise self._error(answer)
        return answer

    def _error(self, data: Mapping[str, object]) -> OpenEnvError:
        code, message = data.get("code"), shown(data.get("message"))
        if code == "CAPACITY_REACHED":
            limit, self._is_lost = data.get("max_sessions"), True
            return NoSession(message, limit if isinstance(limit, int) and limit > 0 else None)
        if code == "VALIDATION_ERROR":
            return ActionRefused(_what_is_wrong(data.get("errors")) or message)
        if code == "EXECUTION_ERROR":
            return StepFailed(f"the environment at {self._url} raised: {message}")
        self._is_lost = True
        if code == "SESSION_ERROR" and message.startswith(UNWRITABLE_ERROR):
            return ActionRefused("the environment does not accept this value", is_over=True)
        return SessionLost(f"{self._url} ended the session: {shown(code)}: {message}")

    def _observed(self, data: Mapping[str, object]) -> Reply:
        observation, reward = data.get("observation"), data.get("reward")
        if not isinstance(observation, dict):
            raise self._lost(f"an answer has no observation: {shown(data)}")
        if reward is not None:
            number = as_number(reward)
            if number is None:
                raise self._lost(f"a reward is not a finite number: {shown(reward)}")
            reward = number
        return Reply(observation, reward, data.get("done") is True)

    def _lost(self, why: str) -> SessionLost:
        self._is_lost = True
        return SessionLost(f"the session of {self._url} is lost: {why}")


class Places:
    """Who may have a session now, first come, first served. `limit` 0 is no limit, until the server names one."""

    def __init__(self, limit: int) -> None:
        self.taken = 0
        self._most = limit
        self._limit = limit
        self._queue: deque[asyncio.Future[None]] = deque()

    @property
    def waiting(self) -> int:
        """Return how many wait for a turn."""
        return len(self._queue)

    async def take(self, expire: Callable[[], None]) -> None:
        """Return when it is the caller's turn; `expire` is called every second until then, and may raise."""
        if self._is_free and not self._queue:
            self.taken += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        try:
            while not turn.done():
                expire()
                await asyncio.wait({turn}, timeout=LOOK_EVERY_S)
        except BaseException:
            if turn.done():
                self.release()
            else:
                self._queue.remove(turn)
            raise

    def release(self) -> None:
        """Give a place back."""
        self.taken -= 1
        self._hand_out()

    def learn(self, limit: int | None) -> None:
        """Take over the limit that the server reported."""
        if limit is not None and limit != self._limit:
            self._limit = min(limit, self._most or limit)

    @property
    def _is_free(self) -> bool:
        return not self._limit or self.taken < self._limit

    def _hand_out(self) -> None:
        while self._queue and self._is_free:
            self.taken += 1
            self._queue.popleft().set_result(None)


def as_number(value: object) -> float | None:
    """`value` as a finite number; None if it is not one. True and False count as 1 and 0."""
    if not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def shown(value: object) -> str:
    """Show in one short line what a server sent, for a log."""
    text = value if isinstance(value, str) else repr(value)
    return " ".join(text[: 2 * SHOWN_CHARACTERS].encode("ascii", "backslashreplace").decode().split())[
        :SHOWN_CHARACTERS
    ]


def _object(text: str | bytes) -> dict[str, object] | None:
    """A JSON object; None if it is not one."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _what_is_wrong(errors: object) -> str:
    """pydantic's errors in words: `number: Input should be a valid integer`."""
    reasons = []
    for error in errors[:ERRORS_SHOWN] if isinstance(errors, list) else []:
        if isinstance(error, dict):
            place = error.get("loc")
            where = ".".join(str(part) for part in place) if isinstance(place, list) else ""
            reasons.append(f"{shown(where)}: {shown(error.get('msg'))}" if where else shown(error.get("msg")))
    return "; ".join(reasons)


async def _refuse_redirect(session: object, context: object, params: aiohttp.TraceRequestRedirectParams) -> None:
    """Raise, before the redirect is followed."""
    reply = params.response
    raise NotOpenEnv(refused_redirect(str(params.url), reply.status, reply.headers.get("Location")) or "a redirect")
