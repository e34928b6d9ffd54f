"""An inference server without a model: deterministic replies on the routes of the real one, for tests and for trying
environments.

    async with FakeInferenceServer(answer=lambda prompt: "4") as server:   # a free loopback port
        config = APIServerConfig(server_type="vllm", base_url=server.base_url, model_name=server.model_name)

    python -m atroposlib.testing.fake_inference_server --port 9001 --right 0.5

Routes: POST /generate (and /v1/generate; in SGLang's form, too), /v1/chat/completions, /v1/completions; GET /v1/models,
/health. The text of a reply comes from `answer(prompt_text)`, its ids from the tokenizer, its log-probabilities from
`fake_logprob`.
By POST /fake an environment names its tokenizer and, under `process`, the reference answer of its current item
(`atroposlib/wire/fake_server.py`). Tests steer the server while it runs: `policy_version`, `delay_s`, `healthy`,
`heeds_n`, `fail_next`.
"""

import asyncio
import signal
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Annotated, Any, Self

import msgspec
import numpy as np
from aiohttp import web
from pydantic import Field, model_validator

from atroposlib.addresses import netloc
from atroposlib.config import Config, load_config
from atroposlib.errors import one_line_errors
from atroposlib.flags import Repeated
from atroposlib.logs import configure_logging, get_logger
from atroposlib.routing import pack
from atroposlib.testing.fake_answers import NO_ANSWER, REFERENCE, AtRandom, CannotAnswer, InTurn, Right, read_answers
from atroposlib.testing.tiny_tokenizer import make_tiny_tokenizer, save_tiny_tokenizer
from atroposlib.utils.tokenizers import chat_ids, load_tokenizer
from atroposlib.wire.batching import RoutingShape
from atroposlib.wire.fake_server import FAKE, ROUTE, FakeModel, Told
from atroposlib.wire.sessions import SESSION_HEADER

log = get_logger(__name__)

# One text for all n samples of a prompt, or one per sample (repeated if there are fewer than n).
Answer = Callable[[str], str | Sequence[str] | Iterator[str]]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
DEFAULT_MAX_TOKENS = 16
PROG = "fake_inference_server"


def fake_logprob(token_id: int, position: int) -> float:
    """The log-probability that this server gives `token_id` at `position` of the reply: between -0.97 and -0.01."""
    return -((31 * token_id + position) % 97 + 1) / 100


def fake_experts(tokens: list[int], shape: RoutingShape) -> str:
    """Make what this server reports as the experts of all tokens but the last: numbers that follow from their ids."""
    layers, ranks = np.arange(shape.layers)[:, None], np.arange(shape.top_k)
    return pack((np.asarray(tokens[:-1])[:, None, None] + layers + ranks) % shape.experts)


def fake_prompt_logprob(rank: int) -> float:
    """Make what this server gives the `rank`-th likeliest token of a prompt's position: together less than 1."""
    return -0.5 * (rank + 1) if rank < 2 else -4.0 - rank


TOKENIZE = "/tokenize"
ASIDE = (ROUTE, TOKENIZE)  # requests that are neither recorded nor made to fail


