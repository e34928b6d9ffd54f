"""OpenAI's /v1/completions, with vLLM's extensions where the server takes them.

Token ids come from `token_ids`, or from names like `token_id:42`; a plain OpenAI server names tokens by their text, of
which only those that belong to one id are used.
"""

from collections.abc import Callable, Mapping
from typing import Any

from sampler_doctor.servers.sampler import (
    UNNAMED,
    Answer,
    Ask,
    NotOffered,
    Sampler,
    answers_of,
    finite,
    in_form,
    offered,
)

ROUTE = "/v1/completions"
ID_NAME = "token_id:"
WITH_IDS = {"return_tokens_as_token_ids": True, "return_token_ids": True}
MOST_TOP = (-1, 20, 5, 1)  # log-probabilities to ask for; -1 is the whole vocabulary


class Completions(Sampler):
    """`names` returns the token id of each text that only one token has; it is called where the server gives no ids."""

    protocol = "completions"
    product, version_route, imitation = "vLLM", "/version", "OpenAI-compatible"

    def __init__(self, url: str, key: str | None, answer_s: float, names: Callable[[], Mapping[str, int]]) -> None:
        super().__init__(url, key, answer_s)
        self._names = names
        self._extensions: Mapping[str, Any] = WITH_IDS

    def open(self, name: str | None) -> None:
        """Find the model's name, and what of vLLM's extensions the server takes."""
        self.model = name or self.first_model()
        try:
            self._most_top()
        except NotOffered:
            self._extensions = {}
            self._most_top()

    def _most_top(self) -> None:
        for top in MOST_TOP:
            try:
                answer, *_ = self.sample(Ask([1], top=top))
            except NotOffered:
                if top == MOST_TOP[-1]:
                    raise
                continue
            if answer.top and answer.top[0]:
                self.top = len(answer.top[0]) if top < 0 else top
                return
        raise NotOffered("log-probabilities")

    def sample(self, ask: Ask) -> list[Answer]:
        if not ask.of_prompt:
            return self._answers(ask, {})
        for extra in ({"prompt_logprobs": 0}, {"echo": True}):
            try:
                answers = self._answers(ask, extra)
            except NotOffered:
                continue
            if answers[0].prompt is not None:
                return answers
        raise NotOffered("neither prompt_logprobs nor echo")

    def _answers(self, ask: Ask, extra: Mapping[str, object]) -> list[Answer]:
        body = {
            "model": ask.model or self.model,
            "prompt": ask.prompt if isinstance(ask.prompt, str) else list(ask.prompt),
            "max_tokens": ask.tokens,
            "temperature": ask.temperature,
            "logprobs": ask.top,
            **ask.options,
            **extra,
            **self._extensions,
        }
        with in_form(ROUTE):
            reply = self.post(ROUTE, body)
            usage = reply.get("usage") or {}
            answers = [self._answer(choice, ask, usage, echoed="echo" in extra) for choice in reply["choices"]]
        return answers_of(ROUTE, ask, answers)

    def _answer(self, choice: Any, ask: Ask, usage: Any, *, echoed: bool) -> Answer:
        given = offered(choice.get("logprobs"), "logprobs")
        logprobs = given["token_logprobs"]
        top = [self._by_id(each or {}) for each in given.get("top_logprobs") or [{}] * len(logprobs)]
        prompt = self._of_prompt(choice, ask)
        if echoed:
            behind = len(ask.prompt)
            prompt, logprobs, top = logprobs[:behind], logprobs[behind:], top[behind:]
        tokens = choice.get("token_ids")
        if tokens is None:
            tokens = [self._id(name) for name in given["tokens"][len(given["tokens"]) - len(logprobs) :]]
        details = usage.get("prompt_tokens_details") or {}
        return Answer(
            tokens,
            logprobs,
            top,
            choice.get("finish_reason"),
            usage.get("prompt_tokens"),
            details.get("cached_tokens"),
            prompt,
        )

    def _of_prompt(self, choice: Any, ask: Ask) -> list[float | None] | None:
        rows = choice.get("prompt_logprobs")
        if rows is None:
            return None
        pairs = zip(ask.prompt, rows, strict=True)
        return [None if row is None else row[str(token)]["logprob"] for token, row in pairs]

    def _id(self, name: str) -> int:
        if name.startswith(ID_NAME):
            return int(name.removeprefix(ID_NAME))
        return self._names().get(name, UNNAMED)

    def _by_id(self, names: Mapping[str, float]) -> dict[int, float]:
        by_id = finite({self._id(name): value for name, value in names.items()})
        by_id.pop(UNNAMED, None)
        return by_id

    def load(self, directory: str) -> str:
        """vLLM's development route; a server of ours has `/reload_weights`."""
        try:
            self.post("/reload_weights", {"path": directory})
            return "/reload_weights"
        except NotOffered:
            reload = {"method": "reload_weights", "kwargs": {"weights_path": directory}}
            self.post("/collective_rpc", reload)
            self.post("/reset_prefix_cache", {})
            return "/collective_rpc reload_weights, /reset_prefix_cache"
