"""`EnvRun`: one run of an environment, from an item to groups at the batching API. `Environment` has one; `serve.py`,
`process.py` and `cli.py` drive it. What it counts goes into the metrics of a step, and what became of each group into
samples.jsonl.

A group is sent, or dropped with a reason. What an author's code raises leaves `handle`; a fault that ends the
environment is an EnvError.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from logging import WARNING
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, Self, TypeVar

from msgspec import structs

from atroposlib.clients.activity import GRADER_FAILED
from atroposlib.clients.waiting import NotYet
from atroposlib.envs.authors import author_checks
from atroposlib.envs.authors.author_checks import settled
from atroposlib.envs.authors.author_errors import ErrorLog, MalformedGroup, needed, shown, written_by_author
from atroposlib.envs.config import BaseEnvConfig
from atroposlib.envs.data.data_report import LoadedData, noted_data, write_reports
from atroposlib.envs.errors import (
    EnvError,
    NotReplayed,
    PeerError,
    RecordError,
    Unscored,
)
from atroposlib.envs.failures import Failure, GroupLost, survivors, too_slow
from atroposlib.envs.limits.time_limit import time_limit
from atroposlib.envs.limits.waits import wait_for_peer
from atroposlib.envs.metrics import Durations, JsonlSink, Metrics, WandbSink
from atroposlib.envs.payloads import (
    Groups,
    Item,
    Rejection,
    ScoredDataGroup,
    completion_lengths,
    defect,
    rejection,
    wire_form,
)
from atroposlib.envs.run import sample_rows
from atroposlib.envs.run.drop_log import DropLog
from atroposlib.envs.run.dynamic_sampling import BatchFilling, Chosen
from atroposlib.envs.run.order import Order, current_place, fill_place
from atroposlib.envs.run.outcomes import Outcomes
from atroposlib.envs.run.sample_rows import Sampled, SampleRows
from atroposlib.envs.run.worker_pool import RunningItem
from atroposlib.envs.sampling.sampled_with import with_settings
from atroposlib.envs.server_handling.errors import WrongAddress
from atroposlib.envs.server_handling.sequences.sampling import Settings
from atroposlib.envs.server_handling.server_baseline import APIServer
from atroposlib.errors import reading
from atroposlib.logs import get_logger
from atroposlib.row_files.record_file import RecordFile
from atroposlib.wire.batching import Cause, GroupRequirements, WandbInfo

if TYPE_CHECKING:  # they load HTTP clients, which no --help waits for
    from atroposlib.envs.run.api_link import ApiLink
    from atroposlib.envs.server_handling.server_manager import ServerManager

log = get_logger(__name__)

T = TypeVar("T")

LENGTHS_KEPT = 10_000
NO_LIMIT = 10**9  # tokens; tokenizers without a limit name one above this, too

_item_number: ContextVar[int | None] = ContextVar("item_number", default=None)  # in a BatchFilling


async def _start_none() -> None:
    """Outside of `serve` there is no queue to fill."""


def _look_at_none(group: ScoredDataGroup, item: Item) -> None:
    """Only `process` looks at each group."""


class Author(sample_rows.Author, Protocol):
    """Lists what a run needs of its environment."""

    name: ClassVar[str | None]
    config: BaseEnvConfig
    server: "ServerManager"
    backlog: list[Item]
    max_token_len: int
    completion_lengths: list[int]
    items_sent_this_step: int

    @property
    def derived_batch_size(self) -> int: ...

    async def setup(self) -> None: ...

    async def collect_trajectories(self, item: Item) -> tuple[Groups, list[Item]]: ...

    async def postprocess_histories(self, trajectories: Groups) -> Groups: ...

    async def handle_send_to_api(self, scored_data: Groups, item: Item, do_send_to_api: bool) -> None: ...

    async def add_rollouts_for_wandb(self, scored_data: ScoredDataGroup, item: Item) -> None: ...

    async def cleanup(self) -> None: ...

    async def wandb_log(self, wandb_metrics: Metrics | None = None) -> None: ...

    async def _before_sending(self, group: ScoredDataGroup) -> ScoredDataGroup: ...

    def _awaits_teacher(self, group: ScoredDataGroup) -> bool: ...

    async def _expect_teacher(self) -> None: ...

    async def _decided(self, items: Sequence[Item]) -> None: ...

    async def _leave_out_long(self, data: LoadedData, limit: int, whose: str, *, held_out_too: bool) -> None: ...

    async def _release(self) -> None: ...


E = TypeVar("E", bound=Author)


class EnvRun(Generic[E]):
    """Keeps what is known and counted of `env`'s run. An async context: leaving it closes files and connections."""

    def __init__(self, env: E) -> None:
        self.env = env
        self.link: ApiLink | None = None  # with the batching API, under `serve`
        self.start_groups: Callable[[], Awaitable[None]] = _start_none
        self.on_group: Callable[[ScoredDataGroup, Item], None] = _look_at_none  # at each that is kept

        # What the API and the trainer said last.
        self.policy_version = 0
        self.total_steps: int = env.config.total_steps
        self.weights_of: int | None = None  # the version that is served again, after the last step
        self.is_last = False  # an evaluation of the last policy, or of what is served after it
        self.needs = GroupRequirements()
        self.context_tokens: int | None = None  # of the server with the shortest context, once set up
        self.wandb_info = WandbInfo(None, None)
        self.registered_name = self.display_name

        # What has been since the start, or since the last log.
        self.counts: Counter[str] = Counter()
        self.errors = ErrorLog(written_by_author(type(env)))
        self.outcomes = Outcomes(self.errors.origin)
        self.waits_for = ""  # empty while groups are sampled
        self.in_flight = 0  # groups
        self.running_items: dict[str, RunningItem] = {}
        self.evaluation: asyncio.Task[None] | None = None
        self.last_completed_item: Item = None
        self.last_loop_time: float | None = None
        self._decided: list[Item] = []  # items whose groups are at the API or thrown away, until the author is told
        self.sending = 0  # groups that dynamic sampling has chosen and the API does not have yet
        self._drops = DropLog(self.errors, self.outcomes, type(env.config).model_fields)
        self.samples = SampleRows(self)
        self.filling: BatchFilling[Sampled] | None = None
        if env.config.max_items_per_batch and env.config.ensure_scores_are_not_same:
            self.filling = BatchFilling(env.config.max_items_per_batch, env.config.max_batches_offpolicy == 0)
        self.order: Order | None = None
        if env.config.deterministic:
            self.order = Order(self.display_name, getattr(env.config, "seed", 0), env.config.startup_timeout)
        self.durations = Durations()
        self.eval_results: Metrics = {}
        self.unwritten: RecordError | None = None  # of the files of an evaluation
        self.data = LoadedData()
        self.held_out: list[dict[str, Any]] = []  # answers of the evaluation that is under way, or over
        self.records: dict[Path, RecordFile] = {}

        path = env.config.metrics_path
        with reading(f"cannot write metrics to {path}", RecordError, remedy="choose another --env.metrics_path"):
            self.sinks: list[JsonlSink | WandbSink] = [JsonlSink(Path(path))] if path else []
        self.wandb_is_open = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        for sink in self.sinks:
            sink.close()
        for sampled in self.filling.undecided() if self.filling is not None else ():
            self.samples.write(sampled, "the run ended before its batch was full")
        for record in self.records.values():
            record.close()
        if self.env.jsonl_writer is not None:
            self.env.jsonl_writer.close()
        await self.env._release()
        await self.env.server.close()

    @property
    def display_name(self) -> str:
        """Return the name under which the environment presents itself."""
        return self.env.config.wandb_name or self.env.name or type(self.env).__name__

    async def set_up(self) -> None:
        """Call the author's `setup`. Raises AuthorError when it fails."""
        with noted_data() as self.data, needed("setup", self.env.setup):
            await settled(self.env.setup())
            author_checks.questions(self.env.setup, getattr(self.env, "held_out", ()))
        limits = [limit for server in self.env.server.servers if (limit := await server.context_length())]
        self.context_tokens = min(limits, default=None)
        if self.context_tokens is not None:
            await self.env._leave_out_long(self.data, self.context_tokens, "of the server", held_out_too=True)
        self.tell_data()

    async def take_over_limit(self) -> None:
        """Leave out what the registered trainer cannot train on."""
        before = [report.as_json() for report in self.data.reports]
        if self.env.max_token_len > 0:
            await self.env._leave_out_long(self.data, self.env.max_token_len, "of the trainer", held_out_too=False)
        if [report.as_json() for report in self.data.reports] != before:
            self.tell_data()
        await self.env._expect_teacher()

    def tell_data(self) -> None:
        """Log what the look at the data has found, and write it to the run's record."""
        for report in self.data.reports:
            report.tell()
        path = self.env.config.run_record_path
        if path is not None and self.data.reports:
            try:
                write_reports(Path(path), self.display_name, self.data.reports)
            except RecordError as error:  # a record of what was just logged
                log.error("%s", error)

    async def log_metrics(self, metrics: Metrics) -> None:
        """Have the author's `wandb_log` write metrics. What it raises costs these, and no run."""
        try:
            await settled(self.env.wandb_log(metrics))
        except EnvError:
            raise
        except Exception as error:
            self.errors.note(error, "wandb_log failed, and its metrics are missing; the run continues")

    # --- one item -------------------------------------------------------------------------------------------------

    async def handle(self, item: Item) -> None:
        """Everything that becomes of `item`, up to the API if there is one. Raises what the author's methods raise."""
        try:
            await self._chosen_among(item)
        except Exception:  # the caller's; what was decided before it is told, unless the item was cancelled
            await self._tell_decided()
            raise
        await self._tell_decided()

    async def _tell_decided(self) -> None:
        decided, self._decided = self._decided, []
        if decided:
            await self.env._decided(decided)

    async def _chosen_among(self, item: Item) -> None:
        if self.filling is None or self.link is None:
            await self._filled(item)
            return
        number = self.filling.begin()
        token = _item_number.set(number)
        is_cancelled = False
        try:
            await self._filled(item)
        except asyncio.CancelledError:
            is_cancelled = True
            raise
        finally:
            _item_number.reset(token)
            chosen = self._settled(self.filling.end(number, self.groups_per_batch))
            if chosen and not is_cancelled:
                self.sending += len(chosen)
                try:
                    await self._send_all(chosen)
                finally:
                    self.sending -= len(chosen)

    async def _filled(self, item: Item) -> None:
        """Work on `item`, in a run that can be repeated until its place is filled."""
        if self.order is None or (place := current_place()) is None:
            await self._handle(item)
            return
        await self.order.fill(place, lambda: self._handle(item), lambda: self.outcomes.last_drop)

    async def _handle(self, item: Item) -> None:
        with self.samples.item():
            await self._handle_traced(item)

    async def _handle_traced(self, item: Item) -> None:
        try:
            groups, more = await self._collected(item)
            self.env.backlog.extend(more or [])
            if groups:
                groups = await settled(self.env.postprocess_histories(groups))
            if groups:
                await self.env.handle_send_to_api(groups, item, do_send_to_api=self.link is not None)
                self.last_completed_item = item
            else:
                self._note_without_group(item, "without a group", "the environment gave no group")
        except GroupLost as error:  # costs the error budget nothing
            self.counts[error.count] += 1
            log.warning("Dropped the item %s: %s", shown(item), error)
            self._note_without_group(item, error.kind, str(error))
        except Unscored as error:  # nor does this
            self.counts[error.count] += 1
            self._drops.unscored(error)
            self._note_without_group(item, GRADER_FAILED, str(error) or "an answer could not be scored")
        except EnvError as error:  # ends the environment; perhaps no row can be written
            self.outcomes.note_failed(error)
            raise
        except WrongAddress as error:
            if self.counts["groups_accepted"] or self.counts["items_rejected"]:  # it was right once
                raise
            raise PeerError(str(error)) from error
        except Exception as error:
            self.outcomes.note_failed(error)
            self.samples.write_lost(item, self.outcomes.last_drop)
            self._decided.append(item)
            raise
        finally:
            await settled(self.env.cleanup())

    def _note_without_group(self, item: Item, kind: str, why: str) -> None:
        """Count an item of which no group is left, and write its row."""
        self.counts["items_without_group"] += 1
        self.outcomes.note_dropped(kind, why)
        self.samples.write_lost(item, why)
        self._decided.append(item)

    async def take(self, scored_data: Groups, item: Item, send: bool, limit_lengths: bool) -> None:
        """Check groups, keep the good ones in the files and tables, and send them. Waits while the API is away.

        Raises MalformedGroup, once the others are sent, for groups that no trainer could use, that the registered one
        cannot, or that the API refused.
        """
        self._drops.note_scored()
        given = scored_data if isinstance(scored_data, list) else [scored_data]
        settled = [self._with_settings(group) for group in given if group]
        groups, defects = [group for group, _ in settled], [found for _, found in settled]
        whole = [group for group, found in zip(groups, defects, strict=True) if found is None]
        accepted = []
        for group in whole:
            self.note_failed_rollouts(Counter(group.get("failed") or {}))
            group = self._in_place(group)
            accepted += self._chosen(group, item, send, limit_lengths)
        if accepted:
            await self._send_all(accepted, send)
        if len(whole) < len(groups):
            self.counts["groups_malformed"] += len(groups) - len(whole)
            for group, found in zip(groups, defects, strict=True):
                if found is not None:
                    self.samples.write_malformed(group, item, f"it cannot be trained on: {found}")
            raise MalformedGroup(
                "a group cannot be trained on: " + "; ".join(found for found in defects if found is not None)
            )

    def _in_place(self, group: ScoredDataGroup) -> ScoredDataGroup:
        """The group with its place in the run, if that can be repeated. Raises GroupLost."""
        if self.order is None or (place := current_place()) is None:
            return group
        place.expect_sampled_by(group)
        return ScoredDataGroup(**{**group, "ordinal": self.order.ordinal(place)})

    def sampled_with(self, group: ScoredDataGroup) -> list[list[Settings]]:
        """The settings with which each sequence was sampled, one unless its turns differ; none where not known."""
        ledger, logprobs = self.env.server.ledger, group.get("inference_logprobs")
        return [
            ledger.settings_of(tokens, masks, logprobs[index] if logprobs else None)
            for index, (tokens, masks) in enumerate(zip(group["tokens"], group["masks"], strict=True))
        ]

    def _with_settings(self, group: ScoredDataGroup) -> tuple[ScoredDataGroup, str | None]:
        """The group with what it does not say of its sampling, or why that cannot be trained on."""
        needs = self.needs
        if self.env._awaits_teacher(group):
            needs = structs.replace(needs, teacher_top_k=None)
            group = ScoredDataGroup(**{**group, "distill_token_ids": None, "distill_logprobs": None})
        if (found := defect(group, needs)) is not None:
            return group, found
        try:
            found_settings = self.sampled_with(group)
        except (OverflowError, TypeError, ValueError):  # no ids: the API or the trainer refuses them
            return group, None
        try:
            group = with_settings(group, found_settings)
        except NotReplayed as error:
            return group, str(error)
        return group, defect(group, needs)  # with what was added

    async def _send_all(self, chosen: Sequence[Sampled], send: bool = True) -> None:
        """Keep groups in the files and tables, and send them."""
        kept = []
        for sampled in chosen:
            try:
                kept.append(replace(sampled, group=await self.env._before_sending(sampled.group)))
            except GroupLost as error:  # the others are sent
                self._note_lost(sampled, error)
        for sampled in kept:
            await self.env.add_rollouts_for_wandb(sampled.group, sampled.item)
            self._remember(sampled)
        refused = []
        for post in _posts(kept):
            try:
                if send:
                    await self._send(post)
            except MalformedGroup as error:  # the others are sent
                refused.append(error)
            self._decided += [sampled.item for sampled in post]
        if refused:
            raise refused[0]

    def _note_lost(self, sampled: Sampled, error: GroupLost) -> None:
        """Count a whole group that cannot be sent."""
        self.counts[error.count] += 1
        self._note_thrown_away(sampled.group)
        self._decided.append(sampled.item)
        self.outcomes.note_dropped(error.kind, str(error))
        log.warning("Dropped a group of the item %s: %s", shown(sampled.item), error)
        self.samples.write(sampled, str(error))

    def turn_to_batch(self, batch: int, policy_version: int) -> None:
        """Begin the places of another batch; what was sampled for the one before and not sent is thrown away."""
        assert self.order is not None
        if self.order.follow(batch, policy_version) and self.filling is not None:
            self._settled(Chosen([], self.filling.start_over()))
            self.order.batches_before = self.filling.batches

    @property
    def groups_per_batch(self) -> int:
        """Return how many groups of a batch are this environment's."""
        return max(1, int(self.env.derived_batch_size) // int(self.env.config.group_size))

    def _settled(self, chosen: Chosen[Sampled]) -> list[Sampled]:
        """The groups to send; those that are thrown away are counted."""
        for thrown in chosen.thrown_away:
            self._note_thrown_away(thrown.group)
            self._decided.append(thrown.item)
            found = thrown.rejected
            self.samples.write(thrown, "its batch was full before it was its turn" if found is None else found.reason)
        if self.filling is not None:
            self.counts["groups_filled_in"] = self.filling.filled_in
        return chosen.sent

    def _chosen(self, group: ScoredDataGroup, item: Item, send: bool, limit_lengths: bool) -> list[Sampled]:
        """The groups to send now that this one has been sampled, with their items: it, none, or with it others."""
        config = self.env.config
        longest = self.env.max_token_len if limit_lengths else -1
        rejected = rejection(group, group_size=config.group_size, max_token_len=longest, scores_must_differ=False)
        if rejected is not None:
            self._note_rejected(rejected, group, item)
            return []
        must_differ = config.ensure_scores_are_not_same and self.needs.teacher_top_k is None
        rejected = rejection(group, group_size=config.group_size, max_token_len=longest, scores_must_differ=must_differ)
        if rejected is None:
            self._drops.note_kept()
        else:
            self.counts["groups_without_signal"] += 1
        if not send or self.filling is None:
            if rejected is not None:
                self._note_rejected(rejected, group, item)
                return []
            fill_place()
            return [self.samples.sampled(group, item)]
        if rejected is not None:
            self.outcomes.note_dropped(*rejected)  # as far as is known
        number = _item_number.get()
        own = self.filling.begin() if number is None else number  # an author may send groups outside of any item
        self.filling.add(own, self.samples.sampled(group, item, rejected), rejected is None)
        fill_place()
        return [] if number is not None else self._settled(self.filling.end(own, self.groups_per_batch))

    def _note_rejected(self, rejected: Rejection, group: ScoredDataGroup, item: Item) -> None:
        """Count a group that is dropped."""
        self.counts["items_rejected"] += 1
        self._note_thrown_away(group)
        self._decided.append(item)
        self.outcomes.note_dropped(*rejected)
        self.samples.write(self.samples.sampled(group, item), rejected.reason)
        self._drops.rejected(rejected, item)

    def _note_thrown_away(self, group: ScoredDataGroup) -> None:
        self.outcomes.thrown_away += 1
        self.counts["groups_thrown_away"] += 1
        self.counts["tokens_thrown_away"] += sum(completion_lengths(group))

    # --- rollouts that fail ---------------------------------------------------------------------------------------

    async def _collected(self, item: Item) -> tuple[Groups, list[Item]]:
        """Collect what the author's method gives. Rollouts that `attempt` runs have their own time limit; a method that
        does without is limited as a whole, for there is no saying which of its rollouts is late.
        """
        limit_s = self.env.config.rollout_limit_s
        try:
            async with time_limit(limit_s) as limit:
                return await author_checks.groups(self.env.collect_trajectories, item)
        except TimeoutError as error:
            if not limit.ran_out:
                raise
            raise GroupLost(str(too_slow(limit_s)), "too slow", "items_timed_out") from error

    def survivors(self, results: Sequence[T | Failure], item: Item) -> tuple[list[T], Counter[Cause]]:
        """Return what `failures.survivors` does; log the failures of a group that continues, and count a lost one's."""
        failures = [result for result in results if isinstance(result, Failure)]
        self.samples.note_failures(failures)
        try:
            left, failed = survivors(results)
        except Exception:  # whatever an author's rollout raised may be what lost the group
            self.note_failed_rollouts(Counter(failure.cause for failure in failures))
            raise
        for failure in failures:
            text = f"A rollout of the item {shown(item)} failed ({failure.cause}); its siblings continue"
            if not failure.is_expected:
                self.errors.note(failure.error, text, WARNING)
            elif str(failure):
                self.errors.note_reason(failure.cause, f"{text}: {failure}")
        return left, failed

    def note_unanswered(self, failure: Failure) -> None:
        """Log why a held-out question has no score; the same reason once a minute."""
        self.errors.note(failure.error, f"A held-out question has no score ({failure.cause})", WARNING)

    def note_failed_rollouts(self, failed: Mapping[str, int]) -> None:
        """Count rollouts that failed, by cause."""
        for cause, count in failed.items():
            self.outcomes.failed[cause] += count
            self.counts[f"rollouts_failed_{cause}"] += count

    def _remember(self, sampled: Sampled) -> None:
        env, group = self.env, sampled.group
        self.on_group(group, sampled.item)
        env.completion_lengths.extend(completion_lengths(group))
        del env.completion_lengths[:-LENGTHS_KEPT]
        if env.config.include_messages and not group.get("messages"):
            group["messages"] = [
                [{"role": "user", "content": env.tokenizer.decode(tokens)}] for tokens in group["tokens"]
            ]
        self.samples.write(sampled)
        self.counts["groups_accepted"] += 1

    async def _send(self, kept: list[Sampled]) -> None:
        from atroposlib.clients.batching_api import ApiRefused  # `--help` does not need it

        if self.link is None:
            raise RuntimeError("handle_send_to_api without an API: pass do_send_to_api=False, or run `serve`")
        bodies = [wire_form(sampled.group, self.link.env_id, self.env.config.include_messages) for sampled in kept]
        try:
            if self.order is None:
                await self.link.post_groups(bodies)
            else:
                for body in bodies:
                    await self.link.post_in_place(body)
        except ApiRefused as error:
            if error.status == 401:
                raise PeerError(str(error)) from error
            if self.order is not None:
                raise EnvError(f"a group cannot be posted in its place: {error}") from error
            self.counts["items_refused_by_api"] += len(kept)
            for sampled in kept:  # each has a row already, from before it was sent
                self.samples.write(sampled, f"the API refused it: {error}")
            raise MalformedGroup(f"the API refused {len(kept)} group(s): {error}") from error
        self.env.items_sent_this_step += len(kept)
        self.outcomes.note_posted(len(kept))

    def write_held_out(self, version: int | None) -> None:
        """Append the answers of an evaluation of this policy version to the file that the configuration names."""
        path = self.env.config.held_out_path
        if path is not None and self.held_out:
            head = {"time": time.time(), "env": self.display_name, "policy_version": version}
            self.record(Path(path), *({**head, **row} for row in self.held_out))
        self.held_out = []

    def record(self, path: Path, *rows: Mapping[str, object]) -> None:
        """Append rows to a file that only records what happened: a disk without room ends nothing."""
        self.records.setdefault(path, RecordFile(path)).append(*rows)

    # --- the peers' view ------------------------------------------------------------------------------------------

    async def wait_for_inference(self) -> None:
        """Return when one of the environment's inference servers answers."""
        await self.wait_for(self.env.server.servers, "inference server", "--openai.base_url")

    async def wait_for(self, asked: Sequence[APIServer], what: str, flag: str) -> None:
        """Return when one of these servers answers; those without a health check count as answering. Raises PeerError
        for none within --env.startup_timeout.
        """
        servers = [server for server in asked if server.config.health_check]
        if len(servers) < len(asked):
            return
        names = ", ".join(server.name for server in servers)

        async def attempt() -> None:
            problems = await asyncio.gather(*(server.probe() for server in servers))
            if all(problem is not None for problem in problems):
                told = "; ".join(str(problem) for problem in problems)
                self.waits_for = f"the {what} at {names} ({told})"
                raise NotYet(told)

        await wait_for_peer(
            f"an answer of the {what}",
            names,
            attempt,
            timeout_s=self.env.config.startup_timeout,
            remedy=f"start the {what}, or correct {flag}",
        )

    @property
    def conversation_limit(self) -> tuple[int, str]:
        """Return the most tokens that a conversation may have, and what limits it: `max_token_length` only where it is
        given, since its default is a weight at the API. NO_LIMIT where nothing is known.
        """
        given = self.env.config.max_token_length if "max_token_length" in self.env.config.model_fields_set else 0
        limits = (
            (given, "--env.max_token_length"),
            (self.context_tokens or 0, "the server's context (--max-model-len)"),
            (self.env.max_token_len, "the trainer's --seq-len"),
        )
        return min((limit for limit in limits if limit[0] > 0), default=(NO_LIMIT, ""))

    @property
    def joined_link(self) -> "ApiLink":
        """The link. Raises RuntimeError outside of `serve`."""
        if self.link is None:
            raise RuntimeError("there is no batching API outside of `serve`")
        return self.link


def _posts(kept: list[Sampled]) -> list[list[Sampled]]:
    """The groups of each post: all in one, but those with a key of their own, by which the API knows them, alone."""
    if any(sampled.group.get("idempotency_key") for sampled in kept):
        return [[sampled] for sampled in kept]
    return [kept] if kept else []
