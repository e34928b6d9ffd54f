"""HTTP clients of inference servers, as the trainer uses them: what they share, and vLLM's bridge routes.

Every call has a deadline.
"""

from typing import ClassVar, Protocol, TypeVar

import msgspec

from atroposlib.addresses import netloc, refused_redirect
from atroposlib.clients.one_request import NoReply, request
from atroposlib.clients.waiting import NotYet, Wait, wait_for
from atroposlib.errors import reading
from atroposlib.logs import get_logger
from atroposlib.wire.bridge import (
    Committed,
    Decoded,
    DecodeProbe,
    Manifest,
    Offer,
    Resumed,
    ServerActivity,
    ServerStatus,
)
from example_trainer.bridges.base import BridgeError
from example_trainer.settings.config import TrainerConfig

log = get_logger(__name__)

Reply = TypeVar("Reply")
CONNECT_S = 5.0
HEARTBEAT_S = 30.0
QUICK_S = 10.0  # for questions asked on the way, where a server that is frozen must not hold the others up
GLANCE_S = 2.0  # for what a step can do without
FOREVER = float("inf")  # the client's own limit holds
SESSIONS = "/v1/bridge/session"
ADAPTER_SESSIONS = "/v1/bridge/adapter/session"


class NoAnswer(BridgeError):
    """The server did not answer: it is not up, silent or gone."""


class Refused(BridgeError):
    """The server answered, with an error."""


class ScoresPrompts(Protocol):
    """A client whose server gives log-probabilities of a prompt."""

    def prompt_logprobs(self, token_ids: list[int]) -> list[float]:
        """Return the log-probability of each token but the first."""


class ScoredPrompt(msgspec.Struct):
    """The reply of /v1/generate, as far as it is read: token id -> log-probability, per position."""

    prompt_logprobs: list[dict[str, float] | None]


class ServerClient:
    """One inference server at `host:port`; `api_key` is its bearer token, if it has one. Every method raises
    BridgeError.
    """

    software: ClassVar[str] = "vLLM"

    def __init__(self, host: str, port: int, api_key: str | None, timeout_s: float) -> None:
        self.url = f"http://{netloc(host, port)}"
        self._timeout_s = timeout_s
        self._api_key = api_key

    def ask(self, kind: type[Reply], method: str, path: str, body: object = None, timeout_s: float = FOREVER) -> Reply:
        """A reply of that kind, whatever the route: what only one mode asks for stays in its own file."""
        with reading(f"{self.url} answered {method} {path} with something other than {kind.__name__}", BridgeError):
            return msgspec.json.decode(self._send(method, path, body, timeout_s), type=kind)

    def _send(self, method: str, path: str, body: object = None, timeout_s: float = FOREVER) -> bytes:
        limit_s = min(timeout_s, self._timeout_s)
        try:
            reply = request(method, self.url + path, connect_s=CONNECT_S, read_s=limit_s, key=self._api_key, body=body)
        except NoReply as silent:
            raise NoAnswer(
                f"the {self.software} server at {self.url} did not answer {method} {path} ({silent.reason},"
                f" limit {limit_s:.0f} s); see its log"
            ) from silent
        if redirected := refused_redirect(self.url + path, reply.status, reply.headers.get("Location")):
            raise BridgeError(redirected)
        if reply.status == 404 and path == "/v1/bridge/status":
            raise BridgeError(
                f"{self.url} is not our vLLM server (no /v1/bridge): start it with example_trainer/vllm_api_server.py"
            )
        if reply.status >= 400:
            raise Refused(
                f"the {self.software} server at {self.url} refused {method} {path}"
                f" ({reply.status}): {_reason(reply.content)}"
            )
        return reply.content


