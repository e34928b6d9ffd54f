"""The `serve` command's loop: keep the trainer's queue filled, evaluate when due, end after the last step.

    built ─▶ inference server answers ─▶ setup ─▶ API answers ─▶ trainer has started: registered
                                    ─▶ loop ─▶ last evaluation ─▶ disconnect

A turn of the loop, ten a second or whenever a group is done: read the status; if the policy moved on, evaluate and
write metrics; start as many groups as the queue policy (`pacing.py`) allows. In-flight groups are never cancelled to
make room.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from atroposlib.clients.batching_api import AsyncBatchingApi, Flags
from atroposlib.clients.waiting import NotYet
from atroposlib.envs.authors import author_checks
from atroposlib.envs.authors.author_checks import settled
from atroposlib.envs.authors.author_errors import ErrorBudget, location
from atroposlib.envs.commands.loop_watch import LoopWatch
from atroposlib.envs.commands.reporting import OWN_SET_UP, Reporting, StartUp
from atroposlib.envs.config import BaseEnvConfig
from atroposlib.envs.errors import DataError, EnvError, WrongSetting
from atroposlib.envs.evaluation.evaluation import (
    Evaluation,
    EvaluationFailed,
    evaluate_version,
    evaluations_file,
    finite_numbers,
)
from atroposlib.envs.files.records import crossed
from atroposlib.envs.limits.waits import wait_for_peer
from atroposlib.envs.payloads import Item
from atroposlib.envs.run.api_link import ApiLink
from atroposlib.envs.run.env_run import EnvRun
from atroposlib.envs.run.environment import Environment, allowed_workers
from atroposlib.envs.run.order import Order, placed, why_not_repeatable
from atroposlib.envs.run.pacing import (
    EVALUATION_RUNS,
    EvaluationSchedule,
    Plan,
    evaluation_interval,
    plan,
    plan_in_order,
)
from atroposlib.envs.run.worker_pool import WorkerPool
from atroposlib.envs.server_handling.errors import PermanentServerError
from atroposlib.logs import get_logger
from atroposlib.processes.identity import this_process
from atroposlib.wire.batching import EnvRegistered, EnvRegistration, EnvStatus
from atroposlib.wire.servers import LISTED_EVERY_S

log = get_logger(__name__)

TURN_S = 0.1
IDLE_REPORT_S = 60.0
NO_ITEMS_TOLD_AFTER_S = 5.0
REJOIN_S = 15.0
GOODBYE_LIMIT_S = 3.0
EVALUATION_TRIES = 3
EVALUATION_PAUSE_S = 3.0


async def serve(env: Environment) -> None:
    """Run `env` until the last step, or until cancelled; leaves nothing running and tells the API goodbye.

    Raises PeerError when a peer does not answer for longer than `startup_timeout`, DataError for what `env` lacks.
    """
    _expect_complete(env.config)
    async with contextlib.aclosing(_client(env.config)) as api, Reporting(api, env._env_run) as reporting:
        await _serve(env, api, reporting)


async def serve_once_built(
    config: BaseEnvConfig, name: str, build: Callable[[StartUp], Awaitable[Environment]]
) -> None:
    """Serve as `serve` does, and from the start report to the API what `build` waits for and notes in the StartUp."""
    _expect_complete(config)
    start = StartUp(name)
    async with contextlib.aclosing(_client(config)) as api, Reporting(api, start) as reporting:
        await _serve(await build(start), api, reporting)


def _expect_complete(config: BaseEnvConfig) -> None:
    """Raise DataError for what the environment lacks, before it waits for its peers: vLLM may take minutes to load."""
    for what in config.lacks():
        raise DataError(what)


def _client(config: BaseEnvConfig) -> AsyncBatchingApi:
    token = config.rollout_server_token
    return AsyncBatchingApi(
        config.rollout_server_url,
        None if token is None else token.get_secret_value(),
        Flags("--env.rollout_server_url", "ATROPOS_API_TOKEN"),
    )


async def _serve(env: Environment, api: AsyncBatchingApi, reporting: Reporting) -> None:
    async with env._env_run as run, ServeLoop(run, api, reporting) as loop:
        await loop.start_up()
        async with LoopWatch():
            await loop.turn_until_done()


class ServeLoop:
    """The run of an environment against the API behind `client`: start_up, turn_until_done. Leaving it ends what it
    started.
    """

    def __init__(self, run: EnvRun[Environment], client: AsyncBatchingApi, reporting: Reporting) -> None:
        self.run = run
        self.env = env = run.env
        self.link = run.link = ApiLink(
            client,
            EnvRegistration(
                max_token_length=env.config.max_token_length,
                desired_name=run.display_name,
                weight=env.config.inference_weight,
                group_size=env.config.group_size,
                min_batch_allocation=env.config.min_batch_allocation,
                steps_per_eval=evaluation_interval(env.config),
                eval_at_start=env.config.eval_at_start,
                process=this_process(),
            ),
            env.config.startup_timeout,
            self._joined,
        )
        self.pool = WorkerPool(
            env.handle_env, env.workers, self._note_end, ErrorBudget(env.config.max_failed_items, run.errors)
        )
        run.running_items = self.pool.running
        self._reporting = reporting
        self._rest_until = 0.0  # while nothing that is sampled is of use
        self._listed_at = 0.0  # when the servers were asked for
        self.schedule = EvaluationSchedule(None, 0, at_start=False)
        run.start_groups = self._sample
        self._status, self._counted = EnvStatus(current_step=0, queue_size=0), 0
        self._sending = self._batches_seen = 0  # by dynamic sampling, when the status was asked for
        self._due: int | None = None
        self._moved_at = time.monotonic()
        self._idle_since = time.monotonic()
        self._no_items_since: float | None = None  # get_next_item gives none
        self._no_items_told_at = 0.0

    async def start_up(self) -> None:
        """Wait for every peer, load the data, join. Raises WrongSetting for a run that was to be repeatable and cannot
        be.
        """
        if self.run.order is not None:
            self._expect_repeatable()
        self._reporting.follow(self.run, self.link)
        await self.run.wait_for_inference()
        start = time.monotonic()
        log.info("Setting up %s", self.run.display_name)
        self.run.waits_for = OWN_SET_UP
        await self._reporting.send()  # an author's setup may block everything else
        await self.run.set_up()
        log.info("Set up %s in %.1f s", self.run.display_name, time.monotonic() - start)
        self.run.waits_for = "a trainer that asks for a batch"
        await self.link.wait_until_up()
        await self.env.register_env()
        await self.env.setup_wandb()
        await self.env.get_server_info()
        await self.run.take_over_limit()
        self.run.waits_for = ""

    def _expect_repeatable(self) -> None:
        name, server = self.run.display_name, self.env.server
        if (why := why_not_repeatable(type(self.env))) is not None:
            raise WrongSetting(f"--env.{why}")
        if getattr(server, "proxy_url", None):
            raise WrongSetting(
                f"--env.deterministic: {name} samples through the proxy {server.proxy_url}, which is not told the seeds"
                " of its requests: drop one of them"
            )

    async def turn_until_done(self) -> None:
        """Turn until the policy has reached the last step and its evaluation is done."""
        await self._await_open_run()
        while True:
            turn_began, self.run.last_loop_time = time.monotonic(), time.time()
            # before the status is asked for: a group must not slip between the two counts
            in_flight, sending, batches = self.pool.in_flight, self.run.sending, self._batches_filled
            status = await self.env.get_status()
            if self.schedule.went_back(status.version):
                log.info(
                    "Policy version %d follows %d: another trainer has taken over",
                    status.version,
                    self.run.policy_version,
                )
                await self._drop_evaluations()
                await self._join_again()
            await self._follow(status)
            await self._follow_servers()
            if status.version >= self.run.total_steps and not self._more_may_come(status):
                break
            self._status, self._counted, self._sending, self._batches_seen = status, in_flight, sending, batches
            await self.env.add_train_workers()
            self.run.durations.add("mainloop_timings", time.monotonic() - turn_began)
            await self.pool.wait(TURN_S)
            if self.pool.fatal is not None:
                raise self.pool.fatal
            if self.run.evaluation is not None and self.run.evaluation.done():
                self.run.evaluation.result()
                self._begin_evaluation()
        await self.pool.cancel_all()
        await self._finish_evaluations()
        counts = "".join(f", {count} {name.replace('_', ' ')}" for name, count in self.run.counts.items())
        log.info("Done: policy version %d of %d%s", status.version, self.run.total_steps, counts)

    def _more_may_come(self, status: EnvStatus) -> bool:
        """Return whether the trainer may serve one more version, to be evaluated, after its last step."""
        if status.more_versions is not True:
            return False
        waited_s, limit_s = time.monotonic() - self._moved_at, self.env.config.startup_timeout
        if self.run.evaluation is not None or waited_s < limit_s:
            return True
        log.warning("The trainer has not said within %.0f s that it is done (--env.startup_timeout): leaving", limit_s)
        return False

    async def __aenter__(self) -> "ServeLoop":
        return self

    async def __aexit__(self, *error: object) -> None:
        """End workers and evaluation, and disconnect; seconds at most, whatever the peers do."""
        await self._reporting.stop()
        await self.pool.cancel_all()
        await self._drop_evaluations()
        try:
            # in a task of its own: a limit within a cancelled task raises no TimeoutError in Python 3.11.2
            await asyncio.wait_for(self.link.leave(), GOODBYE_LIMIT_S)
        except TimeoutError:
            log.warning(
                "Left without disconnecting: %s did not reply within %g s", self.link.client.url, GOODBYE_LIMIT_S
            )

    async def _await_open_run(self) -> None:
        """Return when there are steps left: an API may still hold the trainer of a run that is over.

        Its last policy is evaluated if that is due, since its trainer may be waiting for just that.
        """

        async def attempt() -> None:
            await self._join_again()
            if (await self.env.get_status()).version >= self.run.total_steps:
                await self.link.leave()
                raise NotYet(f"the registered one has done all {self.run.total_steps} steps")

        status = await self.env.get_status()
        if status.version < self.run.total_steps:
            return
        await self._follow(status)
        await self._finish_evaluations()
        await self.link.leave()
        self.run.waits_for = f"a new trainer: the registered one has done all {self.run.total_steps} steps"
        await wait_for_peer(
            "a new trainer",
            self.link.client.url,
            attempt,
            timeout_s=self.env.config.startup_timeout,
            remedy="start a trainer that has steps left",
            every_s=REJOIN_S,
        )
        self.run.waits_for = ""

    async def _join_again(self) -> None:
        """Leave and join, to learn what the new trainer wants."""
        await self.link.leave()
        await self.env.register_env()
        await self.env.get_server_info()

    # --- sampling -------------------------------------------------------------------------------------------------

    async def _sample(self) -> None:
        run, now = self.run, time.monotonic()
        run.in_flight = self.pool.in_flight
        if self.pool.is_paused:
            run.waits_for = "" if run.in_flight else "the pause after its last failure"
            return
        if (rest_s := run.outcomes.pause_s) and now < self._rest_until:
            return
        decision = self._plan()
        before = self.pool.in_flight
        for _ in range(min(1, decision.start) if rest_s else decision.start):
            if not await (self._start_next() if run.order is None else self._start_in_place(run.order)):
                break
        self._rest_until = now + rest_s
        run.in_flight = self.pool.in_flight
        has_ended = self._no_items_since is not None and decision.start > 0 and self.pool.in_flight == before
        run.waits_for = "" if run.in_flight else self._what_is_missing(decision.reason, has_ended)
        self.run.durations.add("workers_added_per_attempt", self.pool.in_flight - before)
        if self.pool.in_flight or self.run.evaluation is not None:
            self._idle_since = now
        elif has_ended:
            self._tell_no_items()
        elif now - self._idle_since >= IDLE_REPORT_S:
            log.info("Not sampling: %s; waiting for the trainer at %s", decision.reason, self.link.client.url)
            self._idle_since = now

    def _plan(self) -> Plan:
        run, filling = self.run, self.run.filling
        known: dict[str, Any] = dict(
            batch_size=self.env.config.batch_size,
            total_steps=run.total_steps,
            max_workers=self.env.max_num_workers,
            evaluating=run.evaluation is not None,
            idle_s=time.monotonic() - self._moved_at,
            oversampling=1.0 if filling is None else filling.oversampling(run.groups_per_batch),
            may_begin=None if filling is None else filling.may_begin(),
        )
        if run.order is None:
            return plan(self.env.config, self._status, in_flight=self._counted, sending=self._sending, **known)
        run.turn_to_batch(self._status.current_step, self._status.version)
        if filling is None:
            known |= {"missing": run.groups_per_batch, "under_way": run.order.begun}
        elif filling.batches > run.order.batches_before:
            known |= {"missing": 0, "under_way": 0}
        else:
            known |= {"missing": filling.missing(run.groups_per_batch), "under_way": run.order.begun - filling.sampled}
        return plan_in_order(self.env.config, self._status, in_flight=self.pool.in_flight, **known)

    async def _start_next(self) -> bool:
        """Start the next item; False if there is none now, or none to start."""
        item = await self._next_item()
        if item is None:
            return False
        if self._batches_filled != self._batches_seen:  # it is for a batch of another policy
            self.env.backlog.append(item)
            return False
        self.pool.start(item)
        return True

    async def _start_in_place(self, order: Order) -> bool:
        """Start the item of the next place; False if there is none now."""
        place = order.begin()
        number = place.batch * (self.env.config.max_items_per_batch or self.run.groups_per_batch) + place.group
        item = await self._item_of(partial(self.env._numbered_item, number))
        if item is None or place.batch != order.batch:
            order.give_back(place)
            return False
        with placed(place):
            self.pool.start(item)
        return True

    def _what_is_missing(self, reason: str, has_ended: bool) -> str:
        """Name what keeps the environment from sampling; `reason` is the queue policy's."""
        if has_ended:
            return f"more items ({self._no_more_items})"
        return "the end of its evaluation" if reason == EVALUATION_RUNS else f"the trainer: {reason}"

    @property
    def _batches_filled(self) -> int:
        """By dynamic sampling. The status does not include those that were filled after it was asked for."""
        return 0 if self.run.filling is None else self.run.filling.batches

    async def _next_item(self) -> Item:
        """The next thing to sample for; None when there is nothing now, or when `get_next_item` failed."""
        if self.env.backlog:
            return self.env.backlog.pop()
        return await self._item_of(self.env.get_next_item)

    async def _item_of(self, give: Callable[[], Any]) -> Item:
        try:
            item = await settled(give())
            if item is not None:
                self._no_items_since = None
            elif self._no_items_since is None:
                self._no_items_since = time.monotonic()
            return item
        except EnvError:
            raise
        except Exception as error:
            self.run.counts["items_failed"] += 1
            self.run.outcomes.note_failed(error)
            self.pool.note_failure(error, "that get_next_item was to give")
            return None

    @property
    def _no_more_items(self) -> str:
        began = time.time() - (time.monotonic() - (self._no_items_since or 0.0))
        since = time.strftime("%H:%M:%S", time.localtime(began))
        return f"the environment has no more items since {since}"

    def _tell_no_items(self) -> None:
        """Once after a while, for an environment may have none for a moment, and then every minute."""
        now, since = time.monotonic(), self._no_items_since or 0.0
        if now - max(since, self._no_items_told_at) < (
            IDLE_REPORT_S if self._no_items_told_at > since else NO_ITEMS_TOLD_AFTER_S
        ):
            return
        self._no_items_told_at = now
        where = location(self.env.get_next_item)
        log.warning(
            "Not sampling: %s, after %d groups. get_next_item gives None%s: let it begin again at the end of its data,"
            " or end the run (Ctrl-C, or fewer steps of the trainer)",
            self._no_more_items,
            self.run.outcomes.posted,
            f" ({where})" if where else "",
        )

    def _note_end(self, success: bool, seconds: float) -> None:
        self.run.counts["items_done" if success else "items_failed"] += 1
        self.run.durations.add("task_duration", seconds)
        self.run.durations.add("succeeded_task_duration" if success else "failed_task_duration", seconds)

    # --- the trainer moves on -------------------------------------------------------------------------------------

    def _joined(self, registration: EnvRegistered) -> None:
        env, run = self.env, self.run
        if run.order is not None:
            run.order.begin_again()
        run.registered_name = registration.wandb_name
        env.wandb_prepend = registration.wandb_name
        env.checkpoint_dir = registration.checkpoint_dir
        env.checkpoint_interval = registration.checkpoint_interval
        run.total_steps = min((n for n in (env.config.total_steps, registration.num_steps) if n > 0), default=1000)
        if env.curr_step == 0 and registration.starting_step > 0:
            env.curr_step = registration.starting_step
            env.load_checkpoint()
        self.schedule = EvaluationSchedule(
            evaluation_interval(env.config), run.total_steps, env.config.eval_at_start, self.schedule.seen
        )

    async def _follow(self, status: EnvStatus) -> None:
        env, run = self.env, self.run
        if 0 < status.num_steps < run.total_steps:
            log.info("The run ends after step %d, not %d", status.num_steps, run.total_steps)
            run.total_steps = self.schedule.last_version = status.num_steps
        run.weights_of = status.weights_of if isinstance(status.weights_of, int) else None
        old_step, moved = env.curr_step, (status.current_step, status.version) != (env.curr_step, run.policy_version)
        run.policy_version = status.version
        due = self.schedule.advance(status.version)
        if due is not None:
            self._due = due
            if self.run.evaluation is None:
                self._begin_evaluation()
        if not moved:
            return
        self._moved_at = time.monotonic()
        await env.server.update_weight(min(1.0, status.env_weight))
        await env.get_server_info()
        await env.env_step_checks()
        env.curr_step = status.current_step
        step = crossed(old_step, env.curr_step, env.checkpoint_interval)
        if step is not None:
            self._save_checkpoint(step)

    async def _follow_servers(self) -> None:
        """Send requests to servers that have joined, and no more to those that leave."""
        if time.monotonic() - self._listed_at < LISTED_EVERY_S:
            return
        self._listed_at = time.monotonic()
        if await self.env.server.follow(await self.link.servers()):
            env = self.env
            env.max_num_workers = allowed_workers(env.config, len(env.server.servers))

    def _save_checkpoint(self, step: int) -> None:
        """Save a checkpoint by the author's method; where it fails, as on a full disk, the previous one stays."""
        try:
            self.env.save_checkpoint(step)
        except OSError as error:
            log.error(
                "The environment's checkpoint of step %d cannot be written: %s; free space in %s. The run continues"
                " with the previous one",
                step,
                error,
                self.env.checkpoint_dir,
            )
        except EnvError:
            raise
        except Exception as error:
            failed = f"save_checkpoint of step {step} failed; the run continues with the previous checkpoint"
            self.run.errors.note(error, failed)

    async def _finish_evaluations(self) -> None:
        while self.run.evaluation is not None:
            await self.run.evaluation
            self._begin_evaluation()

    async def _drop_evaluations(self) -> None:
        """End the one that is running, of a policy that is served no more: its result would count for the policy that
        has this number next.
        """
        self._due, running, self.run.evaluation = None, self.run.evaluation, None
        if running is not None:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    def _begin_evaluation(self) -> None:
        """Start the evaluation that is due, if any; one runs at a time, and the newest due one goes next."""
        due, self._due = self._due, None
        self.run.evaluation = None if due is None else asyncio.create_task(self._evaluate(due))

    async def _evaluate(self, version: int) -> None:
        env, self.run.is_last = self.env, version >= self.run.total_steps
        evaluation = await self._evaluation_of(version)
        path = evaluations_file(env.config.evaluations_path, env.config.data_dir_to_save_evals)
        if path is not None:
            self.run.record(path, evaluation.record(self.run.display_name, self.run.weights_of))
        self.run.write_held_out(version if self.run.weights_of is None else self.run.weights_of)
        await self.link.post_evaluation(
            version, evaluation.accuracy, evaluation.metrics | {"served_version": float(evaluation.served_version)}
        )
        await self.run.log_metrics(
            {key if key.startswith("eval/") else f"eval/{key}": value for key, value in evaluation.metrics.items()}
        )

    async def _evaluation_of(self, version: int) -> Evaluation:
        """The evaluation. One that failed for good has no accuracy, so that a trainer need not wait for it: one whose
        questions failed one by one is not tried again, and another after three tries, if these can help.
        """
        log.info("Evaluating policy version %d", version)
        for attempt in range(1, EVALUATION_TRIES + 1):
            try:
                evaluation = await evaluate_version(self._evaluate_env, version, self.run.policy_version)
            except EnvError:
                raise
            except EvaluationFailed as error:
                self.run.counts["evaluations_failed"] += 1
                log.error("The evaluation of policy version %d failed, and has no accuracy: %s", version, error)
                return Evaluation(version, self.run.policy_version, None, finite_numbers(error.metrics), 0.0)
            # whatever an author's evaluate() raises: tried again here, at last reported to the trainer as no accuracy
            except Exception as error:
                self.run.errors.note(
                    error, f"The evaluation of policy version {version} failed (try {attempt} of {EVALUATION_TRIES})"
                )
                self.run.counts["evaluations_failed"] += 1
                last = f"{self.run.errors.origin(error)}{self.run.errors.again(error)}"
                if isinstance(error, PermanentServerError):
                    break
            else:
                log.info("%s", evaluation.line())
                return evaluation
            await asyncio.sleep(EVALUATION_PAUSE_S)
        log.error("The evaluation of policy version %d failed for good, and has no accuracy: %s", version, last)
        return Evaluation(version, self.run.policy_version, None, {}, 0.0)

    async def _evaluate_env(self) -> dict[str, float]:
        self.run.eval_results, self.run.held_out, self.run.unwritten = {}, [], None
        returned = await author_checks.metrics(self.env.evaluate)
        if self.run.unwritten is not None:
            log.error("%s. The run continues", self.run.unwritten)
        return dict(returned if returned is not None else self.run.eval_results)
