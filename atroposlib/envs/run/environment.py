"""`Environment`, the framework's view of an author's class, and `EnvRun`, one run of it. Authors extend `BaseEnv`
(`base.py`), which adds the commands. `serve.py`, `process.py` and `cli.py` drive a run.

item = get_next_item() ──▶ collect_trajectories(item) ──▶ postprocess_histories ──▶ handle_send_to_api ──▶ batching API
                                 │ rollouts, scores                                     │ checked, kept in files
                                 ▼                                                      ▼
                             self.server (inference)                        samples, metrics, W&B

Every public name of `Environment` is one that environments of the archived ancestor use. All others are free for an
author's own attributes, methods and properties: the framework's own state is on `EnvRun`.
"""

import asyncio
import math
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from logging import WARNING
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from msgspec import structs, to_builtins

from atroposlib.clients.activity import GRADER_FAILED
from atroposlib.clients.waiting import NotYet
from atroposlib.envs.authors import author_checks
from atroposlib.envs.authors.author_errors import ErrorLog, MalformedGroup, needed, shown, written_by_author
from atroposlib.envs.authors.author_methods import settled
from atroposlib.envs.authors.former_attributes import FormerAttributes
from atroposlib.envs.config import BaseEnvConfig
from atroposlib.envs.data.data_report import LoadedData, noted_data, write_reports
from atroposlib.envs.errors import (
    EnvError,
    GroupTooLargeError,
    NotReplayed,
    PeerError,
    RecordError,
    Unscored,
    WrongSetting,
)
from atroposlib.envs.evaluation.evaluation import held_out_row
from atroposlib.envs.failures import Failure, GroupLost, attempt, survivors, too_slow
from atroposlib.envs.files.records import JsonlWriter, markdown_table, write_eval_results
from atroposlib.envs.limits.time_limit import time_limit
from atroposlib.envs.limits.waits import wait_for_peer
from atroposlib.envs.metrics import Durations, JsonlSink, Metrics, WandbSink, length_metrics, open_wandb
from atroposlib.envs.payloads import (
    Groups,
    Item,
    Rejection,
    ScoredDataGroup,
    ScoredDataItem,
    completion_lengths,
    defect,
    group_rollouts,
    rejection,
    wire_form,
    with_failed,
)
from atroposlib.envs.run import checkpoints
from atroposlib.envs.run.dynamic_sampling import BatchFilling, Chosen
from atroposlib.envs.run.outcomes import Outcomes
from atroposlib.envs.run.pacing import batch_share
from atroposlib.envs.run.sample_rows import Sampled, SampleRows
from atroposlib.envs.run.worker_pool import RunningItem
from atroposlib.envs.sampling.chat_template import with_template
from atroposlib.envs.sampling.sampled_with import with_settings
from atroposlib.envs.sampling.sampling_fields import SamplingFields
from atroposlib.envs.server_handling.dispatching.dispatch import gather_or_cancel
from atroposlib.envs.server_handling.errors import WrongAddress
from atroposlib.envs.server_handling.reasoning import ReasoningConfig
from atroposlib.envs.server_handling.sequences.sampling import Settings
from atroposlib.envs.server_handling.server_baseline import APIServer, APIServerConfig, ServerBaseline
from atroposlib.flags import Setting
from atroposlib.groups import rollouts_of
from atroposlib.logs import get_logger, put
from atroposlib.row_files.kept_rows import parse_keep
from atroposlib.row_files.record_file import RecordFile
from atroposlib.type_definitions import Messages
from atroposlib.utils.tokenizers import load_tokenizer
from atroposlib.wire.batching import Cause, EnvStatus, GroupRequirements, WandbInfo

if TYPE_CHECKING:  # loads an HTTP client, which no --help waits for
    from atroposlib.envs.run.api_link import ApiLink

log = get_logger(__name__)

T = TypeVar("T")

LENGTHS_KEPT = 10_000
REJECTIONS_REPORTED = 50
DROPS_REPORTED_EVERY_S = 60.0
ServerConfigs = ServerBaseline | Sequence[APIServerConfig]