class VllmClient(ServerClient):
    """One vLLM server; `api_key` is its --api-key."""

    def wait_until_ready(self, deadline_s: float, *, lora: bool = False) -> ServerStatus:
        """The bridge status once the server answers with its bridge on: for LoRA adapters if `lora`, else for whole
        weights.

        Raises BridgeError at the deadline, and at once for a server of the other kind.
        """

        def absent(reason: str) -> BridgeError:
            return BridgeError(
                f"no vLLM server at {self.url} after {deadline_s:.0f} s: {reason}; start"
                " example_trainer/vllm_api_server.py there, or set --vllm-host/--vllm-port"
            )

        status = wait_for(self.ask_status, Wait("the vLLM server", self.url, deadline_s, absent))
        takes_adapters = status.max_lora_rank is not None
        if lora and not takes_adapters:
            raise BridgeError(
                f"the vLLM server at {self.url} does not accept LoRA adapters: restart it with --enable-lora"
            )
        if takes_adapters and not lora:
            raise BridgeError(
                f"the vLLM server at {self.url} accepts only LoRA adapters: restart it without --enable-lora"
            )
        if not lora and not status.enabled:
            raise BridgeError(
                f"the vLLM server at {self.url} runs without the weight bridge: restart it with"
                " VLLM_ENABLE_SHARED_WEIGHTS=1"
            )
        log.info(
            "vLLM server at %s is ready: model %s, TP=%d, policy version %d",
            self.url,
            status.model,
            status.tp_size,
            status.policy_version,
        )
        return status

    def status(self) -> ServerStatus:
        """Bridge status; raises NoAnswer while the server is not up, another BridgeError if it refuses us."""
        return self.ask(ServerStatus, "GET", "/v1/bridge/status", timeout_s=QUICK_S)

    def activity(self) -> ServerActivity:
        """What the server has done since its start."""
        return self.ask(ServerActivity, "GET", "/v1/bridge/activity", timeout_s=GLANCE_S)

    def manifest(self) -> Manifest:
        return self.ask(Manifest, "GET", "/v1/bridge/manifest")

    def open_session(self, offer: Offer, route: str = SESSIONS) -> None:
        self._send("POST", route, offer)

    def heartbeat(self, session: str, route: str = SESSIONS) -> None:
        self._send("POST", f"{route}/{session}/heartbeat", {}, timeout_s=HEARTBEAT_S)

    def close_session(self, session: str, route: str = SESSIONS) -> None:
        self._send("DELETE", f"{route}/{session}", timeout_s=QUICK_S)

    def commit(self, session: str, policy_version: int) -> Committed:
        return self.ask(Committed, "POST", "/v1/bridge/commit", {"session": session, "policy_version": policy_version})

    def fence(self, session: str, reason: str) -> None:
        """End `session` and have the server refuse to generate, with `reason`, until a trainer has committed a whole
        version.
        """
        self._send("POST", "/v1/bridge/fence", {"session": session, "reason": reason[:2000]}, timeout_s=QUICK_S)

    def pause(self, session: str, policy_version: int, deadline_s: float) -> None:
        self._send(
            "POST",
            "/v1/bridge/pause",
            {"session": session, "policy_version": policy_version, "deadline_s": deadline_s},
        )

    def resume(self, session: str, policy_version: int | None) -> Resumed:
        return self.ask(Resumed, "POST", "/v1/bridge/resume", {"session": session, "policy_version": policy_version})

    def prompt_logprobs(self, token_ids: list[int]) -> list[float]:
        """vLLM's log-probability of each prompt token but the first."""
        scored = self.ask(
            ScoredPrompt,
            "POST",
            "/v1/generate",
            {"prompt": {"prompt_token_ids": token_ids}, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0},
        ).prompt_logprobs[1:]
        return [(position or {})[str(token)] for token, position in zip(token_ids[1:], scored, strict=True)]

    def decode(self, probe: DecodeProbe) -> Decoded:
        """What the server samples from, by answers of its own (vllm_patching/http/decode.py)."""
        return self.ask(Decoded, "POST", "/v1/bridge/decode", probe)

    def longest(self) -> int | None:
        """Tokens of a prompt with its answer, at most."""
        return self.status().max_model_len

    def ask_status(self) -> ServerStatus:
        """`status` for `wait_for`: raises NotYet while the server is not up."""
        try:
            return self.status()
        except NoAnswer as silent:
            raise NotYet(f"no answer ({silent.__cause__})") from silent


def vllm_clients(config: TrainerConfig) -> list[VllmClient]:
    """One client per configured server."""
    return [vllm_client(config, host, port) for host, port in config.vllm_servers]


def vllm_client(config: TrainerConfig, host: str, port: int) -> VllmClient:
    """The client of one server of the run, which all have the same key."""
    key = config.vllm_api_key.get_secret_value() if config.vllm_api_key else None
    return VllmClient(host, port, key, config.bridge_timeout_s)


def _reason(reply: bytes) -> str:
    try:
        content: object = msgspec.json.decode(reply)
    except (ValueError, RecursionError):
        return reply.decode(errors="replace")[:300]
    error = content.get("error", content.get("detail", content)) if isinstance(content, dict) else content
    return str(error.get("message", error) if isinstance(error, dict) else error)
