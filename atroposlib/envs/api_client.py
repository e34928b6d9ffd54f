"""The environment's side of the batching API: one request a method, errors sorted by what can be done about them.

ApiUnreachable   no usable reply, or "not now" (408: too slow, 429: too much, 503: too much of all, 507: the disk is
                 full): ask again later
ApiRefused       any other 4xx: the same request would be refused again

Groups travel as MessagePack to an API that reads it, else as JSON, compressed where that makes them smaller.
"""

import gzip
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import aiohttp
import msgspec
import numpy as np
import orjson
from pydantic import BaseModel, Field

from atroposlib.groups import Needs
from atroposlib.redirects import refused_redirect
from atroposlib.wire.batching import MSGPACK, WAIT_FOR_TRAINER

REQUEST_TIMEOUT_S = 30.0
MAX_RETRY_AFTER_S = 60.0
NOT_NOW = (408, 429)  # too slow or too much; every 5xx may pass, too
COMPRESS_FROM_BYTES = 1024


class ApiUnreachable(Exception):
    """No connection, no reply in time, a 5xx, 408 or 429: the same request may succeed later.

    After `retry_after_s`, if the API said when.
    """

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ApiRefused(Exception):
    """A 4xx or a failure reply; `status` is the HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Registration(BaseModel):
    """What the API tells an environment that joined."""

    env_id: int
    wandb_name: str
    checkpoint_dir: str
    starting_step: int
    checkpoint_interval: int
    num_steps: int


class EnvStatus(BaseModel):
    """The reply of /status-env. `policy_version` and `trained_steps` are None under a trainer that does not report
    them.
    """

    current_step: int = Field(description="batches delivered")
    queue_size: int = Field(description="groups that wait to be delivered, in groups of this environment")
    unallocated_fraction: float = 1.0
    self_queue_size: int = 0
    max_group_size: int = 1
    env_weight: float = 1.0
    policy_version: int | None = None
    trained_steps: int | None = None

    @property
    def version(self) -> int:
        """The policy version that is served, as far as known."""
        return self.current_step if self.policy_version is None else self.policy_version


class BatchLimits(NamedTuple):
    """What a group must be to enter a batch: its sequences, their tokens, and what the trainer needs of them."""

    batch_size: int
    max_token_len: int
    needs: Needs


class BatchingApiClient:
    """Connections to the API at `url`; close it when done. Every request is bounded by 30 s."""

    def __init__(self, url: str, token: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._reads_msgpack = False  # said by the API when this environment joins
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "BatchingApiClient":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def root(self) -> None:
        """Return if an API answers."""
        await self._request("GET", "/")

    async def register_env(self, announcement: Mapping[str, Any]) -> Registration | None:
        """Join; None while no trainer has started."""
        reply = await self._request("POST", "/register-env", announcement)
        if reply.get("status") == WAIT_FOR_TRAINER:
            return None
        return Registration.model_validate(reply)

    async def disconnect_env(self, env_id: int) -> None:
        """Leave."""
        await self._request("POST", "/disconnect-env", {"env_id": env_id})

    async def status(self, env_id: int) -> EnvStatus:
        """Step, queue and this environment's share. Raises ApiRefused when the API does not know `env_id`."""
        return EnvStatus.model_validate(await self._request("GET", f"/status-env?env_id={env_id}"))

    async def batch_limits(self) -> BatchLimits:
        """The trainer's, -1 each before it registered."""
        reply = await self._request("GET", "/info")
        needs = Needs(reply.get("vocab_size"), bool(reply.get("trainable_only", False)))
        return BatchLimits(reply["batch_size"], reply["max_token_len"], needs)

    async def wandb_info(self) -> tuple[str | None, str | None]:
        """(group, project) that the trainer named."""
        reply = await self._request("GET", "/wandb_info")
        return reply.get("group"), reply.get("project")

    async def post_groups(self, groups: Sequence[Mapping[str, Any]], key: str | None = None) -> dict[str, Any]:
        """Hand over one group, or several at once. However often it is repeated with the same `key`, the groups are
        stored once.
        """
        if len(groups) == 1:
            return await self._request("POST", "/scored_data", groups[0], key=key)
        return await self._request("POST", "/scored_data_list", list(groups), key=key)

    async def post_evaluation(self, evaluation: Mapping[str, Any]) -> None:
        """Report an evaluation: env_id, policy_version, accuracy, metrics."""
        await self._request("POST", "/evaluation", evaluation)

    async def _request(self, method: str, path: str, body: Any = None, *, key: str | None = None) -> dict[str, Any]:
        groups = path in ("/scored_data", "/scored_data_list")
        content, headers = _packed(body) if groups and self._reads_msgpack else _encoded(body)
        headers = headers | self._headers | ({} if key is None else {"Idempotency-Key": key})
        if self._session is None:
            # A proxy of the surroundings does not reach loopback, so the environment's proxy variables are left aside.
            self._session = aiohttp.ClientSession(
                trust_env=False, timeout=aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
            )
        try:
            asked = self._session.request(method, self.url + path, data=content, headers=headers, allow_redirects=False)
            async with asked as reply:
                text = await reply.read()
                self._reads_msgpack = self._reads_msgpack or MSGPACK in reply.headers.get("Accept-Post", "")
        except aiohttp.InvalidURL as error:
            raise ApiRefused(f"{self.url} is not an address; correct --env.rollout_server_url", 400) from error
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ApiUnreachable(
                f"{self.url}{path}: {error or f'no reply within {REQUEST_TIMEOUT_S:.0f} s'}"
            ) from error
        if redirected := refused_redirect(self.url + path, reply.status, reply.headers.get("Location")):
            raise ApiRefused(redirected, reply.status)
        if reply.status == 401:
            raise ApiRefused(f"{self.url} wants its token: set ATROPOS_API_TOKEN", 401)
        if reply.status >= 500 or reply.status in NOT_NOW:
            raise ApiUnreachable(
                f"{self.url}{path} replied {reply.status}: {_excerpt(text)}", _seconds(reply.headers.get("Retry-After"))
            )
        if reply.status >= 400:
            raise ApiRefused(f"{self.url}{path} replied {reply.status}: {_excerpt(text)}", reply.status)
        return _object(text, f"{self.url}{path}")