class Environment(FormerAttributes, ABC):
    """An environment server. Override `get_next_item`, `evaluate`, `collect_trajectory` or `collect_trajectories`,
    mostly `setup` too.
    """

    name: ClassVar[str | None] = None
    env_config_cls: ClassVar[type[BaseEnvConfig]] = BaseEnvConfig
    server_cls: ClassVar[type[APIServer]] = APIServer

    def __init__(
        self, config: BaseEnvConfig, server_configs: ServerConfigs, slurm: bool = False, testing: bool = False
    ) -> None:
        from atroposlib.envs.server_handling.server_manager import ServerManager  # `--help` does not need its clients

        self.config: Any = config  # of env_config_cls, whatever that is in a subclass
        self.server = ServerManager(
            server_configs,
            server_class=self.server_cls,
            slurm=slurm,
            testing=testing,
            reasoning_config=ReasoningConfig.from_env_config(config),
        )
        self.tokenizer = with_template(
            load_tokenizer(config.tokenizer_name), config.chat_template, config.chat_template_kwargs
        )
        if config.chat_template is not None or config.chat_template_kwargs:
            self.server.tokenizer = self.tokenizer
        self.max_num_workers = config.max_num_workers  # groups that may be in flight
        if self.max_num_workers < 0:
            self.max_num_workers = config.max_num_workers_per_node * len(self.server.servers)
        self.process_mode = False

        # What the API and the trainer said last.
        self.curr_step = 0
        self.max_token_len = -1
        self.checkpoint_dir = ""
        self.checkpoint_interval = -1
        self.wandb_prepend: str | None = None
        self.status_dict: dict[str, Any] = {}

        # Work in progress, and results since the last log.
        self.workers: set[object] = set()
        self.eval_workers: set[object] = set()
        self.backlog: list[Item] = []
        self.items_sent_this_step = 0
        self.completion_lengths: list[int] = []
        self.rollouts_for_wandb: list[list[tuple[Any, ...]]] = []

        path = config.data_path_to_save_groups
        self.jsonl_writer = JsonlWriter(Path(path)) if path else None
        if self.jsonl_writer is not None:
            self.jsonl_writer.keep(parse_keep(config.keep_samples))
        self._env_run = EnvRun(self)

    # --- what an author writes ------------------------------------------------------------------------------------

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, ServerConfigs]:
        """The configuration before YAML and flags: the environment's, and that of one server, a list of them, or a
        ServerBaseline.
        """
        return cls.env_config_cls(), ServerBaseline()

    async def setup(self) -> None:
        """Load data; called once, before anything else, when the tokenizer is loaded and the inference server
        answers.
        """
        return

    @abstractmethod
    async def get_next_item(self) -> Item:
        """The next thing to sample for, or None when there is nothing now."""

    @abstractmethod
    async def evaluate(self, *args: Any, **kwargs: Any) -> Mapping[str, Any] | None:
        """Measure the served policy. Return metrics (`accuracy`, 0..1, is the one that trainers read), or pass them to
        `evaluate_log`.
        """

    async def collect_trajectory(self, item: Item) -> tuple[ScoredDataItem | list[ScoredDataItem] | None, list[Item]]:
        """One scored rollout of `item`, as its sequence or a list of its sequences, or None to drop the whole group;
        then items to process later. One that raises, or takes too long, has failed: its siblings continue.
        """
        raise NotImplementedError(f"{type(self).__name__} must override collect_trajectory or collect_trajectories")

    async def collect_trajectories(self, item: Item) -> tuple[Groups, list[Item]]:
        """A group of `group_size` scored samples of `item`, or several groups, or None to drop it; and items to
        continue with later. A group that counts rollouts as `failed` has as many fewer.
        """
        limit_s = self.config.rollout_limit_s
        results = await gather_or_cancel(
            [
                attempt(author_checks.trajectory(self.collect_trajectory, item), limit_s)
                for _ in range(self.config.group_size)
            ]
        )
        left, failed = self._env_run.survivors(results, item)
        backlog = [later for _, more in left for later in more or []]
        rollouts = [rollout if isinstance(rollout, list) else [rollout] for rollout, _ in left if rollout]
        return (with_failed(group_rollouts(rollouts), failed) if len(rollouts) == len(left) else None), backlog

    async def postprocess_histories(self, trajectories: Any) -> Groups:
        """The groups as they are to be sent; None drops them."""
        groups: Groups = trajectories
        return groups

    async def cleanup(self) -> None:
        """Called after every item, whatever became of it."""
        return

    async def _before_sending(self, group: ScoredDataGroup) -> ScoredDataGroup:
        """An accepted group as it is to be kept and sent. Raises GroupLost for one that cannot be."""
        return group

    def _awaits_teacher(self, group: ScoredDataGroup) -> bool:
        """Return whether `_before_sending` adds what a teacher says."""
        return False

    async def _expect_teacher(self) -> None:
        """Called before anything is sampled, once the trainer's limits are known. Raises WrongSetting for a teacher
        that cannot read what is sampled.
        """

    async def _evaluate_samples(self, asked: SamplingFields) -> None:
        """`evaluate --samples`, which a `QuestionEnv` can do. Raises EnvError."""
        raise WrongSetting(f"--samples is for a QuestionEnv, and {type(self).__name__} has an evaluation of its own")

    @contextmanager
    def _keep_answers(self, output: Path | None) -> Iterator[None]:
        """Let `evaluate` continue from a file while this lasts, which an `evaluate` of an author's own cannot."""
        log.warning(
            "%s has an evaluate of its own: the same command asks everything again%s",
            type(self).__name__,
            f", and {output} is not written" if output is not None else "",
        )
        yield

    def _reference_of(self, item: Item) -> str | None:
        """The right answer to `item`, for samples.jsonl; None if it is not known."""
        return None

    def _prompt_of(self, item: Item) -> Messages | None:
        """The messages that ask `item`, for samples.jsonl where no rollout has them; None if they are not known."""
        return None

    async def _leave_out_long(self, data: LoadedData, limit: int, whose: str, *, held_out_too: bool) -> None:
        """Leave out questions whose prompts are too long, where they are known: by a `QuestionEnv`."""

    @classmethod
    def _further_servers(cls) -> dict[str, object]:
        """Inference servers beside `openai`, by their entry in the configuration, before YAML and flags."""
        return {}

    @classmethod
    def _resolved_servers(
        cls, name: str, read: object, content: Mapping[str, object], typed: Sequence[Setting]
    ) -> object:
        """The further servers `name` as they are used: as the command line has `read` them from YAML and flags."""
        return read

    @classmethod
    def _check_installed(cls) -> None:
        """Raise MissingExtra without what the environment needs; called before anything is waited for."""
        return

    async def _release(self) -> None:
        """Called when a command ends. `close` is the author's own name; `QuestionEnv` calls it here."""
        return

    # --- one item -------------------------------------------------------------------------------------------------

    async def handle_env(self, item: Item) -> None:
        """Everything that becomes of `item`, up to the API. Raises what the author's methods raise."""
        await self._env_run.handle(item)

    async def handle_send_to_api(
        self,
        scored_data: Groups,
        item: Item = None,
        do_send_to_api: bool = True,
        abort_on_any_max_length_exceeded: bool = True,
    ) -> None:
        """Check groups, keep the good ones in the files and tables, and send them; see `EnvRun.take`."""
        await self._env_run.take(scored_data, item, do_send_to_api, abort_on_any_max_length_exceeded)

    # --- the API's view -------------------------------------------------------------------------------------------

    @property
    def derived_batch_size(self) -> int:
        """Rollouts of each batch that this environment may fill."""
        return batch_share(
            self.config.batch_size,
            self.status_dict.get("unallocated_fraction", 1.0),
            self.config.min_batch_allocation,
        )

    async def register_env(self) -> None:
        """Join the API, once a trainer has started."""
        await self._env_run.joined_link.join()

    async def get_server_info(self) -> None:
        """Read what the trainer's batches take. Raises GroupTooLargeError when a group cannot fit in a batch."""
        info = await self._env_run.joined_link.batch_limits()
        self._env_run.needs = info.requirements()
        self.config.batch_size, self.max_token_len = info.batch_size, info.max_token_len
        if 0 < info.batch_size < self.config.group_size:
            raise GroupTooLargeError(
                f"group_size {self.config.group_size} is larger than the trainer's batch of {info.batch_size}"
                " rollouts: lower --env.group_size, or raise the trainer's batch"
            )

    async def get_status(self) -> EnvStatus:
        """Ask the API where things are, and note it."""
        status = await self._env_run.joined_link.status()
        self.status_dict = to_builtins(status)
        return status

    async def env_step_checks(self) -> None:
        """Called when the trainer has moved on, to `status_dict["current_step"]`: take that over, write the metrics of
        the step.
        """
        self.curr_step = self.status_dict["current_step"]
        if self.items_sent_this_step >= self.config.min_items_sent_before_logging:
            await self.wandb_log({})
            self.items_sent_this_step = 0

    # --- metrics --------------------------------------------------------------------------------------------------

    async def setup_wandb(self) -> None:
        """Open a W&B run if the configuration wants one and the trainer has named a project."""
        run = self._env_run
        if not self.config.use_wandb or run.link is None:
            return
        named = run.wandb_info = await run.link.wandb_info()
        sink = await open_wandb(run.display_name, named.group, named.project, self.config.model_dump(mode="json"))
        if sink is not None:
            run.sinks.append(sink)
            run.wandb_is_open = True

    async def wandb_log(self, wandb_metrics: Metrics | None = None) -> None:
        """Write `wandb_metrics` and those of the framework since the last call. An override adds its own and calls
        this.
        """
        run = self._env_run
        metrics = await self.create_rollout_table(dict(wandb_metrics or {}))
        metrics |= length_metrics(self.completion_lengths, self.max_token_len)
        metrics |= self.perf_stats({})
        metrics |= {"train/items_sent_to_api": self.items_sent_this_step, "policy_version": run.policy_version}
        metrics |= {f"train/{name}": count for name, count in run.counts.items()}
        prefix = self.wandb_prepend or run.registered_name
        written = await self.server.wandb_metrics({f"{prefix}_{key}": value for key, value in metrics.items()})
        self.completion_lengths = []
        for sink in run.sinks:
            sink.write(written, self.curr_step)

    def perf_stats(self, metrics: Metrics) -> Metrics:
        """`metrics` with the durations of items since the last call."""
        return metrics | {f"train_perf/{key}": value for key, value in self._env_run.durations.take().items()}

    async def add_rollouts_for_wandb(self, scored_data: ScoredDataGroup, item: Item = None) -> None:
        """Keep some samples of a group, as (text, score), for the rollout table."""
        if not self._env_run.wandb_is_open or self.config.num_rollouts_to_keep == 0:
            return
        wanted = self.config.num_rollouts_per_group_for_logging
        rollouts: dict[int, tuple[str, float]] = {}
        for number, tokens, score in zip(
            rollouts_of(scored_data), scored_data["tokens"], scored_data["scores"], strict=True
        ):
            if wanted < 0 or number < wanted:
                earlier = f"{rollouts[number][0]}\n\n" if number in rollouts else ""
                rollouts[number] = earlier + self.tokenizer.decode(tokens), score
        self.rollouts_for_wandb.append(list(rollouts.values()))
        del self.rollouts_for_wandb[: -self.config.num_rollouts_to_keep]

    async def create_rollout_table(self, wandb_metrics: Metrics) -> Metrics:
        """`wandb_metrics` with the kept samples as a table."""
        if not self._env_run.wandb_is_open or not self.rollouts_for_wandb:
            return wandb_metrics
        import wandb

        table = wandb.Table(columns=["text", "score"])
        for group in self.rollouts_for_wandb:
            for row in group:
                table.add_data(*row[:2])
        self.rollouts_for_wandb = []
        return wandb_metrics | {"train/rollouts": table}

    async def evaluate_log(
        self,
        metrics: Metrics,
        task_name: str | None = None,
        model_name: str | None = None,
        start_time: float | None = None,
        end_time: float | None = None,
        generation_parameters: dict[str, Any] | None = None,
        samples: list[dict[str, Any]] | None = None,
        verbose: bool = True,
    ) -> None:
        """Note an evaluation's `metrics`; with data_dir_to_save_evals write them and the samples there. Times are
        seconds.
        """
        run = self._env_run
        run.eval_results = dict(metrics)
        run.held_out += [held_out_row(index, sample) for index, sample in enumerate(samples or [])]
        if verbose:
            put(markdown_table(metrics))
        if self.config.data_dir_to_save_evals is None:
            log.warning("The evaluation is not written to files: data_dir_to_save_evals is not set")
            return
        write_eval_results(
            Path(self.config.data_dir_to_save_evals),
            task_name or f"{run.display_name}_eval",
            metrics,
            samples,
            model_name=model_name or self.server.model_name,
            start_time=start_time,
            end_time=end_time,
            generation_parameters=generation_parameters,
        )

    # --- checkpoints ----------------------------------------------------------------------------------------------

    def save_checkpoint(self, step: int, data: dict[str, Any] | None = None) -> None:
        """Called at the trainer's checkpoint steps. An override passes `data`: attributes that a resumed run sets
        again.
        """
        if data is not None:
            checkpoints.save(self.checkpoint_dir, self._env_run.registered_name, step, data)

    def load_checkpoint(self) -> None:
        """Set the attributes that the last whole checkpoint at or before `self.curr_step` holds, if there is one."""
        run, folder, step = self._env_run, self.checkpoint_dir, self.curr_step
        found = checkpoints.load(folder, run.registered_name, run.display_name, step)
        if found is None:
            log.info("No checkpoint of %s up to step %d in %r: starting afresh", run.display_name, step, folder)
            return
        path, attributes = found
        for name, value in attributes.items():
            setattr(self, name, value)
        log.info("Loaded %s", path)

    async def add_train_workers(self) -> None:
        """Called ten times a second: start what the queue policy allows. An override may do nothing, and send groups
        by itself.
        """
        await self._env_run.start_groups()