class FakeInferenceServer:
    """Listens from `start` to `close`, or as an async context manager. `port` 0 takes a free one.

    Requests are recorded in `requests` (path and JSON body) and counted by path in `hits`. A reply ends with the
    tokenizer's end-of-sequence token and "stop", or is cut at max_tokens with "length". With `api_key`, requests
    without it get 401. /v1/models names `tokenizer_folder` as the model's, where environments find the tokenizer. If
    `answer` is a `Right`, it gets the reference answers that an environment tells.
    """

    def __init__(
        self,
        answer: Answer = lambda prompt: "ok",
        tokenizer: Any = None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        model_name: str = "fake",
        tokenizer_folder: str = "",
        policy_version: int = 0,
        api_key: str = "",
    ) -> None:
        self.answer = answer
        self.tokenizer = tokenizer or make_tiny_tokenizer()
        self.tokenizer_folder = tokenizer_folder
        self.host = host
        self.port = port
        self.model_name = model_name
        self.policy_version = policy_version
        self.api_key = api_key
        self.delay_s = 0.0
        self.healthy = True
        self.heeds_n = True
        self.max_model_len: int | None = None  # that /v1/models lists
        self.routing: RoutingShape | None = None  # of a model with experts, whose choices are then returned
        self.requests: list[tuple[str, Any]] = []
        self.sessions: list[str | None] = []  # the header X-Session-ID of each request
        self.hits: Counter[str] = Counter()
        self.in_flight = 0
        self.peak_in_flight = 0
        self._failures: deque[tuple[int, dict[str, str]]] = deque()
        self._runner: web.AppRunner | None = None

    @property
    def base_url(self) -> str:
        """Address for APIServerConfig.base_url."""
        return f"http://{netloc(self.host, self.port)}/v1"

    def fail_next(self, count: int, status: int = 500, headers: dict[str, str] | None = None) -> None:
        """Answer the next `count` POST requests with `status`; 0 breaks the connection without a reply."""
        self._failures.extend((status, headers or {}) for _ in range(count))

    async def start(self) -> None:
        """Listen; the same port again after a `close`. Raises OSError when the port is taken."""
        app = web.Application(middlewares=[self._steer], client_max_size=64 * 2**20)
        app.add_routes(
            [
                web.post("/generate", self._generate),
                web.post("/v1/generate", self._generate),
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/completions", self._completion),
                web.post(ROUTE, self._told),
                web.post(TOKENIZE, self._tokenize),
                web.get("/v1/models", self._models),
                web.get("/health", self._health),
            ]
        )
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, self.host, self.port).start()
        self.port = self._runner.addresses[0][1]

    async def close(self) -> None:
        """Stop listening and break open connections, as a killed server does."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def __aenter__(self) -> "FakeInferenceServer":
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # --- routes ---------------------------------------------------------------------------------------------------

    @web.middleware
    async def _steer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Record, authorise, fail and delay as the test wishes."""
        self.hits[request.path] += 1
        if request.method != "POST":
            return await handler(request)
        if request.path not in ASIDE:
            self.requests.append((request.path, await request.json()))
            self.sessions.append(request.headers.get(SESSION_HEADER))
        if self.api_key and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return web.json_response({"error": {"message": "wrong API key"}}, status=401)
        if request.path in ASIDE:
            return await handler(request)
        if self._failures:
            status, headers = self._failures.popleft()
            if status == 0 and request.transport is not None:
                request.transport.abort()
            return web.json_response(
                {"error": {"message": f"made to fail with {status}"}}, status=status or 500, headers=headers
            )
        self.in_flight += 1
        self.peak_in_flight = max(self.peak_in_flight, self.in_flight)
        try:
            await asyncio.sleep(self.delay_s)
            return await handler(request)
        except CannotAnswer as error:
            return web.json_response({"error": {"message": str(error)}}, status=400)
        finally:
            self.in_flight -= 1

    async def _health(self, request: web.Request) -> web.Response:
        if self.healthy:
            return web.Response()
        return web.json_response(
            {"error": {"message": "the fake server was set to be unhealthy", "code": 503}}, status=503
        )

    async def _models(self, request: web.Request) -> web.Response:
        if not self.healthy:
            return web.Response(status=503)
        root = self.tokenizer_folder or self.model_name
        shown = FakeModel(FAKE, isinstance(self.answer, Right))
        model = {"id": self.model_name, "root": root, "object": "model", **msgspec.to_builtins(shown)}
        if self.max_model_len is not None:
            model["max_model_len"] = self.max_model_len
        return web.json_response({"object": "list", "data": [model]})

    async def _told(self, request: web.Request) -> web.Response:
        told = msgspec.json.decode(await request.read(), type=Told)
        if told.tokenizer is not None:
            try:
                self.tokenizer = await asyncio.to_thread(load_tokenizer, told.tokenizer)
            except (OSError, ValueError) as error:
                return web.Response(status=400, text=str(error))
        if isinstance(self.answer, Right):
            self.answer.reference = told.reference
        return web.Response()

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        ids = self.tokenizer.encode(body["prompt"], add_special_tokens=body.get("add_special_tokens", True))
        return web.json_response({"tokens": ids, "count": len(ids)})

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        if "sampling_params" in body:
            return web.json_response(self._sglang_reply(body))
        prompt = body["prompt"]
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt["prompt_token_ids"]
        samples = self._sample(ids, body)
        reply = {
            "text": [self._text(tokens) for tokens, _ in samples],
            "prompt": self.tokenizer.decode(ids),
            "finish_reasons": [reason for _, reason in samples],
            "prompt_token_ids": ids,
            "token_ids": [tokens for tokens, _ in samples],
            "logprobs": [
                [[{token: fake_logprob(token, at)}] for at, token in enumerate(tokens)] for tokens, _ in samples
            ],
            "policy_versions": [[self.policy_version, self.policy_version] for _ in samples],
            "version_spans": [[[0, self.policy_version]] for _ in samples],
        }
        if self.routing is not None:
            reply["routed_experts"] = [fake_experts([*ids, *tokens], self.routing) for tokens, _ in samples]
        if body.get("prompt_logprobs") is not None:
            ranked = range(max(1, body["prompt_logprobs"]))
            reply["prompt_logprobs"] = [
                [{token + rank: fake_prompt_logprob(rank)} for rank in ranked] if at else []
                for at, token in enumerate(ids)
            ]
        return web.json_response(reply)

    def _sglang_reply(self, body: dict[str, Any]) -> object:
        """A reply in SGLang's form: an object for each sample, alone for one."""
        sampling = body["sampling_params"] or {}
        ids = body.get("input_ids") or self.tokenizer.encode(body["text"])
        asked = {"n": sampling.get("n"), "max_tokens": sampling.get("max_new_tokens")}
        replies = [
            {
                "text": self._text(tokens),
                "output_ids": tokens,
                "meta_info": {
                    "finish_reason": {"type": reason},
                    "prompt_tokens": len(ids),
                    "completion_tokens": len(tokens),
                    "weight_version": str(self.policy_version),
                    "output_token_logprobs": [
                        [fake_logprob(token, at), token, None] for at, token in enumerate(tokens)
                    ],
                    "input_token_logprobs": [[-0.5 if at else None, token, None] for at, token in enumerate(ids)],
                    "input_top_logprobs": [
                        [[-0.5 * (rank + 1), token + rank, None] for rank in range(body.get("top_logprobs_num") or 1)]
                        if at
                        else None
                        for at, token in enumerate(ids)
                    ],
                },
            }
            for tokens, reason in self._sample(ids, asked)
        ]
        return replies[0] if len(replies) == 1 else replies

    async def _chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        reply = self._openai_reply(
            "chat.completion",
            body,
            chat_ids(self.tokenizer, body["messages"], add_generation_prompt=True),
            lambda text: {"message": {"role": "assistant", "content": text}},
        )
        if body.get("stream"):
            return web.Response(text=streamed(reply), content_type="text/event-stream")
        return web.json_response(reply)

    async def _completion(self, request: web.Request) -> web.Response:
        body = await request.json()
        ids = self.tokenizer.encode(body["prompt"])
        return web.json_response(self._openai_reply("text_completion", body, ids, lambda text: {"text": text}))

    # --- replies --------------------------------------------------------------------------------------------------

    def _sample(self, prompt_ids: list[int], body: dict[str, Any]) -> list[tuple[list[int], str]]:
        """(token ids, finish reason) of each of the n replies to a prompt."""
        answered = self.answer(self.tokenizer.decode(prompt_ids))
        limit = body.get("max_tokens") or body.get("max_completion_tokens") or DEFAULT_MAX_TOKENS
        n = (body.get("n") or 1) if self.heeds_n else 1
        texts = islice(cycle([answered] if isinstance(answered, str) else answered), n)
        return [self._tokens(text, limit) for text in texts]

    def _tokens(self, text: str, limit: int) -> tuple[list[int], str]:
        tokens = [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]
        return (tokens, "stop") if len(tokens) <= limit else (tokens[:limit], "length")

    def _text(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def _openai_reply(
        self, kind: str, body: dict[str, object], prompt_ids: list[int], shown: Callable[[str], Mapping[str, object]]
    ) -> dict[str, Any]:
        """`shown` is how a choice holds its text."""
        samples = self._sample(prompt_ids, body)
        completion = sum(len(tokens) for tokens, _ in samples)
        return {
            "id": "fake",
            "object": kind,
            "created": int(time.time()),
            "model": self.model_name,
            "choices": [
                {"index": index, "finish_reason": reason, **shown(self._text(tokens))}
                for index, (tokens, reason) in enumerate(samples)
            ],
            "usage": {
                "prompt_tokens": len(prompt_ids),
                "completion_tokens": completion,
                "total_tokens": len(prompt_ids) + completion,
            },
        }


def streamed(reply: Mapping[str, Any]) -> str:
    """Write a chat completion as a stream of server-sent events, one for each choice and one for the usage."""
    choices = [
        {"index": each["index"], "delta": each["message"], "finish_reason": each["finish_reason"]}
        for each in reply["choices"]
    ]
    common = {**reply, "object": "chat.completion.chunk", "usage": None}
    events = [{**common, "choices": [choice]} for choice in choices]
    events.append({**common, "choices": [], "usage": reply["usage"]})
    return "".join(f"data: {msgspec.json.encode(event).decode()}\n\n" for event in events) + "data: [DONE]\n\n"


class FakeServerConfig(Config):
    """A fake inference server: it answers without a model, so that you can try an environment."""

    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(default=9001, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    answer: Annotated[list[str], Repeated] = Field(
        default=[],
        description="An answer. Repeat the flag for several: each sample gets the next one. Without any, the answer is"
        f" '{NO_ANSWER}'",
    )
    answers: Path | None = Field(
        default=None, description="File with one answer per line; in a .jsonl file, each line is a JSON string."
    )
    random: bool = Field(default=False, description="Answer with random words, numbers and markup.")
    right: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Share of right answers, for the `process` command of an environment with reference_answer(item)."
        " The others are those of --answer, --answers or --random.",
    )
    right_answer: str = Field(
        default=REFERENCE,
        description=f"Text of a right answer, in which {REFERENCE} becomes the reference answer:"
        f" '<answer>{REFERENCE}</answer>'.",
    )
    seed: int = Field(default=0, description="Seed of --random and --right.")
    tokenizer: str | None = Field(
        default=None,
        description="Tokenizer directory or hub name; default: a tiny byte-level one, until an environment names its"
        " own.",
    )
    served_name: str = Field(default="fake", description="Name in /v1/models.")
    max_model_len: int = Field(
        default=32_768, ge=1, description="Context in tokens that /v1/models tells, as vLLM does. Nothing is refused."
    )

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [name for name in ("answer", "answers", "random") if getattr(self, name)]
        if len(given) > 1:
            raise ValueError(f"--{' and --'.join(given)} cannot be combined; choose one")
        if self.right and REFERENCE not in self.right_answer:
            raise ValueError(f"right_answer {self.right_answer!r} does not contain {REFERENCE}")
        return self


def configured_answer(config: FakeServerConfig) -> Answer:
    """Return the source of the answers. Raises ConfigError for a file that has none."""
    answer: Callable[[str], Iterator[str]]
    if config.random:
        answer = AtRandom(config.seed)
    else:
        answer = InTurn(read_answers(config.answers) if config.answers else config.answer or [NO_ANSWER])
    if config.right:
        answer = Right(config.right, answer, text=config.right_answer, seed=config.seed)
    return answer


def _wherever_it_is_read(tokenizer: str) -> str:
    """The absolute path of a directory; a name of the hub as it is."""
    return str(Path(tokenizer).resolve()) if Path(tokenizer).is_dir() else tokenizer


async def _serve(config: FakeServerConfig, answer: Answer) -> None:
    with TemporaryDirectory(prefix="fake-inference-") as made:
        folder = _wherever_it_is_read(config.tokenizer) if config.tokenizer else str(save_tiny_tokenizer(Path(made)))
        async with FakeInferenceServer(
            answer,
            load_tokenizer(folder),
            host=config.host,
            port=config.port,
            model_name=config.served_name,
            tokenizer_folder=folder,
        ) as server:
            server.max_model_len = config.max_model_len
            log.info("Fake inference server listens on %s until it is interrupted", server.base_url)
            await asyncio.Event().wait()


def main() -> None:
    """Serve until SIGINT or SIGTERM, and remove the tokenizer that was made."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    config = load_config(FakeServerConfig, prog=PROG)
    with one_line_errors(PROG):
        answer = configured_answer(config)
    configure_logging("fake-inference")
    try:
        asyncio.run(_serve(config, answer))
    except KeyboardInterrupt:
        log.info("Interrupted")
    except OSError as error:
        where = netloc(config.host, config.port)
        raise SystemExit(f"{PROG}: cannot listen on {where}: {error.strerror}; choose another --port") from None


if __name__ == "__main__":
    main()
