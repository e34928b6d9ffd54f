"""The trainer's session with the batching API: register, fetch batches, report steps, read evaluations.

    register ──▶ fetch_batch (leased) ──▶ train ──▶ checkpoint ──▶ acknowledge

A batch that is not acknowledged goes to the next trainer of this run, so a trainer that resumes from a checkpoint
trains on the batches after it. The client waits up to `patience_s` for an API that is down. An API that was restarted
without a journal has forgotten its trainer; the client registers again from the step the trainer has reached. An API
without leases (the archived ancestor's) never delivers a batch twice. A request for a batch waits in the API until
there is one, so there is no pause between sampling and training. An API that does not wait is polled.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from atroposlib.clients.activity import explain
from atroposlib.clients.batching_api import Answer, ApiRefused, ApiUnreachable, BatchingApi, UnexpectedReply
from atroposlib.clients.heartbeat import Heartbeat
from atroposlib.clients.waiting import NotYet, Wait, wait_for
from atroposlib.groups import Untrainable
from atroposlib.logs import get_logger
from atroposlib.wire import batching as wire
from atroposlib.wire import routes
from atroposlib.wire.batching import BatchReply, ScoredData
from atroposlib.wire.held_out import HeldOut, held_out
from atroposlib.wire.routes import Route
from atroposlib.wire.servers import ServerChange, State
from example_trainer.errors import TrainerError
from example_trainer.loop.bad_data import Rejection

HEARTBEAT_S = 5.0
MAX_REASON = 1000  # characters

R = TypeVar("R")
Item = ScoredData | Untrainable  # a group of a batch, or why it cannot be read

log = get_logger(__name__)


class ApiError(TrainerError):
    """The batching API did not answer in time, or refused; `status` is the HTTP status of a refusal."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class ApiClient:
    """One trainer's session with the batching API.

    `on_rejected` is told of the groups that the API set aside because this trainer cannot use them; it may raise to
    end the run.
    """

    def __init__(
        self,
        url: str,
        registration: wire.Registration,
        *,
        patience_s: float,
        token: str | None = None,
        sleep: Callable[[float], None] = time.sleep,
        on_rejected: Callable[[list[Rejection]], None] = lambda rejections: None,
    ) -> None:
        self._api = BatchingApi(url, token)
        self.url = self._api.url
        self._registration = registration
        self._patience_s = patience_s
        self._sleep = sleep
        self._progress: wire.TrainerStep | None = None  # last reported
        self._trainer = 0  # what /register answered
        self._leases = True  # whether the API has them, as far as is known
        self._arrives = True  # and whether it tells what waits for a batch
        self._lists_servers = True  # and which servers have joined
        # leases of batches that are not acknowledged; a checkpoint holds them, and its resumer registers them
        self.holding: list[int] = []
        self.ids: list[int] = []  # the API's names of the items of the batch fetched last; empty without a lease
        self._env_ids: list[int | None] = []  # and whose they are
        self._on_rejected = on_rejected
        # nobody waits for a beat, and the next request tells what is wrong
        self._heartbeat = Heartbeat(self.url, self._beat, HEARTBEAT_S, (ApiUnreachable, ApiRefused))

    def wait_until_up(self) -> None:
        """Return when GET /info answers. Raises ApiError after `patience_s` seconds."""
        self._patiently(routes.INFO, what="the batching API")

    def register(self, starting_step: int, **run: object) -> None:
        """POST /register: from the next fetch on, environments may join. `starting_step` is the number of steps
        already done.

        `run` is more to register, such as the run's name.
        """
        self._registration = replace(self._registration, starting_step=starting_step, **run)
        self._trainer = self._patiently(routes.REGISTER, self._registration, what="registration").uuid
        self.holding = []

    def fetch_batch(
        self, timeout_s: float, on_arrival: Callable[[Mapping[int, Item]], None] | None = None
    ) -> list[Item]:
        """The next batch, as soon as there is one; it is this trainer's until `acknowledge`.

        While there is none, the log says each minute what is missing, by asking the API. `on_arrival` gets the groups
        that wait for the batch, by their ids, each of them once. Most likely they will be in it, and `ids` will name
        them. An API that cannot tell them gives the batch alone.

        Raises ApiError after `timeout_s` seconds without one.
        """

        def failed(reason: str) -> ApiError:
            return ApiError(
                f"no batch of {self._registration.batch_size} rollouts from {self.url} within {timeout_s:.0f} s"
                f" ({reason}); check that an environment is running and that its group size divides the batch, or raise"
                " --fetch-timeout"
            )

        asking = _AskForBatch(self, time.monotonic() + timeout_s, on_arrival)
        return wait_for(asking.once, Wait("a batch", self.url, timeout_s, failed, why=self.why_no_batch), self._sleep)

    def reordered(self, batch: Sequence[Item], places: Sequence[int]) -> list[Item]:
        """The batch fetched last in another order, which counts from here on: the item at the first of the `places`
        first.
        """
        self._env_ids = [self._env_ids[place] for place in places]
        self.ids = [self.ids[place] for place in places] if self.ids else []
        return [batch[place] for place in places]

    def why_no_batch(self, otherwise: str) -> str:
        """Ask the API why there is no batch; return `otherwise` where it cannot tell."""
        try:
            return ". ".join(explain(self._api.call(routes.ACTIVITY)))
        except (ApiUnreachable, ApiRefused):  # no such route, or down: the next request reports it
            return otherwise

    def servers(self) -> dict[str, State]:
        """Inference servers that have joined or left, by address; none of an API that does not know of any."""
        if not self._lists_servers:
            return {}
        try:
            return self._patiently(routes.SERVERS, what="the list of servers").servers
        except ApiError as error:
            if error.status not in (404, 405):
                raise
            self._lists_servers = False
            return {}

    def change_server(self, url: str, state: State) -> None:
        """Report the state of an inference server that joined or leaves."""
        self._patiently(routes.CHANGE_SERVER, ServerChange(url, state), what="a server's state")

    def reject(self, reasons: Mapping[int, str]) -> list[Rejection]:
        """Set aside items of the batch fetched last, by their places in it; the API never delivers them again.

        An API without leases has given them for good. The result names the environments where the API does.
        """
        groups = [wire.RejectedGroup(self.ids[at], why[:MAX_REASON]) for at, why in reasons.items() if self.ids]
        told: list[wire.SetAside] = []
        if groups:
            told = self._patiently(
                routes.REJECT, wire.Rejection(self._trainer, self.holding[-1], groups), what="the rejection of groups"
            ).rejected
        of = {self.ids.index(each.id): each.environment for each in told}
        return [Rejection(_environment(of.get(at), self._env_ids[at]), why) for at, why in reasons.items()]

    def acknowledge(self, leases: Collection[int] | None = None) -> None:
        """The batches of these leases, or all fetched so far, are trained on, and where that is needed in a checkpoint:
        the API may forget them.
        """
        done = [lease for lease in self.holding if leases is None or lease in leases]
        if done:
            self._patiently(routes.ACKNOWLEDGE, wire.Acknowledgement(self._trainer, done), what="the acknowledgement")
            self.holding = [lease for lease in self.holding if lease not in done]

    def report_step(self, report: wire.TrainerStep) -> None:
        """POST /trainer-step: what is done and what vLLM serves."""
        self._progress = report
        self._patiently(routes.TRAINER_STEP, replace(report, trainer=self._trainer), what="the step report")

    def evaluation(self, policy_version: int, deadline_s: float) -> HeldOut | None:
        """Return the held-out accuracy of `policy_version`, once all announced evaluations are in, or `deadline_s`
        seconds have passed.

        None without any. With `deadline_s` 0 nothing is waited for.
        """
        asking = _AskForEvaluation(self, policy_version, waits=deadline_s > 0)
        wait = Wait(f"the evaluation of policy {policy_version}", self.url, deadline_s, TimeoutError)
        try:
            wait_for(asking.once, wait, self._sleep)
        except TimeoutError:
            log.warning(
                "Continuing without the evaluation of policy %d by %s (--eval-deadline %.0f s)",
                policy_version,
                ", ".join(asking.reply.pending),
                deadline_s,
            )
        return held_out([(result.accuracy, result.metrics) for result in asking.reply.results])

    def close(self) -> None:
        """Drop the connection."""
        self._heartbeat.stop()
        self._api.close()

    def _next_batch(self, wait_s: float) -> list[Item] | None:
        """Ask once for the next batch; the API may wait up to `wait_s` seconds for it. None while there is none."""
        reply = self._leased(wait_s)
        if reply.status == "error":
            log.warning("The batching API at %s has no trainer (%s): registering again", self.url, reply.message)
            done = self._progress
            self.register(self._registration.starting_step if done is None else done.step)
            if done is not None:
                self.report_step(done)
        elif isinstance(reply.batch, list) and reply.batch:
            self.ids = reply.ids if isinstance(reply.ids, list) else []
            self._env_ids = [item.env_id if isinstance(item, ScoredData) else None for item in reply.batch]
            return reply.batch
        return None

    def _leased(self, wait_s: float) -> BatchReply[Any]:
        if self._leases:
            try:
                request = wire.LeaseRequest(self._trainer, self.holding, ids=True, wait_s=wait_s)
                reply = self._patiently(routes.LEASE, request, what="a batch")
            except ApiError as error:
                if error.status not in (404, 405):
                    raise
                reply = BatchReply[ScoredData]()
            if reply.batch is not msgspec.UNSET:
                if isinstance(reply.lease, int):
                    self.holding.append(reply.lease)
                    self._heartbeat.start()
                if isinstance(reply.rejected, list) and reply.rejected:
                    self._on_rejected(
                        [Rejection(_environment(each.environment, each.env_id), each.reason) for each in reply.rejected]
                    )
                return reply
            log.info("The batching API at %s does not lease batches: a lost batch cannot be delivered again", self.url)
            self._leases = False
        return self._patiently(routes.BATCH, what="a batch")

    def _arrivals(self, known: list[int], wait_s: float) -> wire.Arrivals[Any]:
        """The groups that wait for the next batch but are not `known`. Of an API that cannot tell: that it is whole."""
        if self._arrives:
            try:
                request = wire.ArrivalsRequest(self._trainer, self.holding, known, wait_s)
                return self._patiently(routes.ARRIVALS, request, what="groups of the next batch")
            except ApiError as error:
                if error.status not in (404, 405):
                    raise
            log.info("The batching API at %s does not tell what waits for a batch: --overlap has no effect", self.url)
            self._arrives = False
        return wire.Arrivals([], whole=True)

    def _beat(self) -> None:
        self._api.call(routes.HEARTBEAT, wire.Heartbeat(trainer=self._trainer))

    def _call(self, route: Route[R], body: msgspec.Struct | None, query: Mapping[str, int] | None) -> R:
        try:
            return self._api.call(route, body, query=query)
        except UnexpectedReply as error:
            tolerant: dict[Any, Any] = {
                routes.BATCH.reply: BatchReply[Raw],
                routes.ARRIVALS.reply: wire.Arrivals[Raw],
            }
            if route.reply not in tolerant:
                raise
            # group by group, so that those which are not as they should be do not cost the others
            reply: Any = error.answer.read(tolerant[route.reply])
            reply.batch = [_item(error.answer, raw) for raw in reply.batch or []]
            return cast(R, reply)

    def _patiently(
        self, route: Route[R], body: msgspec.Struct | None = None, *, query: Mapping[str, int] | None = None, what: str
    ) -> R:
        """One request, repeated while the API is down, up to `patience_s` seconds. Raises ApiError then, or at once on
        a refusal.
        """

        def attempt() -> R:
            try:
                return self._call(route, body, query)
            except ApiRefused as error:
                raise ApiError(str(error), error.status) from error

        def failed(reason: str) -> ApiError:
            return ApiError(
                f"the batching API at {self.url} did not answer {route.method} {route.path} within"
                f" {self._patience_s:.0f} s ({reason}); start it with `python -m atroposlib.cli.run_api`, or correct"
                " --atropos-url"
            )

        return wait_for(attempt, Wait(what, self.url, self._patience_s, failed), self._sleep)


