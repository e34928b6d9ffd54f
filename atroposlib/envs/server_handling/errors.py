"""Errors between an environment and an inference server, by what the caller can do about them."""

import json
import re
from collections.abc import Mapping
from contextlib import suppress

from atroposlib.redirects import refused_redirect

RETRYABLE_STATUS = frozenset({408, 409, 425, 429})
UNAVAILABLE = 503
NOT_FOUND = 404
_API_PATH = re.compile(r"(/v\d+)?(/models|/chat/completions|/completions)?$")  # what follows the right base_url's root


class ServerError(RuntimeError):
    """A request to an inference server failed."""


class PermanentServerError(ServerError):
    """The same request would fail again: a 4xx reply, or one that cannot be understood."""


class WrongAddress(PermanentServerError):
    """A server answers that does not have what is asked there, for a reason that the message names."""


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
    """What is probably wrong where a living server does not know an address that is asked of it; empty if unknown."""
    if status != NOT_FOUND:
        return ""
    if url.endswith("/generate"):
        return (
            "; that server gives no token ids: start example_trainer/vllm_api_server.py there, or evaluate with"
            " --openai.server_type openai"
        )
    if "/v1" in url:
        return ""
    return f"; did you forget /v1? Try --openai.base_url {_API_PATH.sub('', url)}/v1"


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
    return WrongAddress(message) if hint(url, status) else PermanentServerError(message)
