"""Errors between an environment and an inference server, by what the caller can do about them."""

import json
from collections.abc import Mapping
from contextlib import suppress

from atroposlib.redirects import refused_redirect

RETRYABLE_STATUS = frozenset({408, 409, 425, 429})
UNAVAILABLE = 503


class ServerError(RuntimeError):
    """A request to an inference server failed."""


class PermanentServerError(ServerError):
    """The same request would fail again: a 4xx reply, or one that cannot be understood."""


class RetryableServerError(ServerError):
    """The same request may succeed later or elsewhere: 5xx, 429, a timeout. `retry_after_s` is the server's own
    wish.
    """

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ServerUnreachableError(RetryableServerError):
    """The connection was refused or broke, or the server said that it does not serve (503): nothing should be sent
    there for a while.
    """


class NoLiveServerError(ServerError):
    """No server became live within the time that the configuration allows."""


def describe(error: BaseException) -> str:
    """What happened, also for the errors that come without words."""
    return str(error) or type(error).__name__


def reason_of(body: bytes) -> str:
    """The sentence in an error's body, in OpenAI's form or another."""
    text = body.decode(errors="replace")
    with suppress(ValueError, KeyError, TypeError, RecursionError):  # some other form: the body itself is the best
        text = str(json.loads(text)["error"]["message"])
    return " ".join(text.split())[:500] or "no reason given"


def hint(url: str, status: int) -> str:
    """What is probably wrong where a living server does not know an address of OpenAI's API."""
    return "; did you forget /v1 at the end of --openai.base_url?" if status == 404 and "/v1" not in url else ""


def status_error(url: str, status: int, body: str, headers: Mapping[str, str]) -> ServerError:
    """The error for a reply that is not 2xx."""
    if redirected := refused_redirect(url, status, headers.get("Location")):
        return PermanentServerError(redirected)
    message = f"{url} replied {status}: {' '.join(body.split())[:500]}{hint(url, status)}"
    retry_after = headers.get("Retry-After", "")
    # its other form, a date, is left to the caller's own backoff
    retry_after_s = float(retry_after) if retry_after.isdecimal() else 0.0
    if status == UNAVAILABLE:
        return ServerUnreachableError(message, retry_after_s)
    if status in RETRYABLE_STATUS or status >= 500:
        return RetryableServerError(message, retry_after_s)
    return PermanentServerError(message)