@dataclass
class _AskForBatch:
    """Asks for the next batch, once in each call of `once`, until `deadline`, in seconds of the monotonic clock."""

    client: ApiClient
    deadline: float
    on_arrival: Callable[[Mapping[int, Item]], None] | None
    wait_s: float = 0.0  # of the next request; the first does not wait, so that the log says at once that there is none
    known: list[int] = field(default_factory=list)  # ids of the groups that `on_arrival` has

    def once(self) -> list[Item]:
        """Return the batch. Raises NotYet without one."""
        asked = time.monotonic()
        waits = True
        if self.on_arrival is not None:
            arrivals = self.client._arrivals(self.known, self.wait_s)
            if not arrivals.whole:
                if not arrivals.batch:
                    raise self._not_yet(asked)
                self.known.extend(arrivals.ids)
                self.on_arrival(dict(zip(arrivals.ids, arrivals.batch, strict=True)))
                raise NotYet("it is not whole yet", 0.0)
            waits = not self.client._arrives  # else the request for what arrives has waited
        batch = self.client._next_batch(self.wait_s if waits else 0.0)
        if batch is None:
            raise self._not_yet(asked)
        return batch

    def _not_yet(self, asked: float) -> NotYet:
        now = time.monotonic()
        has_waited = now - asked >= self.wait_s / 2  # if not, the next request comes after a pause
        self.wait_s = min(routes.LEASE_WAIT_S, max(0.0, self.deadline - now))
        return NotYet("there is none yet", 0.0 if has_waited else None)


@dataclass
class _AskForEvaluation:
    """Asks for the evaluations of a policy, once in each call of `once`; keeps the last reply."""

    client: ApiClient
    policy_version: int
    waits: bool
    reply: wire.Evaluations = field(default_factory=lambda: wire.Evaluations([], []))

    def once(self) -> None:
        """Ask. Raises NotYet while an evaluation is pending that is waited for."""
        query = {"policy_version": self.policy_version}
        self.reply = self.client._patiently(routes.EVALUATIONS, query=query, what="evaluations")
        if self.reply.pending and self.waits:
            raise NotYet(f"{', '.join(self.reply.pending)} evaluates it")


def _item(answer: Answer, raw: Raw) -> Item:
    try:
        return answer.decode(raw, ScoredData)
    except msgspec.ValidationError as error:
        return Untrainable(str(error))


def _environment(name: str | None, env_id: int | None) -> str:
    return f"an environment without a name (env_id {env_id})" if name in (None, "unknown") else f"environment {name}"