def _encoded(body: Any) -> tuple[bytes | None, dict[str, str]]:
    """JSON of `body` and its headers, compressed when that makes it smaller."""
    if body is None:
        return None, {}
    content = orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
    headers = {"Content-Type": "application/json"}
    if len(content) >= COMPRESS_FROM_BYTES:
        packed = gzip.compress(content, compresslevel=1)
        if len(packed) < len(content):
            return packed, headers | {"Content-Encoding": "gzip"}
    return content, headers


def _packed(body: Any) -> tuple[bytes, dict[str, str]]:
    return msgspec.msgpack.encode(body, enc_hook=_plain), {"Content-Type": MSGPACK}


def _plain(value: Any) -> Any:
    """An array as lists, a NumPy number as Python's."""
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be sent to the batching API")


def _object(text: bytes, url: str) -> dict[str, Any]:
    try:
        content = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ApiUnreachable(f"{url} did not reply JSON ({error}); is that the batching API?") from error
    if not isinstance(content, dict):
        raise ApiUnreachable(
            f"{url} replied a {type(content).__name__} instead of an object; is that the batching API?"
        )
    if content.get("status") in ("error", "failure"):
        raise ApiRefused(f"{url} refused: {content.get('error') or content.get('message')}", 400)
    return content


def _seconds(retry_after: str | None) -> float | None:
    """Seconds of a Retry-After header, at most a minute; None for a date, which the batching API does not send."""
    return min(float(retry_after), MAX_RETRY_AFTER_S) if retry_after is not None and retry_after.isdecimal() else None


def _excerpt(text: bytes) -> str:
    return " ".join(text.decode(errors="replace").split())[:300]
