"""The trainer's side of the batching API: register, fetch batches, report steps, read evaluations. Synchronous, with
deadlines.

    register ──▶ fetch_batch (leased) ──▶ train ──▶ checkpoint ──▶ acknowledge

A batch that is not acknowledged is given to the next trainer of this run, so that one that resumes from a checkpoint
trains on what came after it. Every request has a 10 s timeout. An API that is down is waited for, up to
`patience_s`; one that was restarted without a journal has forgotten its trainer and is registered with again, from
the step the trainer has reached. An API without leases (the archived ancestor's) gives batches for good.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import orjson
import requests

from atroposlib.clients.waiting import waiting
from atroposlib.logs import get_logger
from atroposlib.redirects import refused_redirect
from atroposlib.wire.batching import MSGPACK
from example_trainer.bad_data import Rejection
from example_trainer.errors import TrainerError
from example_trainer.heartbeat import Heartbeat

NOT_NOW = (408, 429)  # too slow or too much for the API at present
HTTP_TIMEOUT_S = 10.0
POLL_FIRST_S = 0.05
POLL_LAST_S = 1.0
REMINDER_S = 60.0
MAX_REASON = 1000  # characters

log = get_logger(__name__)


class ApiError(TrainerError):
    """The batching API did not answer in time, or refused."""


class _Unreachable(Exception):
    """No usable answer this time; worth another try."""


class _NotFound(ApiError):
    """The API has no such route."""


class ApiClient:
    """One trainer's session with the batching API. `registration` is the body of /register without `starting_step`.

    `on_rejected` is told of the groups that the API set aside because this trainer cannot use them; it may raise to end
    the run.
    """

    def __init__(
        self,
        url: str,
        registration: dict[str, Any],
        *,
        patience_s: float,
        token: str | None = None,
        sleep: Callable[[float], None] = time.sleep,
        on_rejected: Callable[[list[Rejection]], None] = lambda rejections: None,
    ) -> None:
        self.url = url.rstrip("/")
        self._registration = dict(registration)
        self._patience_s = patience_s
        self._sleep = sleep
        self._token = token
        self._session = self._new_session()
        self._progress: tuple[int, int] | None = None  # step and policy version last reported
        self._trainer = 0  # what /register answered
        self._leases = True  # whether the API has them, as far as is known
        self._holding: list[int] = []  # leases of batches that are not acknowledged
        self._ids: list[int] = []  # the API's names of the items of the batch fetched last; empty without a lease
        self._env_ids: list[Any] = []  # and whose they are
        self._on_rejected = on_rejected
        self._heartbeat = Heartbeat(self._beat)

    def wait_until_up(self) -> None:
        """Return when GET /info answers. Raises ApiError after `patience_s` seconds."""
        self._patiently("GET", "/info", what="the batching API")

    def register(self, starting_step: int, **run: Any) -> None:
        """POST /register: from the next fetch on, environments may join. `starting_step` is the number of steps
        already done.

        `run` is more to register, such as the run's name.
        """
        self._registration |= {"starting_step": starting_step, **run}
        self._trainer = self._patiently("POST", "/register", self._registration, what="registration").get("uuid", 0)
        self._holding = []

    def fetch_batch(self, timeout_s: float) -> list[dict[str, Any]]:
        """The next batch, polled for with growing pauses; it is this trainer's until `acknowledge`.

        Raises ApiError after `timeout_s` seconds without one.
        """
        start = time.monotonic()
        reminder, pause = start + REMINDER_S, POLL_FIRST_S
        with waiting(log, "a batch", peer=self.url, deadline_s=timeout_s):
            while True:
                reply = self._next_batch()
                if reply.get("status") == "error":
                    log.warning(
                        "The batching API at %s has no trainer (%s): registering again", self.url, reply.get("message")
                    )
                    self._register_again()
                elif reply.get("batch"):
                    batch: list[dict[str, Any]] = reply["batch"]
                    self._ids = reply.get("ids", [])
                    self._env_ids = [item.get("env_id") if isinstance(item, dict) else None for item in batch]
                    return batch
                now = time.monotonic()
                if now - start >= timeout_s:
                    raise ApiError(
                        f"no batch of {self._registration['batch_size']} sequences from {self.url} within"
                        f" {timeout_s:.0f} s; check that an environment is running and that its group size divides the"
                        " batch, or raise --fetch-timeout"
                    )
                if now >= reminder:
                    log.info(
                        "Still waiting for a batch from %s, %.0f of at most %.0f s", self.url, now - start, timeout_s
                    )
                    reminder += REMINDER_S
                self._sleep(pause)
                pause = min(pause * 1.5, POLL_LAST_S)

    def reject(self, reasons: Mapping[int, str]) -> list[Rejection]:
        """Set aside items of the batch fetched last, by their places in it; the API never delivers them again.

        An API without leases has given them for good. The result names the environments where the API does.
        """
        named = {self._ids[at]: why[:MAX_REASON] for at, why in reasons.items() if self._ids}
        answer: dict[str, Any] = {}
        if named:
            groups = [{"id": name, "reason": why} for name, why in named.items()]
            body = {"trainer": self._trainer, "lease": self._holding[-1], "groups": groups}
            answer = self._patiently("POST", "/batch/reject", body, what="the rejection of groups")
        of = {self._ids.index(each["id"]): each["environment"] for each in answer.get("rejected", ())}
        return [Rejection(_environment(of.get(at), self._env_ids[at]), why) for at, why in reasons.items()]

    def unacknowledged(self) -> list[int]:
        """Leases of the batches fetched so far that the API still keeps; a checkpoint holds them, and its resumer
        registers them.
        """
        return list(self._holding)

    def acknowledge(self) -> None:
        """Every batch fetched so far is trained on, and where that is needed in a checkpoint: the API may forget it."""
        if self._holding:
            self._patiently(
                "POST", "/batch/ack", {"trainer": self._trainer, "leases": self._holding}, what="the acknowledgement"
            )
            self._holding = []

    def report_step(self, step: int, policy_version: int) -> None:
        """POST /trainer-step: step `step` is done and vLLM serves `policy_version`."""
        self._progress = (step, policy_version)
        self._patiently(
            "POST", "/trainer-step", {"step": step, "policy_version": policy_version}, what="the step report"
        )

    def evaluation(self, policy_version: int, deadline_s: float) -> float | None:
        """Mean held-out accuracy of `policy_version`, once all announced evaluations are in, or `deadline_s` seconds
        have passed.

        None without any. With `deadline_s` 0 nothing is waited for.
        """
        results, pending = self._evaluations(policy_version)
        if pending and deadline_s > 0:
            with waiting(
                log,
                f"the evaluation of policy {policy_version} by {', '.join(pending)}",
                peer=self.url,
                deadline_s=deadline_s,
            ):
                end, pause = time.monotonic() + deadline_s, POLL_FIRST_S
                while pending and time.monotonic() < end:
                    self._sleep(pause)
                    pause = min(pause * 1.5, POLL_LAST_S)
                    results, pending = self._evaluations(policy_version)
            if pending:
                log.warning(
                    "Going on without the evaluation of policy %d by %s (--eval-deadline %.0f s)",
                    policy_version,
                    ", ".join(pending),
                    deadline_s,
                )
        accuracies = [result["accuracy"] for result in results if result["accuracy"] is not None]
        return sum(accuracies) / len(accuracies) if accuracies else None

    def close(self) -> None:
        """Drop the connection."""
        self._heartbeat.stop()
        self._session.close()

    def _next_batch(self) -> dict[str, Any]:
        """The reply to a request for a lease, or, from an API that has none, to GET /batch."""
        if self._leases:
            try:
                body = {"trainer": self._trainer, "holding": self._holding, "ids": True}
                reply = self._patiently("POST", "/batch/lease", body, what="a batch")
            except _NotFound:
                reply = {}
            if "batch" in reply:
                if reply.get("lease") is not None:
                    self._holding.append(reply["lease"])
                    self._heartbeat.start()
                if set_aside := reply.get("rejected"):
                    self._on_rejected([_rejection(each) for each in set_aside])
                return reply
            log.info("The batching API at %s has no leases: its batches are taken for good", self.url)
            self._leases = False
        return self._patiently("GET", "/batch", what="a batch")

    def _beat(self) -> None:
        """One sign of life. Nobody waits for it, and the next request tells what is wrong."""
        try:
            with self._new_session() as session:
                beat = {"trainer": self._trainer}
                session.post(f"{self.url}/heartbeat", json=beat, timeout=HTTP_TIMEOUT_S, allow_redirects=False)
        except requests.RequestException as error:
            log.debug("No sign of life reached %s: %s", self.url, error)

    def _new_session(self) -> requests.Session:
        session = requests.Session()
        session.trust_env = False  # a proxy of the environment does not reach loopback
        session.headers["Accept"] = f"{MSGPACK}, application/json"
        if self._token is not None:
            session.headers["Authorization"] = f"Bearer {self._token}"
        return session

    def _evaluations(self, policy_version: int) -> tuple[list[dict[str, Any]], list[str]]:
        reply = self._patiently("GET", f"/evaluations?policy_version={policy_version}", what="evaluations")
        return reply["results"], reply["pending"]

    def _register_again(self) -> None:
        self.register(self._progress[0] if self._progress else self._registration.get("starting_step", 0))
        if self._progress is not None:
            self.report_step(*self._progress)

    def _patiently(self, method: str, path: str, body: dict[str, Any] | None = None, *, what: str) -> dict[str, Any]:
        """One request, repeated while the API is down, up to `patience_s` seconds. Raises ApiError then, or at once on
        a refusal.
        """
        try:
            return self._request(method, path, body)
        except _Unreachable as error:
            log.warning("%s %s%s failed: %s", method, self.url, path, error)
        end, pause, last = time.monotonic() + self._patience_s, POLL_FIRST_S, ""
        with waiting(log, what, peer=self.url, deadline_s=self._patience_s):
            while time.monotonic() < end:
                self._sleep(pause)
                pause = min(pause * 2, POLL_LAST_S)
                try:
                    return self._request(method, path, body)
                except _Unreachable as error:
                    last = str(error)
            raise ApiError(
                f"the batching API at {self.url} did not answer {method} {path} within {self._patience_s:.0f} s"
                f" ({last}); start it with `python -m atroposlib.cli.run_api`, or correct --atropos-url"
            )

    def _request(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        data = None if body is None else orjson.dumps(body)
        try:
            headers = {"Content-Type": "application/json"} if data else None
            reply = self._session.request(
                method, self.url + path, data=data, headers=headers, timeout=HTTP_TIMEOUT_S, allow_redirects=False
            )
        except (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError) as error:
            raise _Unreachable(_reason(error)) from error
        except requests.RequestException as error:
            raise ApiError(f"--atropos-url {self.url} cannot be used: {_reason(error)}") from error
        if redirected := refused_redirect(self.url + path, reply.status_code, reply.headers.get("Location")):
            raise ApiError(redirected)
        if reply.status_code >= 500 or reply.status_code in NOT_NOW:
            raise _Unreachable(f"HTTP {reply.status_code}")
        if reply.status_code in (404, 405):
            raise _NotFound(
                f"{method} {self.url}{path} was refused with HTTP {reply.status_code}; is --atropos-url the batching"
                " API?"
            )
        if reply.status_code == 401:
            raise ApiError(f"the batching API at {self.url} wants its token: set ATROPOS_API_TOKEN, or --atropos-token")
        if reply.status_code == 409:
            raise ApiError(
                f"another trainer has registered with the batching API at {self.url} and has taken over; end one of"
                " the two"
            )
        if reply.status_code >= 400:
            raise ApiError(f"{method} {self.url}{path} was refused with HTTP {reply.status_code}: {reply.text[:300]}")
        try:
            packed = reply.headers.get("Content-Type", "").startswith(MSGPACK)
            # the API's own reader: what it accepted can be read here, such as integers of any length
            content = msgspec.msgpack.decode(reply.content) if packed else msgspec.json.decode(reply.content)
        except msgspec.DecodeError as error:
            raise ApiError(
                f"{method} {self.url}{path} did not answer JSON; is --atropos-url the batching API? ({error})"
            ) from error
        if not isinstance(content, dict):
            raise ApiError(
                f"{method} {self.url}{path} answered {type(content).__name__} instead of an object; is --atropos-url"
                " the batching API?"
            )
        return content


def _rejection(told: Mapping[str, Any]) -> Rejection:
    return Rejection(_environment(told["environment"], told["env_id"]), told["reason"])


def _environment(name: str | None, env_id: Any) -> str:
    return f"an environment without a name (env_id {env_id})" if name in (None, "unknown") else f"environment {name}"


def _reason(error: Exception) -> str:
    """The cause at the bottom of requests' chain, in a few words."""
    if isinstance(error, requests.Timeout):
        return f"no answer within {HTTP_TIMEOUT_S:.0f} s"
    text = str(error)
    return "connection refused" if "refused" in text else text.splitlines()[0][:200] if text else type(error).__name__
