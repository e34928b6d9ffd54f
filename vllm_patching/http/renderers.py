"""vLLM's own token route in the form that the package `renderers` reads; verifiers and prime-rl sample through that.

    POST /renderers/inference/v1/generate   ──▶ vLLM's /inference/v1/generate, and "token": "token_id:N" in each
                                                log-probability, which renderers 0.1.12 demands and vLLM 0.32 omits
    GET  /renderers/v1/models               ──▶ vLLM's /v1/models
    GET  /renderers/v1/sessions/{id}        the policy versions of each reply to requests with `X-Session-ID: id`

A trace of verifiers has no field for policy versions, so the server keeps them. It identifies a reply by the hash of
its sampled ids, because the calls of one session may overlap.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import Request, Response
from msgspec import Struct
from starlette.types import Message

from atroposlib.wire.bridge import AdapterOffer
from atroposlib.wire.sessions import SESSION_HEADER, TOKEN_ROUTE, Call, digest
from vllm_patching.compat import vllm_engine
from vllm_patching.engines.adapters import AdapterEngine
from vllm_patching.engines.base import Refused
from vllm_patching.engines.session import Sessions
from vllm_patching.kv_cache.session import LONGEST_SESSION_ID, session_of

CALLS_KEPT = 65_536
UNFINISHED = {"abort", "error"}  # finish reasons of sequences that vLLM gave up


class Conversations:
    """The calls of each session; the least recently used session is forgotten first."""

    def __init__(self, most: int = CALLS_KEPT) -> None:
        self._most = most
        self._count = 0
        self._calls: OrderedDict[str, list[Call]] = OrderedDict()

    def note(self, session: str, calls: Sequence[Call]) -> None:
        """Keep what one request of `session` sampled."""
        self._calls.setdefault(session, []).extend(calls)
        self._calls.move_to_end(session)
        self._count += len(calls)
        while self._count > self._most and len(self._calls) > 1:
            _, forgotten = self._calls.popitem(last=False)
            self._count -= len(forgotten)

    def calls(self, session: str) -> list[Call]:
        """Return what `session` sampled, in the order of the replies; nothing for one that is unknown or forgotten."""
        return self._calls.get(session, [])


class _Span(Struct):
    version: str
    start: int


class _Choice(Struct):
    token_ids: list[int]
    finish_reason: str | None = None
    weight_versions: list[_Span] | None = None


class _Reply(Struct):
    choices: list[_Choice]


class _Asked(Struct):
    model: str | None = None


async def run_token_route(request: Request, sessions: Sessions, conversations: Conversations) -> Response:
    """vLLM's reply, with the fields that renderers reads; keeps its versions. Raises Refused."""
    session = session_of(request.scope)
    if session is None and SESSION_HEADER in request.headers:
        raise Refused(f"{SESSION_HEADER}: expected 1 to {LONGEST_SESSION_ID} printable characters", 400)
    body = await request.body()
    started = _served_version(sessions, body)
    reply = await relayed(request, TOKEN_ROUTE, body)
    try:
        answer = msgspec.json.decode(reply.body, type=_Reply)
    except msgspec.DecodeError:  # an error, or a stream of events: passed on unchanged
        return reply
    if any(choice.finish_reason in UNFINISHED for choice in answer.choices):
        raise Refused(sessions.serving.gate.reason() or "vLLM gave up a sequence before its end", 503)
    if session is not None:
        conversations.note(session, _calls(answer.choices, sessions, started, _served_version(sessions, body)))
    return _with_token_names(reply)


async def relayed(request: Request, path: str, body: bytes = b"") -> Response:
    """Return what this app's route at `path` answers to the same request. That route notices a client that
    disconnects.
    """
    unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[Message] = []

    async def receive() -> Message:
        return unread.pop() if unread else await request.receive()

    async def send(message: Message) -> None:
        sent.append(message)

    # only the routes: authentication and gate are around the app, and this request has passed them
    await request.app.router({**request.scope, "path": path, "raw_path": path.encode()}, receive, send)
    content = b"".join(message.get("body", b"") for message in sent)
    reply = Response(content, sent[0]["status"] if sent else 500)
    reply.raw_headers = sent[0]["headers"] if sent else reply.raw_headers
    return reply


def _served_version(sessions: Sessions, body: bytes) -> int:
    """That of the policy which a request samples from now."""
    lora = sessions.engines.get(AdapterOffer)
    if not isinstance(lora, AdapterEngine):
        return sessions.serving.policy_version
    try:
        _, version = lora.resolve(msgspec.json.decode(body, type=_Asked).model)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, Refused):  # vLLM itself reports it
        return sessions.serving.policy_version
    return version


def _calls(choices: Sequence[_Choice], sessions: Sessions, started: int, finished: int) -> list[Call]:
    calls = []
    for choice in choices:
        if isinstance(sessions.engines.get(AdapterOffer), AdapterEngine):
            choice.weight_versions = None  # an adapter is not what vLLM labels
        spans = vllm_engine.version_spans(choice, started, finished)
        versions = [spans[0][1], spans[-1][1]] if spans else [started, finished]
        calls.append(Call(digest(choice.token_ids), versions, spans))
    return calls


def _with_token_names(reply: Response) -> Response:
    content: dict[str, Any] = msgspec.json.decode(reply.body)
    for choice in content["choices"]:
        entries = (choice.get("logprobs") or {}).get("content") or []
        for token, entry in zip(choice["token_ids"], entries, strict=False):
            entry["token"] = f"token_id:{token}"
    return Response(msgspec.json.encode(content), reply.status_code, media_type="application/json")
