"""The endpoint's routes: three APIs for agents, and sessions for who trains them.

    POST /v1/chat/completions  /v1/responses  /v1/messages        a call of the model, as a whole or as a stream
    POST /v1/messages/count_tokens  /v1/responses/input_tokens    GET /v1/models  /v1/models/NAME  /health
    GET, POST /sessions   GET, DELETE /sessions/ID   GET /sessions/ID/nodes   POST /sessions/ID/reward
    DELETE /sessions?id=ID&id=ID

A call names its session by its key, by the header X-Session-Id or proxy_x_session_id, or by the address: all of /v1 is
at /sessions/ID/v1, too. With X-Parent-Session-Id, the session is a child of that one, and its first call makes it.
Under a session's key, a name that the agent made up is that session's own. Errors have the form of the API that was
called.
"""

import asyncio
import hmac
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import msgspec
from jinja2 import TemplateError
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Scope

from atroposlib.agents.dialects import chat, messages, responses
from atroposlib.agents.flags import BODY_MB, KEEP_ALIVE_S
from atroposlib.agents.model_call import (
    BAD_REQUEST,
    FORBIDDEN,
    NOT_FOUND,
    TOO_LARGE,
    UNAUTHORISED,
    JsonObject,
    ModelCall,
    ModelReply,
    Refused,
    checked,
    require,
)
from atroposlib.agents.sessions import NAME_CHARS, Session, Sessions, SessionSettings, nodes_as_json
from atroposlib.api.journal.journal_file import JournalError
from atroposlib.envs.server_handling.errors import PermanentServerError, ServerError
from atroposlib.http_guard import HostGuard, OwnHosts
from atroposlib.logs import get_logger

log = get_logger(__name__)
Handler = Callable[[Request], Awaitable[Response]]

BODY_BYTES = BODY_MB << 20
CALLS = ("/chat/completions", "/responses", "/messages")
WRONG_BASE = "; an OpenAI base URL ends in /v1, an Anthropic one does not"
BODIES = 16
SHARE = 4  # of these, the part that one key may take: an agent that sends them slowly keeps no other out
RETRY_S = 1
EXPIRED_EVERY_S = 1.0
ANY_MODEL = "*"
NOT_ALLOWED, BAD_GATEWAY, UNAVAILABLE, INTERNAL = 405, 502, 503, 500
TOO_LONG = ("context length", "max_model_len", "maximum model length")
NAMED_BY = ("x-session-id", "proxy_x_session_id", "proxy-x-session-id")


@dataclass(frozen=True)
class EndpointSettings:
    """`token` opens everything, a session's key only this session. Without a token, whoever reaches the endpoint may
    use any session that it can name. `models` are other names of the model; "*" is any.
    """

    model: str
    models: tuple[str, ...] = ()
    token: str = ""
    hosts: OwnHosts = field(default_factory=OwnHosts)
    body_bytes: int = BODY_BYTES
    bodies: int = BODIES  # of that size, which are read at a time
    keep_alive_s: float = KEEP_ALIVE_S


class SessionRequest(BaseModel):
    """Body of POST /sessions."""

    model_config = ConfigDict(extra="forbid")

    id: str | None = Field(default=None, pattern=rf"^[^/\s\x00-\x1f]{{0,{NAME_CHARS}}}$")  # a part of an address
    reopen: bool = False  # the session of this id, if it has not ended
    settings: SessionSettings = SessionSettings()


def create_app(sessions: Sessions, settings: EndpointSettings) -> Starlette:
    """The endpoint before `sessions`, of which it ends the idle ones while it runs."""
    endpoint = Endpoint(sessions, settings)
    return Starlette(
        routes=list(endpoint.routes()),
        exception_handlers={NOT_FOUND: no_such_route, NOT_ALLOWED: no_such_route},
        middleware=[Middleware(HostGuard, hosts=settings.hosts, bears_token=endpoint.opens_anything)],
        lifespan=endpoint.lifespan,
    )


