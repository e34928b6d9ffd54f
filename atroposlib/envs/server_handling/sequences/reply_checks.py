"""Replies of 200 from servers of other people, checked before anybody reads them.

    reply ──▶ `checked_reply` ──▶ a ChatCompletion or Completion whose choices have texts
                 ├── an error inside ──▶ the ServerError of the status that it names: a 503 is tried again
                 ├── no choice       ──▶ RetryableServerError
                 └── anything else   ──▶ PermanentServerError that names the server and shows what it sent

OpenAI's SDK validates nothing: choices may be None, a reply a string of HTML, a text a list of parts.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

from openai.types import Completion
from openai.types.chat import ChatCompletion
from pydantic import BaseModel

from atroposlib.envs.server_handling.errors import PermanentServerError, RetryableServerError, ServerError, status_error

SHOWN_CHARS = 200
LONGEST_ERROR_BYTES = 16384
# What errors are called that come without a status; of any other the server is thought to be at fault.
STATUS_OF_NAME = {
    "rate": 429,
    "quota": 429,
    "overloaded": 503,
    "unavailable": 503,
    "invalid": 400,
    "badrequest": 400,
    "context_length": 400,
    "authentication": 401,
    "permission": 403,
    "notfound": 404,
    "not_found": 404,
}
UNKNOWN_ERROR = 500

Reply = TypeVar("Reply", ChatCompletion, Completion)


def checked_reply(reply: Reply, url: str) -> Reply:
    """`reply` as every caller may read it: contents are text or None, and counts of tokens are numbers or missing.
    Raises ServerError.
    """
    if not isinstance(reply, BaseModel):
        raise _unreadable(reply, url)
    extra = reply.model_extra or {}
    choices = reply.choices
    if not choices:
        _raise_without_choices(reply, extra, url)
    if not isinstance(choices, list):
        raise _unreadable(choices, url)
    for choice in choices:
        if not isinstance(choice, BaseModel):
            raise _unreadable(choice, url)
        if error := (choice.model_extra or {}).get("error"):
            raise error_in(error, url)
        if getattr(choice, "finish_reason", None) == "error":
            raise RetryableServerError(f"{url} replied 200, and an answer that ended with an error")
        _settle_text(choice, url)
    if reply.usage is not None and not _counts_tokens(reply.usage):
        reply.usage = None
    return reply


def error_in(error: object, url: str) -> ServerError:
    """Make the error that a server means by an error inside a reply of 200."""
    message = error.get("message") if isinstance(error, Mapping) else error
    return status_error(url, _status_of(error), f"{_shown(message or error)} (an error inside a reply of 200)", {})


def raise_error_inside(content: bytes, url: str) -> None:
    """Raise what a body of 200 holds in place of a result, if it is an object with an `error`."""
    if b'"error"' not in content[:LONGEST_ERROR_BYTES] or len(content) > LONGEST_ERROR_BYTES:
        return
    reply = json.loads(content)
    if isinstance(reply, dict) and reply.get("error"):
        raise error_in(reply["error"], url)


def _status_of(error: object) -> int:
    if not isinstance(error, Mapping):
        return UNKNOWN_ERROR
    told = [error.get(key) for key in ("code", "status", "status_code", "type")]
    for value in told:
        if isinstance(value, (int, str)) and re.fullmatch(r"[45]\d\d", str(value)):
            return int(value)
    names = " ".join(value.lower() for value in told if isinstance(value, str))
    return next((status for name, status in STATUS_OF_NAME.items() if name in names), UNKNOWN_ERROR)


def _raise_without_choices(reply: BaseModel, extra: Mapping[str, object], url: str) -> NoReturn:
    if extra.get("error"):
        raise error_in(extra["error"], url)
    if "choices" in reply.model_fields_set:
        raise RetryableServerError(f"{url} replied 200 without any choice")
    if extra.get("message") or extra.get("detail"):  # as vLLM and FastAPI wrote errors
        raise error_in({**extra, "message": extra.get("message") or extra.get("detail")}, url)
    raise _unreadable(reply.model_dump(exclude_unset=True, warnings=False), url)


def _settle_text(choice: Any, url: str) -> None:
    """Make the text of a choice a string, or None where a chat's message may have none."""
    if hasattr(choice, "message"):
        message = choice.message
        if not isinstance(message, BaseModel):
            raise _unreadable(message, url)
        message.content = _text_of(message.content, url)  # type: ignore[attr-defined]
        return
    choice.text = _text_of(getattr(choice, "text", None), url) or ""


def _text_of(content: object, url: str) -> str | None:
    """Return the text of a string, or of a list of parts."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _unreadable(content, url)
    parts = [part.get("text") or "" if isinstance(part, Mapping) else part for part in content]
    if not all(isinstance(part, str) for part in parts):
        raise _unreadable(content, url)
    return "".join(parts)


def _counts_tokens(usage: object) -> bool:
    counts = [getattr(usage, name, None) for name in ("prompt_tokens", "completion_tokens")]
    return all(isinstance(count, int) and count >= 0 for count in counts)


def _unreadable(found: object, url: str) -> PermanentServerError:
    return PermanentServerError(
        f"{url} replied 200 with something other than a completion: {_shown(found)}; does it speak OpenAI's API?"
    )


def _shown(found: object) -> str:
    text = " ".join((found if isinstance(found, str) else repr(found)).split())
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."
