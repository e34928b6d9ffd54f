"""Keys and values are shared by the requests of conversations that began at the same policy version, and by no others.

vLLM's prefix cache finds blocks by a hash of their tokens and of the request's `cache_salt`. The API process puts the
conversation into that field (see session.py); in the engine process, which knows the version that it computes with,
`Salts` replaces it by the version at which the conversation began. A request that a sync overtakes in the queue, before
its first token was read, begins at the new version.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakKeyDictionary

import msgspec
from msgspec import Struct

SESSIONS_KEPT = 65_536  # conversations whose beginning is known; a forgotten one begins again


class Tag(Struct, array_like=True, frozen=True):
    """What the API process tells of a request, in place of its cache salt."""

    session: str | None  # the conversation; None: the request is one of its own
    salt: str | None  # the client's


def tagged(session: str | None, salt: str | None) -> str:
    """Encode a `Tag`."""
    return msgspec.json.encode(Tag(session, salt)).decode()


class Request(Protocol):
    """vLLM's request, as the engine process has it."""

    cache_salt: str | None


@dataclass(slots=True)
class _Admitted:
    tag: Tag
    opens: bool  # nothing of its conversation had come before


class Salts:
    """The cache salts of one engine. `resalted` is called for each request whose salt has changed after admission."""

    def __init__(self, resalted: Callable[[Request], None], most: int = SESSIONS_KEPT) -> None:
        self._resalted = resalted
        self._most = most
        self._version = ""
        self._resets = 0
        self._began: OrderedDict[str, str] = OrderedDict()  # by session
        self._admitted = WeakKeyDictionary[Request, _Admitted]()  # as long as the engine has the request

    def admit(self, request: Request) -> None:
        """Give a request that comes to the engine the salt of its conversation. Raises msgspec.DecodeError for one that
        carries no tag.
        """
        tag = msgspec.json.decode(request.cache_salt or "", type=Tag)
        opens = tag.session not in self._began
        if opens:
            self._begin(tag.session)
        self._admitted[request] = _Admitted(tag, opens)
        request.cache_salt = self._salt(tag)

    def serve(self, version: str, requests: Iterable[tuple[Request, bool]]) -> None:
        """The engine computes with `version` from now on. `requests` are those that it has, each with whether it has
        been read, if only in part.
        """
        self._version = version
        unread: list[tuple[Request, _Admitted]] = []
        begun: set[str | None] = set()
        for request, read in requests:
            admitted = self._admitted[request]
            if read:
                begun.add(admitted.tag.session)
            else:
                unread.append((request, admitted))
        overtaken = {each.tag.session for _, each in unread if each.opens} - (begun - {None})
        for session in overtaken:
            self._begin(session)
        for request, admitted in unread:
            if admitted.opens if admitted.tag.session is None else admitted.tag.session in overtaken:
                request.cache_salt = self._salt(admitted.tag)
                self._resalted(request)

    def reset(self) -> None:
        """The cache is empty. A later trainer may count its versions from the start again, so no salt of before comes
        back.
        """
        self._resets += 1
        self._began.clear()

    def _begin(self, session: str | None) -> None:
        if session is not None:
            self._began[session] = self._now
            self._began.move_to_end(session)
            if len(self._began) > self._most:
                self._began.popitem(last=False)

    @property
    def _now(self) -> str:
        return f"{self._resets}.{self._version}"

    def _salt(self, tag: Tag) -> str:
        began = self._now if tag.session is None else self._began.get(tag.session, self._now)
        return began if tag.salt is None else f"{began}:{tag.salt}"
