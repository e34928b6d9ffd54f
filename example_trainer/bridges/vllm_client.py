"""HTTP client of the vLLM server's bridge routes, as the trainer uses them.

Every call has a deadline and opens its own connection: vLLM closes an idle one after 5 s, perhaps just as the next
request leaves, and a POST that was lost that way must not be repeated blindly.
"""

import time
from typing import Any

import msgspec
import requests

from atroposlib.logs import get_logger
from atroposlib.redirects import refused_redirect
from atroposlib.wire.bridge import AdapterOffer, Attached, BroadcastOffer, Manifest, SingleCopyOffer
from example_trainer.bridges.base import BridgeError

log = get_logger(__name__)

POLL_S = 1.0
CONNECT_S = 5.0
HEARTBEAT_S = 30.0
QUICK_S = 10.0  # for questions asked on the way, where a server that is frozen must not hold the others up
REMIND_S = 15.0


class VllmClient:
    """One vLLM server at `host:port`; `api_key` is its --api-key, if it has one."""

    def __init__(self, host: str, port: int, api_key: str | None, timeout_s: float) -> None:
        self.url = f"http://{host}:{port}"
        self._timeout_s = timeout_s
        self._headers = {"Connection": "close"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})

    def wait_until_ready(self, deadline_s: float, *, lora: bool = False) -> dict[str, Any]:
        """The bridge status once the server answers with its bridge on: for LoRA adapters if `lora`, else for whole
        weights.

        Raises BridgeError at the deadline, and at once for a server of the other kind.
        """
        log.info("Waiting for the vLLM server at %s, at most %.0f s", self.url, deadline_s)
        start = reminded = time.monotonic()
        while True:
            try:
                status = self.status()
                break
            except requests.RequestException as error:
                waited = time.monotonic() - start
                if waited > deadline_s:
                    raise BridgeError(
                        f"no vLLM server at {self.url} after {waited:.0f} s ({type(error).__name__}): "
                        "start example_trainer/vllm_api_server.py there, or set --vllm-host/--vllm-port"
                    ) from error
                if time.monotonic() - reminded > REMIND_S:
                    reminded = time.monotonic()
                    log.info("Still waiting for the vLLM server at %s (%.0f of %.0f s)", self.url, waited, deadline_s)
                time.sleep(POLL_S)
        takes_adapters = "max_lora_rank" in status
        if lora and not takes_adapters:
            raise BridgeError(f"the vLLM server at {self.url} takes no LoRA adapters: restart it with --enable-lora")
        if takes_adapters and not lora:
            raise BridgeError(
                f"the vLLM server at {self.url} takes LoRA adapters only: restart it without --enable-lora"
            )
        if not lora and not status["enabled"]:
            raise BridgeError(
                f"the vLLM server at {self.url} runs without the weight bridge: restart it with"
                " VLLM_ENABLE_SHARED_WEIGHTS=1"
            )
        log.info(
            "vLLM server at %s is ready after %.1f s: model %s, TP=%d, policy version %d",
            self.url,
            time.monotonic() - start,
            status["model"],
            status["tp_size"],
            status["policy_version"],
        )
        return status

    def status(self) -> dict[str, Any]:
        """Bridge status; raises requests.RequestException while the server is not up, BridgeError if it refuses us."""
        return self._call("GET", "/v1/bridge/status", timeout_s=QUICK_S, raise_transport=True)

    def models(self) -> list[str]:
        """The names that clients may ask for."""
        return [model["id"] for model in self._call("GET", "/v1/models")["data"]]

    def manifest(self) -> Manifest:
        return msgspec.convert(self._call("GET", "/v1/bridge/manifest"), Manifest)

    def open_session(self, offer: BroadcastOffer) -> dict[str, Any]:
        return self._call("POST", "/v1/bridge/session", msgspec.to_builtins(offer))

    def heartbeat(self, session: str) -> dict[str, Any]:
        return self._call("POST", f"/v1/bridge/session/{session}/heartbeat", {}, timeout_s=HEARTBEAT_S)

    def close_session(self, session: str) -> None:
        self._call("DELETE", f"/v1/bridge/session/{session}", timeout_s=QUICK_S)

    def commit(self, session: str, policy_version: int) -> dict[str, Any]:
        return self._call("POST", "/v1/bridge/commit", {"session": session, "policy_version": policy_version})

    def fence(self, session: str, reason: str) -> None:
        """End `session` and have the server refuse to generate, with `reason`, until a trainer has committed a whole
        version.
        """
        self._call("POST", "/v1/bridge/fence", {"session": session, "reason": reason[:2000]}, timeout_s=QUICK_S)

    def open_adapter_session(self, offer: AdapterOffer) -> dict[str, Any]:
        return self._call("POST", "/v1/bridge/adapter/session", msgspec.to_builtins(offer))

    def adapter_heartbeat(self, session: str) -> dict[str, Any]:
        return self._call("POST", f"/v1/bridge/adapter/session/{session}/heartbeat", {})

    def close_adapter_session(self, session: str) -> None:
        self._call("DELETE", f"/v1/bridge/adapter/session/{session}")

    def load_adapter(self, session: str, name: str, path: str, policy_version: int) -> dict[str, Any]:
        body = {"session": session, "name": name, "path": path, "policy_version": policy_version}
        return self._call("POST", "/v1/bridge/adapter", body)

    def attach(self, offer: SingleCopyOffer) -> Attached:
        return msgspec.convert(self._call("POST", "/v1/bridge/attach", msgspec.to_builtins(offer)), Attached)

    def pause(self, session: str, policy_version: int, deadline_s: float) -> dict[str, Any]:
        return self._call(
            "POST", "/v1/bridge/pause", {"session": session, "policy_version": policy_version, "deadline_s": deadline_s}
        )

    def resume(self, session: str, policy_version: int | None) -> dict[str, Any]:
        return self._call("POST", "/v1/bridge/resume", {"session": session, "policy_version": policy_version})

    def prompt_logprobs(self, token_ids: list[int]) -> list[float]:
        """vLLM's log-probability of each prompt token but the first."""
        body = {"prompt": {"prompt_token_ids": token_ids}, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        reply = self._call("POST", "/v1/generate", body)
        return [
            position[str(token)] for token, position in zip(token_ids[1:], reply["prompt_logprobs"][1:], strict=True)
        ]

    def _call(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
        raise_transport: bool = False,
    ) -> dict[str, Any]:
        limit_s = min(timeout_s or self._timeout_s, self._timeout_s)
        try:
            # not a Session: its pool would reuse a connection that the server has closed or is about to close
            limits = (CONNECT_S, limit_s)
            reply = requests.request(
                method, self.url + path, json=body, headers=self._headers, timeout=limits, allow_redirects=False
            )
        except requests.RequestException as error:
            if raise_transport:
                raise
            raise BridgeError(
                f"the vLLM server at {self.url} did not answer {method} {path} ({type(error).__name__}, limit"
                f" {limit_s:.0f} s); see its log"
            ) from error
        if redirected := refused_redirect(self.url + path, reply.status_code, reply.headers.get("Location")):
            raise BridgeError(redirected)
        if reply.status_code == 404 and path == "/v1/bridge/status":
            raise BridgeError(
                f"{self.url} is not our vLLM server (no /v1/bridge): start it by example_trainer/vllm_api_server.py"
            )
        if reply.status_code >= 400:
            raise BridgeError(
                f"the vLLM server at {self.url} refused {method} {path} ({reply.status_code}): {_reason(reply)}"
            )
        content: dict[str, Any] = reply.json()
        return content


def _reason(reply: requests.Response) -> str:
    """The sentence in vLLM's or FastAPI's error body."""
    try:
        content = reply.json()
    except requests.JSONDecodeError:
        return reply.text[:300]
    error = content.get("error", content.get("detail", content)) if isinstance(content, dict) else content
    return str(error.get("message", error) if isinstance(error, dict) else error)
