"""Errors between an environment and an inference server, by what the caller can do about them."""

import email.utils
import json
import math
import re
import time
from collections.abc import Mapping
from contextlib import suppress

from atroposlib.addresses import refused_redirect

RETRYABLE_STATUS = frozenset({408, 409, 425, 429})
TOO_MANY_REQUESTS = 429
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

    @property
    def is_refusal(self) -> bool:
        """Return whether the server is well, and refuses calls for a while, such as for their rate."""
        return self.retry_after_s > 0


class RateLimitedError(RetryableServerError):
    """The server got more calls than it takes (429)."""

    @property
    def is_refusal(self) -> bool:
        return True


class ServerUnreachableError(RetryableServerError):
    """The connection was refused or broke, or the server said that it does not serve (503): nothing should be sent
    there for a while.
    """


class NoLiveServerError(ServerError):
    """No server became live within the time that the configuration allows."""


def describe(error: BaseException) -> str:
    """Describe what happened, also for errors that come without words."""
    return str(error) or type(error).__name__


def reason_of(body: bytes) -> str:
    """The sentence in an error's body, in OpenAI's form or another."""
    text = body.decode(errors="replace")
    with suppress(ValueError, KeyError, TypeError, RecursionError):  # some other form: the body itself is the best
        text = str(json.loads(text)["error"]["message"])
    return " ".join(text.split())[:500] or "no reason given"


def hint(url: str, status: int) -> str:
    """Guess what is wrong where a living server does not know an address that is asked of it; empty if unknown."""
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
    retry_after_s = asked_pause_s(headers)
    if status == TOO_MANY_REQUESTS:
        return RateLimitedError(message, retry_after_s)
    if status == UNAVAILABLE:
        return ServerUnreachableError(message, retry_after_s)
    if status in RETRYABLE_STATUS or status >= 500:
        return RetryableServerError(message, retry_after_s)
    return WrongAddress(message) if hint(url, status) else PermanentServerError(message)


def asked_pause_s(headers: Mapping[str, str], now: float | None = None) -> float:
    """The seconds for which a server wants no call: its Retry-After, in seconds (also a fraction of one) or as a date,
    or OpenAI's retry-after-ms. 0 if it says nothing that can be read.
    """
    for name, unit_s in (("retry-after-ms", 0.001), ("Retry-After", 1.0)):
        with suppress(ValueError):
            seconds = float(headers.get(name, "")) * unit_s
            return seconds if math.isfinite(seconds) and seconds > 0 else 0.0
    with suppress(ValueError, TypeError, OverflowError):
        until = email.utils.parsedate_to_datetime(headers.get("Retry-After", "")).timestamp()
        told = headers.get("Date")  # the server's clock, if it shows it
        started = email.utils.parsedate_to_datetime(told).timestamp() if told else now or time.time()
        return max(0.0, until - started)
    return 0.0
