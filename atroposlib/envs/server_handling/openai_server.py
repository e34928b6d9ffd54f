"""Any server that speaks OpenAI's API: text in, text out. It returns no token ids, so it cannot be used for training by
itself.
"""

import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, ClassVar, TypeVar

import aiohttp
import openai
from openai.types import Completion
from openai.types.chat import ChatCompletion

from atroposlib.addresses import proxy_variable, through_proxy
from atroposlib.clients.bearer import bearer
from atroposlib.clients.replies import BoundedResponse, ReplyTooLong, at_most, bounded, limit_of_sampling
from atroposlib.envs.server_handling.dispatching.affinity import session_headers
from atroposlib.envs.server_handling.dispatching.dispatch import gather_or_cancel
from atroposlib.envs.server_handling.errors import (
    PermanentServerError,
    RetryableServerError,
    ServerUnreachableError,
    describe,
    reason_of,
    status_error,
)
from atroposlib.envs.server_handling.reasoning import OPENAI_URL, ReasoningConfig, is_openai
from atroposlib.envs.server_handling.sequences.reply_checks import checked_reply
from atroposlib.envs.server_handling.sequences.sampling import Arguments, PromptLogprobs, SampledTokens, with_stop_ids
from atroposlib.envs.server_handling.server_baseline import APIServer, APIServerConfig, merge_replies
from atroposlib.envs.server_handling.server_config import ServerEnvironment
from atroposlib.envs.server_handling.server_config import resolve_openai_configs as resolve_openai_configs
from atroposlib.logs import get_logger

log = get_logger(__name__)

PROBE_TIMEOUT_S = 5.0
REASON_BYTES = 4096
MODELS_BYTES = 1 << 20
CONNECT_TIMEOUT_S = 10.0
# Below the 5 s after which uvicorn closes an idle connection, so that no request meets a closing one.
KEEPALIVE_S = 4.0

Reply = TypeVar("Reply", ChatCompletion, Completion)


@contextlib.asynccontextmanager
async def replied(
    session: aiohttp.ClientSession, method: str, url: str, **options: Any
) -> AsyncIterator[aiohttp.ClientResponse]:
    """A reply of 200 or 201 to one request, for as long as it is read. Raises a ServerError for any other."""
    options["headers"] = {**session_headers(), **(options.get("headers") or {})}
    try:
        async with session.request(method, url, allow_redirects=False, **options) as reply:
            if reply.status not in (200, 201):
                raise status_error(url, reply.status, (await reply.read()).decode(errors="replace"), reply.headers)
            yield reply
    except ReplyTooLong as error:
        raise PermanentServerError(str(error)) from error
    except (aiohttp.ClientError, TimeoutError, UnicodeError) as error:  # UnicodeError: a name that can be no host's
        raise ServerUnreachableError(f"{url}: {describe(error)}") from error


