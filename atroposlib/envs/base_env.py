"""`BaseEnv`: what an environment author extends. How it is run is in `serve.py`, `process.py` and `cli.py`.

item = get_next_item() ──▶ collect_trajectories(item) ──▶ postprocess_histories ──▶ handle_send_to_api ──▶ batching API
                                 │ rollouts, scores                                     │ checked, kept in files
                                 ▼                                                      ▼
                             self.server (inference)                        samples, metrics, W&B
"""

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from atroposlib.envs import checkpoints
from atroposlib.envs.api_client import ApiRefused, EnvStatus, Registration
from atroposlib.envs.api_link import ApiLink
from atroposlib.envs.author_errors import MalformedGroup, shown
from atroposlib.envs.config import BaseEnvConfig
from atroposlib.envs.errors import GroupTooLargeError, PeerError, Unscored
from atroposlib.envs.metrics import Durations, JsonlSink, Sink, length_metrics, open_wandb
from atroposlib.envs.pacing import batch_share
from atroposlib.envs.payloads import (
    Item,
    ScoredDataGroup,
    ScoredDataItem,
    completion_lengths,
    defect,
    group_items,
    rejection,
    untrainable,
    wire_form,
)
from atroposlib.envs.records import JsonlWriter, markdown_table, write_eval_results
from atroposlib.envs.server_handling.dispatch import gather_or_cancel
from atroposlib.envs.server_handling.server_baseline import APIServer, APIServerConfig, ServerBaseline
from atroposlib.envs.server_handling.server_manager import ServerManager
from atroposlib.groups import Needs
from atroposlib.logs import get_logger
from atroposlib.utils.tokenizers import load_tokenizer

log = get_logger(__name__)

Groups = ScoredDataGroup | list[ScoredDataGroup] | None
ServerConfigs = ServerBaseline | Sequence[APIServerConfig]
LENGTHS_KEPT = 10_000
REJECTIONS_REPORTED = 50


