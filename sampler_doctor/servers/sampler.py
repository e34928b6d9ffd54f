"""What a row asks of a server, and what it gets, whichever protocol the server speaks."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from atroposlib.clients.one_request import NoReply, request
from atroposlib.errors import WRONG_USE, AtroposError

CONNECT_S = 5.0
AFTER_SILENCE_S = 5.0  # for an answer of a server that has just let its time pass
MODELS_ROUTE, CHAT_ROUTE = "/v1/models", "/v1/chat/completions"
NOT_OFFERED = {400, 404, 405, 406, 415, 422, 501}
SHOWN_WORDS = 160
UNNAMED = -1  # in place of a token id, where the server names a token by a text that several tokens have
LEAST_LOGPROB = -1000.0  # below it a server means minus infinity

Body = Mapping[str, Any]


class CannotTest(AtroposError):
    """Is raised when no row can run: the server does not answer, or the model cannot be loaded."""

    exit_status = WRONG_USE


class NotOffered(Exception):
    """The server refuses a request, or its answer lacks what was asked for; the message has its words."""


class Refused(NotOffered):
    """The server wants another key for this route."""


class NotShown(Exception):
    """Nothing can be concluded here, for the reason that the message gives."""


class Broken(Exception):
    """The server failed or did not answer in time."""


@dataclass(frozen=True)
class Ask:
    """One request for `tokens` tokens behind `prompt`, which is token ids or text. `options` have the names of OpenAI's
    and vLLM's completions; `top` is how many log-probabilities to give at each token.
    """

    prompt: Sequence[int] | str
    tokens: int = 1
    temperature: float = 0.0
    top: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    of_prompt: bool = False
    model: str | None = None


@dataclass(frozen=True)
class Answer:
    """One sampled sequence: per token its id, its log-probability, and those of the most probable ones by id. `prompt`
    has those of the prompt's tokens, of which the first has none.
    """

    tokens: list[int]
    logprobs: list[float]
    top: list[dict[int, float]]
    finish: str | None = None
    prompt_tokens: int | None = None
    cached: int | None = None
    prompt: list[float | None] | None = None


class Sampler(ABC):
    """A server. Methods raise NotOffered and Broken."""

    protocol: str
    product: str  # that speaks the protocol first
    version_route: str
    imitation: str  # what a server without that route is called

    def __init__(self, url: str, key: str | None, answer_s: float) -> None:
        self.url = url.rstrip("/")
        self._key, self._answer_s = key, answer_s
        self._patience_s = answer_s  # for the next answer
        self.model = ""
        self.top = 1  # log-probabilities that a position can have, beside the sampled token's

    @abstractmethod
    def sample(self, ask: Ask) -> list[Answer]:
        """Return as many answers as `options["n"]`."""

    def version(self) -> str:
        """Return the server's name and version, as it gives them."""
        try:
            return f"{self.product} {self.get(self.version_route)['version']}"
        except (NotOffered, Broken, TypeError, KeyError):
            return self.imitation

    def longest(self) -> int | None:
        """Return the longest sequence that the server takes, in tokens; None if it does not report it."""
        try:
            with in_form(MODELS_ROUTE):
                cards = self.get(MODELS_ROUTE)["data"]
                own = [card for card in cards if card["id"] == self.model] or cards[:1]
                found = own[0].get("max_model_len") if own else None
                return int(found) if found else None
        except NotOffered:
            return None

    def first_model(self) -> str:
        """Return the name of the first model that the server lists."""
        with in_form(MODELS_ROUTE):
            return str(self.get(MODELS_ROUTE)["data"][0]["id"])

    @abstractmethod
    def load(self, directory: str) -> str:
        """Have the server load other weights by a route of its own, and return the route."""

    def chat(self, messages: Sequence[Mapping[str, str]], top: int) -> tuple[int | None, dict[str, float]]:
        """Return the number of prompt tokens, and the first token's log-probabilities by the token's name."""
        body = {"model": self.model, "messages": messages, "max_tokens": 1, "temperature": 0.0, "logprobs": True}
        with in_form(CHAT_ROUTE):
            reply = self.post(CHAT_ROUTE, {**body, "top_logprobs": top, "return_tokens_as_token_ids": True})
            with_ids = offered(reply["choices"][0].get("logprobs"), "log-probabilities of chat")
            names = {str(each["token"]): float(each["logprob"]) for each in with_ids["content"][0]["top_logprobs"]}
            return (reply.get("usage") or {}).get("prompt_tokens"), names

    def get(self, path: str) -> Any:
        """Return the JSON reply to a GET."""
        return self._reply("GET", path, None)

    def post(self, path: str, body: Body) -> Any:
        """Return the JSON reply to a POST."""
        return self._reply("POST", path, body)

    def _reply(self, method: str, path: str, body: Body | None) -> Any:
        try:
            limit = self._patience_s
            reply = request(
                method, self.url + path, connect_s=CONNECT_S, read_s=limit, whole_s=limit, key=self._key, body=body
            )
        except NoReply as error:
            if error.timed_out:
                self._patience_s = min(AFTER_SILENCE_S, self._answer_s)
            raise Broken(f"{method} {path}: {error.reason} (limit {limit:g} s)") from None
        self._patience_s = self._answer_s
        words = " ".join(reply.content[: 4 * SHOWN_WORDS].decode(errors="replace").split())[:SHOWN_WORDS]
        if reply.status in (401, 403):
            raise Refused(f"{path} answers {reply.status}: set VLLM_API_KEY to the server's key")
        if reply.status in NOT_OFFERED:
            raise NotOffered(f"{path} answers {reply.status}: {words}")
        if not 200 <= reply.status < 300:
            raise Broken(f"{path} answers {reply.status}: {words}")
        try:
            return msgspec.json.decode(reply.content or b"null")
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return words


@contextmanager
def in_form(path: str) -> Iterator[None]:
    """Read a reply of `path`. Raises Broken for one that is not what its API gives."""
    try:
        yield
    except (TypeError, LookupError, AttributeError, ValueError, OverflowError) as error:
        raise Broken(f"{path} does not answer in the form of its API ({type(error).__name__}: {error})") from None


def answers_of(path: str, ask: Ask, answers: Sequence[Answer]) -> list[Answer]:
    """Check that answers hold what they say, and are no more than were asked for. Raises Broken."""
    with in_form(path):
        whole = msgspec.convert([vars(answer) for answer in answers], list[Answer])
        if not whole or any(not len(each.tokens) == len(each.logprobs) == len(each.top) for each in whole):
            raise ValueError("an answer with as many log-probabilities as tokens was expected")
        if len(whole) > (most := ask.options.get("n", 1)):
            raise ValueError(f"{len(whole)} answers where {most} was asked for")
        return whole


def offered(value: object, name: str) -> Any:
    """Return `value`. Raises NotOffered where the reply has none."""
    if value is None:
        raise NotOffered(f"the answer has no {name}")
    return value


def finite(logprobs: Mapping[int, float | None]) -> dict[int, float]:
    """Leave out tokens that cannot be sampled: minus infinity, however the server writes it."""
    return {token: value for token, value in logprobs.items() if value is not None and value > LEAST_LOGPROB}