class OpenAIServer(APIServer):
    """Chat and text completions through OpenAI's SDK; health by GET <base_url>/models."""

    supports_token_ids: ClassVar[bool] = False

    def __init__(self, config: APIServerConfig, reasoning_config: ReasoningConfig | None = None) -> None:
        super().__init__(config, reasoning_config)
        self.base_url = (config.base_url or OPENAI_URL).rstrip("/")
        self._sdk: openai.AsyncOpenAI | None = None
        self._http: aiohttp.ClientSession | None = None
        # Only OpenAI's own address may see the key that the environment holds for it.
        self._api_key = (
            config.key or (ServerEnvironment.read().openai_api_key if is_openai(config.base_url) else None) or ""
        )
        self._headers = bearer(self._api_key, f"the api_key of {self.name}")
        # a run's own servers are asked directly, wherever they are
        self._proxied = config.server_type == "openai" and proxy_variable(self.base_url) is not None
        self._n_is_ignored = config.n_kwarg_is_ignored

    @property
    def name(self) -> str:
        return self.config.base_url or OPENAI_URL

    @property
    def health_url(self) -> str:
        """Return the URL where a GET shows whether the server can serve."""
        return f"{self.base_url}/models"

    @property
    def _via(self) -> str:
        return through_proxy(self.base_url) if self._proxied else ""

    @property
    def sdk(self) -> openai.AsyncOpenAI:
        """The SDK's client: it retries nothing and never times out by itself, both are the caller's business."""
        if self._sdk is None:
            self._sdk = openai.AsyncOpenAI(
                api_key=self._api_key or "none",
                base_url=self.base_url,
                max_retries=0,
                timeout=openai.Timeout(None, connect=CONNECT_TIMEOUT_S),
                http_client=self._sdk_transport(),
            )
        return self._sdk

    def _sdk_transport(self) -> openai.DefaultAsyncHttpxClient:
        """It reads the environment's proxies only where one is meant for this address: reading any may fail."""
        try:
            hooks = {"response": [bounded]}
            return openai.DefaultAsyncHttpxClient(follow_redirects=False, trust_env=self._proxied, event_hooks=hooks)
        except (ImportError, ValueError) as error:  # a kind of proxy that it does not know, or lacks a package for
            raise PermanentServerError(f"{self.name}: {describe(error)}{through_proxy(self.base_url)}") from error

    @property
    def http(self) -> aiohttp.ClientSession:
        """The session of this server's other requests. The admission gates limit it, not the connector."""
        if self._http is None or self._http.closed:
            self._http = aiohttp.ClientSession(
                headers=self._headers,
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
                trust_env=self._proxied,
                response_class=BoundedResponse,
            )
        return self._http

    async def close(self) -> None:
        await super().close()
        if self._http is not None:
            await self._http.close()
        if self._sdk is not None:
            await self._sdk.close()
            self._sdk = None

    async def probe(self) -> str | None:
        """Any reply that is not a server error counts as life: some hosts guard or lack the address that is asked."""
        try:
            async with self.http.get(
                self.health_url, timeout=aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S), allow_redirects=False
            ) as reply:
                if reply.status < 500:
                    return None
                return f"{self.health_url} replied {reply.status}: {reason_of(await reply.content.read(REASON_BYTES))}"
        except TimeoutError:
            return f"{self.health_url} gave no reply within {PROBE_TIMEOUT_S:.0f} s"
        except (aiohttp.ClientError, UnicodeError) as error:
            return f"{self.health_url}: {describe(error)}{self._via}"

    async def context_length(self) -> int | None:
        """Read the context length as vLLM lists it; None for servers that do not list it."""
        url = f"{self.base_url}/models"
        try:
            async with self.http.get(
                url, timeout=aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S), allow_redirects=False
            ) as reply:
                listed = json.loads(await reply.content.read(MODELS_BYTES))["data"]
                limits = [card.get("max_model_len") for card in listed if card.get("id") == self.config.model_name]
                return next((limit for limit in limits if isinstance(limit, int) and limit > 0), None)
        except (aiohttp.ClientError, TimeoutError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None  # other servers have other lists, or none

    async def request_chat(self, arguments: Arguments) -> ChatCompletion:
        asked = self.chat_arguments(with_stop_ids(arguments, extra_body=True))
        return merge_replies(await self._with_n(asked, self.sdk.chat.completions.create))

    async def request_completion(self, arguments: Arguments) -> Completion:
        return merge_replies(
            await self._with_n(
                {**with_stop_ids(arguments, extra_body=True), "model": self.config.model_name},
                self.sdk.completions.create,
            )
        )

    async def request_tokens(self, arguments: Arguments) -> SampledTokens:
        raise NotImplementedError(f"{self.name}: server_type 'openai' returns no token ids; use server_type 'vllm'")

    async def request_prompt_logprobs(self, arguments: Arguments) -> PromptLogprobs:
        raise NotImplementedError(
            f"{self.name}: server_type 'openai' returns no prompt log-probabilities; use server_type 'vllm'"
        )

    async def _with_n(self, arguments: Arguments, create: Callable[..., Awaitable[Reply]]) -> list[Reply]:
        """Replies that hold n choices together, whether or not the server heeds n."""
        n: int = arguments.get("n") or 1
        single: Arguments = {key: value for key, value in arguments.items() if key != "n"}
        if n == 1:
            return [await self._send(create, single)]
        if self._n_is_ignored:
            return await gather_or_cancel([self._send(create, single) for _ in range(n)])
        first = await self._send(create, arguments)
        missing: int = n - len(first.choices)
        if missing <= 0:
            return [first]
        log.info("%s returned %d of n=%d choices; sending n requests from now on", self.name, len(first.choices), n)
        self._n_is_ignored = True
        rest: list[Reply] = await gather_or_cancel([self._send(create, single) for _ in range(missing)])
        return [first] + rest  # noqa: RUF005  mypy infers the element type of a sum only

    async def _send(self, create: Callable[..., Awaitable[Reply]], arguments: Arguments) -> Reply:
        headers = {**session_headers(), **(arguments.get("extra_headers") or {})}
        try:
            with at_most(limit_of_sampling(arguments, _repeated(arguments))):
                reply = await create(**{**arguments, **({"extra_headers": headers} if headers else {})})
        except ReplyTooLong as error:
            raise PermanentServerError(str(error)) from error
        except openai.APITimeoutError as error:
            raise RetryableServerError(f"{self.name} gave no reply in time: {error}") from error
        except openai.APIConnectionError as error:
            said = f"{self.name}: {describe(error.__cause__ or error)}"
            raise ServerUnreachableError(said + self._via) from error
        except openai.APIStatusError as error:
            refusal = error.response
            raise status_error(str(error.request.url), error.status_code, refusal.text, refusal.headers) from error
        except openai.OpenAIError as error:
            raise PermanentServerError(f"{self.name}: {error}") from error
        except (ValueError, RecursionError) as error:  # of the SDK's own decoding
            raise RetryableServerError(f"{self.name} replied 200 with what is not JSON: {describe(error)}") from error
        checked_reply(reply, self.name)
        del reply.choices[arguments.get("n") or 1 :]  # each caller counts on as many as it asked for
        return reply


def _repeated(arguments: Arguments) -> int:
    """At least as many as the prompt has tokens, where a reply repeats it."""
    prompt = arguments.get("prompt")
    return len(prompt) if isinstance(prompt, str | list) and arguments.get("echo") else 0