_item_number: ContextVar[int | None] = ContextVar("item_number", default=None)  # in a BatchFilling


async def _start_none() -> None:
    """Outside of `serve` there is no queue to fill."""


class EnvRun:
    """Keeps what is known and counted of `env`'s run. An async context: leaving it closes files and connections."""

    def __init__(self, env: Environment) -> None:
        self.env = env
        self.link: ApiLink | None = None  # with the batching API, under `serve`
        self.start_groups: Callable[[], Awaitable[None]] = _start_none

        # What the API and the trainer said last.
        self.policy_version = 0
        self.total_steps: int = env.config.total_steps
        self.weights_of: int | None = None  # the version that is served again, after the last step
        self.is_last = False  # an evaluation of the last policy, or of what is served after it
        self.needs = GroupRequirements()
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
        self.sending = 0  # groups that dynamic sampling has chosen and the API does not have yet
        self._rejected_in_row = 0
        self._unscored_in_row = 0
        self._unsaid_drops: Counter[str] = Counter()
        self._drops_said_at = -math.inf
        self.samples = SampleRows(self)
        self.filling: BatchFilling[Sampled] | None = None
        if env.config.max_items_per_batch and env.config.ensure_scores_are_not_same:
            self.filling = BatchFilling(env.config.max_items_per_batch, env.config.max_batches_offpolicy == 0)
        self.durations = Durations()
        self.eval_results: Metrics = {}
        self.data = LoadedData()
        self.held_out: list[dict[str, Any]] = []  # answers of the evaluation that is under way, or over
        self.records: dict[Path, RecordFile] = {}

        path = env.config.metrics_path
        self.sinks: list[JsonlSink | WandbSink] = [JsonlSink(Path(path))] if path else []
        self.wandb_is_open = False

    async def __aenter__(self) -> "EnvRun":
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
        limits = [limit for server in self.env.server.servers if (limit := await server.context_length())]
        if limits:
            await self.env._leave_out_long(self.data, min(limits), "of the server", held_out_too=True)
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

    # --- one item -------------------------------------------------------------------------------------------------

    async def handle(self, item: Item) -> None:
        """Everything that becomes of `item`, up to the API if there is one. Raises what the author's methods raise."""
        if self.filling is None or self.link is None:
            await self._handle(item)
            return
        number = self.filling.begin()
        token = _item_number.set(number)
        is_cancelled = False
        try:
            await self._handle(item)
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

    async def _handle(self, item: Item) -> None:
        with self.samples.item():
            await self._handle_traced(item)

    async def _handle_traced(self, item: Item) -> None:
        try:
            groups, more = await self._collected(item)
            self.env.backlog.extend(more or [])
            if groups:
                groups = await self.env.postprocess_histories(groups)
            if groups:
                await self.env.handle_send_to_api(groups, item, do_send_to_api=self.link is not None)
                self.last_completed_item = item
            else:
                self.counts["items_without_group"] += 1
                self.outcomes.note_dropped("without a group", "the environment gave none")
                self.samples.write_lost(item, "the environment gave no group")
        except GroupLost as error:  # costs the error budget nothing
            self.counts["items_without_group"] += 1
            self.counts[error.count] += 1
            self.outcomes.note_dropped(error.kind, str(error))
            log.warning("Dropped the item %s: %s", shown(item), error)
            self.samples.write_lost(item, str(error))
        except Unscored as error:  # nor does this
            self.counts["items_without_group"] += 1
            self.counts[error.count] += 1
            self._unscored_in_row += 1
            self.outcomes.note_dropped(GRADER_FAILED, str(error))
            log.warning("Dropped a group: %s", error)
            self.samples.write_lost(item, str(error) or "an answer could not be scored")
            if self._unscored_in_row % REJECTIONS_REPORTED == 0:
                log.warning(
                    "%d groups in a row could not be scored and nothing was sent, the last because %s. The trainer "
                    "waits until the policy gives other answers. The scorer's warnings above show the answers; if "
                    "they are reasonable, raise its time limit (--env.grader_timeout, --env.scorer_timeout)",
                    self._unscored_in_row,
                    error,
                )
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
            raise
        finally:
            await self.env.cleanup()

    async def take(self, scored_data: Groups, item: Item, send: bool, limit_lengths: bool) -> None:
        """Check groups, keep the good ones in the files and tables, and send them. Waits while the API is away.

        Raises MalformedGroup, once the others are sent, for groups that no trainer could use, that the registered one
        cannot, or that the API refused.
        """
        self._unscored_in_row = 0
        given = scored_data if isinstance(scored_data, list) else [scored_data]
        settled = [self._with_settings(group) for group in given if group]
        groups, defects = [group for group, _ in settled], [found for _, found in settled]
        whole = [group for group, found in zip(groups, defects, strict=True) if found is None]
        accepted = []
        for group in whole:
            self.note_failed_rollouts(Counter(group.get("failed") or {}))
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
        if send and kept:
            await self._send(kept)

    def _note_lost(self, sampled: Sampled, error: GroupLost) -> None:
        """Count a whole group that cannot be sent."""
        self.counts[error.count] += 1
        self._note_thrown_away(sampled.group)
        self.outcomes.note_dropped(error.kind, str(error))
        log.warning("Dropped a group of the item %s: %s", shown(sampled.item), error)
        self.samples.write(sampled, str(error))

    @property
    def groups_per_batch(self) -> int:
        """Return how many groups of a batch are this environment's."""
        return max(1, int(self.env.derived_batch_size) // int(self.env.config.group_size))

    def _settled(self, chosen: Chosen[Sampled]) -> list[Sampled]:
        """The groups to send; those that are thrown away are counted."""
        for thrown in chosen.thrown_away:
            self._note_thrown_away(thrown.group)
            found = thrown.rejected
            self.samples.write(thrown, "its batch was full before it was its turn" if found is None else found.reason)
        if self.filling is not None:
            self.counts["groups_filled_in"] = self.filling.filled_in
        return chosen.sent

    def _chosen(self, group: ScoredDataGroup, item: Item, send: bool, limit_lengths: bool) -> list[Sampled]:
        """The groups to send now that this one has been sampled, with their items: it, none, or with it others."""
        config = self.env.config
        limits: Any = {
            "group_size": config.group_size,
            "max_token_len": self.env.max_token_len if limit_lengths else -1,
        }
        rejected = rejection(group, **limits, scores_must_differ=False)
        if rejected is not None:
            self._note_rejected(rejected, group, item)
            return []
        must_differ = config.ensure_scores_are_not_same and self.needs.teacher_top_k is None
        rejected = rejection(group, **limits, scores_must_differ=must_differ)
        if rejected is not None:
            self.counts["groups_without_signal"] += 1
        if not send or self.filling is None:
            if rejected is not None:
                self._note_rejected(rejected, group, item)
                return []
            self._rejected_in_row = 0
            return [self.samples.sampled(group, item)]
        if rejected is not None:
            self.outcomes.note_dropped(*rejected)  # as far as is known
        number = _item_number.get()
        own = self.filling.begin() if number is None else number  # an author may send groups outside of any item
        self.filling.add(own, self.samples.sampled(group, item, rejected), rejected is None)
        return [] if number is not None else self._settled(self.filling.end(own, self.groups_per_batch))

    def _note_rejected(self, rejected: Rejection, group: ScoredDataGroup, item: Item) -> None:
        """Count a group that is dropped. The log has one line a minute, however many there are."""
        self.counts["items_rejected"] += 1
        self._note_thrown_away(group)
        self._rejected_in_row += 1
        self.outcomes.note_dropped(*rejected)
        self.samples.write(self.samples.sampled(group, item), rejected.reason)
        self._unsaid_drops[rejected.kind] += 1
        if self._rejected_in_row == REJECTIONS_REPORTED:
            log.warning(
                "%d groups in a row were dropped and nothing was sent, the last because %s%s",
                self._rejected_in_row,
                rejected.reason,
                f" ({self.errors.giver})" if self.errors.giver else "",
            )
        now = time.monotonic()
        if now - self._drops_said_at < DROPS_REPORTED_EVERY_S:
            return
        self._drops_said_at = now
        if self._unsaid_drops.total() == 1:
            log.info("Dropped a group of the item %s: %s", shown(item), rejected.reason)
        else:
            log.info(
                "Dropped %d groups since the last such line (%s), %d of them in a row, with pauses of %.1f s between "
                "items; the last one, of the item %s: %s",
                self._unsaid_drops.total(),
                ", ".join(f"{count} {kind}" for kind, count in self._unsaid_drops.most_common()),
                self._rejected_in_row,
                self.outcomes.pause_s,
                shown(item),
                rejected.reason,
            )
        self._unsaid_drops.clear()

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
        except Exception:
            self.note_failed_rollouts(Counter(failure.cause for failure in failures))
            raise
        for failure in failures:
            text = f"A rollout of the item {shown(item)} failed ({failure.cause}); its siblings continue"
            if not failure.is_expected:
                self.errors.note(failure.error, text, WARNING)
            elif str(failure):
                log.warning("%s: %s", text, failure)
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
        self.counts["groups_accepted"] += 1
        env.completion_lengths.extend(completion_lengths(group))
        del env.completion_lengths[:-LENGTHS_KEPT]
        if env.config.include_messages and not group.get("messages"):
            group["messages"] = [
                [{"role": "user", "content": env.tokenizer.decode(tokens)}] for tokens in group["tokens"]
            ]
        self.samples.write(sampled)

    async def _send(self, kept: list[Sampled]) -> None:
        from atroposlib.clients.batching_api import ApiRefused  # `--help` does not need it

        if self.link is None:
            raise RuntimeError("handle_send_to_api without an API: pass do_send_to_api=False, or run `serve`")
        bodies = [wire_form(sampled.group, self.link.env_id, self.env.config.include_messages) for sampled in kept]
        try:
            await self.link.post_groups(bodies)
        except ApiRefused as error:
            if error.status == 401:
                raise PeerError(str(error)) from error
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
    def joined_link(self) -> "ApiLink":
        """The link. Raises RuntimeError outside of `serve`."""
        if self.link is None:
            raise RuntimeError("there is no batching API outside of `serve`")
        return self.link