@dataclass(frozen=True)
class Endpoint:
    """See the module's head."""

    sessions: Sessions
    settings: EndpointSettings
    process: str = field(default_factory=lambda: uuid.uuid4().hex)
    # the key of each body that is not whole yet, and the bytes that have come
    reading: dict[Request, tuple[str, int]] = field(default_factory=dict)

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """End the idle sessions every second."""
        self.sessions.prepare()
        expiring = asyncio.create_task(self._expire())
        yield
        expiring.cancel()
        with suppress(asyncio.CancelledError):
            await expiring

    def routes(self) -> Iterator[Route]:
        """All routes; those under /v1 a second time, under the address of a session."""
        calls: list[tuple[str, str, ModuleType, Handler]] = [
            ("POST", "/v1/chat/completions", chat, self._chat),
            ("POST", "/v1/responses", responses, self._responses),
            ("POST", "/v1/messages", messages, self._messages),
            ("POST", "/v1/messages/count_tokens", messages, self._count_messages),
            ("POST", "/v1/responses/input_tokens", responses, self._count_responses),
            ("GET", "/v1/models", chat, self._models),
            ("GET", "/v1/models/{model:path}", chat, self._model),
        ]
        for method, path, dialect, handler in calls:
            for prefix in ("", "/sessions/{session}"):
                yield Route(prefix + path, answered_in(dialect, handler), methods=[method])
        for method, path, handler in (
            ("GET", "/health", self._health),
            ("POST", "/sessions", self._create),
            ("GET", "/sessions", self._list),
            ("DELETE", "/sessions", self._end_all),
            ("GET", "/sessions/{session}", self._show),
            ("GET", "/sessions/{session}/nodes", self._nodes),
            ("POST", "/sessions/{session}/reward", self._reward),
            ("DELETE", "/sessions/{session}", self._end),
        ):
            yield Route(path, answered_in(chat, handler), methods=[method])

    def opens_anything(self, scope: Scope) -> bool:
        """Whether a request has the endpoint's token."""
        return bool(self.settings.token) and _same(_key(Headers(scope=scope)), self.settings.token)

    # --- calls of the model ------------------------------------------------------------------------------------------

    async def _chat(self, request: Request) -> Response:
        body, nbytes = await self._body(request)
        session = await self._session(request, body)
        return await self._reply(chat, session, chat.read(body), nbytes)

    async def _responses(self, request: Request) -> Response:
        body, nbytes = await self._body(request)
        session = await self._session(request, body)
        return await self._reply(responses, session, responses.read(body, session.conversation_of), nbytes)

    async def _messages(self, request: Request) -> Response:
        body, nbytes = await self._body(request)
        session = await self._session(request, body)
        return await self._reply(messages, session, messages.read(body), nbytes)

    async def _count_messages(self, request: Request) -> Response:
        body, nbytes = await self._body(request)
        session = await self._session(request, body)
        return JSONResponse({"input_tokens": await session.count(messages.read(body, counts=True), nbytes)})

    async def _count_responses(self, request: Request) -> Response:
        body, nbytes = await self._body(request)
        session = await self._session(request, body)
        counted = await session.count(responses.read(body, session.conversation_of), nbytes)
        return JSONResponse({"object": "response.input_tokens", "input_tokens": counted})

    async def _reply(self, dialect: ModuleType, session: Session, call: ModelCall, nbytes: int) -> Response:
        answering = asyncio.create_task(session.answer(call, nbytes))
        if not call.stream:
            return JSONResponse(dialect.reply(call, await answering))
        # What fails at once gets its status; what takes longer is a stream that is kept alive, and may end in an error.
        answering.add_done_callback(_told)
        await asyncio.wait([answering], timeout=self.settings.keep_alive_s)
        if answering.done():
            answering.result()
        stream = _stream(dialect, call, answering, self.settings.keep_alive_s)
        return StreamingResponse(stream, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    async def _models(self, request: Request) -> Response:
        names = [self.settings.model, *(name for name in self.settings.models if name != ANY_MODEL)]
        shown = [_card(name) for name in names]
        return JSONResponse(
            {"object": "list", "data": shown, "has_more": False, "first_id": names[0], "last_id": names[-1]}
        )

    async def _model(self, request: Request) -> Response:
        self._check_model(request.path_params["model"])
        return JSONResponse(_card(request.path_params["model"]))

    # --- sessions ----------------------------------------------------------------------------------------------------

    async def _health(self, request: Request) -> Response:
        return JSONResponse(
            {
                "status": "ok",
                "model": self.settings.model,
                "sessions": len(self.sessions.by_id),
                "process": self.process,
            }
        )

    async def _create(self, request: Request) -> Response:
        self._check_token(request)
        body, _ = await self._body(request, may_be_empty=True)
        asked = SessionRequest.model_validate(body)
        known = self.sessions.by_id.get(asked.id) if asked.reopen and asked.id is not None else None
        if known is not None and known.parent is not None:
            raise Refused(FORBIDDEN, f"session {asked.id!r:.80} is a sub-agent's: name another")
        session = known or await self.sessions.create(asked.settings, asked.id)
        return JSONResponse(session.description() | {"key": session.record.key}, 200 if known else 201)

    async def _list(self, request: Request) -> Response:
        self._check_token(request)
        return JSONResponse({"sessions": [session.description() for session in self.sessions.by_id.values()]})

    async def _show(self, request: Request) -> Response:
        return JSONResponse((await self._session(request, {})).description())

    async def _nodes(self, request: Request) -> Response:
        self._check_token(request)
        session = self.sessions.get(request.path_params["session"])
        told = {"nodes": nodes_as_json(session.nodes), "messages": session.conversation}
        return JSONResponse(session.description() | told)

    async def _reward(self, request: Request) -> Response:
        self._check_token(request)
        body, _ = await self._body(request)
        value = checked(body, "reward", int, float)
        if value is None:
            raise Refused(BAD_REQUEST, "the body has no reward: expected a number", param="reward")
        session = self.sessions.get(request.path_params["session"])
        await session.reward(float(value))
        return JSONResponse(session.description())

    async def _end(self, request: Request) -> Response:
        self._check_token(request)
        session = self.sessions.get(request.path_params["session"])
        await self.sessions.end([session])
        return JSONResponse(session.description())

    async def _end_all(self, request: Request) -> Response:
        """End those that are named, all or none. One that has ended before is no error: a request may be repeated."""
        self._check_token(request)
        named = [self.sessions.by_id.get(each) for each in request.query_params.getlist("id")]
        there = [session for session in named if session is not None]
        await self.sessions.end(there)
        return JSONResponse({"ended": [session.record.id for session in there]})

    # --- who may do what ---------------------------------------------------------------------------------------------

    async def _session(self, request: Request, body: JsonObject) -> Session:
        """The session of a request. Raises Refused for one that there is not, or that its key does not open."""
        self._check_model(body.get("model"))
        key = _key(request.headers)
        own = self.sessions.by_key.get(key)
        at = request.path_params.get("session")
        named = at or _named(request.headers, body)
        self._check_key(request)
        if own is None and named is None:
            raise Refused(
                UNAUTHORISED,
                "the request names no session: use a session's key as the API key, its address, or X-Session-Id",
            )
        above = request.headers.get("x-parent-session-id")
        if named is not None and above not in (None, named):
            return await self.sessions.child(named, self._known(own, str(above), is_exact=own is None))
        return self._known(own, named, is_exact=own is None or at is not None)

    def _known(self, own: Session | None, name: str | None, *, is_exact: bool) -> Session:
        """The session of this name: a session's id, or what the agent with its key calls itself or a child of its own.
        Raises Refused if there is none, and for a session that the key does not open.
        """
        if own is not None and name is None:
            return own
        if own is not None and not is_exact and name not in self.sessions.by_id:
            return next((each for each in own.family if each.record.id.endswith(f":{name}")), own)
        session = self.sessions.get(str(name))
        if own is not None and own not in session.line:
            raise Refused(FORBIDDEN, f"this key opens session {own.record.id} alone")
        return session

    def _check_key(self, request: Request) -> None:
        key = _key(request.headers)
        if self.settings.token and key not in self.sessions.by_key and not _same(key, self.settings.token):
            raise Refused(UNAUTHORISED, "the API key is neither a session's nor the endpoint's token")

    def _check_token(self, request: Request) -> None:
        if self.settings.token and not self.opens_anything(request.scope):
            raise Refused(UNAUTHORISED, "only the endpoint's token opens this")
        if _key(request.headers) in self.sessions.by_key:
            raise Refused(FORBIDDEN, "a session's key opens nothing but its calls of the model")

    def _check_model(self, name: object) -> None:
        known = (None, self.settings.model, *self.settings.models)
        if ANY_MODEL not in self.settings.models and name not in known:
            raise Refused(
                NOT_FOUND,
                f"The model '{name!s:.80}' does not exist: this endpoint serves '{self.settings.model}';"
                " --also-model '*' takes any name",
                code="model_not_found",
                param="model",
            )

    async def _body(self, request: Request, may_be_empty: bool = False) -> tuple[JsonObject, int]:
        """A body of JSON, and its bytes. Nobody's body is read who has no key. Raises Refused."""
        self._check_key(request)
        try:
            content = await self._content(request)
            if may_be_empty and not content:
                return {}, 0
            body = require(msgspec.json.decode(content))
            msgspec.msgpack.encode(body)  # an integer that no journal holds, before anything is sampled
        except (ValueError, OverflowError, RecursionError) as error:
            raise Refused(BAD_REQUEST, f"the body is not JSON that can be read: {error}") from error
        finally:
            self.reading.pop(request, None)
        return body, len(content)

    async def _content(self, request: Request) -> bytearray:
        content, most, key = bytearray(), self.settings.body_bytes, _key(request.headers)
        most_of_all, most_of_key = most * self.settings.bodies, most * max(1, self.settings.bodies // SHARE)
        async for chunk in request.stream():
            content += chunk
            self.reading[request] = key, len(content)
            if len(content) > most:
                raise Refused(TOO_LARGE, f"the body is larger than {most:,} bytes: shorten it")
            of_key = sum(nbytes for other, nbytes in self.reading.values() if other == key)
            if of_key > most_of_key or sum(nbytes for _, nbytes in self.reading.values()) > most_of_all:
                raise Refused(UNAVAILABLE, "the endpoint is reading as many bodies as it can hold: send it again")
        return content

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(EXPIRED_EVERY_S)
            try:
                await self.sessions.expire()
            except JournalError as error:
                log.error("Sessions cannot be ended: %s", error)


def answered_in(dialect: ModuleType, handler: Handler) -> Handler:
    """Return `handler`, whose errors have the dialect's form."""

    async def answered(request: Request) -> Response:
        try:
            return await handler(request)
        except ClientDisconnect:
            return Response(status_code=BAD_REQUEST)
        except Exception as error:
            status, body = _error(dialect, error)
            return JSONResponse(body, status, {"Retry-After": str(RETRY_S)} if status == UNAVAILABLE else None)

    return answered


async def no_such_route(request: Request, error: Exception) -> Response:
    """The error for an address or a method that there is not, in the form of the API that was called."""
    assert isinstance(error, HTTPException)
    dialect = messages if "/v1/messages" in request.url.path else chat
    is_call = request.url.path.endswith(CALLS)
    said = f"{error.detail}: {request.method} {request.url.path:.200}{WRONG_BASE if is_call else ''}"
    return JSONResponse(dialect.error(error.status_code, said), error.status_code, error.headers)


def _error(dialect: ModuleType, error: BaseException) -> tuple[int, Any]:
    """(status, body) of an error. Raises what is no request's and no server's fault."""
    match error:
        case Refused():
            return error.status, dialect.error(error.status, error.message, error.code, error.param)
        case ValidationError():
            said = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
            return BAD_REQUEST, dialect.error(BAD_REQUEST, said)
        case PermanentServerError() | ValueError() | TemplateError():
            text = str(error)
            code = "context_length_exceeded" if any(words in text for words in TOO_LONG) else None
            return BAD_REQUEST, dialect.error(BAD_REQUEST, text, code)
        case ServerError():
            return BAD_GATEWAY, dialect.error(BAD_GATEWAY, str(error))
        case JournalError():
            return UNAVAILABLE, dialect.error(UNAVAILABLE, str(error))
    log.error("A request failed", exc_info=error)
    return INTERNAL, dialect.error(INTERNAL, f"the endpoint failed ({type(error).__name__}): see its log")


def _told(answering: "asyncio.Task[ModelReply]") -> None:
    """Look at the error of a call, which nobody is told whose agent has gone."""
    if not answering.cancelled():
        answering.exception()


async def _stream(
    dialect: ModuleType, call: ModelCall, answering: "asyncio.Task[ModelReply]", keep_alive_s: float
) -> AsyncIterator[bytes]:
    while not answering.done():
        yield _event(dialect.PING) if dialect.PING else b": keep-alive\n\n"
        await asyncio.wait([answering], timeout=keep_alive_s)
    if (error := answering.exception()) is not None:
        yield _event(dialect.error_event(_error(dialect, error)[1]))
        return
    for event in dialect.events(call, answering.result()):
        yield _event(event)


def _event(event: chat.Event) -> bytes:
    name, data = event
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    return f"{f'event: {name}' + chr(10) if name else ''}data: {text}\n\n".encode()


def _card(name: str) -> JsonObject:
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "display_name": name,
        "created": 0,
        "created_at": "1970-01-01T00:00:00Z",
        "owned_by": "atropos",
    }


def _key(headers: Headers) -> str:
    return headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ").strip()


def _named(headers: Headers, body: JsonObject) -> str | None:
    names = [headers.get(name) for name in NAMED_BY]
    given = body.get("proxy_x_session_id")
    return next((name for name in names if name), given if isinstance(given, str) else None)


def _same(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode(), expected.encode())