class BaseEnv(ABC):
    """An environment server. Override `get_next_item`, `evaluate`, `collect_trajectory` or `collect_trajectories`,
    mostly `setup` too.
    """

    name: ClassVar[str | None] = None
    env_config_cls: ClassVar[type[BaseEnvConfig]] = BaseEnvConfig
    server_cls: ClassVar[type[APIServer]] = APIServer  # type: ignore[type-abstract]

    def __init__(
        self, config: BaseEnvConfig, server_configs: ServerConfigs, slurm: bool = False, testing: bool = False
    ) -> None:
        self.config: Any = config  # of env_config_cls, whatever that is in a subclass
        self.server = ServerManager(
            server_configs,
            server_class=self.server_cls,
            slurm=slurm,
            testing=testing,
            reasoning_config=config.reasoning,
        )
        self.tokenizer = load_tokenizer(config.tokenizer_name)
        self.link: ApiLink | None = None
        self.process_mode = False

        # What the API and the trainer said last.
        self.curr_step = 0
        self.policy_version = 0
        self.total_steps = config.total_steps
        self.max_token_len = -1
        self.needs = Needs()
        self.checkpoint_dir = ""
        self.checkpoint_interval = -1
        self.registered_name = self.display_name
        self.wandb_prepend: str | None = None
        self.status_dict: dict[str, Any] = {}

        # What is going on, and what has been since the last log.
        self.workers: set[Any] = set()
        self.backlog: list[Item] = []
        self.counts: Counter[str] = Counter()
        self._rejected_in_row = 0
        self._unscored_in_row = 0
        self.items_sent_this_step = 0
        self.durations = Durations()
        self.completion_lengths: list[int] = []
        self.rollouts_for_wandb: list[list[tuple[Any, ...]]] = []
        self.eval_results: dict[str, Any] = {}

        self.sinks: list[Sink] = [JsonlSink(Path(config.metrics_path))] if config.metrics_path else []
        self.wandb_is_open = False
        self.jsonl_writer = (
            JsonlWriter(Path(config.data_path_to_save_groups)) if config.data_path_to_save_groups else None
        )

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

    async def collect_trajectory(self, item: Item) -> tuple[ScoredDataItem | None, list[Item]]:
        """One scored sample of `item`, or None to drop the whole group; and items to go on with later."""
        raise NotImplementedError(f"{type(self).__name__} must override collect_trajectory or collect_trajectories")

    async def collect_trajectories(self, item: Item) -> tuple[Groups, list[Item]]:
        """A group of `group_size` scored samples of `item`, or several groups, or None to drop it; and items to go on
        with later.
        """
        results = await gather_or_cancel([self.collect_trajectory(item) for _ in range(self.config.group_size)])
        backlog = [later for _, more in results for later in more or []]
        samples = [sample for sample, _ in results if sample is not None]
        return (group_items(samples) if len(samples) == len(results) else None), backlog

    async def postprocess_histories(self, trajectories: Any) -> Groups:
        """The groups as they are to be sent; None drops them."""
        groups: Groups = trajectories
        return groups

    async def before_sending(self, group: ScoredDataGroup) -> ScoredDataGroup:
        """An accepted group as it is to be kept and sent."""
        return group

    async def cleanup(self) -> None:
        """Called after every item, whatever became of it."""
        return

    # --- one item -------------------------------------------------------------------------------------------------

    async def handle_env(self, item: Item) -> None:
        """Everything that becomes of `item`, up to the API. Raises what the author's methods raise."""
        try:
            groups = await self.groups_of(item)
            if groups:
                await self.handle_send_to_api(groups, item)
            else:
                self.counts["items_without_group"] += 1
        finally:
            await self.cleanup()

    async def groups_of(self, item: Item) -> Groups:
        """What the author's methods make of `item`; None when its answers could not be scored."""
        try:
            groups, more = await self.collect_trajectories(item)
            self.backlog.extend(more or [])
            return await self.postprocess_histories(groups) if groups else None
        except Unscored as error:
            self.note_unscored(str(error))
            return None

    def note_unscored(self, reason: str, count: str = "groups_unscored") -> None:
        """A group was dropped because its answers could not be scored, which costs the error budget nothing."""
        self.counts[count] += 1
        self._unscored_in_row += 1
        log.warning("Dropped a group: %s", reason)
        if self._unscored_in_row % REJECTIONS_REPORTED == 0:
            log.warning(
                "%d groups in a row could not be scored and nothing was sent, the last because %s. The trainer waits "
                "until the policy gives other answers. The scorer's warnings above show these answers; if they are "
                "reasonable, raise its time limit (--env.grader_timeout, --env.scorer_timeout)",
                self._unscored_in_row,
                reason,
            )

    async def handle_send_to_api(
        self,
        scored_data: Groups,
        item: Item = None,
        do_send_to_api: bool = True,
        abort_on_any_max_length_exceeded: bool = True,
    ) -> None:
        """Check groups, keep the good ones in the files and tables, and send them. Waits while the API is away.

        Raises MalformedGroup, once the others are sent, for groups that no trainer could use, that the registered one
        cannot, or that the API refused.
        """
        self._unscored_in_row = 0
        groups = [group for group in (scored_data if isinstance(scored_data, list) else [scored_data]) if group]
        defects = [defect(group) or untrainable(group, self.needs) for group in groups]
        whole = [group for group, found in zip(groups, defects, strict=True) if found is None]
        accepted = [
            await self.before_sending(group)
            for group in whole
            if self._accept(group, item, abort_on_any_max_length_exceeded)
        ]
        for group in accepted:
            await self.add_rollouts_for_wandb(group, item)
            self._remember(group)
        if accepted and do_send_to_api:
            await self._send(accepted)
        if len(whole) < len(groups):
            self.counts["groups_malformed"] += len(groups) - len(whole)
            raise MalformedGroup(
                "a group cannot be trained on: " + "; ".join(found for found in defects if found is not None)
            )

    def _accept(self, group: ScoredDataGroup, item: Item, limit_lengths: bool) -> bool:
        reason = rejection(
            group,
            group_size=self.config.group_size,
            max_token_len=self.max_token_len if limit_lengths else -1,
            scores_must_differ=self.config.ensure_scores_are_not_same,
        )
        if reason is None:
            self._rejected_in_row = 0
            return True
        self.counts["items_rejected"] += 1
        self._rejected_in_row += 1
        log.info("Dropped a group of the item %s: %s", shown(item), reason)
        if self._rejected_in_row % REJECTIONS_REPORTED == 0:
            log.warning(
                "%d groups in a row were dropped and nothing was sent, the last because %s",
                self._rejected_in_row,
                reason,
            )
        return False

    def _remember(self, group: ScoredDataGroup) -> None:
        self.counts["groups_accepted"] += 1
        lengths = completion_lengths(group)
        self.completion_lengths.extend(lengths)
        del self.completion_lengths[:-LENGTHS_KEPT]
        if self.config.include_messages and not group.get("messages"):
            texts = [self.tokenizer.decode(tokens) for tokens in group["tokens"]]
            group["messages"] = [[{"role": "user", "content": text}] for text in texts]
        if self.jsonl_writer is not None:
            text = (
                {}
                if group.get("messages")
                else {"texts": [self.tokenizer.decode(tokens) for tokens in group["tokens"]]}
            )
            extra = {"step": self.curr_step, "policy_version": self.policy_version, "completion_tokens": lengths}
            self.jsonl_writer.write({**extra, **group, **text})

    async def _send(self, groups: list[ScoredDataGroup]) -> None:
        if self.link is None:
            raise RuntimeError("handle_send_to_api without an API: pass do_send_to_api=False, or run `serve`")
        bodies = [wire_form(group, self.link.env_id, self.config.include_messages) for group in groups]
        try:
            await self.link.post_groups(bodies)
        except ApiRefused as error:
            if error.status == 401:
                raise PeerError(str(error)) from error
            self.counts["items_refused_by_api"] += len(groups)
            raise MalformedGroup(f"the API refused {len(groups)} group(s): {error}") from error
        self.items_sent_this_step += len(groups)

    # --- the API's view -------------------------------------------------------------------------------------------

    @property
    def display_name(self) -> str:
        """How this environment presents itself."""
        return self.config.wandb_name or self.name or type(self).__name__

    @property
    def derived_batch_size(self) -> int:
        """Sequences of each batch that this environment may fill."""
        fraction = self.status_dict.get("unallocated_fraction", 1.0)
        return batch_share(self.config.batch_size, fraction, self.config.min_batch_allocation)

    @property
    def max_num_workers(self) -> int:
        """Groups that may be in flight."""
        configured: int = self.config.max_num_workers
        return configured if configured >= 0 else self.config.max_num_workers_per_node * len(self.server.servers)

    def announcement(self) -> dict[str, Any]:
        """The body of /register-env."""
        return {
            "max_token_length": self.config.max_token_length,
            "desired_name": self.display_name,
            "weight": self.config.inference_weight,
            "group_size": self.config.group_size,
            "min_batch_allocation": self.config.min_batch_allocation,
            "steps_per_eval": self.config.evaluation_interval,
            "eval_at_start": self.config.eval_at_start,
        }

    def note_registration(self, registration: Registration) -> None:
        """Take over what the API said when this environment joined, and load the checkpoint of a run that goes on."""
        self.registered_name = registration.wandb_name
        self.wandb_prepend = f"{registration.wandb_name}_"
        self.checkpoint_dir = registration.checkpoint_dir
        self.checkpoint_interval = registration.checkpoint_interval
        limits = [steps for steps in (self.config.total_steps, registration.num_steps) if steps > 0]
        self.total_steps = min(limits, default=1000)
        if self.curr_step == 0 and registration.starting_step > 0:
            self.curr_step = registration.starting_step
            self.load_checkpoint()

    async def register_env(self) -> None:
        """Join the API, once a trainer has started."""
        assert self.link is not None
        await self.link.join()

    async def get_server_info(self) -> None:
        """Read what the trainer's batches take. Raises GroupTooLargeError when a group cannot fit in a batch."""
        assert self.link is not None
        self.config.batch_size, self.max_token_len, self.needs = await self.link.batch_limits()
        if 0 < self.config.batch_size < self.config.group_size:
            raise GroupTooLargeError(
                f"group_size {self.config.group_size} is larger than the trainer's batch of {self.config.batch_size}"
                " sequences: lower --env.group_size, or raise the trainer's batch"
            )

    async def get_status(self) -> EnvStatus:
        """Ask the API where things are, and note it."""
        assert self.link is not None
        status = await self.link.status()
        self.status_dict = status.model_dump()
        return status

    async def env_step_checks(self) -> None:
        """Called when the trainer has moved on, to `status_dict["current_step"]`: take that over, write the figures of
        the step.
        """
        self.curr_step = self.status_dict["current_step"]
        if self.items_sent_this_step >= self.config.min_items_sent_before_logging:
            await self.wandb_log({})
            self.items_sent_this_step = 0

    # --- figures --------------------------------------------------------------------------------------------------

    async def setup_wandb(self) -> None:
        """Open a W&B run if the configuration wants one and the trainer has named a project."""
        if not self.config.use_wandb or self.link is None:
            return
        group, project = await self.link.wandb_info()
        sink = await open_wandb(self.display_name, group, project, self.config.model_dump(mode="json"))
        if sink is not None:
            self.sinks.append(sink)
            self.wandb_is_open = True

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        """Write `wandb_metrics` and the figures since the last call. An override adds its own and calls this."""
        own = await self.create_rollout_table(dict(wandb_metrics or {}))
        own |= length_metrics(self.completion_lengths, self.max_token_len)
        own |= self.perf_stats({})
        own |= {"train/items_sent_to_api": self.items_sent_this_step, "policy_version": self.policy_version}
        own |= {f"train/{name}": count for name, count in self.counts.items()}
        prefix = self.wandb_prepend or f"{self.registered_name}_"
        metrics = await self.server.wandb_metrics({f"{prefix}{key}": value for key, value in own.items()})
        self.completion_lengths = []
        for sink in self.sinks:
            sink.write(metrics, self.curr_step)

    def perf_stats(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """`metrics` with the durations of items since the last call."""
        return metrics | {f"train_perf/{key}": value for key, value in self.durations.take().items()}

    async def add_rollouts_for_wandb(self, scored_data: ScoredDataGroup, item: Item = None) -> None:
        """Keep some samples of a group, as (text, score), for the rollout table."""
        if not self.wandb_is_open or self.config.num_rollouts_to_keep == 0:
            return
        wanted = self.config.num_rollouts_per_group_for_logging
        count = len(scored_data["tokens"]) if wanted < 0 else wanted
        texts = [self.tokenizer.decode(tokens) for tokens in scored_data["tokens"][:count]]
        self.rollouts_for_wandb.append(list(zip(texts, scored_data["scores"], strict=False)))
        del self.rollouts_for_wandb[: -self.config.num_rollouts_to_keep]

    async def create_rollout_table(self, wandb_metrics: dict[str, Any]) -> dict[str, Any]:
        """`wandb_metrics` with the kept samples as a table."""
        if not self.wandb_is_open or not self.rollouts_for_wandb:
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
        metrics: dict[str, Any],
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
        self.eval_results = dict(metrics)
        if verbose:
            print(markdown_table(metrics), flush=True)
        if self.config.data_dir_to_save_evals is None:
            log.warning("The evaluation is not written to files: data_dir_to_save_evals is not set")
            return
        now = time.time()
        begun, ended = start_time if start_time is not None else now, end_time if end_time is not None else now
        general = {
            "model_name": model_name or self.server.model_name,
            "start_time": begun,
            "end_time": ended,
            "total_evaluation_time_seconds": ended - begun,
            "generation_parameters": generation_parameters or {},
        }
        task = task_name or f"{self.display_name}_eval"
        write_eval_results(Path(self.config.data_dir_to_save_evals), metrics, task, general, samples)

    # --- checkpoints ----------------------------------------------------------------------------------------------

    def save_checkpoint(self, step: int, data: dict[str, Any] | None = None) -> None:
        """Called at the trainer's checkpoint steps. An override passes `data`: attributes that a resumed run sets
        again.
        """
        if data is not None:
            checkpoints.save(self.checkpoint_dir, self.registered_name, step, data)

    def load_checkpoint(self) -> None:
        """Set the attributes that the last whole checkpoint at or before `self.curr_step` holds, if there is one."""
        found = checkpoints.load(self.checkpoint_dir, self.registered_name, self.display_name, self.curr_step)
        if found is None:
            log.info(
                "No checkpoint of %s up to step %d in %r: starting afresh",
                self.display_name,
                self.curr_step,
                self.checkpoint_dir,
            )
            return
        path, attributes = found
        for name, value in attributes.items():
            setattr(self, name, value)
        log.info("Loaded %s", path)

    # --- running --------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Close files, runs and connections; an override calls this last."""
        for sink in self.sinks:
            sink.close()
        self.sinks = []
        if self.jsonl_writer is not None:
            self.jsonl_writer.close()
        await self.server.close()

    async def add_train_workers(self) -> None:
        """Called ten times a second: start what the queue policy allows. An override may do nothing, and send groups
        by itself.
        """
        await self.start_groups()

    async def start_groups(self) -> None:
        """Replaced by the serve loop; outside of it there is no queue to fill."""
        return

    async def env_manager(self) -> None:
        """Serve until the last step; see `serve.py`."""
        from atroposlib.envs.serve import serve

        await serve(self)

    async def process_manager(self) -> None:
        """Sample `total_steps` groups into files, without an API; see `process.py`."""
        from atroposlib.envs.process import process

        await process(self)

    @classmethod
    def cli(cls, argv: Sequence[str] | None = None, default_command: str | None = None) -> None:
        """Run the command line `serve | process | evaluate`; `default_command` is taken when none is named."""
        from atroposlib.envs.cli import main

        main(cls, argv, default_command)
