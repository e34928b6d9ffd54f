"""`Environment`, the framework's view of an author's class. Authors extend `BaseEnv` (`base.py`), which adds the
commands. What one run of it does is `EnvRun`'s.

item = get_next_item() ──▶ collect_trajectories(item) ──▶ postprocess_histories ──▶ handle_send_to_api ──▶ batching API
                                 │ rollouts, scores                                     │ checked, kept in files
                                 ▼                                                      ▼
                             self.server (inference)                        samples, metrics, W&B

Every public name of `Environment` is one that environments of the archived ancestor use. All others are free for an
author's own attributes, methods and properties: the framework's own state is on `EnvRun`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from msgspec import to_builtins

from atroposlib.envs.authors import author_checks
from atroposlib.envs.authors.former_attributes import FormerAttributes
from atroposlib.envs.config import BaseEnvConfig
from atroposlib.envs.data.data_report import LoadedData
from atroposlib.envs.errors import (
    GroupTooLargeError,
    RecordError,
    WrongSetting,
)
from atroposlib.envs.evaluation.evaluation import held_out_row
from atroposlib.envs.failures import attempt
from atroposlib.envs.files.records import JsonlWriter, markdown_table, write_eval_results
from atroposlib.envs.metrics import Metrics, length_metrics, open_wandb
from atroposlib.envs.payloads import (
    Groups,
    Item,
    ScoredDataGroup,
    ScoredDataItem,
    group_rollouts,
    with_failed,
)
from atroposlib.envs.run import checkpoints
from atroposlib.envs.run.env_run import EnvRun
from atroposlib.envs.run.pacing import batch_share
from atroposlib.envs.sampling.chat_template import with_template
from atroposlib.envs.sampling.sampling_fields import SamplingFields
from atroposlib.envs.server_handling.dispatching.dispatch import gather_or_cancel
from atroposlib.envs.server_handling.dispatching.request_seeds import for_sample
from atroposlib.envs.server_handling.reasoning import ReasoningConfig
from atroposlib.envs.server_handling.server_baseline import APIServer, APIServerConfig, ServerBaseline
from atroposlib.flags import Setting
from atroposlib.groups import rollouts_of
from atroposlib.logs import get_logger, put
from atroposlib.row_files.kept_rows import parse_keep
from atroposlib.type_definitions import Messages
from atroposlib.utils.tokenizers import load_tokenizer
from atroposlib.wire.batching import EnvStatus

log = get_logger(__name__)

ServerConfigs = ServerBaseline | Sequence[APIServerConfig]


def allowed_workers(config: BaseEnvConfig, servers: int) -> int:
    """Return how many groups may be in flight with so many inference servers."""
    given = config.max_num_workers
    return given if given >= 0 else config.max_num_workers_per_node * servers


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
        self.max_num_workers = allowed_workers(config, len(self.server.servers))  # groups that may be in flight
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
        self.rollouts_for_wandb: list[list[tuple[object, ...]]] = []

        path = config.data_path_to_save_groups
        self.jsonl_writer = JsonlWriter(Path(path)) if path else None
        if self.jsonl_writer is not None:
            self.jsonl_writer.keep(parse_keep(config.keep_samples))
        self._env_run: EnvRun[Environment] = EnvRun(self)

    # --- what an author writes ------------------------------------------------------------------------------------

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, ServerConfigs]:
        """The configuration before YAML and flags: the environment's, and that of one server, a list of them, or a
        ServerBaseline. Nothing is checked before those: a setting without a default is theirs to give.
        """
        return cls.env_config_cls.model_construct(), ServerBaseline()

    async def setup(self) -> None:
        """Load data; called once, before anything else, when the tokenizer is loaded and the inference server
        answers.
        """
        return

    @abstractmethod
    async def get_next_item(self) -> Item:
        """The next thing to sample for, or None when there is nothing now."""

    async def _numbered_item(self, number: int) -> Item:
        """The thing to sample for with this number: for --env.deterministic."""
        raise NotImplementedError(f"{type(self).__name__} does not number its items")

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
                attempt(for_sample(number, author_checks.trajectory(self.collect_trajectory, item)), limit_s)
                for number in range(self.config.group_size)
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

    async def _decided(self, items: Sequence[Item]) -> None:
        """Called once the groups of these items are at the API, or thrown away."""

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
        unallocated = self.status_dict.get("unallocated_fraction", 1.0)
        if self.config.deterministic:  # whatever other environments say, and whenever they do
            unallocated = 1.0 if self.config.min_batch_allocation is None else 0.0
        return batch_share(self.config.batch_size, unallocated, self.config.min_batch_allocation)

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
            await self._env_run.log_metrics({})
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
        try:
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
        except RecordError as error:  # what it found is told all the same
            run.unwritten = error

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
        checkpoint = checkpoints.load(folder, run.registered_name, run.display_name, step)
        if checkpoint is None:
            log.info("No checkpoint of %s up to step %d in %r: starting afresh", run.display_name, step, folder)
            return
        path, attributes = checkpoint
        for name, value in attributes.items():
            setattr(self, name, value)
        log.info("Loaded %s", path)

    async def add_train_workers(self) -> None:
        """Called ten times a second: start what the queue policy allows. An override may do nothing, and send groups
        by itself.
        """
        await self._env_run.start_groups()
